"""Models on one thread, each of whose batches waits for the sessions that are usually back in time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Collection, Hashable

import pytest
import torch

from coppice.engine.batching import BatchingThread, Rejoin

NONE_SUCH = -1


class Adder(BatchingThread):
    """Serves numbers: each batch is what waits."""

    def __init__(self, name: str, host: BatchingThread | None = None) -> None:
        super().__init__(name, host=host)
        self.name = name
        self.numbers: list[int] = []
        self.batches: list[list[int]] = []
        self.threads: set[str] = set()
        self.done = asyncio.Event()

    def load(self) -> None:
        if self.name == "broken":
            raise ValueError("does not load")

    def idle(self) -> bool:
        return not self.numbers

    def waiting(self) -> Collection[Hashable]:
        return self.numbers

    def serve(self) -> None:
        batch, self.numbers = self.numbers, []
        if NONE_SUCH in batch:
            raise RuntimeError("no such number")
        if batch:
            self.threads.add(threading.current_thread().name)
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
    assert guest.threads == host.threads == {"host"}
    assert sum(map(sum, host.batches)) == sum(range(20))
    assert sum(map(sum, guest.batches)) == 3 * sum(range(20))


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


async def test_a_guest_that_does_not_load_is_none(host: Adder) -> None:
    with pytest.raises(ValueError, match="does not load"):
        await Adder("broken", host).start()
    await host.add(1)
    assert host.batches == [[1]]


async def test_a_guest_computes_with_its_own_threads_and_the_host_with_its_own() -> None:
    class Threaded(Adder):
        """Sets at its load how many of torch's threads it computes with, and notes how many it serves with."""

        def load(self) -> None:
            self.counts: set[int] = set()
            torch.set_num_threads(len(self.name))

        def serve(self) -> None:
            self.counts.add(torch.get_num_threads())
            super().serve()

    host = Threaded("hhh")
    guest = Threaded("gg", host)
    for thread in (host, guest):
        await thread.start()
    for number in range(10):
        await asyncio.gather(host.add(number), guest.add(number))
    await host.stop()
    assert (host.counts, guest.counts) == ({3}, {2})


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
