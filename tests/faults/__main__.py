"""`python -m tests.faults`: one fault after another on a stack of its own, under load; exits 1 when a check failed."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from coppice.stack.spec import StackSpec
from lab.measuring import Report, clean_check, reporting, table
from lab.options import JsonFile, Options
from tests.certificates import Authority
from tests.faults.campaign.rig import Plan, Rig, Scenario, proxied
from tests.faults.campaign.scenarios import QUICK, SCENARIOS, choose
from tests.tiny_stack import ONE_THREAD_EACH, tiny_stack

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def campaign(
    spec: StackSpec, scenarios: Sequence[Scenario], plan: Plan, report: Report, say: Callable[[str], object]
) -> None:
    """Run scenarios on a stack and add a row of each and their checks; a row is said when it is done."""

    async def run_all() -> None:
        rig = await Rig.on(stack, proxies, plan)
        for scenario in scenarios:
            row = await rig.run(scenario)
            say(row.line)
            report.rows.append(row.to_json())
            report.checks += [check for check in row.to_checks() if not check.ok or check in row.checks]

    with proxied(spec, plan.tls) as (stack, proxies):
        asyncio.run(run_all())
    report.checks.append(clean_check(stack))


@app.command()
def faults(
    kinds: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME,...", help="Faults or groups of them (see --list); default: all of them."),
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Repetitions of each fault.")] = 3,
    tls: Annotated[bool, typer.Option("--tls", help="All of it under mutual TLS, with new certificates.")] = False,
    listed: Annotated[bool, typer.Option("--list", help="Say what there is and what each proves, and stop.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Kill, stop, cut and mislead processes of a stack of a tiny model with two of everything, while clients ask.

    Every answer, greedy or sampled, must be what plain decoding said before the first fault, token by token; a stream
    that a fault met must go on within 5 s (p99), and afterwards nothing may be left behind: sessions, KV, signals, open
    files, threads. A repetition whose load was too small to prove anything fails as weak. Exit code 1 when a check
    failed.
    """
    console = Console()
    if listed:
        lines = [{"fault": each.name, "group": each.group, "proves": each.proves} for each in SCENARIOS]
        console.print(table("faults", lines))
        return
    with tempfile.TemporaryDirectory(prefix="coppice-faults-") as made:
        folder = Path(made)
        os.environ |= ONE_THREAD_EACH
        target, heads = tiny_stack(folder)
        spec = Options(target=target, heads=heads, dtype="float32").spec()
        plan = Plan(repeat=repeat, tls=Authority(folder / "certificates") if tls else None)
        if plan.tls:
            os.environ["COPPICE_TLS__CA"] = str(plan.tls.folder / "ca.pem")  # clients need no certificate
        scenarios = choose(kinds or [])
        adapting = replace(spec, adapt=True, extra={"adapter": {**QUICK, "adapter.folder": folder / "adapter"}})
        with reporting("faults", spec, Options(json_file=json_file)) as report:
            for stack_spec in (spec, adapting):
                if chosen := [scenario for scenario in scenarios if scenario.adapts == stack_spec.adapt]:
                    campaign(stack_spec, chosen, plan, report, partial(console.print, soft_wrap=True))


if __name__ == "__main__":
    app(prog_name="python -m tests.faults")
