"""Sessions that live exactly as long as their stream: waiting for the next message, idling out, draining."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import TypeVar

from coppice.errors import Unavailable

T = TypeVar("T")


def end_waits(waits: Iterable[asyncio.Timeout]) -> None:
    """Let every wait time out now; one that does so already refuses another time."""
    now = asyncio.get_running_loop().time()
    for wait in waits:
        if not wait.expired():
            wait.reschedule(now)


class StreamWaits:
    """Ends streams that idle too long, and all waiting streams at once when the server drains."""

    def __init__(self, idle_s: float, draining: asyncio.Event) -> None:
        self.idle_s, self.draining = idle_s, draining
        self._waiting: set[asyncio.Timeout] = set()

    async def next(self, messages: AsyncIterator[T]) -> T | None:
        """The next message, None at the stream's end. Raises Unavailable when idle too long or draining."""
        if self.draining.is_set():
            raise Unavailable("the server is draining")
        try:
            async with asyncio.timeout(self.idle_s) as wait:
                self._waiting.add(wait)
                try:
                    return await anext(messages, None)
                finally:
                    self._waiting.discard(wait)
        except TimeoutError:
            reason = "the server is draining" if self.draining.is_set() else f"no message for {self.idle_s:g} s"
            raise Unavailable(reason) from None

    async def end_on_drain(self) -> None:
        """Wait for the drain and end every waiting stream; run this as a task beside the server."""
        await self.draining.wait()
        end_waits(self._waiting)
