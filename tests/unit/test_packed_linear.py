"""Packed linear layers compute what stock ones do."""

from __future__ import annotations

import weakref
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import nn

from coppice.engine import modules as linear
from coppice.engine.modules import FusedLinear, PackedLinear, compile_ahead, compiled_rows, fuse, pays, prepack
from coppice.machine import this_machine

ROUNDING = {torch.bfloat16: 2**-7, torch.float32: 2**-18}


@pytest.fixture(params=ROUNDING, ids=str)
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """One that is packed; float32 as on a processor where that is faster."""
    if request.param is torch.bfloat16 and not pays(torch.bfloat16):
        pytest.skip("this processor has no bfloat16 in oneDNN")
    if not torch.backends.mkldnn.is_available():
        pytest.skip("no oneDNN in this torch")
    monkeypatch.setattr(linear, "pays", lambda _: True)
    return request.param


def _model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 200), nn.SiLU(), nn.Linear(200, 64, bias=False)).to(dtype).requires_grad_(False)


@pytest.mark.parametrize("rows", [1, 13, 17, 300])
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


@pytest.mark.parametrize(
    ("vendor", "features", "packed"),
    [
        ("AuthenticAMD", ("avx2", "avx512f"), True),
        ("AuthenticAMD", ("avx2",), False),
        ("GenuineIntel", ("avx2", "avx512f"), False),
    ],
)
def test_float32_is_packed_where_that_is_known_to_be_faster(
    vendor: str, features: tuple[str, ...], packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = replace(this_machine(), vendor=vendor, features=features)
    monkeypatch.setattr(linear, "this_machine", lambda: machine)
    pays.cache_clear()
    model = _model(torch.float32)
    prepack(model)
    pays.cache_clear()
    assert (type(model[0]) is PackedLinear) == (packed and torch.backends.mkldnn.is_available())


def test_few_numbers_of_rows_are_compiled() -> None:
    made = [compiled_rows(rows) for rows in range(1, 1025)]
    assert made[:16] == list(range(1, 17))
    assert all(rows <= padded < rows * 5 / 4 for rows, padded in enumerate(made, 1))
    assert len(set(made)) == 16 + 4 * 6


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


def test_compiling_ahead_changes_no_answer(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(96, 64, bias=False).to(dtype))
    prepack(model)
    x = torch.randn(37, 96, dtype=dtype)
    with torch.inference_mode():
        before = model(x)
        compile_ahead(model)
        assert torch.equal(model(x), before)
