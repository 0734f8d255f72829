"""Modules in faster forms compute what stock ones do, and other modules are left alone."""

from __future__ import annotations

import weakref
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from coppice.engine import modules
from coppice.engine.modules import FusedLinear, PackedLinear, call_directly, fuse, merge_launches, pays, prepack

ROUNDING = {torch.bfloat16: 2**-7, torch.float32: 2**-18}


@pytest.fixture(params=ROUNDING, ids=str)
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """One that is packed; float32 as on a processor where that is faster."""
    if request.param is torch.bfloat16 and not pays(torch.bfloat16):
        pytest.skip("this processor has no bfloat16 in oneDNN")
    if not torch.backends.mkldnn.is_available():
        pytest.skip("no oneDNN in this torch")
    monkeypatch.setattr(modules, "pays", lambda _: True)
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
    answer = packed(x)
    torch.testing.assert_close(answer, stock(x), rtol=ROUNDING[dtype], atol=ROUNDING[dtype])


def test_a_packed_model_gives_its_matrices_back_and_takes_new_ones(dtype: torch.dtype) -> None:
    stock = _model(dtype)
    packed = deepcopy(stock)
    prepack(packed)
    prepack(packed)  # changes nothing
    assert torch.equal(packed[2].weight.to_dense(), stock[2].weight)
    packed.load_state_dict({**packed.state_dict(), "2.weight": -stock[2].weight}, assign=True)
    prepack(packed)
    x = torch.randn(3, 96, dtype=dtype)
    torch.testing.assert_close(packed(x), -stock(x), rtol=ROUNDING[dtype], atol=ROUNDING[dtype])


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("norm", "merged"), [(Gemma3RMSNorm, True), (LlamaRMSNorm, False), (CohereLayerNorm, False), (nn.LayerNorm, False)]
)
def test_norms_on_the_cpu_become_one_equal_operator(norm: type[nn.Module], merged: bool, kept: torch.dtype) -> None:
    stock, model = (nn.Sequential(norm(48, eps=1e-3)).to(kept) for _ in range(2))
    for module in (stock, model):
        module[0].weight.data = torch.linspace(-1, 2, 48).to(kept)
    modules.merge_norms(model)
    assert (type(model[0]) is not norm) == merged
    states = torch.randn(2, 7, 48).to(kept)
    assert torch.equal(model(states), stock(states))


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
def test_fused_layers_have_the_bits_of_packed_ones_and_keep_nothing(bias: bool, rows: int, dtype: torch.dtype) -> None:
    stock = _Projections(dtype, bias)
    apart, together = deepcopy(stock), deepcopy(stock)
    fuse(together)
    prepack(together)
    prepack(apart)
    assert [type(layer) for layer in together.children()] == [FusedLinear, FusedLinear, FusedLinear, PackedLinear]
    x, y = torch.randn(2, 1, rows, 96, dtype=dtype).unbind()
    for arguments in ((x,), (x, y), (y, x), (x,)):
        assert torch.equal(together(*arguments), apart(*arguments))
    last = weakref.ref(z := x + y)
    together(z)
    del z
    assert last() is None
    for name in ("q_proj", "k_proj", "v_proj"):
        assert torch.equal(together.get_submodule(name).weight, stock.get_submodule(name).weight)


def test_layers_of_another_class_or_size_are_left_alone(dtype: torch.dtype) -> None:
    class Routed(nn.Linear):
        """Whoever subclasses may read the matrix."""

    prepack(routed := nn.Sequential(Routed(32, 32)).to(dtype))
    assert type(routed[0]) is Routed
    model = _Projections(dtype)
    model.v_proj = nn.Linear(64, 32, bias=False).to(dtype)
    fuse(model)
    assert all(type(layer) is nn.Linear for layer in model.children())


# Launches on CUDA.


class Centred(LlamaRMSNorm):
    """Keeps the names of a norm and computes another one."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states - hidden_states.mean(-1, keepdim=True))


class Scaled(nn.Module):
    """Has a norm's parameters and is none."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(16)), 1e-6

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.weight * left * right


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [LlamaRMSNorm, Olmo2RMSNorm])
def test_a_root_mean_square_norm_becomes_one_operator(kind: type[nn.Module], kept: torch.dtype) -> None:
    stock, merged = (kind(16, eps=1e-3).to(kept) for _ in range(2))
    for norm in (stock, merged):
        norm.weight.data = torch.linspace(-1, 2, 16, dtype=kept)
    merge_launches(model := nn.Sequential(merged))
    assert type(model[0]) is not kind
    assert isinstance(model[0], kind)
    states = torch.randn(2, 3, 16, dtype=kept) / 50
    rounding = 1e-6 if kept is torch.float32 else 2**-7
    torch.testing.assert_close(model(states), stock(states), rtol=rounding, atol=rounding)


@pytest.mark.parametrize(
    "module", [Gemma2RMSNorm(16), CohereLayerNorm(16), Centred(16), Scaled(), nn.RMSNorm(16), nn.LayerNorm(16)]
)
def test_other_norms_stay_what_they_are(module: nn.Module) -> None:
    kind = type(module)
    merge_launches(nn.Sequential(module))
    assert type(module) is kind


# Direct calls.


class Gate(nn.Module):
    """A layer with parts, one of them optional, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(4, 8), nn.Linear(8, 4, bias=False), None
        self.scale = nn.Parameter(torch.full((4,), 1.5))

    def forward(self, states: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(states).relu()) * self.scale
        return out if self.norm is None else self.norm(out)


def test_direct_calls_answer_the_same_until_a_part_is_replaced() -> None:
    model, states = nn.Sequential(Gate(), nn.LayerNorm(4), Gate()), torch.randn(3, 4)
    expected, parts = model(states), {name: value.clone() for name, value in model.state_dict().items()}
    call_directly(model)
    assert torch.equal(model(states), expected)
    assert model.state_dict().keys() == parts.keys()
    assert all(torch.equal(value, parts[name]) for name, value in model.state_dict().items())
    gate = model[2]
    assert isinstance(gate, Gate)
    gate.scale = nn.Parameter(torch.full((4,), 3.0))
    assert torch.equal(model(states), 2 * expected)
    gate.down = nn.Linear(8, 4)
    gate.down.weight.data.zero_()
    gate.down.bias.data.zero_()
    assert torch.equal(model(states), torch.zeros(3, 4))


def test_hooks_are_called_where_they_were_or_are_to_be() -> None:
    model, called = nn.Sequential(Gate(), Gate()), list[str]()
    model[0].up.register_forward_hook(lambda *_: called.append("before"))
    call_directly(model, [model[1]])
    model[1].register_forward_pre_hook(lambda *_: called.append("after"))
    model(torch.randn(2, 4))
    assert called == ["before", "after"]
