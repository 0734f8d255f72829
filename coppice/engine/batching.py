"""A thread that owns a model: it takes what sessions send, in order, and serves all that wait in one batch.

Loading, warm-up and every forward run on this thread: a second one would bring a second OpenMP pool, and the two fight.
So a further model of the process may be the guest of another one's thread, which does its work between batches, with as
many of torch's threads as the guest's `load` set.
"""

from __future__ import annotations

import asyncio
import math
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from statistics import median_low
from typing import Any

import structlog

LATEST = 5  # times away that count; one that was long, as when a head had to take in the text, leaves the median alone


class Rejoin:
    """Learns for each session how long it stays away between an answer and its next step."""

    def __init__(self) -> None:
        self._answered: dict[Hashable, float] = {}  # when a session's last answer went out, on one clock
        self._away: dict[Hashable, deque[float]] = {}  # the latest times between an answer and the next step
        self.expected: frozenset[Hashable] = frozenset()  # those of the last batch that are still open

    def answered(self, keys: Iterable[Hashable], now: float) -> None:
        """These were the last batch, whose answers go out now."""
        self.expected = frozenset(keys)
        self._answered |= dict.fromkeys(self.expected, now)

    def came(self, key: Hashable, now: float) -> None:
        """A session's next step is here."""
        if key in self._answered:
            self._away.setdefault(key, deque(maxlen=LATEST)).append(now - self._answered[key])

    def closed(self, key: Hashable) -> None:
        self._answered.pop(key, None)
        self._away.pop(key, None)
        self.expected -= {key}

    def missing(self, here: Collection[Hashable], until: float) -> bool:
        """Whether some session of the last batch, none of those `here`, should be back by `until`.

        One that was never away is expected at once, the others after the median of their times away. To wait is worth
        it where `until` is a batch's time away: who misses a batch waits as long for the next one.
        """
        away = self.expected.difference(here)
        return any(self._answered[key] + median_low(self._away.get(key) or (0.0,)) <= until for key in away)


log = structlog.get_logger()

_JOIN_S = 10.0


class BatchingThread(ABC):
    """`start`, `stop`, `post` and `run` are for the event loop, the rest is the thread's."""

    def __init__(self, name: str, longest_wait_s: float = math.inf, host: BatchingThread | None = None) -> None:
        """longest_wait_s: how long a batch waits, a batch's time at most, for sessions of the one before. host: whose
        thread does this one's work between its own batches; None: it has a thread.
        """
        self.failed = asyncio.Event()
        """the thread ended by an error, or a guest's work did; the model is of no more use"""
        self._name = name
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._longest_wait_s = longest_wait_s
        self._rejoin = Rejoin()
        self._batch_s = 0.0  # moving average
        self._running = True
        self._host = host
        self._guests: list[BatchingThread] = []
        self._threads = 0  # a guest's; known once it has loaded

    async def start(self) -> None:
        """Start the thread and wait until it has loaded. Raises what `load` raises."""
        self.loop = asyncio.get_running_loop()
        loaded: asyncio.Future[None] = self.loop.create_future()
        if self._host is None:
            self._thread = threading.Thread(target=self._run, args=(loaded,), name=self._name, daemon=True)
            self._thread.start()
        else:
            host = self._host
            host.post(lambda: host._guests.append(self) if self._load(loaded) else None)
        await loaded

    async def stop(self) -> None:
        """End the thread after what it is doing. A guest ends with its host."""
        if self._host is None:
            self._inbox.put(lambda: setattr(self, "_running", False))
            await asyncio.to_thread(self._thread.join, _JOIN_S)

    def post(self, work: Callable[[], None]) -> None:
        """Have something done on the thread, behind what was posted before; a dead guest's work is not done."""
        if self._host is None:
            self._inbox.put(work)
        else:
            self._host.post(lambda: self._do(work) if self._running else None)

    async def run(self, work: Callable[[], Any]) -> Any:
        """Have something done on the thread; what it returns. Raises what it raises."""
        outcome: asyncio.Future[Any] = self.loop.create_future()

        def answer() -> None:
            try:
                value = work()
            except Exception as error:
                value = error
            self.loop.call_soon_threadsafe(settle, outcome, value)

        self.post(answer)
        return await outcome

    @abstractmethod
    def load(self) -> None:
        """Load and warm up the model."""

    @abstractmethod
    def idle(self) -> bool:
        """Whether there is nothing to serve."""

    @abstractmethod
    def waiting(self) -> Collection[Hashable]:
        """Sessions with a step that may wait for others to share its batch; none when it may not."""

    @abstractmethod
    def serve(self) -> None:
        """Serve a batch of what waits."""

    def served(self, seconds: float, sessions: Iterable[Hashable], now: float) -> None:
        """Note how long a batch took, and the sessions that are answered now."""
        self._batch_s = 0.9 * (self._batch_s or seconds) + 0.1 * seconds
        self._rejoin.answered(sessions, now)

    def _run(self, loaded: asyncio.Future[None]) -> None:
        if self._load(loaded):
            self._do(self._serve_all)

    def _load(self, loaded: asyncio.Future[None]) -> bool:
        """Load, and tell `start` how that ended; whether it did well."""
        error: BaseException | None = None
        try:
            with self._own_threads():
                self.load()
        except BaseException as raised:
            error, self._running = raised, False
        self.loop.call_soon_threadsafe(settle, loaded, error)
        return self._running

    def _do(self, work: Callable[[], None]) -> None:
        try:
            with self._own_threads():
                work()
        except BaseException:
            self.die()

    def die(self) -> None:
        """End by the exception in hand."""
        log.exception("the thread of the model died")
        self._running = False
        self.loop.call_soon_threadsafe(self.failed.set)

    def _serve_all(self) -> None:
        while self._running:
            self._collect()
            self.serve()
            self._serve_guests()

    @contextmanager
    def _own_threads(self) -> Iterator[None]:
        """torch computes with a guest's threads inside, and with its host's again behind."""
        if self._host is None:
            yield
            return
        import torch  # settings are checked before it is loaded

        host = torch.get_num_threads()
        if self._threads:
            torch.set_num_threads(self._threads)
        try:
            yield
        finally:
            self._threads = torch.get_num_threads()
            torch.set_num_threads(host)

    def _serve_guests(self) -> bool:
        """Serve a batch of each guest that has one; whether any had."""
        waiting = [guest for guest in self._guests if guest._running and not guest.idle()]
        for guest in waiting:
            guest._do(guest.serve)
        return bool(waiting)

    def _collect(self) -> None:
        """Take what came in; wait for work, serving guests, and for sessions of the last batch that are back soon."""
        if self.idle() and not self._serve_guests():
            self._inbox.get()()
        latest = time.perf_counter() + min(self._longest_wait_s, self._batch_s)
        left: float = 0
        while self._running:
            with suppress(queue.Empty):
                work = self._inbox.get(timeout=left) if left > 0 else self._inbox.get_nowait()
                work()
                left = 0
                continue
            idle, left = self.idle(), latest - time.perf_counter()
            here = self.waiting()
            if not idle and (left <= 0 or not here or not self._rejoin.missing(here, latest)):
                return
            if self._serve_guests():
                left = 0
            elif idle:
                return


def settle(future: asyncio.Future[Any], outcome: Any) -> None:
    """Answer a caller with a value or an exception, unless it has left."""
    if future.done():
        return
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
