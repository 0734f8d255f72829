"""One session's committed text in full blocks, each known by a hash of its ids, of all before them and of a salt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import torch
from torch import Tensor

from coppice.engine.kv_cache import BlockTable


def root_digest(salt: str) -> bytes:
    """What the first block's ids are hashed with."""
    return sha256(salt.encode()).digest()


def block_digest(before: bytes, ids: Sequence[int]) -> bytes:
    """The hash of a block, given that of the one before it."""
    return sha256(before + np.array(ids, "<u4").tobytes()).digest()


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """What is known of a full block besides its KV: its hash, and (block_size, F) features of `layers`, on the CPU."""

    digest: bytes
    layers: tuple[int, ...] = ()
    features: Tensor | None = None


class Prefix:
    """One session's text as the cache knows it: its full blocks, and what has been committed behind them."""

    def __init__(self, table: BlockTable, found: Sequence[CachedBlock], salt: str, layers: tuple[int, ...]) -> None:
        """`found`: the blocks that it begins with and that need not be prefilled. Without a salt none will be kept."""
        self.table, self.blocks = table, list(found)
        self.reused_tokens = len(found) * table.block_size
        self._layers = layers
        self._salted, self._digest = bool(salt), found[-1].digest if found else root_digest(salt)
        self.ids: list[int] = []
        """that were appended and are in no full block yet"""
        self._rows: list[Tensor] = []

    def append(self, ids: Sequence[int], features: Tensor | None) -> None:
        """Take committed ids and their (n, F) features; their KV may not be in its place yet."""
        if not self._salted:
            return
        self.ids += ids
        if features is not None:
            self._rows.append(features)

    def cut(self) -> int:
        """Turn the first of `ids` into a full block, and return its number."""
        size = self.table.block_size
        self._digest = block_digest(self._digest, self.ids[:size])
        features = None
        if self._rows:
            rows = torch.cat(self._rows) if len(self._rows) > 1 else self._rows[0]
            features, self._rows = rows[:size].clone(), [rows[size:]]
        del self.ids[:size]
        self.blocks.append(CachedBlock(self._digest, self._layers, features))
        return len(self.blocks) - 1
