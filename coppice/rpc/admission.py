"""Admission to a bounded resource: first come first served, a bounded queue, a bounded wait."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator

from coppice.errors import Overloaded


class Admission:
    """`capacity` units (sessions, KV tokens); callers wait in order for theirs. For one event loop."""

    def __init__(self, what: str, capacity: int, queued: int, wait_s: float) -> None:
        self.what, self.capacity, self.queued, self.wait_s = what, capacity, queued, wait_s
        self.used = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @contextlib.asynccontextmanager
    async def admit(self, units: int = 1) -> AsyncIterator[None]:
        """Hold `units` inside the block.

        Raises Overloaded at once when they can never fit or the queue is full, or after `wait_s` in the queue.
        """
        await self._acquire(units)
        try:
            yield
        finally:
            self.used -= units
            self._wake()

    async def _acquire(self, units: int) -> None:
        if units > self.capacity:
            raise Overloaded(f"{units} {self.what} asked for, {self.capacity} is all there is")
        if not self._waiting and self.used + units <= self.capacity:
            self.used += units
            return
        if len(self._waiting) >= self.queued:
            raise Overloaded(f"no {self.what} free and {len(self._waiting)} requests waiting")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (units, turn)
        self._waiting.append(entry)
        try:
            async with asyncio.timeout(self.wait_s):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():  # granted in the very moment of giving up
                self.used -= units
            else:
                self._waiting.remove(entry)
            self._wake()
            if isinstance(error, TimeoutError):
                raise Overloaded(f"no {self.what} became free within {self.wait_s:g} s") from None
            raise

    def _wake(self) -> None:
        while self._waiting and self.used + self._waiting[0][0] <= self.capacity:
            units, turn = self._waiting.popleft()
            if not turn.done():
                self.used += units
                turn.set_result(None)
