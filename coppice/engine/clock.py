"""How long a forward took, known without having waited for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

R = TypeVar("R")


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class Clock:
    """Runs from its making on; on a CUDA device it measures what the device does, in the order of the stream."""

    def __init__(self, device: torch.device) -> None:
        self._began, self._ns = time.perf_counter_ns(), 0
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if device.type == "cuda":
            self._events = _event(), _event()
            self._events[0].record()

    def stop(self) -> None:
        """Let it run up to here."""
        if self._events:
            self._events[1].record()
        else:
            self._ns = time.perf_counter_ns() - self._began

    def wait(self) -> None:
        """Return once a device has come as far as where it was stopped."""
        if self._events:
            self._events[1].synchronize()

    @property
    def ns(self) -> int:
        """Nanoseconds it ran, once it was stopped. Waits as `wait` does."""
        self.wait()
        return int(self._events[0].elapsed_time(self._events[1]) * 1e6) if self._events else self._ns


class Timed:
    """Runs work on the clock, and adds up how long it took."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._clocks: list[Clock] = []

    def __call__(self, work: Callable[..., R], *inputs: Any) -> R:
        """What the work returns."""
        clock = Clock(self._device)
        outputs = work(*inputs)
        clock.stop()
        self._clocks.append(clock)
        return outputs

    def taken(self) -> int:
        """Nanoseconds of all work since this was asked; waits until a device is done with it."""
        took, self._clocks = sum(clock.ns for clock in self._clocks), []
        return took
