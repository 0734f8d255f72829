"""From a run's work folder to a model folder that can be shipped: bfloat16 safetensors, tokenizer, model card."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from coppice.training.card import write_card
from coppice.training.checkpoint import load_weights
from coppice.training.data.tokenizer import copy_tokenizer
from coppice.training.run_folder import BEST, checkpoints, read_run, replacing

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
