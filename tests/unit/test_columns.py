"""Which columns of a session's features a head gets: those of the layers that it reads, in its order."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from coppice.engine.kv_cache import BlockTable
from coppice.errors import InvalidField
from coppice.speculation.sampling import SamplingParams
from coppice.wire.common import FeatureRef
from coppice.wire.verifier import OpenSession
from services.verifier import features
from services.verifier.features import FeatureWindow, Feed, Numbers, Window, columns, packed
from services.verifier.prefix import Prefix
from services.verifier.session import Session

HELD, HIDDEN, ROWS = (4, 1, 7, 2), 6, 5
CUTS = [HELD, (4,), (2,), (1, 7), (7, 4), (2, 7, 1, 4), (7, 7, 1)]


def rows(dtype: type[np.generic] = np.float32) -> Numbers:
    return (1000 * np.random.default_rng(3).normal(size=(ROWS, len(HELD) * HIDDEN))).astype(dtype)


def part(rows: Numbers, layer: int) -> Numbers:
    at = HELD.index(layer) * HIDDEN
    return rows[:, at : at + HIDDEN]


@pytest.mark.parametrize("dtype", [np.float32, np.int16])
@pytest.mark.parametrize("wanted", CUTS)
def test_the_columns_are_those_of_the_wanted_layers_in_their_order(
    dtype: type[np.generic], wanted: tuple[int, ...]
) -> None:
    session_rows = rows(dtype)
    expected = np.concatenate([part(session_rows, layer) for layer in wanted], axis=1)
    assert np.array_equal(columns(session_rows, HELD, wanted), expected)


@pytest.mark.parametrize("wanted", [HELD, (2, 4)])
def test_a_window_travels_in_parts_of_whole_rows_whatever_chunks_it_came_in(
    wanted: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = np.random.default_rng(1)
    rows = generator.normal(size=(200, len(HELD) * HIDDEN)).astype(np.float32)
    monkeypatch.setattr(features, "FEATURE_WINDOW", 90)
    window = FeatureWindow()
    for chunk in np.split(rows, np.cumsum(generator.integers(1, 15, 13))):
        window.append(chunk)
    row_bytes = 4 * HIDDEN * len(wanted)
    for start in (0, 120, 150, 199):
        first, chunks = window.since(start, 200)
        assert first == max(start, 110)
        for most in (1, 3 * row_bytes + 1, 7 * row_bytes, 1 << 20):
            parts = list(packed(chunks, HELD, wanted, most))
            expected = np.concatenate([part(rows, layer) for layer in wanted], axis=1)[first:]
            assert b"".join(data for _, data in parts) == expected.tobytes()
            assert [len(data) for _, data in parts] == [count * row_bytes for count, _ in parts]
            assert all(len(data) <= max(most, row_bytes) for _, data in parts)
    for start, end in ((200, 201), (0, 110)):
        with pytest.raises(InvalidField, match="not in"):
            window.since(start, end)


def test_a_follower_gets_the_layers_that_it_names() -> None:
    opening = OpenSession("s", [1] * ROWS, SamplingParams(), frozenset(), 99, feature_layers=HELD)
    table = BlockTable("s", 32, np.empty(0, np.int64), 0, True)
    session = Session(0, opening, Prefix(table, [], "", HELD), 50)
    session.commit([1] * ROWS, rows())

    def follow(start: int, count: int, layers: tuple[int, ...] = ()) -> Window:
        ref = FeatureRef("", "s", start, count, layers)
        return session.follow(Feed(ref, "float32", lambda feed: asyncio.sleep(0, None), lambda feed: None))  # type: ignore[arg-type]

    first, chunks, layers = follow(1, 4)
    assert (first, layers) == (1, HELD)
    assert np.array_equal(np.concatenate(chunks), rows()[1:])
    assert follow(1, 4, (2, 4))[0] == 1
    with pytest.raises(InvalidField, match=r"ref\.layers: 3 is not one of the session's layers \(4, 1, 7, 2\)"):
        follow(1, 4, (2, 3))
    with pytest.raises(InvalidField, match="ends behind the 5 committed positions"):
        follow(1, 5)
    assert len(session.feeds) == 2
