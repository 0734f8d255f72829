"""What comes out of Redis: records are acknowledged when they are read, and what was sent and never came is counted.

Learning from a sample twice would be worse than losing it, so nothing is claimed back: reads are NOACK, and Redis keeps
nothing pending for us.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from coppice import failpoints
from coppice.adaptation.records import (
    GROUP,
    NUMBER,
    SENDER,
    Demand,
    Fields,
    QueryRecord,
    Sample,
    demand_key,
    queries_key,
    read_query,
    read_sample,
    samples_key,
)
from coppice.config.adaptation import AdaptationSettings
from coppice.errors import InvalidField
from coppice.store.connection import connect, disconnect
from coppice.telemetry import AdapterMetrics

log = structlog.get_logger()

_CONSUMER = "adapter"
_BATCH = 64  # entries of a stream read at a time
_BLOCK_MS = 500
_DEMAND_TTL_S = 10  # an adapter that is gone asks for nothing
_DEMAND_EVERY_S = 2.0
_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 0.5, 5.0
_SENDERS = 1024  # whose numbers are remembered


class Reader(Protocol):
    """One head's part of the adapter, as the inbox sees it."""

    name: str
    vocab_size: int

    @property
    def demand(self) -> Demand:
        """Which samples it wants now."""

    def take_query(self, record: QueryRecord) -> None:
        """A query ended."""

    def take_sample(self, sample: Sample) -> None:
        """A sample of a query that runs, or ended just now."""


class Inbox:
    """Reads the streams of all heads, and says which samples are wanted."""

    def __init__(self, settings: AdaptationSettings, readers: Sequence[Reader], metrics: AdapterMetrics) -> None:
        self._settings, self._metrics = settings, metrics
        self._readers = list(readers)
        prefix = settings.prefix
        self._queries = {queries_key(prefix, reader.name).encode(): reader for reader in readers}
        self._samples = {samples_key(prefix, reader.name).encode(): reader for reader in readers}
        self._numbers: OrderedDict[tuple[bytes, bytes], int] = OrderedDict()
        self._asked: dict[str, tuple[Demand, float]] = {}
        self.connected = False

    async def run(self) -> None:
        """Read for ever; Redis may come and go."""
        backoff_s = _FIRST_BACKOFF_S
        while True:
            client = connect(self._settings)
            try:
                async with self._in_time():
                    await self._create_groups(client)
                self.connected, backoff_s = True, _FIRST_BACKOFF_S
                while True:
                    async with self._in_time():
                        await self._ask(client)
                    async with self._in_time(_BLOCK_MS / 1000):
                        await self._read(client)
            except (RedisError, OSError, TimeoutError) as error:
                if self.connected:
                    log.warning("redis is away", why=type(error).__name__)
                self.connected = False
            finally:
                self._asked.clear()
                await disconnect(client)
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _LONGEST_BACKOFF_S)

    def _in_time(self, more_s: float = 0.0) -> asyncio.Timeout:
        return asyncio.timeout(self._settings.timeout_s + more_s)

    async def _create_groups(self, client: Redis) -> None:
        for key in (*self._queries, *self._samples):
            try:
                await client.xgroup_create(key, GROUP, id="0", mkstream=True)
            except ResponseError as error:
                if "BUSYGROUP" not in str(error):
                    raise

    async def _ask(self, client: Redis) -> None:
        """Tell drafters which samples are wanted, when that changed and every now and then."""
        now = asyncio.get_running_loop().time()
        for reader in self._readers:
            wanted, key = reader.demand, demand_key(self._settings.prefix, reader.name)
            asked, asked_at = self._asked.get(reader.name, ("", 0.0))
            if wanted == asked and (not wanted or now - asked_at < _DEMAND_EVERY_S):
                continue
            if wanted:
                await client.set(key, wanted, ex=_DEMAND_TTL_S)
            else:
                await client.delete(key)
            self._asked[reader.name] = wanted, now

    async def _read(self, client: Redis) -> None:
        """One batch; samples first, so that a query finds its own. A stream that was flushed gets its group again."""
        streams: dict[Any, Any] = dict.fromkeys((*self._samples, *self._queries), ">")
        try:
            found: Any = await client.xreadgroup(GROUP, _CONSUMER, streams, count=_BATCH, block=_BLOCK_MS, noack=True)
        except ResponseError as error:
            if "NOGROUP" not in str(error):
                raise
            await self._create_groups(client)
            return
        by_key = dict(found or ())
        if by_key:
            failpoints.hit("adapter.read")
        for key, entries in sorted(by_key.items(), key=lambda item: item[0] in self._queries):
            for _, fields in entries:
                self._count(key, fields)
                self._hand_on(key, fields)

    def _hand_on(self, key: bytes, fields: Fields) -> None:
        reader = self._queries.get(key) or self._samples[key]
        stream = "queries" if key in self._queries else "samples"
        self._metrics.read.labels(reader.name, stream).inc()
        try:
            if stream == "queries":
                reader.take_query(read_query(fields))
            else:
                reader.take_sample(read_sample(fields, reader.vocab_size))
        except InvalidField as error:
            self._metrics.malformed.labels(reader.name, stream).inc()
            log.warning("a record is not what it should be", stream=stream, why=str(error))

    def _count(self, key: bytes, fields: Mapping[bytes, bytes]) -> None:
        """Senders number what Redis took from them: a gap was trimmed or flushed before anybody read it."""
        sender, told = fields.get(SENDER, b"")[:64], fields.get(NUMBER, b"")
        if not sender or not told.isdigit() or len(told) > 18:
            return
        number, last = int(told), self._numbers.pop((key, sender), None)
        if last is not None and number > last + 1:
            self._metrics.lost.labels("queries" if key in self._queries else "samples").inc(number - last - 1)
        self._numbers[key, sender] = max(number, last or 0)
        if len(self._numbers) > _SENDERS:
            self._numbers.popitem(last=False)
