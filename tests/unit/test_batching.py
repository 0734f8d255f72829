"""Models on one thread: a guest's batches are served between its host's, and its end is its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Collection, Hashable

import pytest
import torch

from coppice.engine.batching import BatchingThread

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


class Counter(Adder):
    """Notes with how many of torch's threads it serves; `load` sets their number unless it is 0."""

    def __init__(self, name: str, threads: int, host: BatchingThread | None = None) -> None:
        super().__init__(name, host)
        self._set = threads
        self.counts: set[int] = set()

    def load(self) -> None:
        if self._set:
            torch.set_num_threads(self._set)

    def serve(self) -> None:
        self.counts.add(torch.get_num_threads())
        super().serve()


async def test_a_guest_computes_with_its_own_threads_and_the_host_with_its_own() -> None:
    host = Counter("host", 3)
    guests = [Counter("two", 2, host), Counter("silent", 0, host)]
    broken = Counter("broken", 5, host)
    for thread in (host, *guests, broken):
        await thread.start()
    broken.post(lambda: broken.numbers.append(NONE_SUCH))
    async with asyncio.timeout(10):
        await broken.failed.wait()
    for number in range(10):
        await asyncio.gather(host.add(number), *(guest.add(number) for guest in guests))
    await host.stop()
    assert [thread.counts for thread in (host, *guests)] == [{3}, {2}, {3}]
