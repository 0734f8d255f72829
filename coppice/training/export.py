"""From a run's work folder to a model folder that can be shipped: bfloat16 safetensors, tokenizer, model card."""

from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from coppice.training.checkpoint import load_weights
from coppice.training.data.tokenizer import copy_tokenizer
from coppice.training.losses.acceptance import Acceptance
from coppice.training.run_folder import BEST, Run, checkpoints, read_run, replacing

CARD = "README.md"


def write_card(folder: Path, title: str, model: nn.Module, run: Run, acceptance: Acceptance | None = None) -> None:
    """Write README.md into a model's folder."""
    what = f"# {title}\n\n{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters."
    parts = [what, _training(run), _data(run), *([] if acceptance is None else [_table(acceptance)])]
    (folder / CARD).write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _table(acceptance: Acceptance) -> str:
    alphas = " | ".join(f"{alpha:.3f}" for alpha in acceptance.alphas.values())
    places = range(1, len(acceptance.alphas) + 1)
    return (
        "## Acceptance\nOn held-out text, how often the k-th greedy draft token is right when those before it were; "
        f"a greedy chain would commit {acceptance.length:.2f} tokens a step (report.json).\n\n"
        f"| k | {' | '.join(map(str, places))} |\n|---|{'---|' * len(places)}\n| alpha | {alphas} |"
    )


def _training(run: Run) -> str:
    how = "Trained from nothing on the text below: next-token cross-entropy, Muon and AdamW."
    if run.title != "target":
        how = (
            "Trained to predict the target's distribution at every position of its own answers to prefixes of the text "
            "below, half of them at temperature 1, the others at 0 and 0.7."
        )
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "transformers", "tokenizers"))
    state = run.state
    best = "longest accepted length" if state["best"] < 0 else "lowest loss"
    return (
        f"## Training\n{how}\n```\n{run.command}\n```\n"
        f"{state['tokens']:,} tokens in {state['step']:,} steps and {state['seconds'] / 60:.0f} minutes ({versions}). "
        f"These are the weights with the {best} on held-out text, after {state['best_tokens']:,} tokens."
    )


def _data(run: Run) -> str:
    """Return a table with size, epochs and held-out loss of every domain, and a list of their sources."""
    rows = [
        "| domain | documents | held out | tokens | epochs | held-out loss |",
        "|---|---|---|---|---|---|",
    ]
    for name, fact in run.data.items():
        counts = " | ".join(f"{fact[key]:,}" for key in ("documents", "held_out_documents", "tokens"))
        epochs = run.state["drawn"].get(name, 0) / max(1, fact.get("answered", fact["tokens"]))
        loss = f"{run.held_out[name]:.3f}" if name in run.held_out else "none held out"
        rows.append(f"| {name} | {counts} | {epochs:.2f} | {loss} |")
    sources = [f"- {name}: {', '.join(fact['sources'])}" for name, fact in run.data.items()]
    rule = "A document is held out when the SHA-256 of its text, taken modulo 20, is 0."
    return "\n".join(["## Data", *rows, "", *sources, "", rule])


SHARD_SIZE = "40MB"


def export(work: Path, out: Path) -> None:
    """Write the model folder `out` from the best weights in `work`; an older one is replaced when it is complete."""
    with replacing(out) as partial:
        write_model(partial, best_model(work), work)


def write_model(folder: Path, model: Any, work: Path) -> None:
    """Write a causal LM that was trained in `work` into an empty folder."""
    model.to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size=SHARD_SIZE)
    copy_tokenizer(work / "data", folder)
    run = read_run(work)
    write_card(folder, f"A small draft model for {run.target}" if run.target else "A small target model", model, run)


def best_model(work: Path) -> Any:
    """Load the run's model with its best weights, or the newest ones before any evaluation."""
    config: Any = AutoConfig.from_pretrained(work)
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32)
    best = work / BEST
    path = best if best.exists() else checkpoints(work / "checkpoints")[-1] / "model.safetensors"
    load_weights(path, dict(model.named_parameters()))
    return model.eval()
