"""What draft blocks attend to in training, all rows of a text at once: each block sees what it will see when it serves.

A text of N rows (row i: features of token i, token i + 1) is drafted from every row. Block 1 gives each row K slots;
block b + 1 starts behind slot s_b - 1 of block b, on the same row. A slot sees every earlier row's block 1, the slots
before the cut of its own row's earlier blocks, and its own block up to itself (SpecBlock, figure 3; EAGLE-3's
training-time test is the case of one slot).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from coppice.nn.decoder import Attend


def visible(rows: int, slots: int, cuts: Sequence[int], chosen: Tensor | None = None) -> Tensor:
    """(n * K, N * K + b * n * K) bool: what each slot of block b + 1 sees of blocks 1..b + 1, b = len(cuts).

    chosen: (n,) the rows that later blocks start from, ascending; None for all N.
    """
    every = torch.arange(rows)
    some = every if chosen is None else chosen
    row, slot = (some if cuts else every).repeat_interleave(slots), torch.arange(slots)
    own_slot = slot.repeat(len(some if cuts else every))
    parts = []
    for block in range(len(cuts) + 1):
        of = every if block == 0 else some
        their_row, their_slot = of.repeat_interleave(slots), slot.repeat(len(of))
        path = their_slot[None] < cuts[block] if block < len(cuts) else their_slot[None] <= own_slot[:, None]
        seen = (row[:, None] == their_row[None]) & path
        parts.append(seen | (row[:, None] > their_row[None]) if block == 0 else seen)
    return torch.cat(parts, dim=1)


class PathAttention:
    """Keys and values of the blocks so far, for every layer of one forward over (B, N) rows."""

    def __init__(self, rows: int, slots: int, layers: int, chosen: Tensor | None = None) -> None:
        """chosen: the rows that later blocks start from; None for all."""
        self.rows, self.slots, self.layers, self.chosen = rows, slots, layers, chosen
        self._stored: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(layers)]
        self.cuts: list[int] = []

    def attends(self, device: torch.device) -> list[Attend]:
        """One attention for each layer, for the next block; append its cut to `cuts` before the one after."""
        mask = visible(self.rows, self.slots, self.cuts, self.chosen).to(device)

        def attend_in(layer: int) -> Attend:
            def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
                stored = self._stored[layer]
                stored.append((key, value))
                keys, values = (torch.cat(parts, dim=2) for parts in zip(*stored, strict=True))
                grouped = query.shape[1] != key.shape[1]
                out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=grouped)
                return out.transpose(1, 2)

            return attend

        return [attend_in(layer) for layer in range(self.layers)]
