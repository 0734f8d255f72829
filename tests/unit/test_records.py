"""Records of the adapter: they survive their way through Redis' fields, and nothing that is off passes."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coppice import limits
from coppice.adaptation.records import (
    Fields,
    QueryRecord,
    Sample,
    Widths,
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
    rejections=count,
    tau=amount,
    new_tokens=count,
    steps=count,
    tokens_per_s=amount,
    step_ns=count,
    draft_ns=count,
    versions=st.tuples(count, count),
    load=amount,
    policy=st.sampled_from(("route", "single:a", "merge")),
)


def sample(kind: Any = "full", rows: int = 3, width: int = 6, dtype: str = "float32", **changes: Any) -> Sample:
    rng = np.random.default_rng(1)
    features = rng.standard_normal((rows, width)).astype(np.float32)
    data = features.tobytes() if dtype == "float32" else (features.view(np.uint32) >> 16).astype("<u2").tobytes()
    full = kind == "full"
    made: dict[str, Any] = {
        "kind": kind,
        "version": 3,
        "session": "s.1",
        "position": 70,
        "target_id": 9,
        "miss": 0.25,
        "tail": 0.5,
        "top_ids": np.array([9, 2]),
        "top_log_probs": np.array([-1.0, -2.0], np.float32),
        "hidden": rng.standard_normal(4).astype(np.float32),
        "tokens": np.array([*range(rows), 9] if full else [], np.int64),
        "features": data if full else b"",
        "dtype": dtype,
    }
    return Sample(**(made | changes))


def same(one: Sample, other: Sample) -> bool:
    names = [field.name for field in dataclasses.fields(Sample)]
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)


@given(queries)
def test_a_query_record_is_read_as_it_was_written(record: QueryRecord) -> None:
    assert read_query(query_to_fields(record)) == record


@pytest.mark.parametrize("kind", ["head", "full"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sample_is_read_as_it_was_written(kind: str, dtype: str) -> None:
    made = sample(kind, dtype=dtype)
    fields = sample_to_fields(made)
    assert same(read_sample(fields), made)
    assert same(read_sample(fields, Widths(10)), made)
    assert size_of(fields) == sum(map(len, fields)) + sum(map(len, fields.values()))
    bare = sample(kind, top_ids=np.empty(0, np.int64), top_log_probs=np.empty(0, np.float32), tail=1.0)
    assert same(read_sample(sample_to_fields(bare)), bare)


def test_feature_rows_are_float32_whatever_they_came_as() -> None:
    exact, rounded = sample().feature_rows(), sample(dtype="bfloat16").feature_rows()
    assert exact.shape == rounded.shape == (3, 6)
    np.testing.assert_allclose(rounded, exact, rtol=2**-7)


def changed(fields: Fields, **meta: Any) -> Fields:
    return fields | {b"meta": json.dumps(json.loads(fields[b"meta"]) | meta).encode()}


WRONG_NUMBERS = [-1, float("nan"), float("inf"), "1", None, True, [1]]


@pytest.mark.parametrize("name", ["s", "rejections", "tau", "steps", "tokens_per_s", "step_ns", "load"])
@pytest.mark.parametrize("value", WRONG_NUMBERS)
def test_a_query_record_with_a_wrong_number_is_refused(name: str, value: object) -> None:
    fields = query_to_fields(QueryRecord("s", 1.0, 2, 3.0, 4, 5, 6.0, 7, 8, (9, 10), 1.0, "route"))
    with pytest.raises(InvalidField, match=name):
        read_query(changed(fields, **{name: value}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("session", ""),
        ("session", "a b"),
        ("session", 3),
        ("policy", "x" * 81),
        ("policy", 1),
        ("versions", [1]),
        ("versions", [1, -1]),
        ("versions", "12"),
        ("rejections", 1.5),
        ("rejections", 1 << 63),
    ],
)
def test_a_query_record_out_of_bounds_is_refused(name: str, value: object) -> None:
    fields = query_to_fields(QueryRecord("s", 1.0, 2, 3.0, 4, 5, 6.0, 7, 8, (9, 10), 1.0, "route"))
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
        ("kind", {"kind": "tail"}),
        ("dtype", {"dtype": "float16"}),
        ("miss", {"miss": 1.5}),
        ("tail", {"tail": -0.1}),
        ("version", {"version": 0.5}),
        ("position", {"position": limits.MAX_CONTEXT + 1}),
        ("target_id", {"target_id": 10}),
        ("tokens", {"target_id": 8}),
        ("top_ids", {b"top_ids": b"123"}),
        ("top_ids", {b"top_ids": np.array([1, 1], "<i4").tobytes()}),
        ("top_ids", {b"top_ids": np.array([1, 10], "<i4").tobytes()}),
        ("top_ids", {b"top_ids": np.array([1, -1], "<i4").tobytes()}),
        ("top_ids", {b"top_ids": bytes(4 * 65)}),
        ("top_log_probs", {b"top_log_probs": bytes(4)}),
        ("top_log_probs", {b"top_log_probs": NAN[:8]}),
        ("top_log_probs", {b"top_log_probs": np.array([1, -1], "<f4").tobytes()}),
        ("hidden", {b"hidden": b""}),
        ("hidden", {b"hidden": NAN}),
        ("hidden", {b"hidden": bytes(4 * limits.MAX_HIDDEN + 4)}),
        ("tokens", {b"tokens": bytes(8)}),
        ("tokens", {b"tokens": bytes(4 * limits.MAX_WINDOW + 8)}),
        ("features", {b"features": b""}),
        ("features", {b"features": bytes(3 * 6 * 4 - 1)}),
        ("features", {b"features": bytes(3 * 6 * 4 - 3)}),
        ("features", {b"features": NAN * 3}),
    ],
)
def test_a_sample_out_of_bounds_is_refused(name: str, changes: dict[Any, Any]) -> None:
    fields = sample_to_fields(sample())
    meta = {key: value for key, value in changes.items() if isinstance(key, str)}
    fields = changed(fields, **meta) | {key: value for key, value in changes.items() if isinstance(key, bytes)}
    with pytest.raises(InvalidField, match=name):
        read_sample(fields, Widths(10))


@pytest.mark.parametrize("name", ["meta", "top_ids", "top_log_probs", "hidden", "tokens", "features"])
def test_a_sample_without_one_of_its_fields_is_refused(name: str) -> None:
    fields = sample_to_fields(sample())
    del fields[name.encode()]
    with pytest.raises(InvalidField, match=name):
        read_sample(fields)


def test_an_unknown_demand_wants_nothing() -> None:
    assert [read_demand(value) for value in (b"head", b"full", None, b"", b"FULL", b"all")] == [
        "head",
        "full",
        *[""] * 4,
    ]
