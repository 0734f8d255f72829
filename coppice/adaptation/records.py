"""What the adapter is told, and how it stands in Redis: a JSON field of plain values, and a field of bytes an array.

Arrays are little-endian. Whatever is read is checked as if a stranger had written it. Never text: ids and numbers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from coppice import limits
from coppice.errors import InvalidField

Kind = Literal["head", "full"]
Demand = Literal["", "head", "full"]
Fields = dict[bytes, bytes]
"""One stream entry"""

GROUP = "adapter"
"""The consumer group of every stream"""
SENDER, NUMBER = b"by", b"n"
"""Fields that a producer adds to its entries, so that a reader sees what was trimmed before it was read"""
MAX_META_BYTES = 4096
_LARGEST = 1 << 62
_ITEM_BYTES = {"float32": 4, "bfloat16": 2}


def queries_key(prefix: str, head: str) -> str:
    """The stream of query records of a head's pool."""
    return f"{prefix}:{head}:queries"


def samples_key(prefix: str, head: str) -> str:
    """The stream of training samples of a head's pool."""
    return f"{prefix}:{head}:samples"


def demand_key(prefix: str, head: str) -> str:
    """The key that says which samples are wanted of a head's pool: `head`, `full`, or it is absent."""
    return f"{prefix}:{head}:demand"


def read_demand(value: bytes | str | None) -> Demand:
    """What the demand key says; anything unknown wants nothing."""
    return "full" if value == b"full" else "head" if value == b"head" else ""


@dataclass(frozen=True, slots=True)
class QueryRecord:
    """One request that ended, about one of the heads that drafted in it."""

    session: str
    s: float
    """sum of the head's misses, 1 - r each (seeds/specblock, equation 8)"""
    rejections: int
    """misses it consists of"""
    tau: float
    """tokens of a step, mean"""
    new_tokens: int
    steps: int
    tokens_per_s: float
    """of decoding, the prefill left out"""
    step_ns: int
    """wall time of a step, median"""
    draft_ns: int
    """wait for drafts in a step, mean"""
    versions: tuple[int, int]
    """of the head's weights, first and last seen; equal: the query lived on one version"""
    load: float
    """requests running, mean of its start and its end"""
    policy: str


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Sample:
    """What there is to learn from one miss. `full` ones hold the text before it as the head reads it."""

    kind: Kind
    version: int
    """of the weights that drafted"""
    session: str
    position: int
    """absolute position of the token that was missed"""
    target_id: int
    """the token"""
    miss: float
    """1 - r"""
    tail: float
    """the target's mass outside top_ids"""
    top_ids: NDArray[np.int64]
    """(n,) the target's likeliest ids at T=1; none where the miss is not where its walk ended"""
    top_log_probs: NDArray[np.float32]
    """(n,) their raw log-probabilities"""
    hidden: NDArray[np.float32]
    """(H,) what the head's last norm gave, the input of its lm_head"""
    tokens: NDArray[np.int64]
    """full: (W + 1,) ids of the positions before the missed one, and the missed one; head: none"""
    features: bytes = b""
    """full: (W, F) target features of all of these positions but the last, row-major; head: none"""
    dtype: str = "float32"
    """of `features`: float32 or bfloat16"""

    def as_head(self) -> Sample:
        """What a head-only update reads of it."""
        return replace(self, kind="head", tokens=np.empty(0, np.int64), features=b"")

    def feature_rows(self) -> NDArray[np.float32]:
        """(W, F) the features as float32."""
        return _feature_rows(self.features, self.dtype, max(1, len(self.tokens) - 1))


def query_to_fields(record: QueryRecord) -> Fields:
    """QueryRecord to a stream entry."""
    meta = {name: getattr(record, name) for name in QueryRecord.__slots__}
    return {b"meta": _json(meta)}


def read_query(fields: Mapping[bytes, bytes]) -> QueryRecord:
    """A stream entry to QueryRecord. Raises InvalidField."""
    meta = _Meta(fields)
    first_last = meta.value("versions")
    if not isinstance(first_last, list) or len(first_last) != 2:
        raise InvalidField("versions", "are not two numbers")
    first, last = (meta.integer("versions", version) for version in first_last)
    policy = meta.value("policy")
    if not isinstance(policy, str) or len(policy) > limits.MAX_POLICY_CHARS:
        raise InvalidField("policy", f"is not a string of at most {limits.MAX_POLICY_CHARS} characters")
    return QueryRecord(
        session=meta.session(),
        s=meta.number("s"),
        rejections=meta.integer("rejections"),
        tau=meta.number("tau"),
        new_tokens=meta.integer("new_tokens"),
        steps=meta.integer("steps"),
        tokens_per_s=meta.number("tokens_per_s"),
        step_ns=meta.integer("step_ns"),
        draft_ns=meta.integer("draft_ns"),
        versions=(first, last),
        load=meta.number("load"),
        policy=policy,
    )


def sample_to_fields(sample: Sample) -> Fields:
    """Sample to a stream entry."""
    meta = {name: getattr(sample, name) for name in _SAMPLE_META}
    fields = {
        b"meta": _json(meta),
        b"top_ids": sample.top_ids.astype("<i4").tobytes(),
        b"top_log_probs": sample.top_log_probs.astype("<f4").tobytes(),
        b"hidden": sample.hidden.astype("<f4").tobytes(),
    }
    if sample.kind == "full":
        fields |= {b"tokens": sample.tokens.astype("<i4").tobytes(), b"features": sample.features}
    return fields


_SAMPLE_META = ("kind", "version", "session", "position", "target_id", "miss", "tail", "dtype")


