"""Which columns of a session's features a head gets: those of the layers that it reads, in its order."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from coppice.engine.kv_cache import BlockTable
from coppice.errors import InvalidField
from coppice.speculation.sampling import SamplingParams
from coppice.wire.common import FeatureRef
from coppice.wire.verifier import OpenSession
from services.verifier import features
from services.verifier.features import FeatureWindow, Feed, Window, columns, feature_bytes, packed
from services.verifier.prefix import Prefix
from services.verifier.session import Session

HELD, HIDDEN, ROWS = (4, 1, 7, 2), 6, 5
CUTS = [HELD, (4,), (2,), (1, 7), (7, 4), (2, 7, 1, 4), (7, 7, 1)]


def rows(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(ROWS, len(HELD) * HIDDEN, generator=torch.Generator().manual_seed(3)).to(dtype)


def part(rows: torch.Tensor, layer: int) -> torch.Tensor:
    at = HELD.index(layer) * HIDDEN
    return rows[:, at : at + HIDDEN]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wanted", CUTS)
def test_the_columns_are_those_of_the_wanted_layers_in_their_order(dtype: torch.dtype, wanted: tuple[int, ...]) -> None:
    session_rows = rows(dtype)
    expected = torch.cat([part(session_rows, layer) for layer in wanted], dim=1)
    assert torch.equal(columns(session_rows, HELD, wanted), expected)
    sent = torch.frombuffer(bytearray(feature_bytes(session_rows, HELD, wanted)), dtype=dtype)
    assert torch.equal(sent.view(ROWS, -1), expected)


@pytest.mark.parametrize("wanted", [HELD, (2, 4)])
def test_a_window_travels_in_parts_of_whole_rows_whatever_chunks_it_came_in(
    wanted: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(200, len(HELD) * HIDDEN, generator=generator)
    monkeypatch.setattr(features, "FEATURE_WINDOW", 90)
    window = FeatureWindow()
    sizes = torch.randint(1, 30, (13,), generator=generator).tolist()
    for chunk in rows.split([*sizes, 200 - sum(sizes)]):
        window.append(chunk)
    row_bytes = 4 * HIDDEN * len(wanted)
    for start in (0, 120, 150, 199):
        first, chunks = window.since(start, 200)
        assert first == max(start, 110)
        for most in (1, 3 * row_bytes + 1, 7 * row_bytes, 1 << 20):
            parts = list(packed(chunks, HELD, wanted, most))
            expected = torch.cat([part(rows, layer) for layer in wanted], dim=1)[first:]
            sent = torch.frombuffer(bytearray(b"".join(data for _, data in parts)), dtype=torch.float32)
            assert torch.equal(sent.view(200 - first, -1), expected)
            assert [len(data) for _, data in parts] == [count * row_bytes for count, _ in parts]
            assert all(len(data) <= max(most, row_bytes) for _, data in parts)
    for start, end in ((200, 201), (0, 110)):
        with pytest.raises(InvalidField, match="not in"):
            window.since(start, end)


def test_a_follower_gets_the_layers_that_it_names() -> None:
    opening = OpenSession("s", [1] * ROWS, SamplingParams(), frozenset(), 99, feature_layers=HELD)
    table = BlockTable("s", 32, np.empty(0, np.int64), 0, True)
    session = Session(0, opening, Prefix(table, [], "", HELD), 50)
    session.commit([1] * ROWS, rows(torch.float32))

    def follow(start: int, count: int, layers: tuple[int, ...] = ()) -> Window:
        ref = FeatureRef("", "s", start, count, layers)
        return session.follow(Feed(ref, "float32", lambda feed: asyncio.sleep(0, None), lambda feed: None))  # type: ignore[arg-type]

    first, chunks, layers = follow(1, 4)
    assert (first, layers) == (1, HELD)
    assert torch.equal(torch.cat(chunks), rows(torch.float32)[1:])
    assert follow(1, 4, (2, 4))[0] == 1
    with pytest.raises(InvalidField, match=r"ref\.layers: 3 is not one of the session's layers \(4, 1, 7, 2\)"):
        follow(1, 4, (2, 3))
    with pytest.raises(InvalidField, match="ends behind the 5 committed positions"):
        follow(1, 5)
    assert len(session.feeds) == 2
