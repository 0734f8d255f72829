"""`coppice train target`, a command that `coppice.training.cli` finds by its entry point."""

from typing import Annotated

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
) -> None:
    """Train a small Llama target and its tokenizer from text, then write its model folder."""

    from coppice.stack.spec import check_device
    from coppice.training.heads import Recipe
    from lab.pretrain.target import HOW, target_run

    check_device("device", device)
    work, command = work_folder(out, resume), command_line("target", data, {"out": out.name, "tokens": str(tokens)})
    recipe = Recipe(tokens, adam=3e-3, small_batch=2048, batch=4096, length=256, long_length=512, eval_tokens=200_000)
    run = target_run(data, work, recipe, resume=resume, device=device, seed=seed)
    if run.train():
        run.export(out, "A small target model", command, HOW)
