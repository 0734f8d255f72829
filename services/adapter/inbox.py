"""What comes out of Redis: the streams of all heads are read once, and what was sent and never came is counted.

How far a head's streams were read, and each sender's last number, are part of that head's state, saved with all else
that its records changed. After a crash the next adapter reads on from what it still knows: no record counts twice, and
those since the last save are not lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import structlog
from redis.exceptions import RedisError

from coppice import failpoints
from coppice.adaptation.signals import NUMBER, SENDER, Stream, read_query, read_sample, redis_key
from coppice.backoff import Backoff
from coppice.errors import InvalidField, Unavailable
from coppice.rpc.redis_connection import Connection

from .loop import HeadLoop
from .state import AdapterMetrics

log = structlog.get_logger()

_BATCH = 64  # entries of a stream read at a time
_PAUSE_S = 0.25  # before streams are read again that had nothing
_DEMAND_TTL_S = 10  # an adapter that is gone asks for nothing
_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 0.5, 5.0
_SENDERS = 256  # of a stream, whose numbers are remembered
_BEGINNING = "0-0"  # the id before all entries
# The id of a stream's last entry, and the next entries behind a position, if there is one.
_READ = """
local last = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
local batch = ARGV[1] ~= '' and redis.call('XREAD', 'COUNT', ARGV[2], 'STREAMS', KEYS[1], ARGV[1])
return {last and last[1] or '0-0', batch and batch[1][2] or {}}
"""


class Inbox:
    """Reads the streams of all heads, and says which samples are wanted."""

    def __init__(self, url: str, readers: Sequence[HeadLoop], metrics: AdapterMetrics) -> None:
        self._readers, self._metrics = readers, metrics
        self._connection = Connection(url)
        streams: tuple[Stream, ...] = ("samples", "queries")  # in this order, so that a query finds its samples
        self._streams = {redis_key(reader.name, stream): (reader, stream) for stream in streams for reader in readers}
        self._refused: set[str] = set()  # keys, of streams and of demands
        self._malformed: set[str] = set()  # keys with such records

    async def run(self) -> None:
        """Read for ever; Redis may come and go."""
        backoff = Backoff(_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S)
        while True:
            try:
                pause_s = 0.0 if await self.read() else _PAUSE_S
                backoff.succeed()
            except Unavailable as error:
                if backoff.fresh:
                    log.warning("redis is away", why=str(error))
                pause_s = backoff.fail()
            await asyncio.sleep(pause_s)

    async def read(self) -> bool:
        """Say what is wanted and hand on one batch of every stream; returns whether there was any.

        A stream is read from its end if no position is known, for what is there may have been learnt before. One that
        ends before its position was made again, or Redis lost entries: it is read anew, and what was read is known by
        its numbers. A key that Redis refuses stops no other. Raises Unavailable.
        """
        commands: dict[str, tuple[Any, ...]] = {}
        for reader in self._readers:
            key, demand = redis_key(reader.name, "demand"), reader.demand
            commands[key] = ("SET", key, demand, "EX", _DEMAND_TTL_S) if demand else ("DEL", key)
        for key, (reader, stream) in self._streams.items():
            commands[key] = ("EVAL", _READ, 1, key, reader.state.positions.get(stream, ""), _BATCH)
        async with self._connection.exchange() as client:
            pipe = client.pipeline(transaction=False)
            for command in commands.values():
                pipe.execute_command(*command)
            answers: list[Any] = await pipe.execute(raise_on_error=False)
        entries = 0
        for key, answer in zip(commands, answers, strict=True):
            if isinstance(answer, RedisError):
                if key not in self._refused:
                    log.warning("redis refuses a key", key=key, why=str(answer))
                self._refused.add(key)
                continue
            self._refused.discard(key)
            if key in self._streams:
                end, batch = answer
                self._take(key, end.decode(), batch)
                entries += len(batch)
        return entries > 0

    def _take(self, key: str, end: str, batch: Sequence[Any]) -> None:
        """Hand on a stream's entries, (id, [name, value, name, ...]) each; `end`: the id of its last one."""
        reader, stream = self._streams[key]
        positions, numbers = reader.state.positions, reader.state.numbers.setdefault(stream, {})
        if batch:
            failpoints.hit("adapter.read")
        for entry, values in batch:
            positions[stream] = entry.decode()
            fields = dict(zip(values[::2], values[1::2], strict=True))
            if self._is_new(numbers, stream, fields):
                self._metrics.read.labels(reader.name, stream).inc()
                try:
                    if stream == "queries":
                        reader.take_query(read_query(fields))
                    else:
                        reader.take_sample(read_sample(fields, *reader.widths))
                except InvalidField as error:
                    self._metrics.malformed.labels(reader.name, stream).inc()
                    if key not in self._malformed:
                        log.warning("a record is malformed", key=key, why=str(error))
                    self._malformed.add(key)
        if _order(positions.setdefault(stream, end)) > _order(end):
            positions[stream] = _BEGINNING

    def _is_new(self, numbers: dict[str, int], stream: Stream, fields: Mapping[bytes, bytes]) -> bool:
        """Tell whether a record was not read before, and count those missing before it.

        Senders number what they send: a gap was trimmed before anybody read it, or lost with Redis.
        """
        sender, digits = fields.get(SENDER, b"")[:64].decode("latin-1"), fields.get(NUMBER, b"")
        if not sender or not digits.isdigit() or len(digits) > 18:
            return True
        number, last = int(digits), numbers.pop(sender, None)
        numbers[sender] = max(number, last or 0)  # the newest comes last
        if len(numbers) > _SENDERS:
            del numbers[next(iter(numbers))]
        if last is not None:
            self._metrics.lost.labels(stream).inc(max(0, number - last - 1))
        return last is None or number > last


def _order(entry: str) -> tuple[int, ...]:
    """Return the numbers of an entry's id, `MILLISECONDS-SEQUENCE`, by which ids are ordered."""
    return tuple(map(int, entry.split("-")))
