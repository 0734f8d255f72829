"""What comes out of Redis: the streams of all heads are read once, and what was sent and never came is counted.

How far a head's streams were read is part of that head's state, saved with all else that its records changed. After a
crash the next adapter reads on from what it still knows: no record counts twice, and those since the last save are not
lost.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import structlog
from redis.asyncio import Redis

from coppice import failpoints
from coppice.adaptation.record_queue import Stream
from coppice.adaptation.records import (
    NUMBER,
    SENDER,
    Demand,
    Fields,
    demand_key,
    queries_key,
    read_query,
    read_sample,
    samples_key,
)
from coppice.backoff import Backoff
from coppice.config.adaptation import AdaptationSettings
from coppice.errors import InvalidField, Unavailable
from coppice.store.connection import Connection
from coppice.telemetry import AdapterMetrics

from .head_loop import HeadLoop

log = structlog.get_logger()

_BATCH = 64  # entries of a stream read at a time
_BLOCK_MS = 500
_DEMAND_TTL_S = 10  # an adapter that is gone asks for nothing
_DEMAND_EVERY_S = 2.0
_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 0.5, 5.0
_SENDERS = 1024  # whose numbers are remembered
_BEGINNING = "0-0"  # the id before all entries


class Inbox:
    """Reads the streams of all heads, and says which samples are wanted."""

    def __init__(self, settings: AdaptationSettings, readers: Sequence[HeadLoop], metrics: AdapterMetrics) -> None:
        self._settings, self._readers, self._metrics = settings, readers, metrics
        self._connection = Connection(settings)
        self._streams: dict[bytes, tuple[HeadLoop, Stream]] = {}  # samples first, so that a query finds its own
        for reader in readers:
            self._streams[samples_key(settings.prefix, reader.name).encode()] = reader, "samples"
        for reader in readers:
            self._streams[queries_key(settings.prefix, reader.name).encode()] = reader, "queries"
        self._numbers: OrderedDict[tuple[bytes, bytes], int] = OrderedDict()
        self._asked: dict[str, tuple[Demand, float]] = {}

    async def begin(self) -> None:
        """Note where the streams end, if Redis answers: what comes from now on will be read."""
        with contextlib.suppress(Unavailable):
            await self._find_positions()

    async def run(self) -> None:
        """Read for ever; Redis may come and go."""
        backoff, connected = Backoff(_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S), False
        while True:
            try:
                await self._find_positions()
                backoff.succeed()
                connected = True
                while True:
                    async with self._connection.exchange() as client:
                        await self._ask(client)
                    async with self._connection.exchange(_BLOCK_MS / 1000) as client:
                        await self._read(client)
            except Unavailable as error:
                if connected:
                    log.warning("redis is away", why=str(error))
                connected = False
            finally:
                self._asked.clear()
                await self._connection.close()
            await asyncio.sleep(backoff.fail())

    async def _find_positions(self) -> None:
        """Begin at the end of a stream whose position is not known, or lies ahead of it.

        It is not known to an adapter that remembers nothing: what is there may have been learnt before. It lies ahead
        when Redis lost entries or its clock went back.
        """
        async with self._connection.exchange() as client:
            for key, (reader, stream) in self._streams.items():
                newest: Any = await client.xrevrange(key, count=1)
                end = newest[0][0].decode() if newest else _BEGINNING
                reader.positions[stream] = min(reader.positions.get(stream, end), end, key=_order)

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
        """Hand on one batch of every stream that has entries."""
        after: Any = {key: reader.positions[stream] for key, (reader, stream) in self._streams.items()}
        batches: Any = dict(await client.xread(after, count=_BATCH, block=_BLOCK_MS) or ())
        if batches:
            failpoints.hit("adapter.read")
        for key, (reader, stream) in self._streams.items():
            for entry, fields in batches.get(key, ()):
                reader.positions[stream] = entry.decode()
                self._count(key, stream, fields)
                self._hand_on(reader, stream, fields)

    def _hand_on(self, reader: HeadLoop, stream: Stream, fields: Fields) -> None:
        self._metrics.read.labels(reader.name, stream).inc()
        try:
            if stream == "queries":
                reader.take_query(read_query(fields))
            else:
                reader.take_sample(read_sample(fields, reader.widths))
        except InvalidField as error:
            self._metrics.malformed.labels(reader.name, stream).inc()
            log.warning("a record is not what it should be", stream=stream, why=str(error))

    def _count(self, key: bytes, stream: Stream, fields: Mapping[bytes, bytes]) -> None:
        """Count what is missing: senders number what Redis took, so a gap was trimmed before anybody read it."""
        sender, digits = fields.get(SENDER, b"")[:64], fields.get(NUMBER, b"")
        if not sender or not digits.isdigit() or len(digits) > 18:
            return
        number, last = int(digits), self._numbers.pop((key, sender), None)
        if last is not None and number > last + 1:
            self._metrics.lost.labels(stream).inc(number - last - 1)
        self._numbers[key, sender] = max(number, last or 0)
        if len(self._numbers) > _SENDERS:
            self._numbers.popitem(last=False)


def _order(entry: str) -> tuple[int, ...]:
    """Return the numbers of an entry's id, `MILLISECONDS-SEQUENCE`, by which ids are ordered."""
    return tuple(map(int, entry.split("-")))
