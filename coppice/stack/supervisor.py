"""Keeps a stack whole: a process that dies is started again where it was, after a pause."""

from __future__ import annotations

import time
from collections.abc import Callable

from coppice.stack.launch import Stack
from coppice.stack.process import ProcessFailed, ServiceProcess

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
MOST_DEATHS, WITHIN_S = 3, 60.0
"""an orchestrator that dies so often in so many seconds is not started again"""
MOST_PAUSES = 8
"""doublings after which a pause is the longest"""


class Supervisor:
    """Looks at the processes of a running stack. Nothing in it waits for a process to load."""

    def __init__(self, stack: Stack, say: Callable[[str], object]) -> None:
        """`say` is given a line for every process that died or is back."""
        self._stack, self._say = stack, say
        self._deaths: dict[str, list[float]] = {name: [] for name in stack.processes}
        """when each died, by time.monotonic(), since it last lived for WITHIN_S"""
        self._starts_at: dict[str, float] = {}
        """when what is dead is started again"""

    def look(self) -> bool:
        """Start what died once its pause is over, and return whether all run again since this look.

        Raises ProcessFailed when an orchestrator has died too often.
        """
        back = [self._look(process) for process in self._stack.processes.values()]
        return any(back) and not self._starts_at and all(each.ready for each in self._stack.processes.values())

    def _look(self, process: ServiceProcess) -> bool:
        name, now = process.name, time.monotonic()
        if name in self._starts_at:
            if now >= self._starts_at[name]:
                del self._starts_at[name]
                self._stack.revive(name)
        elif process.ended:
            pause_s = self._pause(process, now)
            self._say(f"{name} {process.ended}; it is started again in {pause_s:g} s (log: {process.log_file})")
            process.forget()
            self._starts_at[name] = now + pause_s
        elif process.ready is None and process.find_ready():
            self._say(f"{name} is back, {now - self._deaths[name][-1]:.1f} s after it died")
            return True
        return False

    def _pause(self, process: ServiceProcess, now: float) -> float:
        """Seconds from a death to the next start: twice as many with each, few again after a quiet while."""
        deaths = self._deaths[process.name]
        if deaths and now - deaths[-1] > WITHIN_S:
            deaths.clear()
        deaths.append(now)
        if process.role == "orchestrator" and len(deaths) >= MOST_DEATHS and now - deaths[-MOST_DEATHS] < WITHIN_S:
            try:
                process.check()
            except ProcessFailed as error:
                raise ProcessFailed(f"{MOST_DEATHS} times in {WITHIN_S:g} s {error}") from None
        return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(len(deaths) - 1, MOST_PAUSES))
