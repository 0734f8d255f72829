"""The command `coppice bench adapt`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coppice.bench.options import (
    Dtype,
    JsonFile,
    NewTokens,
    Seed,
    Target,
    encode,
    finish,
    offline,
    reference_of,
    spec_of,
)

if TYPE_CHECKING:
    from coppice.stack.spec import HeadSpec, StackSpec

WHAT = ("shift", "devices", "passes", "kv")


def adapt(
    what: Annotated[
        str,
        typer.Option(
            help="shift: stories, then code again, by policy; devices: training on the serving core or beside it "
            "(table 4); passes: one mixed stream again and again (table 5); kv: what a swap costs sessions that go on."
        ),
    ] = "shift",
    target: Target = None,
    head: Annotated[
        str, typer.Option(metavar="NAME=KIND[:DIR]", help="The head; its kind is specblock or eagle3.")
    ] = "specblock-code",
    n: Annotated[int, typer.Option("--n", min=3, help="Queries of the stream, or of one pass.")] = 300,
    passes: Annotated[int, typer.Option(min=1, help="Passes over the mixed stream.")] = 4,
    methods: Annotated[
        str, typer.Option(metavar="NAME,...", help="Policies compared on the shifted stream.")
    ] = "never,always,full-only,head-only,bandit",
    max_new_tokens: NewTokens = 48,
    budget: Annotated[int, typer.Option(min=1, help="Draft nodes verified a step.")] = 12,
    turn: Annotated[int, typer.Option(min=1, help="Queries that a policy serves in its turn.")] = 10,
    setting: Annotated[
        list[str] | None,
        typer.Option(metavar="SECTION.NAME=VALUE", help="A setting of the adapter (repeatable)."),
    ] = None,
    seed: Seed = 0,
    dtype: Dtype = None,
    json_file: JsonFile = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Also draw it (.png, .svg).")] = None,
) -> None:
    """What adaptation gains and costs on a stream that changes, every policy on the same stream in the same minutes."""
    from dataclasses import replace

    from rich.console import Console

    from coppice.adaptation.bandit import UPDATES
    from coppice.bench.adapt.adapt import (
        DEMO_FLAGS,
        AdaptReport,
        adapt_row,
        device_lanes,
        draw,
        judged_lanes,
        policy_lanes,
        shift_checks,
    )
    from coppice.bench.adapt.lanes import run_lanes
    from coppice.bench.adapt.shift import mixed, programs, shifted
    from coppice.bench.report import exactness_checks
    from coppice.config.sections import ADAPTED_KINDS
    from coppice.stack.spec import HeadSpec

    if what not in WHAT:
        raise typer.BadParameter(f"{what!r} is not one of {', '.join(WHAT)}", param_hint="--what")
    policies = methods.split(",")
    for policy in policies:
        if policy not in UPDATES:
            raise typer.BadParameter(f"{policy!r} is not one of {', '.join(UPDATES)}", param_hint="--methods")
    chosen = HeadSpec.parse(head)
    if chosen.kind not in ADAPTED_KINDS:
        why = f"{chosen.kind} heads are not adapted; those of these kinds are: {', '.join(ADAPTED_KINDS)}"
        raise typer.BadParameter(why, param_hint="--head")
    if n > (most := 2 * len(programs())):
        raise typer.BadParameter(f"there are {most} different prompts", param_hint="--n")
    if what == "kv":
        _kv(spec_of(target, [head], "float32"), chosen, n, max_new_tokens, budget, json_file)
        return
    flags = DEMO_FLAGS | dict(_pair(text) for text in setting or ())
    base = replace(spec_of(target, [head], dtype), budget=budget)
    stream = mixed(n, passes, seed) if what == "passes" else shifted(n, seed)
    if what == "devices":
        lanes = device_lanes(chosen, base, flags)
    else:
        lanes = policy_lanes(policies if what == "shift" else ["never", "bandit"], chosen, base, flags)
    console = Console()
    told = base.settings().verifier
    report = AdaptReport(f"bench adapt --what {what}", told.dtype, told.threads, told.device)
    with console.status("starting") as status:
        run_lanes(lanes, stream, max_new_tokens, turn, lambda line: status.update(line))
        status.update("judging")
        for lane, verdicts in judged_lanes(lanes, stream, reference_of(base)):
            never = report.rows[0] if report.rows and report.rows[0].method == "never" else None
            report.rows.append(adapt_row(lane, stream, never, verdicts))
    rows = report.adapted()
    report.checks += exactness_checks(rows, told.dtype, False, max_new_tokens)
    if what == "shift":
        report.checks += shift_checks(rows, int(flags.get("bandit.cold_events", 8)))
    report.figures = {"settings": flags, "stream": [query.part for query in stream]}
    if plot:
        draw(rows, stream, plot)
    finish(console, report, json_file)


def _kv(spec: "StackSpec", head: "HeadSpec", n: int, max_new_tokens: int, budget: int, json_file: Path | None) -> None:
    """Half of the stories are learnt from, the others are drafted along."""
    from rich.table import Table

    from coppice.bench.adapt.old_kv import learnt, old_kv
    from coppice.bench.adapt.shift import stories
    from coppice.bench.paper.rank import answers

    console, report = offline("bench adapt --what kv", spec)
    ids = [encode(spec.target, prompt) for prompt in stories()[:n]]
    with console.status("the target answers"):
        texts = answers(spec.target, ids, max_new_tokens, "float32")
    with console.status("the head learns"):
        learner = learnt(head, spec.target, texts[: n // 2], max(1, n // 32))
    with console.status("drafting along the other answers"):
        found = old_kv(head, spec.target, learner, texts[n // 2 :], budget, threads=1)
    table = Table("along the second half of an answer", "tau", "steps", title_justify="left")
    for way, replayed in found.items():
        table.add_row(way, f"{replayed.tau:.3f}", str(replayed.steps))
    console.print(table)
    report.figures = {way: {"tau": replayed.tau, "steps": replayed.steps} for way, replayed in found.items()}
    finish(console, report, json_file)


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or "." not in name:
        raise typer.BadParameter(f"{text!r} is not SECTION.NAME=VALUE", param_hint="--setting")
    return name, value
