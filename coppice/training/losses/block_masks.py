"""What draft blocks attend to in training, all rows of a text at once: each block sees what it will see when it serves.

A text of N rows (row i: features of token i, token i + 1) is drafted from every row. Block 1 gives each row K slots;
block b + 1 starts behind slot s_b - 1 of block b, on the same row. A slot sees every earlier row's block 1, the slots
before the cut of its own row's earlier blocks, and its own block up to itself (SpecBlock, figure 3; EAGLE-3's
training-time test is the case of one slot), or all of its own block under Falcon's relaxed mask.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from coppice.heads.models.layers import Attend


def visible(rows: int, slots: int, cuts: Sequence[int], chosen: Tensor | None = None, relaxed: bool = False) -> Tensor:
    """Return (n * K, N * K + b * n * K) bool: which slots of blocks 1..b + 1 each slot of b + 1 sees, b = len(cuts).

    `chosen` are the (n,) ascending rows that later blocks start from; None for all N. If `relaxed`, a slot also sees
    the later ones of its own block.
    """
    every = torch.arange(rows)
    some = every if chosen is None else chosen
    row, slot = (some if cuts else every).repeat_interleave(slots), torch.arange(slots)
    own_slot = slot.repeat(len(some if cuts else every))
    parts = []
    for block in range(len(cuts) + 1):
        of = every if block == 0 else some
        their_row, their_slot = of.repeat_interleave(slots), slot.repeat(len(of))
        last = torch.full_like(own_slot, slots - 1) if relaxed else own_slot
        path = their_slot[None] < cuts[block] if block < len(cuts) else their_slot[None] <= last[:, None]
        seen = (row[:, None] == their_row[None]) & path
        parts.append(seen | (row[:, None] > their_row[None]) if block == 0 else seen)
    return torch.cat(parts, dim=1)


def groups_visible(rows: int, slots: int) -> Tensor:
    """Return (N + N * K, N + N * K) bool: what a prefix's rows and the K mask tokens behind each of them see.

    A mask sees the rows up to its own and its group up to itself, never another group (SpecBlock, appendix A.4).
    """
    prefix = torch.arange(rows)
    row, slot = prefix.repeat_interleave(slots), torch.arange(slots).repeat(rows)
    causal = torch.cat((prefix, row))[:, None] >= prefix
    own = (row[:, None] == row) & (slot[:, None] >= slot)
    return torch.cat((causal, torch.cat((own.new_zeros(rows, rows * slots), own))), dim=1)


def anchored_visible(rows: Tensor, count: int, size: int, causal: bool) -> Tensor:
    """Return (n * size, count + n * size) bool: what the blocks of masks behind (n,) of `count` rows see.

    They see the committed rows up to their own and their own block, or up to themselves in it, never another one
    (DFlash, arXiv 2602.06036; DSpark, arXiv 2607.05147, section 5).
    """
    row = rows.repeat_interleave(size)
    own = row[:, None] == row
    if causal:
        slot = torch.arange(size, device=rows.device).repeat(len(rows))
        own &= slot[:, None] >= slot
    return torch.cat((row[:, None] >= torch.arange(count, device=rows.device), own), dim=1)


def attend_by(mask: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return the attention of (B, H, T, D) queries under a (T, L) bool mask as (B, T, H, D)."""
    grouped = query.shape[1] != key.shape[1]
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=grouped)
    return out.transpose(1, 2)


class PathAttention:
    """Keys and values of the blocks so far, for every layer of one forward over (B, N) rows."""

    def __init__(self, rows: int, slots: int, layers: int, chosen: Tensor | None = None, relaxed: bool = False) -> None:
        """`chosen` are the rows that later blocks start from; None for all. `relaxed` is as for `visible`."""
        self.rows, self.slots, self.layers, self.chosen, self.relaxed = rows, slots, layers, chosen, relaxed
        self._stored: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(layers)]
        self.cuts: list[int] = []

    def attends(self, device: torch.device) -> list[Attend]:
        """Return each layer's attention for the next block; append its cut to `cuts` before the one after."""
        mask = visible(self.rows, self.slots, self.cuts, self.chosen, self.relaxed).to(device)

        def attend_in(layer: int) -> Attend:
            def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
                stored = self._stored[layer]
                stored.append((key, value))
                keys, values = (torch.cat(parts, dim=2) for parts in zip(*stored, strict=True))
                return attend_by(mask, query, keys, values)

            return attend

        return [attend_in(layer) for layer in range(self.layers)]
