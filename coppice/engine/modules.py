"""A model's modules in forms that are faster and compute the same: linear layers on a CPU, few launches on CUDA.

Linear layers. Stock bfloat16 layers on a CPU hand oneDNN a row-major matrix, which it rearranges in every call.
Rearranged once, a target of 18M parameters takes 0.88 of the time and answers with the same bits. A call costs 20 us,
so layers that are given the same input are multiplied as one: 0.9 of what is left. Stock float32 layers go to MKL: on
an EPYC with AVX-512 two to eight rows take oneDNN a half to a third of its time. The processor decides which of the two
multiplies, not a timing, so that replicas answer with the same bits.

oneDNN compiles kernels for every number of rows, in 0.3 ms and half a megabyte a layer's shape, and keeps a thousand:
numbers of rows above 16 are rounded up to one of four between two powers of two.

Launches. A launch costs the host and the GPU some microseconds, whatever it computes. Written in transformers'
operators, a norm is eight launches and the rotation of queries and keys ten; a layer of Qwen3 has four norms.
"""

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from inspect import signature
from types import FunctionType
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from coppice.machine import this_machine

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""names of layers that are called with the same input"""
EXACT = 16  # rows up to which kernels are compiled for every number
MOST = 1024  # rows up to which numbers of rows are rounded
_ROTATE = "apply_rotary_pos_emb"  # the global of transformers' modules that rotates queries and keys
_ROUNDING = 1e-5

_multiply: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
"""oneDNN's product, (input, weight, bias, "none", [], "") -> input @ weight.T + bias; None where torch has none"""
_PADDING = {
    rows: padding
    for rows in range(EXACT + 1, MOST + 1)
    if (padding := -rows % (1 << ((rows - 1).bit_length() - 3)))  # less than a quarter
}
"""rows that are added to so many, where any are"""
PAIRED = {**_PADDING, 1: 1}
"""as `_PADDING`, where a row alone must be summed as those beside others: of one, oneDNN cuts a long sum in parts"""


class PackedLinear(nn.Linear):
    """A linear layer without gradient; `weight` is opaque but for its shape, and `weight.to_dense()` is the matrix."""

    padding: Mapping[int, int] = _PADDING

    def forward(self, input: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)."""
        out: Tensor
        rows = input.numel() // input.shape[-1]
        if (padding := self.padding.get(rows)) is None:
            out = _multiply(input, self.weight, self.bias, "none", [], "")
            return out
        # Written out here and below: these calls are half of what a forward spends in Python.
        out = _multiply(F.pad(input.reshape(rows, -1), (0, 0, 0, padding)), self.weight, self.bias, "none", [], "")
        return out[:rows].view(*input.shape[:-1], -1)


class _Fused:
    """Several layers as one matrix, and what it made of the input that they are being called with."""

    def __init__(self, layers: Sequence[nn.Linear], packed: bool) -> None:
        self.widths = tuple(layer.out_features for layer in layers)
        biases = tuple(layer.bias for layer in layers if layer.bias is not None)
        weight = torch.cat(tuple(layer.weight for layer in layers)).detach()
        self.weight = _reordered(weight) if packed else weight
        self.packed = packed
        self.bias = torch.cat(biases).detach() if biases else None
        self.input: Tensor | None = None
        self.parts: dict[int, Tensor] = {}  # those of `input` that were not asked for yet


class FusedLinear(nn.Linear):
    """One of several layers that are multiplied as one; without gradient, and its weights cannot be replaced."""

    fused: _Fused
    number: int
    padding: Mapping[int, int] = _PADDING

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """(out_features, in_features), a copy."""
        return self.fused.weight.to_dense().split_with_sizes(self.fused.widths)[self.number]

    def forward(self, input: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features). The input's product is kept until all layers had their part."""
        fused = self.fused
        if fused.input is not input or self.number not in fused.parts:
            rows = input.numel() // input.shape[-1]
            if not fused.packed:
                out = F.linear(input, fused.weight, fused.bias)
            elif (padding := self.padding.get(rows)) is None:
                out = _multiply(input, fused.weight, fused.bias, "none", [], "")
            else:
                padded = F.pad(input.reshape(rows, -1), (0, 0, 0, padding))
                out = _multiply(padded, fused.weight, fused.bias, "none", [], "")[:rows].view(*input.shape[:-1], -1)
            fused.input, fused.parts = input, dict(enumerate(out.split_with_sizes(fused.widths, -1)))
        part = fused.parts.pop(self.number)
        if not fused.parts:
            fused.input = None
        return part


