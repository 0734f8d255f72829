"""Records on their way to Redis: a bounded queue that never waits, and one task that sends it in batches.

Redis absent, slow, full or flushed costs records and nothing else: each one is sent or dropped, and counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from coppice.adaptation.records import (
    NUMBER,
    SENDER,
    Demand,
    Fields,
    QueryRecord,
    Sample,
    demand_key,
    queries_key,
    query_to_fields,
    read_demand,
    sample_to_fields,
    samples_key,
    size_of,
)
from coppice.config.adaptation import AdaptationSettings
from coppice.store.connection import connect, disconnect
from coppice.telemetry import SignalMetrics

log = structlog.get_logger()

Stream = Literal["queries", "samples"]

_PERIOD_S = 0.1  # between two batches
_POLL_S = 1.0  # between two looks at the demand key
_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 1.0, 5.0
_BATCH_ENTRIES, _BATCH_BYTES = 256, 1 << 20


@dataclass(frozen=True, slots=True)
class _Entry:
    stream: Stream
    key: str
    fields: Fields
    size: int
    kept: int  # entries that the stream keeps, about


class Producer:
    """Sends records to the streams of the heads. The verbs that take one may be called from any thread."""

    def __init__(self, settings: AdaptationSettings, metrics: SignalMetrics, demand_of: str = "") -> None:
        """`demand_of` is the head whose demand for samples is followed, none when empty."""
        self.demand: Demand = ""
        """which samples are wanted; nothing while Redis does not answer"""
        self._settings, self._metrics, self._demand_of = settings, metrics, demand_of
        self._name, self._taken = secrets.token_hex(8).encode(), Counter[str]()  # entries that Redis took, by key
        self._lock = threading.Lock()
        self._queue: deque[_Entry] = deque()
        self._queued_bytes = 0
        self._allowance, self._allowed_at = float(settings.bytes_per_s), time.monotonic()
        self._client: Redis | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._polled_at = -_POLL_S
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to send, on the running loop. Redis need not be there."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Send what waits, if Redis takes it within a moment, drop the rest and end."""
        self._stopping.set()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=3 * self._settings.timeout_s)
            self._task.cancel()
            await asyncio.wait([self._task])
        self._drop(self._take(None), "stopped")
        self._let_go()
        if self._closing:
            await asyncio.wait(self._closing, timeout=self._settings.timeout_s)

    def query(self, head: str, record: QueryRecord) -> None:
        """Queue a query's record."""
        key = queries_key(self._settings.prefix, head)
        self._put("queries", key, query_to_fields(record), self._settings.queries_kept)

    def sample(self, head: str, sample: Sample) -> None:
        """Queue a training sample."""
        key = samples_key(self._settings.prefix, head)
        self._put("samples", key, sample_to_fields(sample), self._settings.samples_kept)

    def _put(self, stream: Stream, key: str, fields: Fields, kept: int) -> None:
        size = size_of(fields)
        entry = _Entry(stream, key, fields, size, min(kept, max(1, self._settings.stream_bytes // size)))
        self._metrics.produced.labels(stream).inc()
        with self._lock:
            refused = self._refuses(size)
            if not refused:
                self._queue.append(entry)
                self._queued_bytes += size
        if refused:
            self._drop([entry], refused)

    def _refuses(self, size: int) -> str:
        """Why an entry may not wait here; empty when it may."""
        bounds, now = self._settings, time.monotonic()
        if size > bounds.entry_bytes:
            return "oversized"
        if len(self._queue) >= bounds.queue_entries or self._queued_bytes + size > bounds.queue_bytes:
            return "full"
        earned = (now - self._allowed_at) * bounds.bytes_per_s
        self._allowance, self._allowed_at = min(self._allowance + earned, bounds.bytes_per_s), now
        if size > self._allowance:
            return "rate"
        self._allowance -= size
        return ""

    def _take(self, most: int | None = _BATCH_ENTRIES) -> list[_Entry]:
        """The oldest entries, as many as make a batch; all of them for None."""
        taken: list[_Entry] = []
        size = 0
        with self._lock:
            while self._queue and (most is None or (len(taken) < most and size < _BATCH_BYTES)):
                taken.append(self._queue.popleft())
                size += taken[-1].size
            self._queued_bytes -= size
        return taken

    def _drop(self, entries: Sequence[_Entry], reason: str) -> None:
        for entry in entries:
            self._metrics.dropped.labels(entry.stream, reason).inc()

    # --- the task ---

    async def _run(self) -> None:
        backoff_s = _FIRST_BACKOFF_S
        while True:
            last = self._stopping.is_set()
            try:
                await self._poll()
                while batch := self._take():
                    await self._send(batch)
                pause_s, backoff_s = _PERIOD_S, _FIRST_BACKOFF_S
            except (RedisError, OSError, TimeoutError) as error:
                if self.demand or backoff_s == _FIRST_BACKOFF_S:
                    log.warning("redis does not take signals", why=type(error).__name__)
                self.demand = ""
                pause_s, backoff_s = backoff_s, min(2 * backoff_s, _LONGEST_BACKOFF_S)
            except Exception:
                log.exception("signals not sent")
                self.demand, pause_s = "", _LONGEST_BACKOFF_S
            if last:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._stopping.wait()

    async def _poll(self) -> None:
        """Look at the demand, at most once a second: that is also how a Redis that is back is noticed."""
        now = time.monotonic()
        if now - self._polled_at < _POLL_S and self._client is not None:
            return
        self._polled_at = now
        key = demand_key(self._settings.prefix, self._demand_of)
        async with self._connected() as client:
            if self._demand_of:
                self.demand = read_demand(await client.get(key))
            else:
                await client.ping()

    async def _send(self, batch: Sequence[_Entry]) -> None:
        """One round trip. A batch is not sent twice: when its answer is lost it counts as dropped."""
        answers: Sequence[Any] = ()
        try:
            async with self._connected() as client:
                pipe = client.pipeline(transaction=False)
                numbers = self._taken.copy()
                for entry in batch:
                    numbers[entry.key] += 1
                    fields: Any = {**entry.fields, SENDER: self._name, NUMBER: str(numbers[entry.key])}
                    pipe.xadd(entry.key, fields, maxlen=entry.kept, approximate=True)
                answers = await pipe.execute(raise_on_error=False)
        finally:
            for entry, answer in zip(batch, answers, strict=False):
                if isinstance(answer, Exception):
                    self._drop([entry], "refused")
                else:
                    self._taken[entry.key] += 1
                    self._metrics.sent.labels(entry.stream).inc()
            self._drop(batch[len(answers) :], "redis")

    @contextlib.asynccontextmanager
    async def _connected(self) -> AsyncIterator[Redis]:
        """A client for one exchange. After any trouble, cancellation included, its connections are never used again."""
        if self._client is None:
            self._client = connect(self._settings)
        try:
            async with asyncio.timeout(2 * self._settings.timeout_s):
                yield self._client
        except BaseException:
            self._let_go()
            raise

    def _let_go(self) -> None:
        """Close the client, in the background."""
        client, self._client = self._client, None
        if client is not None:
            task = asyncio.create_task(disconnect(client))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
