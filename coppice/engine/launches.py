"""Parts of a model that a GPU runs in one launch each: norms, rotary embeddings and gates.

A launch costs the host and the GPU some microseconds, whatever it computes. Written in transformers' operators, a norm
is eight launches, the rotation of queries and keys ten, and a gate two; a layer of Qwen3 has four norms.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_ROTATE = "apply_rotary_pos_emb"  # the global of transformers' modules that rotates queries and keys
_ROUNDING = 1e-5
Forward = Callable[..., Any]


def merge_launches(model: nn.Module) -> None:
    """Have a model's norms, rotations and gates run in one launch each on CUDA, and elsewhere as before.

    A part is replaced only if it answers a probe as the merged form does, whatever its class is called; others, such as
    Gemma's norms, stay as they are. What torch.compile traces is the stock form, which it fuses itself.
    """
    with torch.inference_mode():
        for module in list(model.modules()):
            kind: Any = type(module)
            if kind.__call__ is not nn.Module.__call__ or "forward" in module.__dict__:
                continue
            if (eps := _epsilon(module)) is not None:
                module.__class__ = _replaced(kind, _normalising(kind, eps))
            elif _is_gated(module):
                module.__class__ = _replaced(kind, _gating(kind))
            elif (forward := _rotating(kind)) is not None:
                module.__class__ = _replaced(kind, forward)


@cache
def _replaced(kind: Any, forward: Forward) -> Any:
    """The class with another `forward`."""
    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def _launches(tensor: Tensor) -> bool:
    """Whether a kernel of ours is to be launched for it now."""
    return tensor.is_cuda and not torch.compiler.is_compiling()


# Norms.


def _epsilon(module: nn.Module) -> float | None:
    """The epsilon of a module that divides its input by the root of its mean square and multiplies by its weight; None
    for any other module.
    """
    weight = module._parameters.get("weight")
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    held = [*module._parameters, *module._buffers, *module._modules]
    if held != ["weight"] or weight is None or weight.dim() != 1 or not isinstance(eps, float):
        return None
    random = torch.Generator().manual_seed(0)
    probe = copy.copy(module)
    # Weights of both signs, and numbers so small that the epsilon counts.
    probe._parameters = {"weight": nn.Parameter(torch.randn(weight.shape, generator=random), requires_grad=False)}
    states = torch.randn(2, 3, len(weight), generator=random) * torch.tensor([[[1.0]], [[eps**0.5]]])
    try:
        answer = probe(states)
    except Exception:  # it takes something else
        return None
    expected = F.rms_norm(states, weight.shape, probe._parameters["weight"], eps)
    return eps if torch.allclose(answer, expected, rtol=_ROUNDING, atol=_ROUNDING) else None


@cache
def _normalising(kind: Any, eps: float) -> Forward:
    def forward(self: Any, hidden_states: Tensor) -> Any:
        """(..., N) -> (..., N)."""
        weight = self.weight
        if _launches(hidden_states) and hidden_states.dtype is weight.dtype:
            return F.rms_norm(hidden_states, weight.shape, weight, eps)
        return kind.forward(self, hidden_states)

    return forward


# Gates.


def _is_gated(module: Any) -> bool:
    """Whether a module computes down(silu(gate(x)) * up(x)), also of large numbers, which some models clamp."""
    parts = module._modules
    if not {"gate_proj", "up_proj", "down_proj"} <= parts.keys() or not isinstance(parts["gate_proj"], nn.Linear):
        return False
    gate = parts["gate_proj"]
    weight = gate.weight
    states = torch.randn(2, gate.in_features, generator=torch.Generator().manual_seed(0)).to(weight.device)
    for scale in (1.0, 100.0):
        probe = (scale * states).to(weight.dtype)[None]
        try:
            answer = module(probe)
        except Exception:  # it takes something else
            return False
        if not torch.equal(answer, module.down_proj(F.silu(gate(probe)) * module.up_proj(probe))):
            return False
    return True


@cache
def _gating(kind: Any) -> Forward:
    def forward(self: Any, hidden_states: Tensor) -> Any:
        """(..., H) -> (..., H)."""
        if not _launches(hidden_states):
            return kind.forward(self, hidden_states)
        from coppice.engine import launches_triton

        gate, up = self.gate_proj(hidden_states), self.up_proj(hidden_states)
        return self.down_proj(launches_triton.gate(gate, up))

    return forward


# Rotations.


@cache
def _rotating(kind: Any) -> Forward | None:
    """The class's `forward` with the rotation in one launch; None where it has none, or another one."""
    forward: Any = kind.forward
    code = getattr(forward, "__code__", None)
    if code is None or _ROTATE not in code.co_names or not _rotates_halves(stock := forward.__globals__.get(_ROTATE)):
        return None
    known = {**forward.__globals__, _ROTATE: partial(_rotate, stock)}
    del known["__name__"]  # dynamo would look the names up in the module of that name
    merged = FunctionType(code, known, forward.__name__, forward.__defaults__, forward.__closure__)
    merged.__kwdefaults__ = forward.__kwdefaults__
    return merged


def _rotates_halves(stock: Any) -> bool:
    """Whether a function rotates the halves of queries and keys against each other, with the stock formula's bits."""
    random = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        query, key = (torch.randn(1, heads, 5, 8, generator=random, dtype=dtype) for heads in (4, 2))
        cos, sin = torch.randn(2, 1, 5, 8, generator=random, dtype=dtype)
        try:
            answers = stock(query, key, cos, sin)
        except Exception:  # it takes something else
            return False
        for answer, states in zip(answers, (query, key), strict=True):
            first, second = states.chunk(2, dim=-1)
            if not torch.equal(answer, states * cos + torch.cat((-second, first), dim=-1) * sin):
                return False
    return True


def _rotate(stock: Forward, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *more: Any, **named: Any) -> Any:
    """query (1, H, T, D), key (1, KVH, T, D), cos and sin (1, T, D) -> query and key, rotated."""
    whole = cos.shape == (1, query.shape[2], query.shape[3]) and query.dtype == key.dtype == cos.dtype
    if more or named or not whole or not _launches(query):
        return stock(query, key, cos, sin, *more, **named)
    from coppice.engine import launches_triton

    return launches_triton.rotate(query, key, cos, sin)
