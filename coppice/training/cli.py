"""`coppice train target|head`. Heavy imports wait until a command runs."""

from pathlib import Path
from typing import Annotated, Any

import typer

from coppice.config.sections import FEATURE_KINDS
from coppice.heads.models.expectation import read_expectation, warning_of
from coppice.limits import MAX_FEATURE_LAYERS
from coppice.machine import extension, extensions, usable_cores
from coppice.training.run_folder import stop_signal, work_folder, write_run

app = typer.Typer(
    help="Train a target of your own, or a draft head for a target.", no_args_is_help=True, add_completion=False
)

TRAINED_KINDS = (*FEATURE_KINDS, "lm")
TRAINING = "coppice.training"
"""the entry points under which packages add kinds of heads that can be trained (coppice/training/heads.py)"""
TARGET_TOKENS, HEAD_TOKENS = 4_000_000, 400_000

Data = Annotated[
    list[str],
    typer.Option(
        "--data",
        help="NAME=GLOB[:WEIGHT], repeatable, of text or of JSON lines; python:stdlib is installed Python source.",
    ),
]
Out = Annotated[Path, typer.Option("--out", help="Model folder to write; OUT.work holds packed data and checkpoints.")]
Tokens = Annotated[int, typer.Option("--tokens", min=1, help="Tokens of the whole run; may be changed on --resume.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in OUT.work.")]
Device = Annotated[str, typer.Option("--device", help="A torch device.")]
Workers = Annotated[
    int | None, typer.Option("--workers", min=1, help="Training threads, one core each; default: all cores of a CPU.")
]
Seed = Annotated[int, typer.Option("--seed", min=0)]
Layers = Annotated[
    str,
    typer.Option("--layers", help="Target layers that the head reads, such as 2,10,17; default: 2, L/2 and L - 3."),
]


def own_folder(out: Path, resume: bool) -> Path:
    """Return the run's work folder. Raises BadParameter if a new run would write over another's checkpoints."""
    work = work_folder(out)
    if not resume and any(work.glob("checkpoints/*/state.json")):
        why = f"{work} holds checkpoints of a run: --resume goes on with it, another folder begins anew"
        raise typer.BadParameter(why, param_hint="--out")
    return work


@app.command("target")
def train_target(
    data: Data,
    out: Out,
    tokens: Tokens = TARGET_TOKENS,
    resume: Resume = False,
    device: Device = "cpu",
    workers: Workers = None,
    seed: Seed = 0,
) -> None:
    """Train a small Llama target and its tokenizer from text, then write its model folder."""
    from coppice.training import target
    from coppice.training.dtype import usable_device
    from coppice.training.export import export
    from coppice.training.trainer import RunOptions, Schedule

    usable_device(device)
    work = own_folder(out, resume)
    write_run(work, "target", data, {"out": out.name, "tokens": str(tokens)})
    options = RunOptions(resume, device, _threads(workers, device), seed)
    if target.train_target(data, work, Schedule(tokens=tokens), options=options):
        export(work, out)


