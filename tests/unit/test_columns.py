"""Which columns of a session's features a head gets: those of the layers that it reads, in its order."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from coppice.engine.kv_cache import BlockTable
from coppice.errors import InvalidField
from coppice.speculation.sampling import SamplingParams
from coppice.wire.common import FeatureRef
from coppice.wire.verifier import OpenSession
from services.verifier.features import FeatureRows, FeatureWindow, columns, feature_bytes
from services.verifier.prefix import Prefix
from services.verifier.session import Session

HELD, HIDDEN, ROWS = (4, 1, 7, 2), 6, 5
CUTS = [HELD, (4,), (2,), (1, 7), (7, 4), (2, 7, 1, 4), (7, 7, 1)]


def rows(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(ROWS, len(HELD) * HIDDEN, generator=torch.Generator().manual_seed(3)).to(dtype)


def part(features: torch.Tensor, layer: int) -> torch.Tensor:
    at = HELD.index(layer) * HIDDEN
    return features[:, at : at + HIDDEN]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wanted", CUTS)
def test_the_columns_are_those_of_the_wanted_layers_in_their_order(dtype: torch.dtype, wanted: tuple[int, ...]) -> None:
    features = rows(dtype)
    expected = torch.cat([part(features, layer) for layer in wanted], dim=1)
    assert torch.equal(columns(features, HELD, wanted), expected)
    sent = torch.frombuffer(bytearray(feature_bytes(features, HELD, wanted)), dtype=dtype)
    assert torch.equal(sent.view(ROWS, -1), expected)


def sent(rows: FeatureRows, most_bytes: int = 1 << 20) -> torch.Tensor:
    """Float32 rows as they arrive, having travelled in parts."""
    parts = list(rows.parts(most_bytes))
    assert sum(count for count, _ in parts) == rows.count
    return torch.frombuffer(bytearray(b"".join(data for _, data in parts)), dtype=torch.float32).view(rows.count, -1)


@pytest.mark.parametrize("wanted", [HELD, (2, 4)])
def test_a_window_travels_in_parts_of_whole_rows_whatever_chunks_it_came_in(wanted: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(200, len(HELD) * HIDDEN, generator=generator)
    window = FeatureWindow(most=90)
    sizes = torch.randint(1, 30, (13,), generator=generator).tolist()
    for chunk in rows.split([*sizes, 200 - sum(sizes)]):
        window.append(chunk)
    row_bytes = 4 * HIDDEN * len(wanted)
    for start, count in ((0, 200), (150, 50), (120, 7), (199, 1), (0, 181)):
        held = FeatureRows(*window.read(start, count), HELD, wanted)
        first = max(start, start + count - 90, window.start)
        assert held.count == start + count - first
        for most in (1, 3 * row_bytes + 1, 7 * row_bytes, 1 << 20):
            expected = torch.cat([part(rows, layer) for layer in wanted], dim=1)[first : start + count]
            assert torch.equal(sent(held, most), expected)
            largest = max(1, most // row_bytes)
            counts = [count for count, _ in held.parts(most)]
            assert counts[:-1] == [largest] * (len(counts) - 1)
            assert counts[-1] <= largest
    with pytest.raises(InvalidField, match="not in"):
        window.read(150, 51)


def test_a_window_is_read_with_the_layers_that_it_names() -> None:
    opening = OpenSession("s", [1] * ROWS, SamplingParams(), frozenset(), 99, feature_layers=HELD)
    table = BlockTable("s", 32, np.empty(0, np.int64), 0, True)
    session = Session(0, opening, Prefix(table, [], "", HELD), 100, 50)
    features = rows(torch.float32)
    session.commit([1] * 2, features[:2])
    session.commit([1] * 3, features[2:])
    assert torch.equal(sent(session.read_features(FeatureRef("", "s", 1, 4))), features[1:])
    expected = torch.cat((part(features, 2), part(features, 4)), dim=1)[1:]
    assert torch.equal(sent(session.read_features(FeatureRef("", "s", 1, 4, (2, 4)))), expected)
    with pytest.raises(InvalidField, match=r"ref\.layers: 3 is not one of the session's layers \(4, 1, 7, 2\)"):
        session.read_features(FeatureRef("", "s", 1, 4, (2, 3)))
