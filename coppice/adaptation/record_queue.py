"""Records that wait to be sent: bounded in number, in bytes and in bytes a second, so that nobody ever waits."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Literal

from coppice.adaptation.records import Fields

Stream = Literal["queries", "samples"]

_BATCH_ENTRIES, _BATCH_BYTES = 256, 1 << 20


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a stream."""

    stream: Stream
    key: str
    fields: Fields
    size: int
    """bytes"""
    kept: int
    """about how many entries the stream keeps"""


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much may wait and be sent, and about how many records a stream keeps."""

    queue_entries: int = 4096
    queue_bytes: int = 64 << 20
    entry_bytes: int = 8 << 20
    bytes_per_s: int = 32 << 20
    queries_kept: int = 10_000
    samples_kept: int = 4096


BOUNDS = Bounds()


class RecordQueue:
    """A queue between any thread that puts and one that takes."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._lock = threading.Lock()
        self._entries: deque[Entry] = deque()
        self._bytes = 0
        self._allowance, self._allowed_at = float(bounds.bytes_per_s), time.monotonic()

    def put(self, entry: Entry) -> str:
        """Append an entry; returns "" or, when it may not wait here, why: oversized, full or rate."""
        with self._lock:
            refused = self._refuses(entry.size)
            if not refused:
                self._entries.append(entry)
                self._bytes += entry.size
            return refused

    def _refuses(self, size: int) -> str:
        bounds, now = self._bounds, time.monotonic()
        if size > bounds.entry_bytes:
            return "oversized"
        if len(self._entries) >= bounds.queue_entries or self._bytes + size > bounds.queue_bytes:
            return "full"
        earned = (now - self._allowed_at) * bounds.bytes_per_s
        self._allowance, self._allowed_at = min(self._allowance + earned, bounds.bytes_per_s), now
        if size > self._allowance:
            return "rate"
        self._allowance -= size
        return ""

    def take(self) -> list[Entry]:
        """Remove the oldest entries, as many as make a batch."""
        batch: list[Entry] = []
        size = 0
        with self._lock:
            while self._entries and len(batch) < _BATCH_ENTRIES and size < _BATCH_BYTES:
                batch.append(self._entries.popleft())
                size += batch[-1].size
            self._bytes -= size
        return batch
