"""Signals for the adapter, as stream entries in Redis: a query is one field of JSON, a sample several of bytes.

Arrays are little-endian. Whatever is read is checked as if a stranger had written it. Never text: ids and numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

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


def _checked_session(session: str) -> str:
    limits.check_session("session", session)
    return session


_Session = Annotated[str, AfterValidator(_checked_session)]
_Count = Annotated[int, Field(ge=0, le=limits.MAX_COUNT)]
_Amount = Annotated[float, Field(ge=0, le=1e18, allow_inf_nan=False)]
_Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


def redis_key(head: str, name: Literal["queries", "samples", "demand"]) -> str:
    """Return the key of one of a head's streams, or of what is wanted of the head: a Demand, absent for nothing."""
    return f"coppice:{head}:{name}"


def read_demand(value: bytes | str | None) -> Demand:
    """Read the demand key's value; anything unknown wants nothing."""
    demands: dict[bytes | str | None, Demand] = {name.encode(): name for name in get_args(Demand)}
    return demands.get(value, "")


def size_of(fields: Mapping[bytes, bytes]) -> int:
    """Count the bytes of an entry's names and values."""
    return sum(len(name) + len(value) for name, value in fields.items())


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


_QUERY = TypeAdapter(QueryRecord)


def query_to_fields(record: QueryRecord) -> Fields:
    """Write a QueryRecord as a stream entry."""
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

    session: str
    """the request's name"""
    tokens: NDArray[np.int64]
    """(W + 1,) ids"""
    features: bytes
    """(W, F) target features of all of these positions but the last, row-major"""
    dtype: str = "float32"
    """of the features; or bfloat16"""

    def feature_rows(self) -> NDArray[np.float32]:
        """Return the (W, F) features as float32."""
        if self.dtype == "bfloat16":  # the upper half of a float32
            flat = (np.frombuffer(self.features, "<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            flat = np.frombuffer(self.features, "<f4").astype(np.float32)
        return flat.reshape(len(self.tokens) - 1, -1)


def sample_to_fields(sample: Sample) -> Fields:
    """Write a Sample as a stream entry."""
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
