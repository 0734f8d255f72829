"""Linear layers whose weights lie as the CPU's matrix units read them.

Stock bfloat16 layers on a CPU hand oneDNN a row-major matrix, which it rearranges in every call. Rearranged once, a
target of 18M parameters takes 0.88 of the time and answers with the same bits. And every call has a price of its own
(20 us here), so layers that are given the same input are multiplied as one: 0.9 of what is left. Stock float32 layers
go to MKL, which is slow on AMD's processors: on an EPYC with AVX-512 two to eight rows take oneDNN a half to a third of
its time. Which of the two multiplies is a matter of the processor, not of a timing: replicas answer with the same bits.

For every number of rows oneDNN compiles kernels, half a megabyte a layer's shape, and keeps a thousand of them. So
numbers of rows above 16 are rounded up to one of four between two powers of two, and compiled for ahead of time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from coppice.machine import this_machine

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""names of layers that are called with the same input"""
EXACT = 16
"""rows up to which kernels are compiled for every number"""
MOST, AHEAD_S = 1024, 0.5
"""rows up to which kernels are compiled ahead of time, and for how long"""


_multiply: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
"""oneDNN's product, (input, weight, bias, "none", [], "") -> input @ weight.T + bias; None where torch has none"""


def compiled_rows(rows: int) -> int:
    """The number of rows that so many are multiplied as: less than a quarter more."""
    step = 1 if rows <= EXACT else 1 << ((rows - 1).bit_length() - 3)
    return -(-rows // step) * step


_PADDING = {rows: compiled_rows(rows) - rows for rows in range(1, MOST + 1) if compiled_rows(rows) > rows}
"""rows that are added to so many, where any are; beyond MOST nothing is compiled ahead, and nothing added"""


class PackedLinear(nn.Linear):
    """A linear layer without gradient; `weight` is opaque but for its shape, and `weight.to_dense()` is the matrix."""

    def forward(self, input: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)."""
        out: Tensor
        rows = input.numel() // input.shape[-1]
        if (padding := _PADDING.get(rows)) is None:
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

    def matrix(self, number: int) -> Tensor:
        """The weight of layer `number`, (out_features, in_features)."""
        return self.weight.to_dense().split_with_sizes(self.widths)[number]


class FusedLinear(nn.Linear):
    """One of several layers that are multiplied as one; without gradient, and its weights cannot be replaced."""

    fused: _Fused
    number: int

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """(out_features, in_features), a copy."""
        return self.fused.matrix(self.number)

    def forward(self, input: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features). The input's product is kept until all layers had their part."""
        fused = self.fused
        if fused.input is not input or self.number not in fused.parts:
            rows = input.numel() // input.shape[-1]
            if not fused.packed:
                out = F.linear(input, fused.weight, fused.bias)
            elif (padding := _PADDING.get(rows)) is None:
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

    packed: the matrix lies as oneDNN reads it, and only where that pays; else row by row, as GPUs read it.

    One that is given another input than its siblings is right too, only slower. Up to some tens of rows the bits are
    the same; of many, oneDNN may sum a wider matrix in another order.
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
    """Pack the weights of a model's linear layers, of those that are not yet; the model computes the same from then on.

    Does nothing on other devices, in other dtypes, for bfloat16 on processors where oneDNN does not support it, and for
    float32 where that is not faster. Subclasses of nn.Linear are left alone: others may read their weights.
    """
    for layer in model.modules():
        if _packs(layer, (nn.Linear, PackedLinear)):
            packed = _reordered(layer.weight)
            layer.weight = packed if "weight" in layer._buffers else nn.Parameter(packed, requires_grad=False)
            layer.__class__ = PackedLinear


def weight_bytes(model: nn.Module) -> int:
    """Bytes of a model's weights, of each matrix in every form that it lies in."""
    fused = {layer.fused.weight for layer in model.modules() if isinstance(layer, FusedLinear)}
    return sum(weight.numel() * weight.element_size() for weight in fused.union(model.parameters(), model.buffers()))


def compile_ahead(model: nn.Module) -> None:
    """Have oneDNN compile for a packed model's layers, for small numbers of rows first, while little time has passed.

    Where it stops, the first forward with another number of rows takes longer: 0.3 ms for each shape here.
    """
    held = [
        (layer.fused.weight, layer.fused.bias) if isinstance(layer, FusedLinear) else (layer.weight, layer.bias)
        for layer in model.modules()
        if isinstance(layer, (PackedLinear, FusedLinear))
    ]
    shapes = {(weight.shape, weight.dtype, bias is None): (weight, bias) for weight, bias in held}
    until = time.perf_counter() + AHEAD_S
    with torch.inference_mode():
        for rows in sorted({compiled_rows(rows) for rows in range(1, MOST + 1)}):
            for weight, bias in shapes.values():
                if time.perf_counter() > until:
                    return
                _multiply(torch.zeros(rows, weight.shape[1], dtype=weight.dtype), weight, bias, "none", [], "")


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
