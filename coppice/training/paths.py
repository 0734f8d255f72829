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


def visible(rows: int, slots: int, cuts: Sequence[int]) -> Tensor:
    """(N * K, (b + 1) * N * K) bool: what each slot of block b + 1 sees of blocks 1..b + 1, b = len(cuts)."""
    row = torch.arange(rows).repeat_interleave(slots)
    slot = torch.arange(slots).repeat(rows)
    same = row[:, None] == row[None]
    earlier = row[:, None] > row[None]
    upto = slot[:, None] >= slot[None]
    parts = [same & (slot[None] < cut) for cut in cuts] + [same & upto]
    parts[0] = parts[0] | earlier
    return torch.cat(parts, dim=1)


class PathAttention:
    """Keys and values of the blocks so far, for every layer of one forward over (B, N) rows."""

    def __init__(self, rows: int, slots: int, layers: int) -> None:
        self.rows, self.slots, self.layers = rows, slots, layers
        self._stored: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(layers)]
        self.cuts: list[int] = []

    def attends(self, device: torch.device) -> list[Attend]:
        """One attention for each layer, for the next block; append its cut to `cuts` before the one after."""
        mask = visible(self.rows, self.slots, self.cuts).to(device)

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
