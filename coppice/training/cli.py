"""`coppice train target|head`. Heavy imports wait until a command runs."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Train a target of your own, or a draft head for a target.", no_args_is_help=True)

Data = Annotated[
    list[str], typer.Option("--data", help="NAME=GLOB[:WEIGHT], repeatable; GLOB python:stdlib is installed Python source.")
]
Out = Annotated[Path, typer.Option("--out", help="Model folder to write; OUT.work holds packed data and checkpoints.")]
Tokens = Annotated[int, typer.Option("--tokens", min=1, help="Tokens of the whole run; may be changed on --resume.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in OUT.work.")]
Compile = Annotated[bool, typer.Option("--compile/--no-compile", help="Use torch.compile.")]
Device = Annotated[str, typer.Option("--device", help="A torch device.")]
Seed = Annotated[int, typer.Option("--seed", min=0)]


def work_folder(out: Path) -> Path:
    """Where a run keeps what is not shipped: beside the model folder, so that the folder can be copied as it is."""
    return out.with_name(out.name + ".work")


@app.command("target")
def train_target(
    data: Data,
    out: Out,
    tokens: Tokens = 4_000_000,
    resume: Resume = False,
    compile_model: Compile = False,
    device: Device = "cpu",
    seed: Seed = 0,
) -> None:
    """Train a small Llama target and its tokenizer from text."""
    from coppice.training import target
    from coppice.training.schedule import Schedule

    target.train_target(
        data, work_folder(out), Schedule(tokens=tokens), resume=resume, compiled=compile_model, device=device, seed=seed
    )


@app.command("head")
def train_head() -> None:
    """Placeholder."""


if __name__ == "__main__":
    app()
