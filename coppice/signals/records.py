"""Signals for the adapter, as stream entries in Redis: a JSON field of plain values, and a field of bytes an array.

Arrays are little-endian. Whatever is read is checked as if a stranger had written it. Never text: ids and numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from coppice import limits
from coppice.errors import InvalidField

Stream = Literal["queries", "samples"]
Demand = Literal["", "texts", "misses"]
"""what is wanted: nothing; samples of what was committed, each position once; or also how far drafts missed"""
Fields = dict[bytes, bytes]
"""One stream entry"""

SENDER, NUMBER = b"by", b"n"
"""Fields that a producer adds to its entries, so that a reader sees what was trimmed before it was read"""
MAX_META_BYTES = 4096
_ITEM_BYTES = {"float32": 4, "bfloat16": 2}

T = TypeVar("T")


def _checked_session(session: str) -> str:
    limits.check_session("session", session)
    return session


_Session = Annotated[str, AfterValidator(_checked_session)]
_Count = Annotated[int, Field(ge=0, le=limits.MAX_COUNT)]
_Amount = Annotated[float, Field(ge=0, le=1e18, allow_inf_nan=False)]
_Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


def queries_key(prefix: str, head: str) -> str:
    """The stream of query records of a head's pool."""
    return f"{prefix}:{head}:queries"


def samples_key(prefix: str, head: str) -> str:
    """The stream of training samples of a head's pool."""
    return f"{prefix}:{head}:samples"


def demand_key(prefix: str, head: str) -> str:
    """The key that says what is wanted of a head's pool: a Demand, absent for nothing."""
    return f"{prefix}:{head}:demand"


def read_demand(value: bytes | str | None) -> Demand:
    """Read the demand key's value; anything unknown wants nothing."""
    demands: dict[bytes | str | None, Demand] = {name.encode(): name for name in get_args(Demand)}
    return demands.get(value, "")


@dataclass(frozen=True, slots=True)
class QueryRecord:
    """One request that ended, about one of the heads that drafted in it."""

    session: _Session
    s: _Amount
    """sum of the head's misses, 1 - r each (SpecBlock, equation 8); 0 where only texts are wanted"""
    tau: _Amount
    """mean tokens of a step"""
    new_tokens: _Count
    steps: _Count
    tokens_per_s: _Amount
    """of decoding, without the prefill"""
    versions: tuple[_Count, _Count]
    """of the head's weights, first and last seen; equal: the query lived on one version"""
    kind: Annotated[int, Field(ge=0, le=limits.MAX_KINDS)] = 0
    """of text that the drafter took the prompt for"""
    variant: Annotated[int, Field(ge=0, le=limits.MAX_VARIANTS)] = 0
    """of the weights, which drafted all of it"""
    sketch: tuple[Annotated[float, Field(ge=-1.001, le=1.001)], ...] = ()
    """what the prompt is like (coppice/weights/variants.py); empty: not known, or several variants drafted"""


@dataclass(frozen=True, slots=True)
class SampleFacts:
    """The plain values of a sample."""

    session: _Session
    position: Annotated[int, Field(ge=0, le=limits.MAX_CONTEXT)]
    """absolute position of the last token"""
    dtype: Annotated[str, Field(pattern="^(float32|bfloat16)$")] = "float32"
    """of the features"""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Sample:
    """A window of a committed text, as the head reads it."""

    facts: SampleFacts
    tokens: NDArray[np.int64]
    """(W + 1,) ids"""
    features: bytes
    """(W, F) target features of all of these positions but the last, row-major"""

    @property
    def session(self) -> str:
        """The request's name."""
        return self.facts.session

    def feature_rows(self) -> NDArray[np.float32]:
        """Return the (W, F) features as float32."""
        return _feature_rows(self.features, self.facts.dtype, len(self.tokens) - 1)


_QUERY, _SAMPLE = TypeAdapter(QueryRecord), TypeAdapter(SampleFacts)


