"""Records of the adapter: they survive their way through Redis' fields, and nothing that is off passes."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coppice import limits
from coppice.adaptation import signals
from coppice.errors import InvalidField
from coppice.speculation.sampling import SamplingParams
from coppice.wire.common import Features
from coppice.wire.drafter import Advance, OpenDraft
from services.drafter.worker import WINDOW, Samples

count = st.integers(0, 1 << 53)
amount = st.floats(0, 1e12)
queries = st.builds(
    signals.QueryRecord,
    session=st.from_regex(r"\A[A-Za-z0-9_.-]{1,64}\Z"),
    s=amount,
    tau=amount,
    new_tokens=count,
    steps=count,
    tokens_per_s=amount,
    versions=st.tuples(count, count),
    kind=st.integers(0, limits.MAX_KINDS),
    variant=st.integers(0, limits.MAX_VARIANTS),
)
RECORD = signals.QueryRecord("s", 1.0, 3.0, 4, 5, 6.0, (9, 10))


def sample(rows: int = 3, width: int = 6, dtype: str = "float32", session: str = "s.1") -> signals.Sample:
    features = np.random.default_rng(1).standard_normal((rows, width)).astype(np.float32)
    data = features.tobytes() if dtype == "float32" else (features.view(np.uint32) >> 16).astype("<u2").tobytes()
    return signals.Sample(session, np.arange(rows + 1), data, dtype)


@given(queries)
def test_a_query_record_is_read_as_it_was_written(record: signals.QueryRecord) -> None:
    assert signals.read_query(signals.query_to_fields(record)) == record


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sample_is_read_as_it_was_written_and_its_features_as_float32(dtype: str) -> None:
    written, fields = sample(dtype=dtype), signals.sample_to_fields(sample(dtype=dtype))
    for read in (signals.read_sample(fields), signals.read_sample(fields, 10, 6)):
        assert (read.session, read.dtype, read.features) == (written.session, written.dtype, written.features)
        assert read.tokens.tolist() == written.tokens.tolist()
        np.testing.assert_allclose(read.feature_rows(), sample().feature_rows(), rtol=2**-7)
    assert signals.size_of(fields) == sum(map(len, fields)) + sum(map(len, fields.values()))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        *((name, (-1, float("nan"), float("inf"), "1", None, True, [1])) for name in ("s", "tau", "tokens_per_s")),
        ("steps", (-1, 1.5, 1 << 63, "1", None, True)),
        ("session", ("", "a b", 3)),
        ("versions", ([1], [1, -1], "12")),
    ],
)
def test_a_query_record_out_of_bounds_is_refused(name: str, values: tuple[object, ...]) -> None:
    for value in values:
        meta = json.loads(signals.query_to_fields(RECORD)[b"meta"]) | {name: value}
        with pytest.raises(InvalidField, match=name):
            signals.read_query({b"meta": json.dumps(meta).encode()})


@pytest.mark.parametrize("meta", [b"", b"[]", b"{", b"\xff", b"{}", b"[" * 3000, b" " * 5000])
def test_what_is_no_record_is_refused(meta: bytes) -> None:
    for fields in ({b"meta": meta}, {}):
        for read in (signals.read_query, signals.read_sample):
            with pytest.raises(InvalidField):
                read(fields)


NAN = np.array([np.nan] * 6, "<f4").tobytes()


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("dtype", {b"dtype": b"float16"}),
        ("session", {b"session": b"a b"}),
        ("session", {b"session": b"\xff"}),
        ("tokens", {b"tokens": np.array([1, 2, 3, 10], "<i4").tobytes()}),
        ("tokens", {b"tokens": np.array([1, 2, 3, -1], "<i4").tobytes()}),
        ("tokens", {b"tokens": bytes(15)}),
        ("tokens", {b"tokens": bytes(8)}),
        ("tokens", {b"tokens": bytes(4 * limits.MAX_WINDOW + 8)}),
        ("features", {b"features": b""}),
        ("features", {b"features": bytes(3 * 6 * 4 - 1)}),
        ("features", {b"features": bytes(3 * 6 * 4 - 3)}),
        ("features", {b"features": NAN * 3}),
        ("features", {b"features": bytes(3 * 5 * 4)}),
    ],
)
def test_a_sample_out_of_bounds_is_refused(name: str, changes: dict[bytes, bytes]) -> None:
    fields = signals.sample_to_fields(sample())
    for off in (fields | changes, {other: fields[other] for other in fields if other != name.encode()}):
        with pytest.raises(InvalidField, match=name):
            signals.read_sample(off, 10, 6)


def test_an_unknown_demand_wants_nothing() -> None:
    values = (b"texts", b"misses", None, b"", b"TEXTS", b"head")
    assert [signals.read_demand(value) for value in values] == ["texts", "misses", *[""] * 4]


# --- samples as a drafter makes them: of what is committed, every position once, and none that nobody asked for ---

WIDTH, PROMPT = 3, 10


class Taken:
    """Stands for the producer: wants something, keeps what it is given."""

    def __init__(self, demand: str) -> None:
        self.demand = demand
        self.samples: list[signals.Sample] = []

    def demand_for(self, head: str) -> str:
        assert head == "a"
        return self.demand

    def sample(self, head: str, sample: signals.Sample) -> None:
        assert head == "a"
        self.samples.append(sample)


def feature_rows(start: int, count: int) -> Features:
    rows = np.arange(start, start + count, dtype="<f4").repeat(WIDTH)
    return Features(start, count, "float32", rows.tobytes())


def sampled(demand: str, end: int) -> list[signals.Sample]:
    """A text whose token at position p is p, committed one by one behind a prompt of ten tokens."""
    taken: Any = Taken(demand)
    samples = Samples(taken, "a")
    samples.open(0, OpenDraft("s", list(range(PROMPT)), SamplingParams(), features=feature_rows(0, PROMPT)))
    for position in range(PROMPT, end):
        samples.advance(0, Advance([position], feature_rows(position, 1)))
    samples.close(0)
    return taken.samples  # type: ignore[no-any-return]


def test_nothing_is_sent_that_nobody_asked_for() -> None:
    assert sampled("", 300) == []


def test_texts_hold_every_position_once_and_a_short_end_with_what_was_before_it() -> None:
    whole = [list(range(PROMPT, PROMPT + WINDOW)), list(range(PROMPT + WINDOW, PROMPT + 2 * WINDOW))]
    texts = sampled("texts", PROMPT + 2 * WINDOW + 15)
    assert [sample.tokens.tolist() for sample in texts] == whole  # the rest is too short to be worth a sample
    for sample in texts:
        assert sample.feature_rows()[:, 0].tolist() == sample.tokens[:-1].tolist()
        assert sample.session == "s"
    assert [sample.tokens.tolist() for sample in sampled("misses", 28)] == [list(range(28))]
