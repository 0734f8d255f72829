"""Training samples for the adapter: windows of what was committed."""

from __future__ import annotations

import numpy as np

from coppice.adaptation.signals import Producer, Sample
from coppice.wire.common import Features
from coppice.wire.drafter import Advance, OpenDraft

WINDOW = 64
"""positions of a sample"""
_LEAST_TEXT = 16  # committed positions of a text's end that are worth a sample


class _Window:
    """A session's latest committed positions: at most WINDOW ids and feature rows."""

    def __init__(self, opening: OpenDraft, features: Features) -> None:
        self.session = opening.session
        self.ids: list[int] = []
        self.rows: list[bytes] = []
        self.append(opening.ids, features)
        self.sampled = self.end  # the end of the last sample, before the first one the prompt's end

    def append(self, ids: list[int], features: Features) -> None:
        """Take the features of positions up to a new end, `ids` those of its last positions."""
        count = min(features.count, len(ids), WINDOW)
        rows, width = features.inline or b"", len(features.inline or b"") // max(1, features.count)
        first = features.count - count
        self.ids = [*self.ids, *ids[len(ids) - count :]][-WINDOW:]
        new = [rows[at * width : (at + 1) * width] for at in range(first, features.count)]
        self.rows = [*self.rows, *new][-WINDOW:]
        self.dtype, self.end = features.dtype or "float32", features.start + features.count


class Samples:
    """Cuts samples of sessions by their key, and queues them while an adapter learns from texts."""

    def __init__(self, producer: Producer, head: str) -> None:
        self._producer, self._head = producer, head
        self._windows: dict[int, _Window] = {}

    @property
    def _wanted(self) -> bool:
        return bool(self._producer.demand_for(self._head))

    def open(self, key: int, opening: OpenDraft) -> None:
        """Take a session's prompt, if samples are wanted now and it comes with features."""
        if opening.features is not None and self._wanted:
            self._windows[key] = _Window(opening, opening.features)

    def advance(self, key: int, advance: Advance) -> None:
        """Take what a session committed. A window that is full of what was not sampled yet is a sample."""
        window = self._windows.get(key)
        if window is not None and advance.ids and advance.features is not None:
            window.append(advance.ids, advance.features)
            self._offer(window, WINDOW)

    def close(self, key: int) -> None:
        """Forget a session, whose end may be a sample too."""
        window = self._windows.pop(key, None)
        if window is not None:
            self._offer(window, _LEAST_TEXT)

    def _offer(self, window: _Window, least: int) -> None:
        if self._wanted and window.end - window.sampled >= least:
            window.sampled = window.end
            sample = Sample(window.session, np.array(window.ids, np.int64), b"".join(window.rows[:-1]), window.dtype)
            self._producer.sample(self._head, sample)