def read_sample(fields: Mapping[bytes, bytes], vocab_size: int = 0) -> Sample:
    """A stream entry to Sample; vocab_size 0 admits any id. Raises InvalidField."""
    meta = _Meta(fields)
    kind, dtype = meta.value("kind"), meta.value("dtype")
    if kind not in get_args(Kind):
        raise InvalidField("kind", "is neither head nor full")
    if dtype not in _ITEM_BYTES:
        raise InvalidField("dtype", "is neither float32 nor bfloat16")
    target_id = meta.integer("target_id", most=_most_id(vocab_size))
    top_ids = _ids(fields, "top_ids", 0, limits.MAX_TOP_N, vocab_size)
    top_log_probs = _floats(fields, "top_log_probs", len(top_ids), len(top_ids))
    if len(set(top_ids.tolist())) != len(top_ids):
        raise InvalidField("top_ids", "has an id twice")
    if (top_log_probs > 1e-3).any():
        raise InvalidField("top_log_probs", "has a value above 0")
    tokens, features = np.empty(0, np.int64), b""
    if kind == "full":
        tokens = _ids(fields, "tokens", 3, limits.MAX_WINDOW + 1, vocab_size)
        if tokens[-1] != target_id:
            raise InvalidField("tokens", "do not end with the target's")
        features = _bytes(fields, "features")
        row_bytes, rest = divmod(len(features), len(tokens) - 1)
        width, part = divmod(row_bytes, _ITEM_BYTES[dtype])
        if rest or part or not 0 < width <= 3 * limits.MAX_HIDDEN:
            raise InvalidField("features", f"{len(features)} bytes are not {len(tokens) - 1} rows of {dtype}")
        if not np.isfinite(_feature_rows(features, dtype, len(tokens) - 1)).all():
            raise InvalidField("features", "has a value that is not finite")
    return Sample(
        kind=kind,
        version=meta.integer("version"),
        session=meta.session(),
        position=meta.integer("position", most=limits.MAX_CONTEXT),
        target_id=target_id,
        miss=meta.number("miss", 1.0),
        tail=meta.number("tail", 1.0),
        top_ids=top_ids,
        top_log_probs=top_log_probs,
        hidden=_floats(fields, "hidden", 1, limits.MAX_HIDDEN),
        tokens=tokens,
        features=features,
        dtype=dtype,
    )


def size_of(fields: Mapping[bytes, bytes]) -> int:
    """Bytes of an entry's names and values."""
    return sum(len(name) + len(value) for name, value in fields.items())


class _Meta:
    """The JSON field of an entry, its values checked as they are taken."""

    def __init__(self, fields: Mapping[bytes, bytes]) -> None:
        text = _bytes(fields, "meta")
        if len(text) > MAX_META_BYTES:
            raise InvalidField("meta", f"has more than {MAX_META_BYTES} bytes")
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            raise InvalidField("meta", "is no JSON") from None
        if not isinstance(found, dict):
            raise InvalidField("meta", "is no JSON object")
        self._found: dict[str, Any] = found

    def value(self, name: str) -> Any:
        if name not in self._found:
            raise InvalidField(name, "is missing")
        return self._found[name]

    def integer(self, name: str, value: Any = None, most: int = _LARGEST) -> int:
        value = self.value(name) if value is None else value
        if not isinstance(value, int) or isinstance(value, bool):
            raise InvalidField(name, "is no integer")
        limits.check_range(name, value, 0, most)
        return value

    def number(self, name: str, most: float = 1e18) -> float:
        value = self.value(name)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise InvalidField(name, "is no number")
        limits.check_range(name, value, 0, most)
        return float(value)

    def session(self) -> str:
        value = self.value("session")
        if not isinstance(value, str):
            raise InvalidField("session", "is no string")
        limits.check_session("session", value)
        return value


def _json(meta: Mapping[str, Any]) -> bytes:
    """Raises ValueError on a number that is not finite."""
    return json.dumps(meta, separators=(",", ":"), allow_nan=False).encode()


def _bytes(fields: Mapping[bytes, bytes], name: str) -> bytes:
    value = fields.get(name.encode())
    if not isinstance(value, bytes):
        raise InvalidField(name, "is missing")
    return value


def _most_id(vocab_size: int) -> int:
    return vocab_size - 1 if vocab_size else (1 << 31) - 1


def _count(name: str, data: bytes, low: int, high: int) -> None:
    if len(data) % 4:
        raise InvalidField(name, f"{len(data)} bytes are no 4-byte values")
    limits.check_count(name, len(data) // 4, low, high)


def _ids(fields: Mapping[bytes, bytes], name: str, low: int, high: int, vocab_size: int) -> NDArray[np.int64]:
    data = _bytes(fields, name)
    _count(name, data, low, high)
    ids = np.frombuffer(data, "<i4").astype(np.int64)
    if len(ids):
        limits.check_range(name, int(ids.min()), 0, _most_id(vocab_size))
        limits.check_range(name, int(ids.max()), 0, _most_id(vocab_size))
    return ids


def _floats(fields: Mapping[bytes, bytes], name: str, low: int, high: int) -> NDArray[np.float32]:
    data = _bytes(fields, name)
    _count(name, data, low, high)
    values = np.frombuffer(data, "<f4").astype(np.float32)
    if not np.isfinite(values).all():
        raise InvalidField(name, "has a value that is not finite")
    return values


def _feature_rows(data: bytes, dtype: str, rows: int) -> NDArray[np.float32]:
    if dtype == "bfloat16":  # the upper half of a float32
        flat = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        flat = np.frombuffer(data, "<f4").astype(np.float32)
    return flat.reshape(rows, -1)
