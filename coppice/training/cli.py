"""`coppice train target|head`. Heavy imports wait until a command runs."""

from pathlib import Path
from typing import Annotated

import typer

from coppice.config.sections import FEATURE_KINDS
from coppice.limits import MAX_FEATURE_LAYERS
from coppice.machine import usable_cores
from coppice.training.run_folder import work_folder, write_run

app = typer.Typer(
    help="Train a target of your own, or a draft head for a target.", no_args_is_help=True, add_completion=False
)

HEAD_KINDS = (*FEATURE_KINDS, "lm")
TARGET_TOKENS, HEAD_TOKENS = 4_000_000, 400_000

Data = Annotated[
    list[str],
    typer.Option("--data", help="NAME=GLOB[:WEIGHT], repeatable; the GLOB python:stdlib is installed Python source."),
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
    from coppice.training.schedule import Schedule
    from coppice.training.trainer import RunOptions

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
    tokens: Tokens = HEAD_TOKENS,
    kind: Annotated[str, typer.Option("--kind", help=f"Kind of head: {', '.join(HEAD_KINDS)}.")] = "lm",
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
    if kind not in HEAD_KINDS:
        raise typer.BadParameter(f"unknown kind {kind!r}; known: {', '.join(HEAD_KINDS)}", param_hint="--kind")
    if not (target / "config.json").is_file():
        raise typer.BadParameter(f"{target} is not a model folder: it has no config.json", param_hint="--target")
    from coppice.training import feature_heads, lm_head
    from coppice.training.data.target_answers import ANSWERS_SHARE, AnswerPlan, record_answers
    from coppice.training.dtype import fast_dtype, usable_device
    from coppice.training.export import export
    from coppice.training.progress import Progress
    from coppice.training.trainer import RunOptions

    dtype = str(fast_dtype(usable_device(device))).removeprefix("torch.")
    read, fields = _layers(layers, kind), _fields(shape, kind)
    if loss not in ("", "soft", "l1", "coupled") or (loss and kind not in FEATURE_KINDS):
        raise typer.BadParameter(f"{loss!r} is not soft, l1 or coupled, or {kind} has none", param_hint="--loss")
    if kind in FEATURE_KINDS:
        feature_heads.check_shape(kind, target, read, fields)
    work = own_folder(out, resume)
    flags = {"kind": kind, "target": target.name, "out": out.name, "tokens": str(tokens)}
    flags |= {"layers": ",".join(map(str, read))} if read else {}
    flags |= {name: value for name, value in (("shape", shape), ("loss", loss)) if value}
    write_run(work, "head", data, flags | ({"adamw": ""} if adamw else {}))
    plan = AnswerPlan(int(tokens * ANSWERS_SHARE), seed=seed)
    with Progress("tokens") as progress:
        progress.say("recording the target's answers")
        recorded = record_answers(
            data,
            target,
            answers or work / "lessons",
            plan,
            device=device,
            dtype=dtype,
            layers=read,
            progress=progress.reach,
        )
    recorded.describe(work / "data")
    options = RunOptions(resume, device, _threads(workers, device), seed)
    if kind == "lm":
        if lm_head.train_lm(recorded, target, work, lm_head.lm_schedule(tokens), options=options):
            export(work, out)
        return
    done = feature_heads.train_feature_head(
        kind,
        recorded,
        target,
        work,
        feature_heads.head_schedule(tokens),
        rates=feature_heads.ADAMW_RATES if adamw else feature_heads.RATES,
        learning={"objective": loss} if loss else {},
        shape=fields,
        options=options,
    )
    if done:
        feature_heads.export_feature_head(work, out, recorded, target, device)


def _layers(told: str, kind: str) -> tuple[int, ...]:
    """Read the layers of a head. Raises BadParameter."""
    if told and kind not in FEATURE_KINDS:
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
        if kind not in FEATURE_KINDS or not name.isidentifier() or not value.isdecimal():
            raise typer.BadParameter(f"{part!r} is not NAME=NUMBER of a head's configuration", param_hint="--shape")
        fields[name] = int(value)
    return fields


def _threads(workers: int | None, device: str) -> int:
    return workers or (usable_cores() if device == "cpu" else 1)


if __name__ == "__main__":
    app()