@app.command("head")
def train_head(
    data: Data,
    out: Out,
    target: Annotated[Path, typer.Option("--target", help="Model folder of the target that teaches.")],
    tokens: Annotated[
        int,
        typer.Option(
            "--tokens",
            min=1,
            help="Tokens of the whole run; may be changed on --resume. A third of them is recorded first, for every "
            "--data at least 1,024, and an eighth of that (1,024 to 8,192) is held out beside it.",
        ),
    ] = HEAD_TOKENS,
    kind: Annotated[
        str, typer.Option("--kind", help=f"Kind of head: {', '.join(TRAINED_KINDS)}, or one that a package adds.")
    ] = "lm",
    resume: Resume = False,
    device: Device = "cpu",
    workers: Workers = None,
    seed: Seed = 0,
    answers: Annotated[
        Path | None,
        typer.Option(
            "--lessons", help="Folder of the target's answers, which heads may share; default: OUT.work/lessons."
        ),
    ] = None,
    layers: Layers = "",
    shape: Annotated[
        str,
        typer.Option(
            "--shape", help="NAME=NUMBER,... of the head's configuration, such as markov_rank=16,block_size=8."
        ),
    ] = "",
    loss: Annotated[
        str, typer.Option("--loss", help="soft, l1 or coupled: what slots learn by; default: the kind's own.")
    ] = "",
    adamw: Annotated[
        bool, typer.Option("--adamw", help="Heads that read features: AdamW for all weights, not Muon for matrices.")
    ] = False,
) -> None:
    """Record a target's answers, train a draft head on its distributions there, then write the head's folder."""
    if kind not in (kinds := (*TRAINED_KINDS, *extensions(TRAINING))):
        raise typer.BadParameter(f"unknown kind {kind!r}; known: {', '.join(kinds)}", param_hint="--kind")
    if not (target / "config.json").is_file():
        raise typer.BadParameter(f"{target} is not a model folder: it has no config.json", param_hint="--target")
    from coppice.training import feature_heads, heads
    from coppice.training.data.target_answers import READ_TIMES, AnswerPlan, RecordingStopped, record_answers
    from coppice.training.dtype import fast_dtype, usable_device
    from coppice.training.progress import Progress
    from coppice.training.trainer import RunOptions

    dtype = str(fast_dtype(usable_device(device))).removeprefix("torch.")
    read, fields = _layers(layers, kind), _fields(shape, kind)
    if loss not in ("", "soft", "l1", "coupled") or (loss and kind not in FEATURE_KINDS):
        raise typer.BadParameter(f"{loss!r} is not soft, l1 or coupled, or {kind} has none", param_hint="--loss")
    build = {"lm": heads.LanguageModelInTraining}.get(kind, feature_heads.FeatureHeadInTraining)
    if kind not in TRAINED_KINDS:
        build = extension(TRAINING, kind, "--kind")
    elif kind in FEATURE_KINDS and (note := feature_heads.check_shape(kind, target, read, fields)):
        typer.echo(note)
    work = own_folder(out, resume)
    flags = {"kind": kind, "target": target.resolve().name, "out": out.name, "tokens": str(tokens)}
    flags |= {"layers": ",".join(map(str, read))} if read else {}
    flags |= {name: value for name, value in (("shape", shape), ("loss", loss)) if value}
    write_run(work, "head", data, flags | ({"adamw": ""} if adamw else {}))
    with stop_signal() as stopping, Progress("tokens") as progress:
        progress.say("recording the target's answers")
        how: Any = {
            "device": device,
            "dtype": dtype,
            "layers": read,
            "progress": progress.reach,
            "stopped": stopping.is_set,
        }
        try:
            plan = AnswerPlan(tokens // READ_TIMES, seed=seed)
            recorded = record_answers(data, target, answers or work / "lessons", plan, **how)
        except RecordingStopped as stop:
            progress.print(f"recorded {stop} tokens, go on with the same command")
            return
    recorded.describe(work / "data")
    options = RunOptions(resume, device, _threads(workers, device), seed)
    config = heads.TrainingConfig(kind, target, recorded, work, fields, loss, options)
    rates, schedule = feature_heads.ADAMW_RATES if adamw else feature_heads.RATES, feature_heads.head_schedule(tokens)
    if kind == "lm":
        rates, schedule = heads.LM_RATES, heads.lm_schedule(tokens)
    if heads.train_head(head := build(config), config, schedule, rates):
        heads.export_head(head, config, out)
        lengths = read_expectation(out).lengths if kind in FEATURE_KINDS else {}
        figures = "".join(f", accepted length {length:.2f} on {name}" for name, length in lengths.items())
        warning = f"\nwarning: {why}; more --tokens may help" if lengths and (why := warning_of(out)) else ""
        typer.echo(f"wrote {out}{figures}{warning}\ntry: coppice up --target {target} --head mine={kind}:{out}")


def _layers(told: str, kind: str) -> tuple[int, ...]:
    """Read the layers of a head. Raises BadParameter."""
    if told and kind == "lm":
        raise typer.BadParameter(f"a head of kind {kind} reads no features", param_hint="--layers")
    parts = [part.strip() for part in told.split(",")] if told else []
    if not all(part.isdecimal() for part in parts) or len(parts) > MAX_FEATURE_LAYERS:
        why = f"{told!r} is not 1 to {MAX_FEATURE_LAYERS} numbers with commas between them"
        raise typer.BadParameter(why, param_hint="--layers")
    return tuple(map(int, parts))


def _fields(told: str, kind: str) -> dict[str, int]:
    """Read fields of a head's configuration. Raises BadParameter."""
    fields: dict[str, int] = {}
    for part in filter(None, told.split(",")):
        name, _, value = part.partition("=")
        if kind == "lm" or not name.isidentifier() or not value.isdecimal():
            raise typer.BadParameter(f"{part!r} is not NAME=NUMBER of a head's configuration", param_hint="--shape")
        fields[name] = int(value)
    return fields


def _threads(workers: int | None, device: str) -> int:
    return workers or (usable_cores() if device == "cpu" else 1)


if __name__ == "__main__":
    app()
