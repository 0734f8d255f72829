"""A loop whose clock jumps: where nothing is ready, the next timer is due at once, so that sleeps take no time."""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Awaitable, Callable
from typing import Any


class _Jumping(selectors.DefaultSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        """What is ready now; else, unless a thread or a socket is all that is waited for, time passes."""
        ready = super().select(None if timeout is None else 0)
        self.now += (timeout or 0.0) if not ready else 0.0
        return ready


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop on that clock, which begins at 0."""

    def __init__(self) -> None:
        self._clock = _Jumping()
        super().__init__(self._clock)

    def time(self) -> float:
        """Seconds that were slept."""
        return self._clock.now


def without_waiting(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Decorator: runs a test on a loop whose clock jumps."""

    @functools.wraps(test)
    def run(*arguments: Any, **options: Any) -> None:
        with asyncio.Runner(loop_factory=JumpingLoop) as runner:
            runner.run(test(*arguments, **options))  # type: ignore[arg-type]

    return run
