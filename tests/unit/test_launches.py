"""What replaces norms, rotations and gates on CUDA computes what they did; other modules are left alone."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from coppice.engine import modules
from coppice.engine.modules import merge_launches


@pytest.fixture(autouse=True)
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules, "_launches", lambda _: True)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [LlamaRMSNorm, Olmo2RMSNorm])
def test_a_root_mean_square_norm_becomes_one_operator(kind: type[nn.Module], dtype: torch.dtype) -> None:
    stock, merged = (kind(16, eps=1e-3).to(dtype) for _ in range(2))
    for norm in (stock, merged):
        norm.weight.data = torch.linspace(-1, 2, 16, dtype=dtype)
    merge_launches(model := nn.Sequential(merged))
    assert type(model[0]) is not kind
    assert isinstance(model[0], kind)
    states = torch.randn(2, 3, 16, dtype=dtype) / 50
    rounding = 1e-6 if dtype is torch.float32 else 2**-7
    torch.testing.assert_close(model(states), stock(states), rtol=rounding, atol=rounding)


@pytest.mark.parametrize(
    "module", [Gemma2RMSNorm(16), CohereLayerNorm(16), Centred(16), Scaled(), nn.RMSNorm(16), nn.LayerNorm(16)]
)
def test_other_norms_stay_what_they_are(module: nn.Module) -> None:
    kind = type(module)
    merge_launches(nn.Sequential(module))
    assert type(module) is kind


class Mlp(nn.Module):
    """Llama's, or one that bounds its gate."""

    def __init__(self, bound: float) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)
        self.bound = bound

    def forward(self, states: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(states).clamp(max=self.bound)) * self.up_proj(states))
        return out


@pytest.mark.parametrize(("bound", "replaced"), [(1e9, True), (7.0, False)])
def test_a_gate_that_does_more_is_left_alone(bound: float, replaced: bool) -> None:
    merge_launches(nn.Sequential(mlp := Mlp(bound)))
    assert (type(mlp) is not Mlp) == replaced


_KERNELS = """
import torch
from torch.nn import functional as F
from coppice.engine.kernels import gate, rotate
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
torch.manual_seed(0)
for dtype in (torch.float32, torch.float16):
    for dim in (8, 96):
        # Parts of one product, as the joined layers answer.
        query, key, _ = torch.randn(1, 5, 8 * dim, dtype=dtype).split((4 * dim, 2 * dim, 2 * dim), -1)
        query, key = (states.view(1, 5, -1, dim).transpose(1, 2) for states in (query, key))
        cos, sin = torch.randn(2, 1, 5, dim, dtype=dtype)
        for mine, stock in zip(rotate(query, key, cos, sin), apply_rotary_pos_emb(query, key, cos, sin), strict=True):
            assert torch.equal(mine, stock)
            assert mine.transpose(1, 2).is_contiguous()
    opened, values = torch.randn(1, 3, 2200, dtype=dtype).split(1100, -1)
    close = 1e-6 if dtype is torch.float32 else 1e-3
    torch.testing.assert_close(gate(opened, values), F.silu(opened) * values, rtol=close, atol=close)
"""


def test_the_kernels_compute_the_stock_formulas() -> None:
    """Interpreted; in 16 bits by float16, since the interpreter cuts bfloat16 off."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", _KERNELS], env=environment, check=True, timeout=150)
