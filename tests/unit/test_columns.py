"""Which columns of a session's features a head gets: those of the layers that it reads, in its order."""

from __future__ import annotations

import pytest
import torch

from coppice.errors import InvalidField
from coppice.messages.steps import FeatureRef, OpenSession
from coppice.speculation.sampling import SamplingParams
from services.verifier.features import columns
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


def test_a_window_is_read_with_the_layers_that_it_names() -> None:
    opening = OpenSession("s", [1] * ROWS, SamplingParams(), frozenset(), 99, feature_layers=HELD)
    table: object = None
    session = Session(0, opening, table, 100, 50)  # type: ignore[arg-type]
    features = rows(torch.float32)
    session.commit([1] * 2, features[:2])
    session.commit([1] * 3, features[2:])
    assert torch.equal(session.read_features(FeatureRef("", "s", 1, 4)), features[1:])
    expected = torch.cat((part(features, 2), part(features, 4)), dim=1)[1:]
    assert torch.equal(session.read_features(FeatureRef("", "s", 1, 4, (2, 4))), expected)
    with pytest.raises(InvalidField, match=r"ref\.layers: 3 is not one of the session's layers \(4, 1, 7, 2\)"):
        session.read_features(FeatureRef("", "s", 1, 4, (2, 3)))
