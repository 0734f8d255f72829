"""The share of the time that training may compute."""

from __future__ import annotations

import time


class CpuShare:
    """Sleeps often enough that a thread computes for no more than a share of the time."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._began, self._computed = time.monotonic(), time.thread_time()

    def rest(self) -> None:
        """Sleep until the share is kept."""
        computed, passed = time.thread_time() - self._computed, time.monotonic() - self._began
        time.sleep(max(0.0, computed / self._share - passed))
