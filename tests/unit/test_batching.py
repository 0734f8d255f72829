"""Models on one thread, whose batches wait for sessions that are usually back in time, and how large they may be."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Collection, Hashable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coppice.engine.batching import BatchingThread, Rejoin
from coppice.speculation.tree import DraftTree, path_scores, prune
from services.verifier.budget import CostCurve, Profile, share

NONE_SUCH = -1


class Adder(BatchingThread):
    """Serves numbers: each batch is what waits. Computes with as many of torch's threads as its name has letters."""

    def __init__(self, name: str, host: BatchingThread | None = None) -> None:
        super().__init__(name, host=host)
        self.name = name
        self.numbers: list[int] = []
        self.batches: list[list[int]] = []
        self.threads: set[tuple[str, int]] = set()
        self.done = asyncio.Event()

    def load(self) -> None:
        torch.set_num_threads(len(self.name))

    def idle(self) -> bool:
        return not self.numbers

    def waiting(self) -> Collection[Hashable]:
        return self.numbers

    def serve(self) -> None:
        batch, self.numbers = self.numbers, []
        if NONE_SUCH in batch:
            raise RuntimeError("no such number")
        if batch:
            self.threads.add((threading.current_thread().name, torch.get_num_threads()))
            self.batches.append(batch)
            self.loop.call_soon_threadsafe(self.done.set)

    async def add(self, *numbers: int) -> None:
        """Post numbers and wait for a batch."""
        self.done.clear()
        self.post(lambda: self.numbers.extend(numbers))
        async with asyncio.timeout(10):
            await self.done.wait()


@pytest.fixture
async def host() -> AsyncIterator[Adder]:
    thread = Adder("host")
    await thread.start()
    yield thread
    await thread.stop()
    assert not thread._thread.is_alive()


async def test_a_guest_works_on_its_host_s_thread_whichever_has_something_to_do(host: Adder) -> None:
    guest = Adder("guest", host)
    await guest.start()
    for number in range(20):
        await guest.add(number)
        await asyncio.gather(host.add(number), guest.add(number, number))
    assert (host.threads, guest.threads) == ({("host", 4)}, {("host", 5)})
    assert (sum(map(sum, host.batches)), sum(map(sum, guest.batches))) == (190, 3 * 190)


async def test_the_host_goes_on_when_a_guest_dies(host: Adder) -> None:
    guest, other = Adder("guest", host), Adder("other", host)
    await guest.start()
    await other.start()
    guest.post(lambda: guest.numbers.append(NONE_SUCH))
    async with asyncio.timeout(10):
        await guest.failed.wait()
    guest.post(lambda: host.numbers.append(99))  # a dead guest's work is not done
    await asyncio.gather(host.add(1), other.add(2))
    assert (host.batches, other.batches, guest.batches) == ([[1]], [[2]], [])
    assert not host.failed.is_set()


@pytest.mark.parametrize(
    ("away", "here", "until", "waits"),
    [
        ({"a": [0.01] * 20, "b": [0.03] * 20, "slow": [0.5] * 20}, {"a"}, 0.1, True),
        ({"a": [0.01] * 20, "b": [0.03] * 20, "slow": [0.5] * 20}, {"a", "b"}, 0.1, False),  # slow would be too late
        ({"a": [0.01] * 20, "b": [0.03] * 20}, {"a"}, 0.02, False),  # and so would b
        ({"once": [*[0.02] * 4, 9.0], "other": [0.02] * 5}, {"other"}, 0.03, True),
        ({"changed": [0.02, 0.02, 9.0, 9.0, 9.0], "other": [0.02] * 5}, {"other"}, 0.03, False),
    ],
)
def test_a_batch_waits_for_those_of_the_last_one_that_are_usually_back_in_time(
    away: dict[str, list[float]], here: set[str], until: float, waits: bool
) -> None:
    """Rounds in which every session comes back after its own times; three of five of these count."""
    rejoin, now = Rejoin(), 0.0
    for times in zip(*away.values(), strict=True):
        rejoin.answered(away, now)
        for key, took in zip(away, times, strict=True):
            rejoin.came(key, now + took)
        now += 1.0
    rejoin.answered(away, now)
    assert rejoin.missing(here, now + until) == waits


