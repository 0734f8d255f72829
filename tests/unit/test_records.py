"""Records of the adapter: they survive their way through Redis' fields, and nothing that is off passes."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coppice import limits
from coppice.adaptation.signals import (
    Fields,
    QueryRecord,
    Sample,
    query_to_fields,
    read_demand,
    read_query,
    read_sample,
    sample_to_fields,
    size_of,
)
from coppice.errors import InvalidField

count = st.integers(0, 1 << 53)
amount = st.floats(0, 1e12)
queries = st.builds(
    QueryRecord,
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
RECORD = QueryRecord("s", 1.0, 3.0, 4, 5, 6.0, (9, 10))


def sample(rows: int = 3, width: int = 6, dtype: str = "float32", session: str = "s.1") -> Sample:
    features = np.random.default_rng(1).standard_normal((rows, width)).astype(np.float32)
    data = features.tobytes() if dtype == "float32" else (features.view(np.uint32) >> 16).astype("<u2").tobytes()
    return Sample(session, np.arange(rows + 1), data, dtype)


def same(one: Sample, other: Sample) -> bool:
    plain = [(each.session, each.dtype, each.tokens.tolist(), each.features) for each in (one, other)]
    return plain[0] == plain[1]


@given(queries)
def test_a_query_record_is_read_as_it_was_written(record: QueryRecord) -> None:
    assert read_query(query_to_fields(record)) == record


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sample_is_read_as_it_was_written(dtype: str) -> None:
    fields = sample_to_fields(sample(dtype=dtype))
    assert same(read_sample(fields), sample(dtype=dtype))
    assert same(read_sample(fields, 10, 6), sample(dtype=dtype))
    assert size_of(fields) == sum(map(len, fields)) + sum(map(len, fields.values()))


def test_feature_rows_are_float32_whatever_they_came_as() -> None:
    exact, rounded = sample().feature_rows(), sample(dtype="bfloat16").feature_rows()
    assert exact.shape == rounded.shape == (3, 6)
    np.testing.assert_allclose(rounded, exact, rtol=2**-7)


def changed(fields: Fields, **meta: Any) -> Fields:
    return fields | {b"meta": json.dumps(json.loads(fields[b"meta"]) | meta).encode()}


WRONG_NUMBERS = [-1, float("nan"), float("inf"), "1", None, True, [1]]


@pytest.mark.parametrize("name", ["s", "tau", "steps", "tokens_per_s"])
@pytest.mark.parametrize("value", WRONG_NUMBERS)
def test_a_query_record_with_a_wrong_number_is_refused(name: str, value: object) -> None:
    fields = query_to_fields(RECORD)
    with pytest.raises(InvalidField, match=name):
        read_query(changed(fields, **{name: value}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("session", ""),
        ("session", "a b"),
        ("session", 3),
        ("versions", [1]),
        ("versions", [1, -1]),
        ("versions", "12"),
        ("steps", 1.5),
        ("steps", 1 << 63),
    ],
)
def test_a_query_record_out_of_bounds_is_refused(name: str, value: object) -> None:
    fields = query_to_fields(RECORD)
    with pytest.raises(InvalidField, match=name):
        read_query(changed(fields, **{name: value}))


@pytest.mark.parametrize("meta", [b"", b"[]", b"{", b"\xff", b"{}", b"[" * 3000, b" " * 5000])
def test_what_is_no_record_is_refused(meta: bytes) -> None:
    for read in (read_query, read_sample):
        with pytest.raises(InvalidField):
            read({b"meta": meta})
        with pytest.raises(InvalidField):
            read({})


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
    with pytest.raises(InvalidField, match=name):
        read_sample(sample_to_fields(sample()) | changes, 10, 6)


@pytest.mark.parametrize("name", ["session", "dtype", "tokens", "features"])
def test_a_sample_without_one_of_its_fields_is_refused(name: str) -> None:
    fields = sample_to_fields(sample())
    del fields[name.encode()]
    with pytest.raises(InvalidField, match=name):
        read_sample(fields)


def test_an_unknown_demand_wants_nothing() -> None:
    values = (b"texts", b"misses", None, b"", b"TEXTS", b"head")
    assert [read_demand(value) for value in values] == ["texts", "misses", *[""] * 4]
