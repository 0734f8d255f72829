"""A thread that owns a model: it takes what sessions send, in order, and serves all that wait in one batch.

Loading, warm-up and every forward run on this thread: a second one would bring a second OpenMP pool, and the two fight.
"""

from __future__ import annotations

import asyncio
import math
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable
from contextlib import suppress
from typing import Any

import structlog

from coppice.engine.rejoin import Rejoin

log = structlog.get_logger()

_JOIN_S = 10.0


class BatchingThread(ABC):
    """`start`, `stop` and `post` are for the event loop, the rest is the thread's."""

    def __init__(self, name: str, longest_wait_s: float = math.inf) -> None:
        """longest_wait_s: how long a batch waits for sessions of the one before; a batch's time bounds it, too."""
        self.failed = asyncio.Event()
        """the thread ended by an error; the process is of no more use"""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._longest_wait_s = longest_wait_s
        self._rejoin = Rejoin()
        self._batch_s = 0.0  # moving average
        self._running = True

    async def start(self) -> None:
        """Start the thread and wait until it has loaded. Raises what `load` raises."""
        self.loop = asyncio.get_running_loop()
        loaded: asyncio.Future[None] = self.loop.create_future()
        self._loaded = loaded
        self._thread.start()
        await loaded

    async def stop(self) -> None:
        """End the thread after what it is doing."""
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join, _JOIN_S)

    def post(self, work: Callable[[], None]) -> None:
        """Have something done on the thread, behind what was posted before."""
        self._inbox.put(work)

    # --- the thread ---

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

    def _run(self) -> None:
        try:
            self.load()
        except BaseException as error:
            self.loop.call_soon_threadsafe(settle, self._loaded, error)
            return
        self.loop.call_soon_threadsafe(settle, self._loaded, None)
        try:
            while self._running:
                self._collect()
                self.serve()
        except BaseException:
            log.exception("the thread of the model died")
            self.loop.call_soon_threadsafe(self.failed.set)

    def _collect(self) -> None:
        """Take what came in; wait for work, and for sessions of the last batch that usually are back soon."""
        if self.idle():
            self._take(self._inbox.get())
        latest = time.perf_counter() + min(self._longest_wait_s, self._batch_s)
        while self._running:
            try:
                self._take(self._inbox.get_nowait())
            except queue.Empty:
                here, left = self.waiting(), latest - time.perf_counter()
                if left <= 0 or not here or not self._rejoin.missing(here, latest):
                    return
                with suppress(queue.Empty):
                    self._take(self._inbox.get(timeout=left))

    def _take(self, work: Callable[[], None] | None) -> None:
        if work is None:
            self._running = False
        else:
            work()


def settle(future: asyncio.Future[Any], outcome: Any) -> None:
    """Answer a caller with a value or an exception, unless it has left."""
    if future.done():
        return
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