def query_to_fields(record: QueryRecord) -> Fields:
    """Write a QueryRecord as a stream entry."""
    return {b"meta": _QUERY.dump_json(record)}


def read_query(fields: Mapping[bytes, bytes]) -> QueryRecord:
    """Read a stream entry as a QueryRecord. Raises InvalidField."""
    return _read_meta(fields, _QUERY)


def sample_to_fields(sample: Sample) -> Fields:
    """Write a Sample as a stream entry."""
    tokens = sample.tokens.astype("<i4").tobytes()
    return {b"meta": _SAMPLE.dump_json(sample.facts), b"tokens": tokens, b"features": sample.features}


@dataclass(frozen=True, slots=True)
class Widths:
    """What the samples of one head are as wide as; 0 admits any."""

    vocab: int = 0
    features: int = 0


def read_sample(fields: Mapping[bytes, bytes], widths: Widths = Widths()) -> Sample:
    """Read a stream entry as a Sample of a head. Raises InvalidField."""
    facts = _read_meta(fields, _SAMPLE)
    tokens = _ids(fields, "tokens", 3, limits.MAX_WINDOW + 1, widths.vocab)
    return Sample(facts, tokens, _features(fields, len(tokens) - 1, facts.dtype, widths.features))


def size_of(fields: Mapping[bytes, bytes]) -> int:
    """Count the bytes of an entry's names and values."""
    return sum(len(name) + len(value) for name, value in fields.items())


def _read_meta(fields: Mapping[bytes, bytes], shape: TypeAdapter[T]) -> T:
    text = _bytes(fields, "meta")
    if len(text) > MAX_META_BYTES:
        raise InvalidField("meta", f"has more than {MAX_META_BYTES} bytes")
    try:
        return shape.validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise InvalidField(".".join(map(str, first["loc"])) or "meta", first["msg"]) from None


def _bytes(fields: Mapping[bytes, bytes], name: str) -> bytes:
    value = fields.get(name.encode())
    if not isinstance(value, bytes):
        raise InvalidField(name, "is missing")
    return value


def _count(name: str, data: bytes, low: int, high: int) -> None:
    if len(data) % 4:
        raise InvalidField(name, f"{len(data)} bytes are no 4-byte values")
    limits.check_count(name, len(data) // 4, low, high)


def _ids(fields: Mapping[bytes, bytes], name: str, low: int, high: int, vocab_size: int) -> NDArray[np.int64]:
    data = _bytes(fields, name)
    _count(name, data, low, high)
    ids = np.frombuffer(data, "<i4").astype(np.int64)
    if len(ids) and ids.min() < 0:
        raise InvalidField(name, f"token id {ids.min()} is negative")
    limits.check_ids(name, ids.tolist(), vocab_size)
    return ids


def _features(fields: Mapping[bytes, bytes], rows: int, dtype: str, numbers: int) -> bytes:
    """Return the features of `rows` positions, checked to be whole rows of finite numbers, so many (0: any) a row."""
    data = _bytes(fields, "features")
    row_bytes, rest = divmod(len(data), rows)
    width, part = divmod(row_bytes, _ITEM_BYTES[dtype])
    if rest or part or not 0 < width <= limits.MAX_FEATURE_LAYERS * limits.MAX_HIDDEN:
        raise InvalidField("features", f"{len(data)} bytes are not {rows} rows of {dtype}")
    if numbers and width != numbers:
        raise InvalidField("features", f"a row has {width} numbers, this head's have {numbers}")
    if not np.isfinite(_feature_rows(data, dtype, rows)).all():
        raise InvalidField("features", "has a value that is not finite")
    return data


def _feature_rows(data: bytes, dtype: str, rows: int) -> NDArray[np.float32]:
    if dtype == "bfloat16":  # the upper half of a float32
        flat = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        flat = np.frombuffer(data, "<f4").astype(np.float32)
    return flat.reshape(rows, -1)
