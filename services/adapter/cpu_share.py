"""The share of the time that training may compute."""

from __future__ import annotations

import time

_LONGEST_S = 1.0  # between two rests; what is longer was no computing: the process was held still


class CpuShare:
    """Sleeps often enough that a thread computes for no more than a share of the time. Make it on that thread."""

    def __init__(self, share: float) -> None:
        self.seconds = 0.0
        """passed since it was made, as far as the process ran"""
        self._share = share
        self._last, self._began = time.monotonic(), time.thread_time()

    def rest(self) -> None:
        """Sleep until the share is kept."""
        self._count()
        computed = time.thread_time() - self._began
        time.sleep(min(_LONGEST_S, max(0.0, computed / self._share - self.seconds)))
        self._count()

    def _count(self) -> None:
        now = time.monotonic()
        self.seconds += min(now - self._last, _LONGEST_S)
        self._last = now
