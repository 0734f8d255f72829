"""Signals for the adapter: records, as stream entries in Redis, and the bounded queue by which they get there.

A query is one field of JSON, a sample several of bytes. Arrays are little-endian. Whatever is read is checked as if a
stranger had written it. Never text: ids and numbers. Redis absent, slow, full or flushed costs records and nothing
else: each one is sent or dropped, and counted.
"""

import asyncio
import contextlib
import math
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, get_args

import numpy as np
import prometheus_client
import structlog
from numpy.typing import NDArray
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from coppice import limits
from coppice.errors import Backoff, InvalidField, Unavailable
from coppice.rpc.redis_connection import TIMEOUT_S, Connection

log = structlog.get_logger()

_PERIOD_S = 0.1  # between two batches
_POLL_S = 1.0  # between two looks at the demand key
_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 1.0, 5.0
_BATCH_ENTRIES, _BATCH_BYTES = 256, 1 << 20

Stream = Literal["queries", "samples"]
Demand = Literal["", "texts", "misses"]
"""what is wanted: nothing; samples of what was committed, each position once; or also how far drafts missed"""
Fields = dict[bytes, bytes]  # one stream entry

SENDER, NUMBER = b"by", b"n"
"""Fields that a producer adds to its entries, so that a reader sees what was trimmed before it was read"""
MAX_META_BYTES = 4096
_ITEM_BYTES = {"float32": 4, "bfloat16": 2}
_Session = Annotated[str, AfterValidator(partial(limits.check_session, "session"))]
_Count = Annotated[int, Field(ge=0, le=limits.MAX_COUNT)]
_Amount = Annotated[float, Field(ge=0, le=1e18, allow_inf_nan=False)]


def redis_key(head: str, name: Literal["queries", "samples", "demand"]) -> str:
    """Return the key of one of a head's streams, or of what is wanted of the head: a Demand, absent for nothing."""
    return f"coppice:{head}:{name}"


def read_demand(value: bytes | str | None) -> Demand:
    """Read the demand key's value; anything unknown wants nothing."""
    return next((name for name in get_args(Demand) if name.encode() == value), "")


def size_of(fields: Mapping[bytes, bytes]) -> int:
    """Count the bytes of an entry's names and values."""
    return sum(len(name) + len(value) for name, value in fields.items())


@dataclass(frozen=True, slots=True)
class QueryRecord:
    """One request that ended, about one of the heads that drafted in it."""

    session: _Session
    s: _Amount  # sum of the head's misses, 1 - r each (SpecBlock, equation 8); 0 where only texts are wanted
    tau: _Amount  # mean tokens of a step
    new_tokens: _Count
    steps: _Count
    tokens_per_s: _Amount  # of decoding, without the prefill
    versions: tuple[_Count, _Count]  # of the head's weights, first and last seen; equal: the query lived on one version
    kind: Annotated[int, Field(ge=0, le=limits.MAX_KINDS)] = 0
    """of text that the drafter took the prompt for"""
    variant: Annotated[int, Field(ge=0, le=limits.MAX_VARIANTS)] = 0
    """of the weights, which drafted all of it"""
    sketch: tuple[Annotated[float, Field(ge=-1.001, le=1.001)], ...] = ()
    """what the prompt is like (coppice/adaptation/weights.py); empty: not known, or several variants drafted"""


_QUERY = TypeAdapter(QueryRecord)


def query_to_fields(record: QueryRecord) -> Fields:
    return {b"meta": _QUERY.dump_json(record)}


