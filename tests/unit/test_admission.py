"""Admission: seats are handed on in order, and none is lost or given twice, whoever gives up at whatever moment."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coppice.errors import Overloaded
from coppice.rpc.admission import Admission
from tests.processes import without_waiting

CAPACITY = 3
ACTS = st.one_of(
    st.tuples(st.just("come"), st.integers(1, CAPACITY)),
    st.tuples(st.just("cancel"), st.integers(0, 20)),
    st.tuples(st.just("leave"), st.integers(0, 20)),
    st.tuples(st.just("turn"), st.integers(1, 3)),
    st.tuples(st.just("sleep"), st.just(0)),
)


class Caller:
    """One who wants some units, holds them until told to leave, and may be cancelled at any moment."""

    def __init__(self, admission: Admission, units: int) -> None:
        self.units, self.holds, self._leave = units, False, asyncio.Event()
        self.task = asyncio.create_task(self._run(admission))

    async def _run(self, admission: Admission) -> None:
        with contextlib.suppress(Overloaded):
            async with admission.admit(self.units):
                self.holds = True
                try:
                    await self._leave.wait()
                finally:
                    self.holds = False

    def leave(self) -> None:
        """Give the units back in the next turn of the loop."""
        self._leave.set()


async def _play(acts: list[tuple[str, int]]) -> None:
    admission = Admission("seats", CAPACITY, queued=6, wait_s=0.001)
    callers: list[Caller] = []
    for act, number in acts:
        if act == "come":
            callers.append(Caller(admission, number))
        elif act == "turn":
            for _ in range(number):
                await asyncio.sleep(0)
        elif act == "sleep":
            await asyncio.sleep(0.001)
        elif callers and act == "cancel":
            callers[number % len(callers)].task.cancel()
        elif callers:
            callers[number % len(callers)].leave()
        assert admission.used <= CAPACITY
        assert sum(caller.units for caller in callers if caller.holds) <= admission.used
    for caller in callers:
        caller.leave()
    for outcome in await asyncio.gather(*(caller.task for caller in callers), return_exceptions=True):
        assert outcome is None or isinstance(outcome, asyncio.CancelledError)
    assert admission.used == 0
    async with admission.admit(CAPACITY):
        assert admission.used == CAPACITY


@given(st.lists(ACTS, max_size=40))
@settings(max_examples=200, deadline=None)
def test_no_interleaving_loses_a_seat_or_ends_in_another_error(acts: list[tuple[str, int]]) -> None:
    without_waiting(_play)(acts)


@without_waiting
async def test_those_who_wait_are_served_in_order() -> None:
    admission = Admission("seats", 2, queued=8, wait_s=5)
    held = [Caller(admission, 1), Caller(admission, 1)]
    await asyncio.sleep(0)
    large, small = Caller(admission, 2), Caller(admission, 1)
    held[0].leave()
    await asyncio.sleep(0.01)
    assert [large.holds, small.holds] == [False, False]  # the small one does not overtake
    held[1].leave()
    await asyncio.sleep(0.01)
    assert [large.holds, small.holds] == [True, False]
    large.leave()
    await asyncio.sleep(0.01)
    assert small.holds
    small.leave()
    await asyncio.gather(*(caller.task for caller in (*held, large, small)))


@without_waiting
async def test_those_who_are_refused_come_back_as_fast_as_places_become_free() -> None:
    """However many they are: what they are told is spread over time, a few of them for each place."""
    held_s, capacity = 0.2, 4
    admission = Admission("seats", capacity, queued=0, wait_s=1)
    async with admission.admit():
        await asyncio.sleep(held_s)
    callers = [Caller(admission, 1) for _ in range(capacity)]
    await asyncio.sleep(0)

    def hints(count: int) -> list[float]:
        told = []
        for _ in range(count):
            with pytest.raises(Overloaded) as refused:
                admission.check()
            told.append(refused.value.retry_after_s)
        return told

    first = hints(40)
    assert first[0] == pytest.approx(0.1 + held_s / capacity / 4, abs=0.02)
    assert first[39] - first[0] == pytest.approx(39 * held_s / capacity / 4, rel=0.2)
    assert max(hints(400)) <= 0.1 + 4 * 1.5 * held_s  # nobody needs to wait for more than a few turns
    await asyncio.sleep(1.2)
    assert hints(1)[0] == pytest.approx(first[0], abs=0.02)
    for caller in callers:
        caller.leave()
    await asyncio.gather(*(caller.task for caller in callers))