def fuse(model: nn.Module, packed: bool = True) -> None:
    """Make one matrix of the layers that Llama and its relatives give the same input; the rest as in `prepack`.

    packed: the matrix lies as oneDNN reads it, and only where that pays; else row by row, as GPUs read it. A layer that
    is given another input than its siblings is right too, only slower. Up to some tens of rows the bits are the same;
    of many, oneDNN may sum a wider matrix in another order.
    """
    fuses = _packs if packed else _is_plain
    for module in model.modules():
        for names in SIBLINGS:
            layers = [layer for name in names if fuses(layer := module._modules.get(name))]
            if len(layers) < len(names) or len({(layer.in_features, layer.bias is None) for layer in layers}) > 1:
                continue
            fused = _Fused(layers, packed)
            for number, layer in enumerate(layers):
                layer._parameters.clear()
                layer.__class__ = FusedLinear
                layer.__dict__.update(fused=fused, number=number, bias=None)


def prepack(model: nn.Module) -> None:
    """Pack the weights of a model's linear layers where `pays` says so; others may read those of subclasses."""
    for layer in model.modules():
        if _packs(layer, (nn.Linear, PackedLinear)):
            packed = _reordered(layer.weight)
            layer.weight = packed if "weight" in layer._buffers else nn.Parameter(packed, requires_grad=False)
            layer.__class__ = PackedLinear


def weight_bytes(model: nn.Module) -> int:
    """Bytes of a model's weights, of each matrix in every form that it lies in."""
    fused = {layer.fused.weight for layer in model.modules() if isinstance(layer, FusedLinear)}
    return sum(weight.numel() * weight.element_size() for weight in fused.union(model.parameters(), model.buffers()))


def _packs(layer: nn.Module | None, classes: tuple[type, ...] = (nn.Linear,)) -> TypeGuard[nn.Linear]:
    """Whether it is of these classes, and oneDNN would read its weight in a form that it does not have yet."""
    if layer is None or type(layer) not in classes or "forward" in layer.__dict__:
        return False  # a forward of its own, as quantised layers and those of ranks have, reads the weight as it was
    weight: Any = layer.weight
    return bool(weight.device.type == "cpu" and not weight.is_mkldnn and pays(weight.dtype))


def _is_plain(layer: nn.Module | None) -> TypeGuard[nn.Linear]:
    """Whether it is a linear layer whose call is its product alone: parts of one on several devices are not."""
    hooked = layer is not None and (layer._forward_pre_hooks or layer._forward_hooks)
    return type(layer) is nn.Linear and type(layer.weight) is nn.Parameter and not hooked


