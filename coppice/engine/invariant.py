"""Parts of a model whose rows are computed the same whatever is beside them, and wherever they stand in a batch.

A product that oneDNN makes of a packed matrix adds up each row by itself, in an order that the number of rows does not
change. Others are made for a fixed number of rows. A function of single numbers has two forms in torch, one for whole
vectors and one for what is left at the end of a piece, which may round otherwise: here nothing is left.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROWS = 16
"""rows of a product whose matrix is not packed"""
VECTOR = 64
"""numbers in two vectors, which torch's loops take at once, of any type"""
GRAIN = 1 << 15
"""numbers from which on torch gives parts to several threads"""


def by_rows(function: Callable[[Tensor], Tensor], states: Tensor) -> Tensor:
    """A function of single numbers, (..., N) -> (..., N), whose rows do not depend on one another's number."""
    width, numbers = states.shape[-1], states.numel()
    padding = -width % VECTOR
    threads = min(torch.get_num_threads(), -(-numbers // GRAIN)) or 1
    if not padding and not -(-numbers // threads) % VECTOR:
        return function(states)
    rows = F.pad(states.reshape(-1, width), (0, padding))
    most = max(1, (GRAIN - 1) // (width + padding))
    return torch.cat([function(some) for some in torch.split(rows, most)])[:, :width].view(states.shape)


class RowsLinear(nn.Linear):
    """A linear layer that multiplies ROWS rows at a time."""

    def forward(self, input: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)."""
        rows = input.reshape(-1, input.shape[-1])
        padded = F.pad(rows, (0, 0, 0, -len(rows) % ROWS))
        out = torch.cat([F.linear(some, self.weight, self.bias) for some in torch.split(padded, ROWS)])
        return out[: len(rows)].view(*input.shape[:-1], self.out_features)


def by_row(model: nn.Module) -> None:
    """Have a model's functions and products, those that are not packed yet, compute every row by itself."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = RowsLinear
        elif type(module).__module__ in ("torch.nn.modules.activation", "transformers.activations"):
            kind: Any = type(module)
            module.__class__ = _by_rows(kind)


@cache
def _by_rows(kind: Any) -> Any:
    """The class of a function of single numbers, by rows."""

    def forward(self: Any, states: Tensor) -> Tensor:
        """(..., N) -> (..., N)."""
        return by_rows(lambda some: kind.forward(self, some), states)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
