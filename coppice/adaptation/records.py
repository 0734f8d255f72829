"""What the adapter is told, and how it stands in Redis: a JSON field of plain values, and a field of bytes an array.

Arrays are little-endian. Whatever is read is checked as if a stranger had written it. Never text: ids and numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Literal, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from coppice import limits
from coppice.errors import InvalidField

Kind = Literal["head", "full"]
Demand = Literal["", "misses", "head", "full", "text"]
"""what is wanted: nothing; how far drafts missed, without samples of it or with some; or `text`: windows of what was
committed, each position once"""
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
    """sum of the head's misses, 1 - r each (SpecBlock, equation 8)"""
    rejections: _Count
    """misses it consists of"""
    tau: _Amount
    """mean tokens of a step"""
    new_tokens: _Count
    steps: _Count
    tokens_per_s: _Amount
    """of decoding, without the prefill"""
    step_ns: _Count
    """median wall time of a step"""
    draft_ns: _Count
    """mean wait for drafts in a step"""
    versions: tuple[_Count, _Count]
    """of the head's weights, first and last seen; equal: the query lived on one version"""
    load: _Amount
    """requests running, mean of its start and its end"""
    policy: Annotated[str, Field(max_length=limits.MAX_POLICY_CHARS)]
    kind: Annotated[int, Field(ge=0, le=limits.MAX_KINDS)] = 0
    """of text that the drafter took the prompt for"""
    variant: Annotated[int, Field(ge=0, le=limits.MAX_VARIANTS)] = 0
    """of the weights, which drafted all of it"""
    sketch: tuple[Annotated[float, Field(ge=-1.001, le=1.001)], ...] = ()
    """what the prompt is like (coppice/weights/variants.py); empty: not known, or several variants drafted"""


@dataclass(frozen=True, slots=True, eq=False, repr=False, kw_only=True)
class SampleFacts:
    """The plain values of a sample."""

    kind: Kind
    version: _Count
    """of the weights that drafted"""
    session: _Session
    position: Annotated[int, Field(ge=0, le=limits.MAX_CONTEXT)]
    """absolute position of the token that was missed"""
    target_id: Annotated[int, Field(ge=0, lt=1 << 31)]
    """the token"""
    miss: _Share
    """1 - r"""
    tail: _Share
    """the target's mass outside top_ids"""
    dtype: Annotated[str, Field(pattern="^(float32|bfloat16)$")] = "float32"
    """of a full sample's features"""
    previous_id: Annotated[int, Field(ge=0, lt=1 << 31)] = 0
    """the token before the one that was missed"""


@dataclass(frozen=True, slots=True, eq=False, repr=False, kw_only=True)
class Sample(SampleFacts):
    """What there is to learn from one miss. `full` ones hold the text before it as the head reads it.

    A full sample that is of a text and not of a miss has neither a hidden state nor top ids.
    """

    top_ids: NDArray[np.int64]
    """(n,) the target's likeliest ids at T=1; none where the miss is not where its walk ended"""
    top_log_probs: NDArray[np.float32]
    """(n,) their raw log-probabilities"""
    hidden: NDArray[np.float32]
    """(H,) what the head's last norm gave, the input of its lm_head; of a text: none"""
    tokens: NDArray[np.int64]
    """full: (W + 1,) ids of the positions before the missed one, and the missed one; head: none"""
    features: bytes = b""
    """full: (W, F) target features of all of these positions but the last, row-major; head: none"""

    def as_head(self) -> Sample:
        """Return the part that a head-only update reads."""
        return replace(self, kind="head", tokens=np.empty(0, np.int64), features=b"")

    def feature_rows(self) -> NDArray[np.float32]:
        """Return the (W, F) features as float32."""
        return _feature_rows(self.features, self.dtype, max(1, len(self.tokens) - 1))


_QUERY, _SAMPLE = TypeAdapter(QueryRecord), TypeAdapter(SampleFacts)


def query_to_fields(record: QueryRecord) -> Fields:
    """Write a QueryRecord as a stream entry."""
    return {b"meta": _QUERY.dump_json(record)}


def read_query(fields: Mapping[bytes, bytes]) -> QueryRecord:
    """Read a stream entry as a QueryRecord. Raises InvalidField."""
    return _read_meta(fields, _QUERY)


