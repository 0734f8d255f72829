"""Processes of a stack with two of everything are broken under eight sessions: no request fails, no token is wrong.

Each role is struck once each way; `make proof` does every scenario of `python -m tests.faults` twenty times.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from coppice.stack.spec import HeadSpec, StackSpec
from tests.faults.campaign.rig import Plan, Rig, Scenario, proxied
from tests.faults.campaign.scenarios import SCENARIOS
from tests.tiny import make_target

STRUCK = [f"{role}-{fault}" for role in ("drafter", "verifier", "orchestrator") for fault in ("kill", "stop", "cut")]
CHOSEN = [scenario for scenario in SCENARIOS if scenario.name in (*STRUCK, "client-vanish")]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """The target itself as a head, so that drafts matter."""
    target = make_target(tmp_path_factory.mktemp("target"), 32, layers=8, tokenizer=False)
    heads = (HeadSpec("self", "lm", target),)
    spec = StackSpec(target=target, heads=heads, dtype="float32", verifier_threads=1, drafter_threads=1)
    with proxied(spec) as (stack, proxies):
        yield asyncio.run(Rig.on(stack, proxies, Plan(repeat=1, sessions=8, new_tokens=32)))
    assert stack.unclean == []


@pytest.mark.parametrize("scenario", CHOSEN, ids=lambda scenario: scenario.name)
def test_texts_are_plains_and_nothing_is_left_behind(rig: Rig, scenario: Scenario) -> None:
    row = asyncio.run(rig.run(scenario))
    assert row.repetitions
    assert [check for check in row.to_checks() if not check.ok] == []
