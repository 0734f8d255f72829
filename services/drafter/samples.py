"""Training samples for the adapter: windows of what was committed."""

from __future__ import annotations

from collections import deque

import numpy as np

from coppice.signals.producer import Producer
from coppice.signals.records import Sample, SampleFacts
from coppice.wire.common import Features

WINDOW = 64
"""positions of a sample"""
_LEAST_TEXT = 16  # committed positions of a text's end that are worth a sample


class Window:
    """A session's latest committed positions: ids and feature rows, as they came; WINDOW of them and an advance."""

    def __init__(self) -> None:
        self.end, self.dtype = 0, "float32"
        self.sampled = 0  # the end of the last sample, before the first one the prompt's end
        self._ids: deque[int] = deque()
        self._rows: deque[bytes] = deque()

    def append(self, ids: list[int], features: Features) -> None:
        """Take the features of positions up to a new end, `ids` those of its last positions."""
        while len(self._ids) > WINDOW:
            self._ids.popleft()
            self._rows.popleft()
        inline, count = features.inline or b"", features.count
        width = len(inline) // max(1, count)
        new = min(count, len(ids)) if self._ids else min(count, WINDOW)  # of a prompt no more than is ever read
        self.dtype = features.dtype or "float32"
        self._ids += ids[len(ids) - new :]
        self._rows += (inline[at * width : (at + 1) * width] for at in range(count - new, count))
        self.end = features.start + count
        self.sampled = self.sampled or self.end

    def sample(self, session: str) -> Sample:
        """The last positions, at most WINDOW; they count as sampled."""
        self.sampled = self.end
        ids, rows = list(self._ids)[-WINDOW:], list(self._rows)[-WINDOW:-1]
        return Sample(SampleFacts(session, self.end - 1, self.dtype), np.array(ids, np.int64), b"".join(rows))


class Samples:
    """Makes samples while someone wants them."""

    def __init__(self, producer: Producer, head: str) -> None:
        self._producer, self._head = producer, head

    @property
    def wanted(self) -> bool:
        """Whether an adapter learns from texts now."""
        return bool(self._producer.demand_for(self._head))

    def offer(self, session: str, window: Window, *, ended: bool) -> None:
        """Queue the window if it is full of what was not sampled yet, or the text has ended."""
        if self.wanted and window.end - window.sampled >= (_LEAST_TEXT if ended else WINDOW):
            self._producer.sample(self._head, window.sample(session))