def test_a_session_without_a_past_is_waited_for_and_one_that_closed_or_was_left_out_is_not() -> None:
    rejoin = Rejoin()
    rejoin.answered(["old", "new"], 1.0)
    rejoin.came("old", 1.01)
    assert rejoin.missing({"old"}, 1.2)
    rejoin.closed("new")
    assert not rejoin.missing({"old"}, 1.2)
    rejoin.came("new", 1.3)  # a step on its way when the session ended
    rejoin.answered(["new"], 1.4)
    assert rejoin.missing({"old"}, 1.5)
    assert not rejoin.missing({"new"}, 1.5)  # "old" was not in the last batch


# --- the budget from measurement: the cut is the best there is, and the cost curve follows what forwards take ---


@st.composite
def packed(draw: st.DrawFn) -> list[DraftTree]:
    """One to three trees of eight nodes in all, scores in any order a calibration may bring about."""
    trees = []
    for _ in range(draw(st.integers(1, 3))):
        size = draw(st.integers(0, 8 - sum(map(len, trees))))
        parents = [draw(st.integers(0, node)) for node in range(size)]
        scores = [draw(st.floats(-6, 0, width=16)) for _ in range(size)]
        trees.append(DraftTree(np.arange(size), np.array(parents, np.int64), np.array(scores, np.float32)))
    return trees


@given(packed(), st.integers(1, 3), st.dictionaries(st.integers(1, 12), st.floats(0.001, 0.1), min_size=1, max_size=4))
def test_no_cut_promises_more_tokens_a_second(trees: list[DraftTree], rows: int, points: dict[int, float]) -> None:
    """The best of so many nodes are those of the highest path scores, which hold all their ancestors."""
    scores, curve = [path_scores(tree) for tree in trees], CostCurve(points)
    budgets = share(scores, rows, float(rows), curve)
    kept = [prune(tree, budget)[1] for tree, budget in zip(trees, budgets, strict=True)]
    promised = sum(float(np.exp(found[nodes - 1]).sum()) for found, nodes in zip(scores, kept, strict=True))
    rate = (rows + promised) / curve([rows + sum(budgets)])[0]
    chances = sorted(np.exp(np.concatenate(scores)).tolist(), reverse=True)
    most = max((rows + sum(chances[:count])) / curve([rows + count])[0] for count in range(len(chances) + 1))
    assert rate == pytest.approx(most)


def linear(fixed: float, per_row: float) -> CostCurve:
    return CostCurve({rows: fixed + per_row * rows for rows in (1, 16, 256)})


def test_a_curve_meets_its_points_never_falls_and_goes_on_behind_them() -> None:
    curve = CostCurve({1: 0.010, 4: 0.009, 16: 0.014, 32: 0.022})
    assert curve([1, 4, 16, 32]) == pytest.approx([0.010, 0.010, 0.014, 0.022])
    assert curve([24, 48]) == pytest.approx([0.018, 0.030])
    assert (np.diff(curve(range(1, 100))) >= 0).all()
    assert CostCurve({8: 0.5})([100]) == [0.5]


def test_a_curve_follows_what_forwards_take_where_they_are_and_elsewhere_a_little() -> None:
    curve = linear(0.01, 0.0001)
    before = curve([1, 16, 256])
    curve.observe(1, 60.0)  # a stall
    assert all(now < 1.2 * then for now, then in zip(curve([1, 16, 256]), before, strict=True))
    for _ in range(200):
        curve.observe(16, 0.03)
        curve.observe(256, before[2])
    assert curve([16, 256]) == [pytest.approx(0.03, rel=0.05), pytest.approx(before[2], rel=0.3)]


def test_a_hint_is_of_the_load_and_comes_back_when_the_load_goes() -> None:
    profile = Profile()
    price = linear(0.01, 0.001)
    assert profile.hint(1, 1, price) is None
    for _ in range(50):
        profile.observe(np.log([0.5, 0.3, 0.2, 0.05]))
    assert profile.hint(1, 1, linear(0.01, 0.0)) is None
    assert profile.hint(64, 64, price) == 0
    profile.observe(np.log([0.5]))  # smaller trees, as hinted, say nothing of the rest
    assert profile.hint(2, 2, price) == 2  # 167, 214, 225, 222 tokens a second with 0 to 3 nodes each
    assert profile.hint(1, 1, linear(0.01, 0.0)) is None
