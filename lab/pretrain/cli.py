"""`coppice train target`, a command that `coppice.training.cli` finds by its entry point."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from coppice.training.cli import Data, Device, Out, Resume, Seed, command_line, work_folder


def train_target(
    data: Data,
    out: Out,
    tokens: Annotated[
        int, typer.Option("--tokens", min=1, help="Of the whole run; may be changed on --resume.")
    ] = 4_000_000,
    resume: Resume = False,
    device: Device = "cpu",
    seed: Seed = 0,
    config: Annotated[
        Path | None,
        typer.Option(help="A config.json of a causal language model, whatever its model_type; default: the demo's."),
    ] = None,
) -> None:
    """Train a small target and its tokenizer from text, then write its model folder."""
    from coppice.stack.spec import check_device
    from coppice.training.heads import Recipe
    from lab.pretrain.target import HOW, SIZES, target_run

    check_device("device", device)
    flags = {"out": out.name, "tokens": str(tokens)} | ({"config": config.name} if config else {})
    work, command = work_folder(out, resume), command_line("target", data, flags)
    sizes: dict[str, Any] = json.loads(config.read_text(encoding="utf-8")) if config else SIZES
    recipe = Recipe(tokens, adam=3e-3, small_batch=2048, batch=4096, length=256, long_length=512, eval_tokens=200_000)
    run = target_run(data, work, recipe, sizes, resume=resume, device=device, seed=seed)
    if run.train():
        run.export(out, "A small target model", command, HOW)
