"""`coppice train target`, a command that `coppice.training.cli` finds by its entry point."""

from typing import Annotated

import typer

from coppice.training.cli import Data, Device, Out, Resume, Seed, Workers, own_folder, threads


def train_target(
    data: Data,
    out: Out,
    tokens: Annotated[
        int, typer.Option("--tokens", min=1, help="Of the whole run; may be changed on --resume.")
    ] = 4_000_000,
    resume: Resume = False,
    device: Device = "cpu",
    workers: Workers = None,
    seed: Seed = 0,
) -> None:
    """Train a small Llama target and its tokenizer from text, then write its model folder."""
    from coppice.training.heads import RunOptions
    from coppice.training.run_folder import write_run
    from coppice.training.trainer import Schedule, usable_device
    from lab.pretrain import target as pretrain

    usable_device(device)
    work = own_folder(out, resume)
    write_run(work, "target", data, {"out": out.name, "tokens": str(tokens)})
    options = RunOptions(resume, device, threads(workers, device), seed)
    if trained := pretrain.train_target(data, work, Schedule(tokens=tokens), options):
        pretrain.export(trained, work, out)
