"""Processes of a stack with two of everything are broken under eight sessions: no request fails, no token is wrong.

A process of each role is struck each way; `make nightly` does every scenario of `python -m tests.faults` twenty
times.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from coppice.stack.spec import HeadSpec, StackSpec
from tests.faults.campaign.rig import Fault, FaultRow, Plan, Rig, Scenario, proxied
from tests.faults.campaign.scenarios import SCENARIOS
from tests.mutants import MUTANTS, Mutant
from tests.tiny import make_target


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """The target itself as a head, so that drafts matter."""
    target = make_target(tmp_path_factory.mktemp("target"), 32, layers=8, tokenizer=False)
    heads = (HeadSpec("self", "lm", target),)
    spec = StackSpec(target=target, heads=heads, dtype="float32", verifier_threads=1, drafter_threads=1)
    with proxied(spec) as (stack, proxies):
        yield asyncio.run(Rig.on(stack, proxies, Plan(repeat=1, sessions=8, new_tokens=32)))
    assert stack.unclean == []


def struck(fault: Fault, *roles: str) -> Scenario:
    """A blow to a process of each of the roles at once."""

    async def run(rig: Rig, row: FaultRow, number: int) -> None:
        await rig.strike(row, fault, *(rig.names(role)[0] for role in roles))
        if not row.drafted:
            row.weak.append("no draft was ever accepted")

    return Scenario(fault, "", "", run)


STRUCK = [
    struck("kill", "drafter", "orchestrator", "verifier"),
    struck("stop", "drafter", "verifier"),
    struck("cut", "orchestrator", "verifier"),
]
VANISH = next(scenario for scenario in SCENARIOS if scenario.name == "client-vanish")


@pytest.mark.parametrize("scenario", [*STRUCK, VANISH], ids=lambda each: each.name)
def test_texts_are_plains_and_nothing_is_left_behind(rig: Rig, scenario: Scenario) -> None:
    row = asyncio.run(rig.run(scenario))
    assert row.repetitions
    assert [check for check in row.to_checks() if not check.ok] == []


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_a_bug_can_be_planted(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it stands for is still there; `make nightly` looks whether its check finds it."""
    mutant.plant(monkeypatch)
