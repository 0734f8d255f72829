"""Packed linear layers compute what stock ones do."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn

from coppice.packed.linear import PackedLinear, prepack, supported

needs_bfloat16 = pytest.mark.skipif(not supported(), reason="this processor has no bfloat16 in oneDNN")


def _model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 200), nn.SiLU(), nn.Linear(200, 64, bias=False)).to(dtype).requires_grad_(False)


@needs_bfloat16
@pytest.mark.parametrize("rows", [1, 13, 300])
def test_packed_layers_answer_within_a_rounding_of_stock_ones(rows: int) -> None:
    stock = _model(torch.bfloat16)
    packed = deepcopy(stock)
    prepack(packed)
    assert [type(layer) for layer in packed] == [PackedLinear, nn.SiLU, PackedLinear]
    x = torch.randn(2, rows, 96, dtype=torch.bfloat16)
    torch.testing.assert_close(packed(x), stock(x), rtol=2**-7, atol=2**-7)


@needs_bfloat16
def test_a_packed_model_gives_its_matrices_back_and_takes_new_ones() -> None:
    stock = _model(torch.bfloat16)
    packed = deepcopy(stock)
    prepack(packed)
    prepack(packed)  # changes nothing
    assert torch.equal(packed[2].weight.to_dense(), stock[2].weight)
    state = packed.state_dict()
    state["2.weight"] = -stock[2].weight
    packed.load_state_dict(state, assign=True)
    prepack(packed)
    x = torch.randn(3, 96, dtype=torch.bfloat16)
    torch.testing.assert_close(packed(x), -stock(x), rtol=2**-7, atol=2**-7)


def test_float32_is_left_alone() -> None:
    model = _model(torch.float32)
    prepack(model)
    assert [type(layer) for layer in model] == [nn.Linear, nn.SiLU, nn.Linear]


@needs_bfloat16
def test_layers_of_another_class_are_left_alone() -> None:
    class Routed(nn.Linear):
        """Whoever subclasses may read the matrix."""

    model = nn.Sequential(Routed(32, 32)).to(torch.bfloat16)
    prepack(model)
    assert type(model[0]) is Routed
