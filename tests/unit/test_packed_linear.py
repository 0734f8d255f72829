"""Packed linear layers compute what stock ones do."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from copy import deepcopy

import pytest
import torch
from torch import nn

from coppice.packed import linear
from coppice.packed.linear import FusedLinear, PackedLinear, fuse, packed_over_stock, pays, prepack

ROUNDING = {torch.bfloat16: 2**-7, torch.float32: 2**-18}


@pytest.fixture(params=ROUNDING, ids=str)
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.dtype]:
    """One that is packed; float32 as if that were faster."""
    if request.param is torch.bfloat16 and not pays(torch.bfloat16):
        pytest.skip("this processor has no bfloat16 in oneDNN")
    monkeypatch.setattr(linear, "packed_over_stock", lambda: 0.0)
    pays.cache_clear()
    yield request.param
    pays.cache_clear()


def _model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 200), nn.SiLU(), nn.Linear(200, 64, bias=False)).to(dtype).requires_grad_(False)


@pytest.mark.parametrize("rows", [1, 13, 300])
def test_packed_layers_answer_within_a_rounding_of_stock_ones(rows: int, dtype: torch.dtype) -> None:
    stock = _model(dtype)
    packed = deepcopy(stock)
    prepack(packed)
    assert [type(layer) for layer in packed] == [PackedLinear, nn.SiLU, PackedLinear]
    x = torch.randn(2, rows, 96, dtype=dtype)
    torch.testing.assert_close(packed(x), stock(x), rtol=ROUNDING[dtype], atol=ROUNDING[dtype])


def test_a_packed_model_gives_its_matrices_back_and_takes_new_ones(dtype: torch.dtype) -> None:
    stock = _model(dtype)
    packed = deepcopy(stock)
    prepack(packed)
    prepack(packed)  # changes nothing
    assert torch.equal(packed[2].weight.to_dense(), stock[2].weight)
    state = packed.state_dict()
    state["2.weight"] = -stock[2].weight
    packed.load_state_dict(state, assign=True)
    prepack(packed)
    x = torch.randn(3, 96, dtype=dtype)
    torch.testing.assert_close(packed(x), -stock(x), rtol=ROUNDING[dtype], atol=ROUNDING[dtype])


def test_float32_is_left_alone_where_that_is_no_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    assert packed_over_stock() > 0
    monkeypatch.setattr(linear, "packed_over_stock", lambda: 0.9)
    pays.cache_clear()
    model = _model(torch.float32)
    prepack(model)
    pays.cache_clear()
    assert [type(layer) for layer in model] == [nn.Linear, nn.SiLU, nn.Linear]


def test_layers_of_another_class_are_left_alone(dtype: torch.dtype) -> None:
    class Routed(nn.Linear):
        """Whoever subclasses may read the matrix."""

    model = nn.Sequential(Routed(32, 32)).to(dtype)
    prepack(model)
    assert type(model[0]) is Routed


class _Projections(nn.Module):
    """Grouped-query attention's, by the names that Hugging Face models have for them."""

    def __init__(self, dtype: torch.dtype, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q_proj, self.k_proj = nn.Linear(96, 64, bias=bias), nn.Linear(96, 32, bias=bias)
        self.v_proj, self.o_proj = nn.Linear(96, 32, bias=bias), nn.Linear(64, 96, bias=bias)
        self.to(dtype).requires_grad_(False)

    def forward(self, x: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
        """Of `x`, the keys of `other` if there is one."""
        return torch.cat([self.q_proj(x), self.k_proj(x if other is None else other), self.v_proj(x)], dim=-1)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 13])
def test_fused_layers_answer_with_the_bits_of_packed_ones(bias: bool, rows: int, dtype: torch.dtype) -> None:
    apart = _Projections(dtype, bias)
    together = deepcopy(apart)
    fuse(together)
    prepack(together)
    prepack(apart)
    kinds = [type(layer) for layer in together.children()]
    assert kinds == [FusedLinear, FusedLinear, FusedLinear, PackedLinear]
    x, y = torch.randn(2, 1, rows, 96, dtype=dtype).unbind()
    for arguments in ((x,), (x, y), (y, x), (x,)):
        assert torch.equal(together(*arguments), apart(*arguments))


def test_fused_layers_keep_nothing_of_a_call_and_give_their_matrices_back(dtype: torch.dtype) -> None:
    stock = _Projections(dtype)
    fused = deepcopy(stock)
    fuse(fused)
    x = torch.randn(1, 4, 96, dtype=dtype)
    seen = weakref.ref(x)
    fused(x)
    del x
    assert seen() is None
    for name in ("q_proj", "k_proj", "v_proj"):
        assert torch.equal(fused.get_submodule(name).weight, stock.get_submodule(name).weight)


def test_layers_that_do_not_fit_together_are_not_fused(dtype: torch.dtype) -> None:
    model = _Projections(dtype)
    model.v_proj = nn.Linear(64, 32, bias=False).to(dtype)
    fuse(model)
    assert all(type(layer) is nn.Linear for layer in model.children())
