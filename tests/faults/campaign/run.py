"""The scenarios that there are, which of them are asked for, and how they are run one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import typer

from coppice.stack.spec import StackSpec
from lab.measuring import clean_check
from lab.report import Check
from tests.faults.campaign import adaptation, clients, scenarios
from tests.faults.campaign.report import FaultRow
from tests.faults.campaign.rig import Plan, Rig, Scenario, proxied


def every() -> list[Scenario]:
    """All scenarios, in the order they are run in."""
    return [*scenarios.SCENARIOS, *clients.SCENARIOS, *adaptation.SCENARIOS]


def choose(kinds: Sequence[str]) -> list[Scenario]:
    """The scenarios of names and groups, none meaning all. Raises BadParameter for what is neither."""
    asked = {part for kind in kinds for part in kind.split(",") if part}
    known = {name for each in every() for name in (each.name, each.group)}
    if unknown := sorted(asked - known):
        raise typer.BadParameter(f"{unknown[0]!r} is none of {', '.join(sorted(known))}", param_hint="--kinds")
    return [each for each in every() if not asked or {each.name, each.group} & asked]


def campaign(
    spec: StackSpec, chosen: Sequence[Scenario], plan: Plan, folder: Path, say: Callable[[str], object]
) -> tuple[list[FaultRow], list[Check]]:
    """Run scenarios, those that need an adapter on a second stack, whose adapter keeps its state in `folder`. Return a
    row of each, which is said when it is done, and a check of each stack.
    """
    rows: list[FaultRow] = []
    checks: list[Check] = []
    for adapts in (False, True):
        some = [scenario for scenario in chosen if scenario.adapts == adapts]
        if not some:
            continue
        with proxied(adapting(spec, folder / "adapter") if adapts else spec, plan.tls) as (stack, proxies):

            async def all_of_them(some: Sequence[Scenario] = some) -> None:
                rig = await Rig.on(stack, proxies, plan)
                for scenario in some:
                    rows.append(await rig.run(scenario))
                    say(rows[-1].line)

            asyncio.run(all_of_them())
        checks.append(clean_check(stack))
    return rows, checks


def adapting(spec: StackSpec, folder: Path) -> StackSpec:
    """The same beside an adapter that updates often and keeps its state in `folder`."""
    quick = {"adapter": {**adaptation.QUICK, "adapter.folder": folder}}
    extra = {role: {**quick.get(role, {}), **spec.extra.get(role, {})} for role in (*quick, *spec.extra)}
    return replace(spec, adapt=True, extra=extra)
