"""From a run's work folder to a model folder that can be shipped: bfloat16 safetensors, tokenizer, model card."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from coppice.training.card import write_card
from coppice.training.checkpoint import load_weights
from coppice.training.data.packing import held_out_batches, open_prepared
from coppice.training.data.tokenizer import copy_tokenizer
from coppice.training.run_folder import BEST, checkpoints, read_run, replacing
from coppice.training.target import language_model_loss
from coppice.training.workers import Workers

SHARD_SIZE = "40MB"
HELD_OUT_ROWS = 64


def export(work: Path, out: Path) -> None:
    """Write the model folder `out` from the best weights in `work`; an older one is replaced when it is complete."""
    with replacing(out) as partial:
        write_model(partial, best_model(work), work)


def write_model(folder: Path, model: Any, work: Path) -> None:
    """Write a causal LM that was trained in `work` into an empty folder."""
    model.to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size=SHARD_SIZE)
    copy_tokenizer(work / "data", folder)
    # What is measured and sampled for the card is what is shipped: the rounded weights.
    shipped: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    shipped.eval()
    write_card(folder, shipped, replace(read_run(work), held_out=measure(shipped, work)))


def best_model(work: Path) -> Any:
    """Load the run's model with its best weights, or the newest ones before any evaluation."""
    config: Any = AutoConfig.from_pretrained(work)
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32)
    best = work / BEST
    path = best if best.exists() else checkpoints(work / "checkpoints")[-1] / "model.safetensors"
    load_weights(path, dict(model.named_parameters()))
    return model.eval()


def measure(model: PreTrainedModel, work: Path) -> dict[str, float]:
    """Measure the held-out cross-entropy of each domain in nats a token."""
    workers = Workers(model, language_model_loss, num_workers=1, micro_tokens=1024)
    texts = [domain for domain in open_prepared(work / "data") if not domain.of_prompts]
    batches = held_out_batches(texts, HELD_OUT_ROWS, 256)
    losses = {name: workers.mean_loss(batch) for name, batch in batches.items()}
    workers.close()
    return losses
