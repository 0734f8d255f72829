"""Processes of a stack with two of everything are broken under 16 sessions: no request fails, no token is wrong.

`make test` strikes each role three times each way; `make proof` runs every scenario twenty times.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import replace

import pytest

from coppice.faults.command import adapting, every
from coppice.faults.rig import Plan, Rig, Scenario, proxied
from coppice.stack_spec import HeadSpec, StackSpec
from tests.tiny import make_target
from tests.unit.test_feature_heads import save_random

PROOF = bool(os.environ.get("COPPICE_PROOF"))
QUICK = ("kill", "stop", "cut")
STRUCK = [f"{role}-{fault}" for role in ("drafter", "verifier", "orchestrator") for fault in QUICK]
SCENARIOS = [one for one in every() if PROOF or one.name in (*STRUCK, "client-vanish")]
PLAN = Plan(repeat=20 if PROOF else 3, sessions=16, new_tokens=48)
VOCAB = 32  # so small that a random head is right now and then


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> StackSpec:
    """The target itself as a head, so that drafts matter; at full counts also one whose weights can be replaced."""
    target = make_target(tmp_path_factory.mktemp("target"), VOCAB, layers=8, tokenizer=False)
    block = save_random(tmp_path_factory.mktemp("block"), "specblock", vocab_size=VOCAB, draft_vocab_size=24)
    learning = (HeadSpec("block", "specblock", block),) if PROOF else ()
    return StackSpec(
        target=target,
        heads=(HeadSpec("self", "lm", target), *learning),
        dtype="float32",
        verifier_threads=1,
        drafter_threads=1,
        log_dir=tmp_path_factory.mktemp("logs"),
    )


def _rig(spec: StackSpec) -> Iterator[Rig]:
    with proxied(spec) as (stack, proxies):
        yield asyncio.run(Rig.on(stack, proxies, PLAN))
    assert stack.unclean == []


@pytest.fixture(scope="module")
def rig(spec: StackSpec) -> Iterator[Rig]:
    yield from _rig(spec)


@pytest.fixture(scope="module")
def adapted_rig(spec: StackSpec, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """The same beside an adapter that updates every few queries."""
    folder = tmp_path_factory.mktemp("adapter")
    yield from _rig(adapting(replace(spec, log_dir=folder / "logs"), folder / "state"))


def _holds(rig: Rig, scenario: Scenario) -> None:
    row = asyncio.run(rig.run(scenario))
    assert row.repetitions
    assert [check for check in row.to_checks() if not check.ok] == []


@pytest.mark.parametrize("scenario", [one for one in SCENARIOS if not one.adapts], ids=lambda one: one.name)
def test_texts_are_plains_and_nothing_is_left_behind(rig: Rig, scenario: Scenario) -> None:
    _holds(rig, scenario)


if PROOF:

    @pytest.mark.parametrize("scenario", [one for one in SCENARIOS if one.adapts], ids=lambda one: one.name)
    def test_texts_are_plains_whatever_happens_to_adaptation(adapted_rig: Rig, scenario: Scenario) -> None:
        _holds(adapted_rig, scenario)
