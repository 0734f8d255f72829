"""Keeps a stack whole: a process that dies is started again where it was, after a pause."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from coppice.backoff import Backoff
from coppice.stack.launch import Stack
from coppice.stack.process import ProcessFailed

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
MOST_DEATHS, WITHIN_S = 3, 60.0
"""an orchestrator that dies so often in so many seconds is not started again"""


@dataclass(slots=True)
class _Watch:
    """What is known of one process. Both times are of time.monotonic()."""

    backoff: Backoff = field(default_factory=lambda: Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S))
    deaths: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_DEATHS))
    starts_at: float | None = None
    """when it is started again; None unless it is dead"""

    def died(self, now: float) -> float:
        """Take in a death; returns the pause before the next start, which is short again after a quiet while."""
        if self.deaths and now - self.deaths[-1] > WITHIN_S:
            self.backoff.succeed()
        self.deaths.append(now)
        pause_s = self.backoff.fail()
        self.starts_at = now + pause_s
        return pause_s

    @property
    def too_often(self) -> bool:
        """Whether the latest deaths followed each other too quickly."""
        return len(self.deaths) == MOST_DEATHS and self.deaths[-1] - self.deaths[0] < WITHIN_S


class Supervisor:
    """Looks at the processes of a running stack. Nothing in it waits for a process to load."""

    def __init__(self, stack: Stack, say: Callable[[str], object]) -> None:
        """`say` is given a line for every process that died or is back."""
        self._stack, self._say = stack, say
        self._watches = {name: _Watch() for name in stack.processes}

    def look(self) -> bool:
        """Start what died once its pause is over, and return whether all run again since this look.

        Raises ProcessFailed when an orchestrator has died too often.
        """
        back = [self._look(name, watch) for name, watch in self._watches.items()]
        dead = [watch for watch in self._watches.values() if watch.starts_at is not None]
        return any(back) and not dead and all(process.ready for process in self._stack.processes.values())

    def _look(self, name: str, watch: _Watch) -> bool:
        process, now = self._stack.processes[name], time.monotonic()
        if watch.starts_at is not None:
            if now >= watch.starts_at:
                watch.starts_at = None
                self._stack.revive(name)
        elif process.ended:
            self._mourn(name, watch, now)
        elif process.ready is None and process.find_ready():
            self._say(f"{name} is back, {now - watch.deaths[-1]:.1f} s after it died")
            return True
        return False

    def _mourn(self, name: str, watch: _Watch, now: float) -> None:
        """Say that a process died, and when it is started again."""
        process = self._stack.processes[name]
        pause_s = watch.died(now)
        if watch.too_often and self._stack.is_orchestrator(name):
            try:
                process.check()
            except ProcessFailed as error:
                raise ProcessFailed(f"{MOST_DEATHS} times in {WITHIN_S:g} s {error}") from None
        self._say(f"{name} {process.ended}; it is started again in {pause_s:g} s (log: {process.log_file})")
        process.forget()
