"""`coppice train head`. Heavy imports wait until a command runs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from coppice.config.gguf import as_folder
from coppice.config.model import read_expectation, warning_of
from coppice.config.sections import TRAINED_KINDS
from coppice.limits import MAX_FEATURE_LAYERS
from coppice.machine import Dtype, extension, extensions

app = typer.Typer(help="Train a draft head for a target.", no_args_is_help=True, add_completion=False)

TRAINING, COMMANDS = "coppice.training", "coppice.commands.train"
"""Entry points of packages that add kinds of heads to train (heads.py), and commands: NAME = MODULE:FUNCTION."""

Data = Annotated[
    list[str],
    typer.Option(
        help="NAME=GLOB[:WEIGHT], repeatable, of text or of JSON lines; python:stdlib is installed Python source, and "
        "hf:ORG/NAME:SPLIT a data set, by the package datasets.",
    ),
]
Out = Annotated[Path, typer.Option(help="Model folder to write; OUT.work holds recordings and checkpoints.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint in OUT.work.")]
Device = Annotated[str, typer.Option(help="A torch device.")]
Seed = Annotated[int, typer.Option(min=0)]


@app.callback()
def _group() -> None:
    """A group of commands, also where `head` is the only one."""


def work_folder(out: Path, resume: bool) -> Path:
    """Return the work folder beside the model folder. Raises BadParameter if a new run would overwrite a checkpoint."""
    work = out.with_name(out.name + ".work")
    if not resume and (work / "checkpoint.safetensors").exists():
        reason = f"{work} holds a run's checkpoint: --resume goes on with it, another folder begins anew"
        raise typer.BadParameter(reason, param_hint="--out")
    return work


def command_line(command: str, data: list[str], flags: Mapping[str, str]) -> str:
    """Return the command that starts a run, directories stripped, for its card. Raises DataError."""
    from coppice.training.data import parse_corpora

    parts = [f"--data '{corpus.public}'" for corpus in parse_corpora(data)]
    return " ".join(
        [f"coppice train {command}", *parts, *(f"--{name} {value}".strip() for name, value in flags.items())]
    )


@app.command("head")
def train_head(
    data: Data,
    out: Out,
    target: Annotated[Path, typer.Option(help="Folder or GGUF file of the target that teaches.")],
    kind: Annotated[str, typer.Option(help=f"Kind of head: {', '.join(TRAINED_KINDS)}, or one that a package adds.")],
    tokens: Annotated[
        int,
        typer.Option(
            min=1,
            help="Tokens of the whole run; may be changed on --resume. A third of them is recorded first, for every "
            "--data at least 2,048, and an eighth of that (2,048 to 8,192) is held out beside it.",
        ),
    ] = 400_000,
    resume: Resume = False,
    device: Device = "cpu",
    seed: Seed = 0,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Of the target's answers; default: by what the device multiplies.")
    ] = None,
    lessons: Annotated[
        Path | None, typer.Option(help="Folder of the target's answers, which heads may share; default: in OUT.work.")
    ] = None,
    layers: Annotated[
        str, typer.Option(help="Target layers that the head reads, such as 2,10,17; default: 2, L/2 and L - 3.")
    ] = "",
    shape: Annotated[
        str, typer.Option(help="NAME=NUMBER,... of the head's configuration, such as markov_rank=16,block_size=8.")
    ] = "",
    adamw: Annotated[bool, typer.Option("--adamw", help="AdamW for all weights, not Muon for matrices.")] = False,
) -> None:
    """Record a target's answers, train a draft head on its distributions there, then write the head's folder."""
    if kind not in (kinds := (*TRAINED_KINDS, *extensions(TRAINING))):
        raise typer.BadParameter(f"unknown kind {kind!r}; known: {', '.join(kinds)}", param_hint="--kind")
    from coppice.commands.up import find_model

    target = as_folder("target", find_model(None, target, None)[0] or target)
    if not (target / "config.json").is_file():
        raise typer.BadParameter(f"{target} is not a model folder: it has no config.json", param_hint="--target")
    import torch

    from coppice.stack.spec import check_device
    from coppice.training import heads
    from coppice.training.answers import READ_TIMES, record_answers
    from coppice.training.losses import fast_dtype
    from coppice.training.progress import Progress

    check_device("device", device)
    read, fields = _layers(layers), _fields(shape)
    build = heads.FeatureHeadInTraining
    if kind not in TRAINED_KINDS:
        build = extension(TRAINING, kind, "--kind")
    elif note := heads.check_shape(kind, target, read, fields):
        typer.echo(note)
    work = work_folder(out, resume)
    flags = {"kind": kind, "target": target.resolve().name, "out": out.name, "tokens": str(tokens)}
    flags |= {"layers": ",".join(map(str, read))} if read else {}
    flags |= ({"shape": shape} if shape else {}) | ({"adamw": ""} if adamw else {})
    command = command_line("head", data, flags)
    with heads.stop_signal() as stopping, Progress("tokens") as progress:

        def reach(recorded: int, total: int) -> None:
            progress.reach(recorded, total)
            if stopping.is_set():
                progress.print(f"recorded {recorded} tokens, go on with the same command")
                raise typer.Exit

        progress.say("recording the target's answers")
        folder = lessons or work / "lessons"
        own = dtype or str(fast_dtype(torch.device(device))).removeprefix("torch.")
        where: dict[str, Any] = {"seed": seed, "device": device, "dtype": own, "layers": read}
        answers = record_answers(
            data, target, folder, tokens // READ_TIMES, **where, progress=reach, say=progress.print
        )
    config = heads.TrainingConfig(kind, target, answers, work, fields, resume, device, seed)
    recipe = heads.Recipe(tokens, adam=1e-3, muon=0.0) if adamw else heads.Recipe(tokens)
    run = heads.Trainer(build(config), config, recipe)
    if run.train():
        run.export(out, f"A {kind} draft head for {target.resolve().name}", command)
        lengths = read_expectation(out).lengths if (out / "config.json").is_file() else {}
        figures = "".join(f", accepted length {length:.2f} on {name}" for name, length in lengths.items())
        note = warning_of(out) if lengths else ""
        warning = f"\nwarning: {note}; more --tokens may help" if note else ""
        typer.echo(f"wrote {out}{figures}{warning}\ntry: coppice up --target {target} --head mine={kind}:{out}")


def _layers(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")] if text else []
    if not all(part.isdecimal() for part in parts) or len(parts) > MAX_FEATURE_LAYERS:
        reason = f"{text!r} is not 1 to {MAX_FEATURE_LAYERS} numbers with commas between them"
        raise typer.BadParameter(reason, param_hint="--layers")
    return tuple(map(int, parts))


def _fields(text: str) -> dict[str, int]:
    fields: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if not name.isidentifier() or not value.isdecimal():
            raise typer.BadParameter(f"{part!r} is not NAME=NUMBER of a head's configuration", param_hint="--shape")
        fields[name] = int(value)
    return fields


for _name in extensions(COMMANDS):
    app.command(_name)(extension(COMMANDS, _name, "command"))