def _reordered(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
    return packed


@cache
def pays(dtype: torch.dtype) -> bool:
    """Whether this processor multiplies matrices of a dtype faster when they are packed."""
    mkldnn: Any = torch.backends.mkldnn
    if not mkldnn.is_available():
        return False
    if dtype is torch.float32:
        machine = this_machine()
        return machine.vendor == "AuthenticAMD" and "avx512f" in machine.features
    return dtype is torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def merge_launches(model: nn.Module) -> None:
    """Run a model's norms and rotations on CUDA in one launch each, where they answer a probe as the merged form."""
    with torch.inference_mode():
        for module in list(model.modules()):
            kind: Any = type(module)
            if kind.__call__ is not nn.Module.__call__ or "forward" in module.__dict__:
                continue
            if (eps := _norm_epsilon(module, 0.0, torch.float32, _ROUNDING)) is not None:
                module.__class__ = _normalising(kind, eps)
            elif (merged := _rotating(kind)) is not None:
                module.__class__ = merged


def derived(kind: Any, **methods: Any) -> Any:
    """The class with other methods, under its own name."""
    return type(kind.__name__, (kind,), {**methods, "__module__": kind.__module__})


def _tried(function: Callable[..., Any], *inputs: Any) -> Any:
    """What a function answers; None where it takes something else."""
    try:
        return function(*inputs)
    except Exception:
        return None


def _norm_epsilon(module: nn.Module, offset: float, dtype: torch.dtype | None, rounding: float) -> float | None:
    """The epsilon of a norm that divides its input by the root of its mean square and multiplies it by `offset` plus
    its weight, up to a rounding, in this dtype (None: its weight's); None for any other module, and for norms of ours.
    """
    weight, eps = module._parameters.get("weight"), getattr(module, "variance_epsilon", getattr(module, "eps", None))
    alone = not len(list(module.children())) and "forward" not in module.__dict__
    alone = alone and len(signature(type(module).forward).parameters) == 2  # norms with a gate take that too
    stock = type(module).__call__ is nn.Module.__call__ and type(module).forward.__module__ != __name__
    if not (stock and alone and weight is not None and weight.dim() == 1 and isinstance(eps, float)):
        return None
    random, probe, dtype = torch.Generator().manual_seed(0), copy.copy(module), dtype or weight.dtype
    # Weights of both signs, and numbers so small that the epsilon counts.
    gain = torch.randn(weight.shape, generator=random).to(dtype)
    probe._parameters = {"weight": nn.Parameter(gain, requires_grad=False)}
    states = torch.randn(2, 3, *gain.shape, generator=random) * torch.tensor([[[1.0]], [[eps**0.5]]])
    states = states.to(dtype)
    expected = F.rms_norm(states.float(), gain.shape, offset + gain.float(), eps).to(dtype)
    return eps if _tried(torch.allclose, _tried(probe, states), expected, rounding, rounding) else None


def merge_norms(model: nn.Module) -> None:
    """Run Gemma's norms on the CPU, (1 + weight) times in float32, as one operator where a probe has the same bits."""
    with torch.inference_mode():
        for module in list(model.modules()):
            if (eps := _norm_epsilon(module, 1.0, None, 0.0)) is not None:
                module.__dict__["gain"] = 1.0 + cast(Tensor, module.weight).float()
                module.__class__ = _of_gain(cast(Any, type(module)), eps)


@cache
def _of_gain(kind: Any, eps: float) -> Any:
    """The class of a norm whose weight became `gain`, in float32."""

    def forward(self: Any, hidden_states: Tensor) -> Any:
        """(..., N) -> (..., N)."""
        gain = self.gain  # as F.rms_norm does, without a call of Python's
        return torch.rms_norm(hidden_states.float(), gain.shape, gain, eps).to(hidden_states.dtype)

    return derived(kind, forward=forward)


@cache
def _normalising(kind: Any, eps: float) -> Any:
    """The class of a norm in one launch."""

    def forward(self: Any, hidden_states: Tensor) -> Any:
        """(..., N) -> (..., N)."""
        weight = self.weight
        if hidden_states.dtype is weight.dtype:
            return F.rms_norm(hidden_states, weight.shape, weight, eps)
        return kind.forward(self, hidden_states)

    return derived(kind, forward=forward)


@cache
def _rotating(kind: Any) -> Any:
    """The class with the rotation in its `forward` in one launch; None where it has none, or another one."""
    forward: Any = kind.forward
    code = getattr(forward, "__code__", None)
    if code is None or _ROTATE not in code.co_names or not _rotates_halves(stock := forward.__globals__.get(_ROTATE)):
        return None

    def rotate_in_one(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *more: Any, **named: Any) -> Any:
        whole = query.shape == (1, query.shape[1], *cos.shape[1:]) and query.dtype == key.dtype == cos.dtype
        if more or named or not whole:
            return stock(query, key, cos, sin, *more, **named)
        return rotate(query, key, cos, sin)

    names = {**forward.__globals__, _ROTATE: rotate_in_one}
    merged = FunctionType(code, names, forward.__name__, forward.__defaults__, forward.__closure__)
    merged.__kwdefaults__ = forward.__kwdefaults__
    return derived(kind, forward=merged)


def _rotates_halves(stock: Any) -> bool:
    """Whether a function rotates the halves of queries and keys against each other, with the stock formula's bits."""
    random = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        query, key = (torch.randn(1, heads, 5, 8, generator=random, dtype=dtype) for heads in (4, 2))
        cos, sin = torch.randn(2, 1, 5, 8, generator=random, dtype=dtype)
        for answer, states in zip(_tried(stock, query, key, cos, sin) or (None, None), (query, key), strict=True):
            first, second = states.chunk(2, dim=-1)
            if answer is None or not torch.equal(answer, states * cos + torch.cat((-second, first), dim=-1) * sin):
                return False
    return True


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`kernels.rotate`, of which see there."""
    from coppice.engine import kernels  # Triton comes with torch for CUDA only

    return kernels.rotate(query, key, cos, sin)


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def call_directly(model: nn.Module, hooked: Collection[nn.Module] = ()) -> None:
    """Have a model's modules called as their `forward`, and their parts found as plain attributes.

    A call of nn.Module looks into four dictionaries for hooks, and a part is searched in three more, which are cold
    whenever the weights of a layer have gone through the caches. Left to torch are modules that are `hooked` later or
    already or called in a way of their own, whole models, which transformers knows by their class, and buffers, which
    some modules replace. A part is still replaced by assignment, and by nothing else.
    """
    for module in model.modules():
        kind: Any = type(module)
        replaced = "forward" in module.__dict__  # such a forward may exchange the module's parameters meanwhile
        module.__dict__.update(module._modules if replaced else module._modules | module._parameters)
        own = replaced or kind.__call__ is not nn.Module.__call__
        watched = module in hooked or any(map(module.__dict__.get, _HOOKS))
        if not (own or watched or isinstance(module, PreTrainedModel)):
            module.__class__ = _direct(kind)


@cache
def _direct(kind: Any) -> Any:
    """The class with its `forward` as the call."""
    return derived(kind, __call__=kind.forward)