def sample_to_fields(sample: Sample) -> Fields:
    """Write a Sample as a stream entry."""
    facts = SampleFacts(**{name: getattr(sample, name) for name in SampleFacts.__slots__})
    fields = {
        b"meta": _SAMPLE.dump_json(facts),
        b"top_ids": sample.top_ids.astype("<i4").tobytes(),
        b"top_log_probs": sample.top_log_probs.astype("<f4").tobytes(),
        b"hidden": sample.hidden.astype("<f4").tobytes(),
    }
    if sample.kind == "full":
        fields |= {b"tokens": sample.tokens.astype("<i4").tobytes(), b"features": sample.features}
    return fields


@dataclass(frozen=True, slots=True)
class Widths:
    """What the samples of one head are as wide as; 0 admits any."""

    vocab: int = 0
    hidden: int = 0
    features: int = 0


def read_sample(fields: Mapping[bytes, bytes], widths: Widths = Widths()) -> Sample:
    """Read a stream entry as a Sample of a head. Raises InvalidField."""
    vocab_size = widths.vocab
    facts = _read_meta(fields, _SAMPLE)
    limits.check_ids("target_id", [facts.target_id], vocab_size)
    limits.check_ids("previous_id", [facts.previous_id], vocab_size)
    top_ids = _ids(fields, "top_ids", 0, limits.MAX_TOP_N, vocab_size)
    top_log_probs = _floats(fields, "top_log_probs", len(top_ids), len(top_ids))
    if len(set(top_ids.tolist())) != len(top_ids):
        raise InvalidField("top_ids", "has an id twice")
    if (top_log_probs > limits.LOG_PROB_TOLERANCE).any():
        raise InvalidField("top_log_probs", "has a value above 0")
    of_text = facts.kind == "full" and not (len(top_ids) or fields.get(b"hidden", b"?"))
    hidden = _floats(fields, "hidden", 0 if of_text else widths.hidden or 1, widths.hidden or limits.MAX_HIDDEN)
    tokens, features = np.empty(0, np.int64), b""
    if facts.kind == "full":
        tokens = _ids(fields, "tokens", 3, limits.MAX_WINDOW + 1, vocab_size)
        if tokens[-1] != facts.target_id:
            raise InvalidField("tokens", "do not end with the target's")
        features = _features(fields, len(tokens) - 1, facts.dtype, widths.features)
    return Sample(
        **{name: getattr(facts, name) for name in SampleFacts.__slots__},
        top_ids=top_ids,
        top_log_probs=top_log_probs,
        hidden=hidden,
        tokens=tokens,
        features=features,
    )


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


def _floats(fields: Mapping[bytes, bytes], name: str, low: int, high: int) -> NDArray[np.float32]:
    data = _bytes(fields, name)
    _count(name, data, low, high)
    values = np.frombuffer(data, "<f4").astype(np.float32)
    if not np.isfinite(values).all():
        raise InvalidField(name, "has a value that is not finite")
    return values


def _features(fields: Mapping[bytes, bytes], rows: int, dtype: str, wanted: int) -> bytes:
    """Return the features of `rows` positions, checked to be whole rows of finite numbers, `wanted` (0: any) a row."""
    data = _bytes(fields, "features")
    row_bytes, rest = divmod(len(data), rows)
    width, part = divmod(row_bytes, _ITEM_BYTES[dtype])
    if rest or part or not 0 < width <= limits.MAX_FEATURE_LAYERS * limits.MAX_HIDDEN:
        raise InvalidField("features", f"{len(data)} bytes are not {rows} rows of {dtype}")
    if wanted and width != wanted:
        raise InvalidField("features", f"a row has {width} numbers, this head's have {wanted}")
    if not np.isfinite(_feature_rows(data, dtype, rows)).all():
        raise InvalidField("features", "has a value that is not finite")
    return data


def _feature_rows(data: bytes, dtype: str, rows: int) -> NDArray[np.float32]:
    if dtype == "bfloat16":  # the upper half of a float32
        flat = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        flat = np.frombuffer(data, "<f4").astype(np.float32)
    return flat.reshape(rows, -1)
