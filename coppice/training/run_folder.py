"""What a run writes: its work folder beside the model folder that it makes, checkpoints, weights and the model card.

Checkpoints are safetensors for weights and optimiser state, and JSON for counters; nothing is pickled.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from threading import Event
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from coppice.training.data import copy_tokenizer, parse_spec

BEST = "best.safetensors"
"""in a run's work folder: the weights to export"""


@dataclass(frozen=True)
class Run:
    """What a model card tells of a run."""

    title: str
    command: str
    data: dict[str, dict[str, Any]]
    """as in data.json"""
    state: dict[str, Any]
    """as in the newest checkpoint"""
    held_out: dict[str, float]
    """held-out loss of each domain"""
    target: str = ""
    """the name of a head's target"""


def work_folder(out: Path) -> Path:
    """Return where a run keeps what is not shipped: beside the model folder, which can so be copied as it is."""
    return out.with_name(out.name + ".work")


def checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder, oldest first."""
    return sorted(folder.glob("step-*"))


def write_run(work: Path, title: str, lines: list[str], flags: dict[str, str]) -> None:
    """Write down the command that starts this run, directories stripped, for the card."""
    parts = [f"--data '{parse_spec(line).public}'" for line in lines]
    parts += [f"--{name} {value}".strip() for name, value in flags.items()]
    work.mkdir(parents=True, exist_ok=True)
    run = {"title": title, "command": f"coppice train {title} " + " ".join(parts), "target": flags.get("target", "")}
    (work / "run.json").write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")


def read_run(work: Path) -> Run:
    """Read what a card tells of the run in `work`. Held-out losses are those of its last evaluation."""
    state = json.loads((checkpoints(work / "checkpoints")[-1] / "state.json").read_text(encoding="utf-8"))
    run = json.loads((work / "run.json").read_text(encoding="utf-8"))
    facts = json.loads((work / "data" / "data.json").read_text(encoding="utf-8"))
    return Run(**run, data=facts, state=state, held_out=state["held_out"])


@contextmanager
def stop_signal() -> Iterator[Event]:
    """Let SIGTERM set an event, so that what works can end at a place to go on from."""
    stopping = Event()
    previous = signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    try:
        yield stopping
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def replacing(out: Path) -> Iterator[Path]:
    """Give an empty folder to write into; at the end, and only without an error, it takes the place of `out`."""
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    for file in partial.iterdir():
        file.chmod(0o644)  # safetensors writes for the owner alone, but images run as another user
    shutil.rmtree(out, ignore_errors=True)
    partial.rename(out)


KEEP = 2
Named = dict[str, Tensor]


def optimiser_tensors(optimisers: list[torch.optim.Optimizer], named: Named) -> Named:
    """Return all optimiser state as tensors called `PARAMETER|KEY`; `named` maps names to the model's parameters."""
    names = {id(p): name for name, p in named.items()}
    tensors: Named = {}
    for optimiser in optimisers:
        for p, state in optimiser.state.items():
            for key, value in state.items():
                tensors[f"{names[id(p)]}|{key}"] = torch.as_tensor(value).detach().cpu().contiguous()
    return tensors


def load_optimisers(optimisers: list[torch.optim.Optimizer], named: Named, tensors: Named) -> None:
    """Restore the optimisers' state from the tensors of `optimiser_tensors`."""
    owners = {id(p): opt for opt in optimisers for group in opt.param_groups for p in group["params"]}
    for key, value in tensors.items():
        name, _, field = key.rpartition("|")
        p = named[name]
        owners[id(p)].state[p][field] = value.clone() if field == "step" else value.to(p.device).clone()


def save_weights(path: Path, named: Named) -> None:
    """Write one safetensors file atomically."""
    temporary = path.with_suffix(".partial")
    save_file({name: p.detach().cpu().contiguous() for name, p in named.items()}, temporary)
    os.replace(temporary, path)


def load_weights(path: Path, named: Named) -> None:
    """Copy a safetensors file into the parameters. Raises ValueError for missing or unknown names."""
    tensors = load_file(path)
    if tensors.keys() != named.keys():
        raise ValueError(f"{path}: names differ from the model's: {sorted(tensors.keys() ^ named.keys())[:4]}")
    with torch.no_grad():
        for name, p in named.items():
            p.copy_(tensors[name])


def save_checkpoint(
    folder: Path, step: int, named: Named, optimisers: list[torch.optim.Optimizer], state: dict[str, Any]
) -> Path:
    """Write `folder/step-NNNNNNN` (complete or not there at all) and delete all but the last KEEP."""
    final = folder / f"step-{step:07d}"
    with replacing(final) as partial:
        save_weights(partial / "model.safetensors", named)
        save_file(optimiser_tensors(optimisers, named), partial / "optimizer.safetensors")
        (partial / "state.json").write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
    for old in checkpoints(folder)[:-KEEP]:
        shutil.rmtree(old)
    return final


def load_checkpoint(path: Path, named: Named, optimisers: list[torch.optim.Optimizer]) -> dict[str, Any]:
    """Restore weights and optimisers in place and return the counters."""
    load_weights(path / "model.safetensors", named)
    load_optimisers(optimisers, named, load_file(path / "optimizer.safetensors"))
    state: dict[str, Any] = json.loads((path / "state.json").read_text(encoding="utf-8"))
    return state


CARD = "README.md"
TAUGHT = (
    "Trained to predict the target's distribution at every position of its own answers to prefixes of the text below, "
    "half of them at temperature 1, the others at 0 and 0.7."
)


def write_card(folder: Path, title: str, model: nn.Module, run: Run, how: str = TAUGHT, more: str = "") -> None:
    """Write README.md into a model's folder. `how` it was trained; `more`: a further section."""
    what = f"# {title}\n\n{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters."
    parts = filter(None, (what, _training(run, how), _data(run), more))
    (folder / CARD).write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _training(run: Run, how: str) -> str:
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


def write_model(folder: Path, model: Any, work: Path, title: str, how: str = TAUGHT) -> None:
    """Write a causal LM that was trained in `work` into an empty folder, in bfloat16, with tokenizer and card."""
    model.to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size=SHARD_SIZE)
    copy_tokenizer(work / "data", folder)
    write_card(folder, title, model, read_run(work), how)
