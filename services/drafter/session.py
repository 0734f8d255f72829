"""A drafting session as both threads know it: its key, and what waits to be sent to its client."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from coppice.errors import CoppiceError, Overloaded
from coppice.wire.drafter import DraftOpened, TreeDelta

MAX_BACKLOG = 32  # steps not taken and answers not sent; a client that reads its answers has a few


Answer = DraftOpened | TreeDelta | Exception


@dataclass(eq=False, slots=True)
class Session:
    """Belongs to the event loop, save `taken` and `drafting`."""

    key: int
    answers: asyncio.Queue[Answer | None] = field(default_factory=asyncio.Queue)
    """what to send; None only wakes the sender"""
    sent: int = 0
    """steps handed to the worker"""
    taken: int = 0
    """steps the worker took; its thread counts"""
    drafting: tuple[int, int] = 0, 0
    """when the step that is drafted for came, and when the thread began, of `perf_counter_ns`"""
    newest: int | None = None
    """number of the newest step while it is not answered"""
    ended: bool = False
    """no further step comes"""
    end: CoppiceError | None = None
    """why, unless the client closed its side"""

    @property
    def finished(self) -> bool:
        """No further step comes and the last one is answered."""
        return self.ended and self.newest is None

    def check_backlog(self) -> None:
        """Raise Overloaded when the client sends steps faster than it reads answers or the head drafts."""
        if self.sent - self.taken + self.answers.qsize() > MAX_BACKLOG:
            raise Overloaded(f"more than {MAX_BACKLOG} steps or answers are waiting")

    def finish(self, end: CoppiceError | None) -> None:
        """End after the current step, with `end` as the status."""
        self.ended, self.end = True, end
        self.answers.put_nowait(None)
