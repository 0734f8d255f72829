"""The scenarios that there are, which of them are asked for, and how they are run one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from coppice.config.sections import ADAPTED_KINDS
from coppice.errors import InvalidField
from coppice.stack.spec import StackSpec
from lab.measuring import clean_check
from lab.report import Check
from tests.faults.campaign import adaptation, clients, scenarios
from tests.faults.campaign.ledger import Ledger
from tests.faults.campaign.rig import Plan, Rig, Scenario, proxied


def every() -> list[Scenario]:
    """All scenarios, in the order they are run in."""
    return [*scenarios.SCENARIOS, *clients.SCENARIOS, *adaptation.SCENARIOS]


def choose(kinds: Sequence[str], spec: StackSpec) -> tuple[list[Scenario], list[Scenario]]:
    """The scenarios of names and groups, none meaning all, and those left out because no head of the stack can learn.

    Raises InvalidField for what is neither, and for what was asked for by name and cannot be done.
    """
    asked = {part for kind in kinds for part in kind.split(",") if part}
    known = {name for one in every() for name in (one.name, one.group)}
    if unknown := sorted(asked - known):
        raise InvalidField("kinds", f"{unknown[0]!r} is none of {', '.join(sorted(known))}")
    chosen = [one for one in every() if not asked or {one.name, one.group} & asked]
    learns = any(head.kind in ADAPTED_KINDS for head in spec.heads)
    impossible = [one for one in chosen if (one.trains or one.adapts) and not learns]
    if asked and impossible:
        raise InvalidField("kinds", f"{impossible[0].name} needs a head of these kinds: {', '.join(ADAPTED_KINDS)}")
    return [one for one in chosen if one not in impossible], impossible


def campaign(spec: StackSpec, chosen: Sequence[Scenario], plan: Plan, ledger: Ledger, folder: Path) -> list[Check]:
    """Run what the ledger lacks of scenarios, those that need an adapter on a second stack, whose adapter keeps its
    state in `folder`. Return a check of each stack.
    """
    checks: list[Check] = []
    for adapts in (False, True):
        left = [one for one in chosen if one.adapts == adapts and ledger.left(one.name)]
        if not left:
            continue
        ledger.print(f"starting a stack for {len(left)} faults")
        with proxied(adapting(spec, folder / "adapter") if adapts else spec, plan.tls) as (stack, proxies):

            async def all_of_them(left: Sequence[Scenario] = left) -> None:
                rig = await Rig.on(stack, proxies, plan, ledger.note)
                for one in left:
                    rig.plan = replace(plan, repeat=ledger.left(one.name))
                    ledger.complete(await rig.run(one, ledger.begin(one.name)))

            asyncio.run(all_of_them())
        checks.append(clean_check(stack))
    return checks


def adapting(spec: StackSpec, folder: Path) -> StackSpec:
    """The same beside an adapter that updates often and keeps its state in `folder`."""
    quick = {"adapter": {**adaptation.QUICK, "adapter.folder": folder}}
    extra = {role: {**quick.get(role, {}), **spec.extra.get(role, {})} for role in (*quick, *spec.extra)}
    return replace(spec, adapt=True, extra=extra)