def read_query(fields: Mapping[bytes, bytes]) -> QueryRecord:
    """Read a stream entry as a QueryRecord. Raises InvalidField."""
    text = _bytes(fields, "meta")
    if len(text) > MAX_META_BYTES:
        raise InvalidField("meta", f"has more than {MAX_META_BYTES} bytes")
    try:
        return _QUERY.validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise InvalidField(".".join(map(str, first["loc"])) or "meta", first["msg"]) from None


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Sample:
    """A window of a committed text, as the head reads it."""

    session: str  # the request's name
    tokens: NDArray[np.int64]  # (W + 1,) ids
    features: bytes  # (W, F) target features of all of these positions but the last, row-major
    dtype: str = "float32"  # of the features; or bfloat16

    def feature_rows(self) -> NDArray[np.float32]:
        """Return the (W, F) features as float32."""
        if self.dtype == "bfloat16":  # the upper half of a float32
            flat = (np.frombuffer(self.features, "<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            flat = np.frombuffer(self.features, "<f4").astype(np.float32)
        return flat.reshape(len(self.tokens) - 1, -1)


def sample_to_fields(sample: Sample) -> Fields:
    tokens = sample.tokens.astype("<i4").tobytes()
    plain = {b"session": sample.session.encode(), b"dtype": sample.dtype.encode()}
    return plain | {b"tokens": tokens, b"features": sample.features}


def read_sample(fields: Mapping[bytes, bytes], vocab_size: int = 0, width: int = 0) -> Sample:
    """Read a stream entry as a Sample of a head with features of `width` numbers; 0 admits any. Raises InvalidField."""
    session, dtype = (_bytes(fields, name).decode("latin-1") for name in ("session", "dtype"))
    limits.check_session("session", session)
    if dtype not in _ITEM_BYTES:
        raise InvalidField("dtype", f"is none of {', '.join(_ITEM_BYTES)}")
    data, features = _bytes(fields, "tokens"), _bytes(fields, "features")
    if len(data) % 4:
        raise InvalidField("tokens", f"{len(data)} bytes are no 4-byte values")
    limits.check_count("tokens", len(data) // 4, 3, limits.MAX_WINDOW + 1)
    tokens = np.frombuffer(data, "<i4").astype(np.int64)
    if tokens.min() < 0:
        raise InvalidField("tokens", f"token id {tokens.min()} is negative")
    limits.check_ids("tokens", tokens.tolist(), vocab_size)
    numbers, rest = divmod(len(features), (len(tokens) - 1) * _ITEM_BYTES[dtype])
    if rest or not 0 < numbers <= limits.MAX_FEATURE_LAYERS * limits.MAX_HIDDEN:
        raise InvalidField("features", f"{len(features)} bytes are not {len(tokens) - 1} rows of {dtype}")
    if width and numbers != width:
        raise InvalidField("features", f"a row has {numbers} numbers, this head's have {width}")
    sample = Sample(session, tokens, features, dtype)
    if not np.isfinite(sample.feature_rows()).all():
        raise InvalidField("features", "has a value that is not finite")
    return sample


def _bytes(fields: Mapping[bytes, bytes], name: str) -> bytes:
    value = fields.get(name.encode())
    if value is None:
        raise InvalidField(name, "is missing")
    return value


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
_Entry = tuple[Stream, str, Fields]  # a record on its way, with its key


class Producer:
    """Sends records to the streams of the heads. `query` and `sample` may be called from any thread."""

    def __init__(
        self, url: str, registry: prometheus_client.CollectorRegistry, heads: Sequence[str], bounds: Bounds = BOUNDS
    ) -> None:
        """`heads`: those whose demand for samples is followed."""
        counter = partial(prometheus_client.Counter, registry=registry, namespace="coppice")
        self._produced = counter("signals_produced", "records made for the adapter", ["stream"])
        self._taken = counter("signals_sent", "records that Redis took", ["stream"])
        self._dropped = counter("signals_dropped", "records that were dropped", ["stream", "reason"])
        self._heads, self._bounds = heads, bounds
        self._demands: dict[str, Demand] = {}
        self._lock = threading.Lock()  # of the queue
        self._entries: deque[_Entry] = deque()
        self._bytes = 0
        self._allowance, self._allowed_at = float(bounds.bytes_per_s), time.monotonic()
        self._name = secrets.token_hex(8).encode()
        self._sent = Counter[str]()  # entries, by key: a reader sees by their numbers what it never got
        self._refusing: set[str] = set()  # keys
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
        self._put(("queries", redis_key(head, "queries"), query_to_fields(record)))

    def sample(self, head: str, sample: Sample) -> None:
        self._put(("samples", redis_key(head, "samples"), sample_to_fields(sample)))

    def _put(self, entry: _Entry) -> None:
        """Queue a record, or drop it where it would exceed a bound."""
        bounds, size = self._bounds, size_of(entry[2])
        self._produced.labels(entry[0]).inc()
        with self._lock:
            now = time.monotonic()
            earned = (now - self._allowed_at) * bounds.bytes_per_s
            self._allowance, self._allowed_at = min(self._allowance + earned, bounds.bytes_per_s), now
            if size > bounds.entry_bytes:
                reason = "oversized"
            elif len(self._entries) >= bounds.queue_entries or self._bytes + size > bounds.queue_bytes:
                reason = "full"
            elif size > self._allowance:
                reason = "rate"
            else:
                self._entries.append(entry)
                self._bytes += size
                self._allowance -= size
                return
        self._drop([entry], reason)

    def _batch(self) -> list[_Entry]:
        """Remove the oldest entries, as many as make a batch."""
        batch: list[_Entry] = []
        size = 0
        with self._lock:
            while self._entries and len(batch) < _BATCH_ENTRIES and size < _BATCH_BYTES:
                batch.append(self._entries.popleft())
                size += size_of(batch[-1][2])
            self._bytes -= size
        return batch

    def _drop(self, entries: Sequence[_Entry], reason: str) -> None:
        for stream, *_ in entries:
            self._dropped.labels(stream, reason).inc()

    async def _run(self) -> None:
        backoff = Backoff(_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S)
        while True:
            last = self._stopping.is_set()
            try:
                if time.monotonic() - self._polled_at >= _POLL_S:
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
        """Look at the demand: that is also how a Redis that is back is noticed."""
        async with self._connection.exchange(TIMEOUT_S) as client:
            pipe = client.pipeline(transaction=False)
            pipe.ping()
            for head in self._heads:
                pipe.get(redis_key(head, "demand"))
            _, *demands = await pipe.execute()
        self._demands = dict(zip(self._heads, map(read_demand, demands), strict=True))
        self._polled_at = time.monotonic()

    async def _send(self, batch: Sequence[_Entry]) -> None:
        """Send a batch in one round trip. It is not sent twice: when its answer is lost it counts as dropped."""
        bounds, answers = self._bounds, list[Any]()
        try:
            async with self._connection.exchange(TIMEOUT_S) as client:
                pipe = client.pipeline(transaction=False)
                for _, key, fields in batch:
                    self._sent[key] += 1
                    numbered: Any = {**fields, SENDER: self._name, NUMBER: str(self._sent[key])}
                    most = min(bounds.stream_entries, max(1, bounds.stream_bytes // size_of(fields)))
                    pipe.xadd(key, numbered, maxlen=most, approximate=True)
                answers = await pipe.execute(raise_on_error=False)
        finally:
            self._drop(batch[len(answers) :], "redis")
        for (stream, key, fields), answer in zip(batch, answers, strict=True):
            if isinstance(answer, Exception):
                if key not in self._refusing:
                    log.warning("redis refuses records", key=key, why=str(answer))
                self._refusing.add(key)
                self._drop([(stream, key, fields)], "refused")
            else:
                self._refusing.discard(key)
                self._taken.labels(stream).inc()
