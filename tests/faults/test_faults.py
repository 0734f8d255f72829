"""Processes of a stack with two of everything are broken under eight sessions: no request fails, no token is wrong.

Each role is struck once each way; `make proof` does every scenario of `python -m tests.faults` twenty times.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import pytest

from coppice.client.completion import StreamEvent
from coppice.stack.spec import HeadSpec, StackSpec
from coppice.wire.generation import Chunk, Finished, Origin, Started
from tests.faults.campaign.load import Stream
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


# --- the campaign's own parts: each violation is found, and a bad result is refused ---

PLAIN = (11, 12, 13, 14, 15)


def started(held: int = 0) -> tuple[StreamEvent, int]:
    """An event, and behind how many tokens its attempt was told to go on."""
    return Started(3, "plain", (), 0), held


def chunk(*ids: int) -> tuple[StreamEvent, int]:
    return Chunk("", ids, (Origin.ROOT,) * len(ids), ("",) * len(ids)), 0


def finished(new_tokens: int) -> tuple[StreamEvent, int]:
    return Finished("length", 3, new_tokens, [], [], []), 0


def heard(events: Sequence[tuple[StreamEvent, int]], *, left: bool = False) -> Stream:
    """What a client saw that was handed all that came."""
    stream = Stream(PLAIN, left=left)
    for event, held in events:
        stream.hear(event, held)
    stream.ids, stream.ended = list(stream.received), stream.began
    return stream


WHOLE = [started(), chunk(11), chunk(12, 13), chunk(14, 15), finished(5)]
RESUMED = [started(), chunk(11, 12), started(2), chunk(13, 14, 15), finished(3)]
ONLY_ITS_END = [started(), chunk(*PLAIN), started(5), finished(0)]


def test_a_good_history_breaks_no_rule() -> None:
    left = [heard(events, left=True) for events in ([], [started()], WHOLE[:3], RESUMED[:-1])]
    for stream in (*left, *map(heard, (WHOLE, RESUMED, ONLY_ITS_END))):
        assert (stream.violations, stream.wrong) == ([], 0)


@pytest.mark.parametrize(
    ("events", "wrong", "violation"),
    [
        ([started(), chunk(11), chunk(11, 12, 13, 14, 15), finished(6)], 5, ""),
        ([started(), chunk(11), chunk(13, 14, 15), finished(4)], 4, ""),
        ([started(), chunk(*PLAIN, 16), finished(6)], 1, ""),
        ([started(), chunk(11, 12, 13), finished(3)], 2, ""),
        ([*WHOLE, chunk(16)], 1, "chunk after the end"),
        ([*WHOLE, finished(5)], 0, "finished after the end"),
        ([chunk(11), started(1), chunk(12, 13, 14, 15), finished(4)], 0, "chunk before the answer started"),
        ([started(), chunk(11, 12), started(1), *RESUMED[3:]], 0, "went on behind 1 tokens, 2 were received"),
        ([started(), chunk(11), started(2), *RESUMED[3:]], 4, "went on behind 2 tokens, 1 were received"),
        ([*WHOLE[:-1], finished(4)], 0, "the end says 4 tokens, 5 were received"),
    ],
)
def test_every_violation_is_found(events: list[tuple[StreamEvent, int]], wrong: int, violation: str) -> None:
    stream = heard(events)
    assert stream.wrong == wrong
    assert violation in "".join(stream.violations)
    assert bool(stream.violations) == bool(violation)
    stream = heard(WHOLE)
    stream.ids[-1:] = []
    assert stream.violations == ["its client was handed other tokens than came"]
