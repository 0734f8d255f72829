"""Records on their way to Redis: a bounded queue that never waits, and one task that sends it in batches.

Redis absent, slow, full or flushed costs records and nothing else: each one is sent or dropped, and counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import prometheus_client
import structlog

from coppice.backoff import Backoff
from coppice.errors import Unavailable
from coppice.rpc.redis_connection import TIMEOUT_S, Connection
from coppice.signals.records import (
    NUMBER,
    SENDER,
    Demand,
    Fields,
    QueryRecord,
    Sample,
    Stream,
    query_to_fields,
    read_demand,
    redis_key,
    sample_to_fields,
    size_of,
)

log = structlog.get_logger()

_PERIOD_S = 0.1  # between two batches
_POLL_S = 1.0  # between two looks at the demand key
_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 1.0, 5.0
_LOG_EVERY = 100  # refused entries of a key
_BATCH_ENTRIES, _BATCH_BYTES = 256, 1 << 20


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a stream."""

    stream: Stream
    key: str
    fields: Fields
    size: int
    """bytes"""


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much may wait and be sent, and about how much a stream keeps."""

    queue_entries: int = 4096
    queue_bytes: int = 64 << 20
    entry_bytes: int = 8 << 20
    bytes_per_s: int = 32 << 20
    stream_entries: int = 10_000
    stream_bytes: int = 256 << 20


BOUNDS = Bounds()


class SignalMetrics:
    """What a process counts about the records it sends to the adapter: produced = sent + dropped + waiting."""

    def __init__(self, registry: prometheus_client.CollectorRegistry) -> None:
        counter = partial(prometheus_client.Counter, registry=registry, namespace="coppice")
        self.produced = counter("signals_produced", "records made for the adapter", ["stream"])
        self.sent = counter("signals_sent", "records that Redis took", ["stream"])
        self.dropped = counter("signals_dropped", "records that were dropped", ["stream", "reason"])


class Producer:
    """Sends records to the streams of the heads. `query` and `sample` may be called from any thread."""

    def __init__(self, url: str, metrics: SignalMetrics, heads: Sequence[str], bounds: Bounds = BOUNDS) -> None:
        """`heads`: those whose demand for samples is followed."""
        self._metrics, self._heads, self._bounds = metrics, heads, bounds
        self._demands: dict[str, Demand] = {}
        self._lock = threading.Lock()  # of the queue
        self._entries: deque[Entry] = deque()
        self._bytes = 0
        self._allowance, self._allowed_at = float(bounds.bytes_per_s), time.monotonic()
        self._name = secrets.token_hex(8).encode()
        self._sent = Counter[str]()  # entries, by key: a reader sees by their numbers what it never got
        self._refused = Counter[str]()  # entries that it refused, by key
        self._connection = Connection(url)
        self._polled_at = -math.inf
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to send, on the running loop. Redis need not be there."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Send what waits, if Redis takes it within a moment, drop the rest and end."""
        self._stopping.set()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=3 * TIMEOUT_S)
            self._task.cancel()
            await asyncio.wait([self._task])
        while batch := self._batch():
            self._drop(batch, "stopped")
        await self._connection.close()

    def demand_for(self, head: str) -> Demand:
        """Return what is wanted of a head; nothing while Redis does not answer."""
        return self._demands.get(head, "")

    def query(self, head: str, record: QueryRecord) -> None:
        """Queue a query's record."""
        self._put("queries", head, query_to_fields(record))

    def sample(self, head: str, sample: Sample) -> None:
        """Queue a training sample."""
        self._put("samples", head, sample_to_fields(sample))

    # --- the queue ---

    def _put(self, stream: Stream, head: str, fields: Fields) -> None:
        entry = Entry(stream, redis_key(head, stream), fields, size_of(fields))
        self._metrics.produced.labels(stream).inc()
        with self._lock:
            refused = self._refuses(entry.size)
            if not refused:
                self._entries.append(entry)
                self._bytes += entry.size
                self._allowance -= entry.size
        if refused:
            self._drop([entry], refused)

    def _refuses(self, size: int) -> str:
        """Return why an entry of this size may not wait here, "" if it may."""
        bounds, now = self._bounds, time.monotonic()
        earned = (now - self._allowed_at) * bounds.bytes_per_s
        self._allowance, self._allowed_at = min(self._allowance + earned, bounds.bytes_per_s), now
        if size > bounds.entry_bytes:
            return "oversized"
        if len(self._entries) >= bounds.queue_entries or self._bytes + size > bounds.queue_bytes:
            return "full"
        return "rate" if size > self._allowance else ""

    def _batch(self) -> list[Entry]:
        """Remove the oldest entries, as many as make a batch."""
        batch: list[Entry] = []
        size = 0
        with self._lock:
            while self._entries and len(batch) < _BATCH_ENTRIES and size < _BATCH_BYTES:
                batch.append(self._entries.popleft())
                size += batch[-1].size
            self._bytes -= size
        return batch

    def _drop(self, entries: Sequence[Entry], reason: str) -> None:
        for entry in entries:
            self._metrics.dropped.labels(entry.stream, reason).inc()

    # --- the task ---

    async def _run(self) -> None:
        backoff = Backoff(_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S)
        while True:
            last = self._stopping.is_set()
            try:
                await self._poll()
                while batch := self._batch():
                    await self._send(batch)
                backoff.succeed()
                pause_s = _PERIOD_S
            except Unavailable as error:
                if any(self._demands.values()) or backoff.fresh:
                    log.warning("redis does not take signals", why=str(error))
                self._demands, self._polled_at = {}, -math.inf
                pause_s = backoff.fail()
            except Exception:
                log.exception("signals not sent")
                self._demands, pause_s = {}, _LONGEST_BACKOFF_S
            if last:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._stopping.wait()

    async def _poll(self) -> None:
        """Look at the demand, at most once a second: that is also how a Redis that is back is noticed."""
        now = time.monotonic()
        if now - self._polled_at < _POLL_S:
            return
        async with self._connection.exchange(TIMEOUT_S) as client:
            pipe = client.pipeline(transaction=False)
            pipe.ping()
            for head in self._heads:
                pipe.get(redis_key(head, "demand"))
            _, *demands = await pipe.execute()
        self._demands = dict(zip(self._heads, map(read_demand, demands), strict=True))
        self._polled_at = now

    async def _send(self, batch: Sequence[Entry]) -> None:
        """Send a batch in one round trip. It is not sent twice: when its answer is lost it counts as dropped."""
        bounds, answers = self._bounds, list[Any]()
        try:
            async with self._connection.exchange(TIMEOUT_S) as client:
                pipe = client.pipeline(transaction=False)
                for entry in batch:
                    self._sent[entry.key] += 1
                    fields: Any = {**entry.fields, SENDER: self._name, NUMBER: str(self._sent[entry.key])}
                    most = min(bounds.stream_entries, max(1, bounds.stream_bytes // entry.size))
                    pipe.xadd(entry.key, fields, maxlen=most, approximate=True)
                answers = await pipe.execute(raise_on_error=False)
        finally:
            self._drop(batch[len(answers) :], "redis")
        for entry, answer in zip(batch, answers, strict=True):
            if isinstance(answer, Exception):
                if self._refused[entry.key] % _LOG_EVERY == 0:
                    log.warning("redis refuses records", key=entry.key, why=str(answer))
                self._refused[entry.key] += 1
                self._drop([entry], "refused")
            else:
                self._metrics.sent.labels(entry.stream).inc()
