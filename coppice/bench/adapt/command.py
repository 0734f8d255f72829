"""The command `coppice bench adapt`."""

from pathlib import Path
from typing import Annotated

import typer

from coppice.bench.options import (
    Dtype,
    JsonFile,
    Seed,
    Target,
    finish,
    reference_of,
    report_of,
    spec_of,
)

WHAT = ("shift", "devices", "passes")


def adapt(
    what: Annotated[
        str,
        typer.Option(
            help="shift: stories, then code again, by policy; devices: training on the serving core or beside it "
            "(table 4); passes: one mixed stream again and again (table 5)."
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
        BUDGET,
        DEMO_FLAGS,
        AdaptRow,
        adapt_row,
        adapt_table,
        device_lanes,
        draw,
        judged_lanes,
        shift_checks,
        spec_for,
    )
    from coppice.bench.adapt.lanes import NEW_TOKENS, Lane, run_lanes
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
    base = replace(spec_of(target, [head], dtype), budget=BUDGET)
    stream = mixed(n, passes, seed) if what == "passes" else shifted(n, seed)
    if what == "devices":
        lanes = device_lanes(chosen, base)
    else:
        compared = policies if what == "shift" else ["never", "bandit"]
        lanes = [Lane(policy, spec_for(policy, chosen, base)) for policy in compared]
    console = Console()
    report = report_of(f"bench adapt --what {what}", base)
    rows: list[AdaptRow] = []
    with console.status("starting") as status:
        run_lanes(lanes, stream, lambda line: status.update(line))
        status.update("judging")
        for lane, verdicts in judged_lanes(lanes, stream, reference_of(base)):
            never = rows[0].row if rows and rows[0].row.method == "never" else None
            rows.append(adapt_row(lane, stream, never, verdicts))
    report.rows += (row.to_json() for row in rows)
    title = f"{report.command}: tau (tokens/s) by part, updates counted in; {report.dtype}, {report.threads} threads"
    report.tables.append(adapt_table(rows, title))
    report.checks += exactness_checks([row.row for row in rows], report.dtype, False, NEW_TOKENS)
    if what == "shift":
        report.checks += shift_checks(rows)
    report.figures = {"settings": DEMO_FLAGS, "stream": [query.part for query in stream]}
    if plot:
        draw(rows, stream, plot)
    finish(console, report, json_file)
