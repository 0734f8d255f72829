"""`coppice faults`: one fault after another on a stack of its own, under load; exits 1 when a check failed."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coppice.bench.options import Heads, JsonFile, Target

if TYPE_CHECKING:
    from coppice.bench.report import Check
    from coppice.faults.ledger import Ledger
    from coppice.faults.rig import Plan, Scenario
    from coppice.stack.spec import StackSpec

app = typer.Typer(help="Break one process after another under load and compare every answer with plain decoding.")


@app.command()
def faults(
    kinds: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME,...", help="Faults or groups of them (see --list); default: all of them."),
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Repetitions of each fault.")] = 3,
    sessions: Annotated[int, typer.Option(min=2, help="Clients that ask without a pause.")] = 16,
    max_new_tokens: Annotated[int, typer.Option(min=8, help="Tokens of each answer, past end-of-text ids too.")] = 48,
    requests: Annotated[int, typer.Option(min=100, help="Requests of the hundred clients of overload-clients.")] = 1000,
    target: Target = None,
    heads: Heads = None,
    tls: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="All of it under mutual TLS: a folder of certificates as docs/security.md has."
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with what the file of --json holds of an earlier call.")
    ] = False,
    listed: Annotated[bool, typer.Option("--list", help="Say what there is and what each proves, and stop.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Kill, stop, cut and mislead processes of a stack with two of everything, in float32, while clients ask.

    Every answer, greedy or sampled, must be what plain decoding said before the first fault, token by token; a stream
    that a fault met must go on within 5 s (p99), and afterwards nothing may be left behind: sessions, KV, signals, open
    files, threads. A repetition whose load was too small to prove anything fails as weak. Exit code 1 when a check
    failed. Every repetition prints a line and leaves its results in the file of --json.
    """
    from rich.console import Console

    from coppice.bench.measuring import finish, report_of
    from coppice.bench.options import spec_of
    from coppice.faults.ledger import Ledger
    from coppice.faults.rig import Plan

    console = Console()
    if listed:
        return _list(console)
    spec = spec_of(target, heads, "float32")
    chosen, left_out = choose(kinds or [], spec)
    if left_out:
        console.print(f"left out, no head can be adapted: {', '.join(one.name for one in left_out)}", highlight=False)
    report = report_of("faults", spec)
    plan = Plan(repeat=repeat, sessions=sessions, new_tokens=max_new_tokens, requests=requests, tls=tls)
    if tls:
        os.environ["COPPICE_TLS__CA"] = f"{tls}/ca.pem"  # clients need no certificate
    report.figures["asked"] = {
        "repeat": repeat,
        "sessions": sessions,
        "new_tokens": max_new_tokens,
        "requests": requests,
        "tls": tls is not None,
    }
    with console.status("starting") as status:
        faults = [one.name for one in chosen]
        ledger = Ledger(report, faults, repeat, json_file, lambda line: console.print(line, soft_wrap=True))
        if resume:
            ledger.resume()
        try:
            report.checks += campaign(spec, chosen, plan, ledger, lambda line: status.update(line))
        except BaseException:
            ledger.report().print(console)
            raise
    finish(console, ledger.report(), json_file)


def every() -> list[Scenario]:
    """All scenarios, in the order they are run in."""
    from coppice.faults import adaptation, clients, scenarios

    return [*scenarios.SCENARIOS, *clients.SCENARIOS, *adaptation.SCENARIOS]


def choose(kinds: Sequence[str], spec: StackSpec) -> tuple[list[Scenario], list[Scenario]]:
    """The scenarios of names and groups, none meaning all, and those left out because no head of the stack can learn.

    Raises InvalidField for what is neither, and for what was asked for by name and cannot be done.
    """
    from coppice.config.sections import ADAPTED_KINDS
    from coppice.errors import InvalidField

    scenarios = every()
    asked = {part for kind in kinds for part in kind.split(",") if part}
    known = {one.name for one in scenarios} | {one.group for one in scenarios}
    if unknown := sorted(asked - known):
        raise InvalidField("kinds", f"{unknown[0]!r} is none of {', '.join(sorted(known))}")
    chosen = [one for one in scenarios if not asked or {one.name, one.group} & asked]
    learns = any(head.kind in ADAPTED_KINDS for head in spec.heads)
    impossible = [one for one in chosen if (one.trains or one.adapts) and not learns]
    if asked and impossible:
        raise InvalidField("kinds", f"{impossible[0].name} needs a head of these kinds: {', '.join(ADAPTED_KINDS)}")
    return [one for one in chosen if one not in impossible], impossible


def campaign(
    spec: StackSpec, scenarios: Sequence[Scenario], plan: Plan, ledger: Ledger, say: Callable[[str], None]
) -> list[Check]:
    """Run what the ledger lacks of scenarios, those that need an adapter on a second stack. Return a check of each."""
    from coppice.bench.measuring import clean_check
    from coppice.faults.rig import Rig, proxied

    checks: list[Check] = []
    for adapts in (False, True):
        of_stack = [one for one in scenarios if one.adapts == adapts and ledger.left(one.name)]
        if not of_stack:
            continue
        ledger.print(f"starting a stack for {len(of_stack)} faults")
        with tempfile.TemporaryDirectory(prefix="coppice-faults-") as folder:
            with proxied(adapting(spec, Path(folder)) if adapts else spec, plan.tls) as (stack, proxies):

                async def all_of_them(scenarios: Sequence[Scenario] = of_stack) -> None:
                    rig = await Rig.on(stack, proxies, plan, say, ledger.note)
                    for one in scenarios:
                        rig.plan = replace(plan, repeat=ledger.left(one.name))
                        ledger.note(await rig.run(one, ledger.begin(one.name)), complete=True)

                asyncio.run(all_of_them())
            checks.append(clean_check(stack))
    return checks


def adapting(spec: StackSpec, folder: Path) -> StackSpec:
    """The same beside an adapter that updates often and keeps its state in `folder`."""
    from coppice.faults.adaptation import QUICK

    quick = {**QUICK, "adapter": {**QUICK["adapter"], "adapter.folder": folder}}
    extra = {role: {**quick.get(role, {}), **spec.extra.get(role, {})} for role in (*quick, *spec.extra)}
    return replace(spec, adapt=True, extra=extra)


def _list(console: Any) -> None:
    from rich.table import Table

    table = Table("fault", "group", "what it proves", box=None, pad_edge=False)
    for one in every():
        table.add_row(one.name, one.group, one.proves)
    console.print(table)
