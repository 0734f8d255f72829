"""The keys and values of all sessions: one tensor cut into blocks, and who owns which block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK_SIZE = 32
"""tokens of one KV block"""


class KVShape(NamedTuple):
    """What one layer keeps of a token: `kv_heads` keys of `key_dim` and values of `value_dim` numbers."""

    kv_heads: int
    key_dim: int
    value_dim: int


class OutOfBlocks(RuntimeError):
    """The pool has too few free blocks; nothing was changed."""


@dataclass
class BlockTable:
    """Where one session's tokens lie: token i is in slot blocks[i // block_size] * block_size + i % block_size.

    num_tokens: tokens the session holds. consecutive: the blocks are neighbours in order, so that slots of
    consecutive tokens are consecutive too. Made and changed by KVPool only.
    """

    session: str
    block_size: int
    blocks: NDArray[np.int64]
    num_tokens: int
    consecutive: bool

    @property
    def capacity(self) -> int:
        """Tokens that fit in the blocks held."""
        return len(self.blocks) * self.block_size

    def slots(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """The slots of token indices, the same shape; indices are below capacity."""
        return self.blocks[tokens // self.block_size] * self.block_size + tokens % self.block_size


class KVPool:
    """Paged KV of one target, with exact accounting.

    `layers` holds each layer's keys (slots, kv_heads, key_dim) and values (slots, kv_heads, value_dim), where slots are
    blocks * block_size + 1. Those of one shape are parts of one tensor, a slab, so that few copies move a token of all
    layers. A session's blocks are kept consecutive where possible, because then its prefix is read as a view instead of
    a gather. The slot `spare`, the last one, is nobody's: rows that pad a batch write there.
    """

    def __init__(
        self,
        *,
        layers: Sequence[KVShape],
        tokens: int,
        block_size: int = BLOCK_SIZE,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """A pool for `tokens` tokens, rounded up to whole blocks."""
        blocks = -(-tokens // block_size)
        shapes = [(kv_heads, dim) for kv_heads, *dims in layers for dim in dims]
        kinds = list(dict.fromkeys(shapes))
        # Of each key and value, in the order of the layers: its slab, and its place there.
        self._places = [(kinds.index(shape), shapes[:at].count(shape)) for at, shape in enumerate(shapes)]
        self.spare = blocks * block_size
        # Zeros, not empty: padding may read a slot before it is written, and 0 * NaN is NaN.
        self._slabs = [
            torch.zeros(shapes.count(shape), self.spare + 1, *shape, dtype=dtype, device=device) for shape in kinds
        ]
        self._views = [slab.transpose(1, 2).unsqueeze(1) for slab in self._slabs]  # (n, 1, kv_heads, slots, dim)
        stored = [self._slabs[slab][place] for slab, place in self._places]
        self.layers = tuple(zip(stored[::2], stored[1::2], strict=True))
        self.dtype, self.device = dtype, torch.device(device)
        self.block_size = block_size
        self._free = np.ones(blocks, dtype=np.bool_)
        self._tables: dict[str, BlockTable] = {}
        self.moves: list[NDArray[np.int64]] | None = None
        """(2, n) each, what `move` was called with since somebody emptied the list; None while nobody does"""

    @property
    def num_blocks(self) -> int:
        """Blocks in all."""
        return len(self._free)

    @property
    def used_blocks(self) -> int:
        """Blocks owned by sessions."""
        return int(np.count_nonzero(~self._free))

    @property
    def free_tokens(self) -> int:
        """Tokens that fit in the blocks nobody owns."""
        return (self.num_blocks - self.used_blocks) * self.block_size

    @property
    def used_tokens(self) -> int:
        """Tokens held by sessions."""
        return sum([table.num_tokens for table in self._tables.values()])

    def read(self, start: int, count: int) -> tuple[Tensor, ...]:
        """Views (1, kv_heads, count, dim) of slots: key of layer 0, value of layer 0, key of layer 1, and so on."""
        parts = [view.narrow(3, start, count).unbind(0) for view in self._views]
        return parts[0] if len(parts) == 1 else tuple(parts[slab][place] for slab, place in self._places)

    def allocate(self, session: str, num_tokens: int) -> BlockTable:
        """Room for a new session's first tokens. Raises OutOfBlocks, and ValueError when the session has a table."""
        if session in self._tables:
            raise ValueError(f"session {session} already has a block table")
        blocks = self._take(self._blocks_for(num_tokens), after=None)
        table = BlockTable(session, self.block_size, blocks, num_tokens, _is_run(blocks))
        self._tables[session] = table
        return table

    def extend(self, table: BlockTable, num_tokens: int) -> None:
        """Let the table hold num_tokens tokens in all, committed ones and rows in flight. Raises OutOfBlocks."""
        missing = self._blocks_for(num_tokens) - len(table.blocks)
        if missing > 0:
            last = int(table.blocks[-1]) if len(table.blocks) else None
            table.blocks = np.concatenate([table.blocks, self._take(missing, after=last)])
            table.consecutive = _is_run(table.blocks)
        table.num_tokens = num_tokens

    def free(self, table: BlockTable) -> None:
        """Give all blocks of a session back. Raises ValueError when that was done before."""
        if self._tables.get(table.session) is not table:
            raise ValueError(f"session {table.session} has no such block table")
        del self._tables[table.session]
        self._free[table.blocks] = True
        table.blocks = table.blocks[:0]
        table.num_tokens = 0

    def compact(self, table: BlockTable, base_len: int, rows: Sequence[int]) -> None:
        """After a step: keep the KV of the accepted path and forget the other rows.

        base_len: tokens committed before the step, whose rows lie at base_len, base_len + 1, ... rows: the accepted
        rows of the piece in order, the root's 0 first. They move to base_len ..; the table then holds
        base_len + len(rows) tokens and keeps its blocks, which the next step needs again.
        """
        accepted = np.asarray(rows, np.int64)
        moved = np.flatnonzero(accepted != np.arange(len(accepted)))
        if len(moved):  # else the path is a prefix of the rows and lies right already
            start = moved[0]
            tokens = np.stack([accepted[start:], np.arange(start, len(accepted))])
            self.move(table.slots(base_len + tokens))
        table.num_tokens = base_len + len(accepted)

    def move(self, slots: NDArray[np.int64]) -> None:
        """Copy the KV of the slots `slots[0]` to `slots[1]`, which may overlap; slots: (2, n)."""
        if self.moves is not None:
            self.moves.append(slots)
        source, target = (torch.from_numpy(row).to(self.device) for row in slots)
        self.move_there(source, target)

    def move_there(self, source: Tensor, target: Tensor) -> None:
        """The same with slots that lie on the pool's device, (n,) each; `moves` does not hear of it."""
        with torch.inference_mode():
            # The gather copies, so that overlapping source and target do no harm.
            for slab in self._slabs:
                slab.index_copy_(1, target, slab.index_select(1, source))

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _take(self, count: int, after: int | None) -> NDArray[np.int64]:
        """Own `count` free blocks: those right after `after` if they are free, else inside the longest free run."""
        if count > (free := int(np.count_nonzero(self._free))):
            raise OutOfBlocks(f"{count} blocks of {self.block_size} tokens needed, {free} free")
        if after is not None and self._free[after + 1 : after + 1 + count].sum() == count:
            start = after + 1
        else:
            edges = np.flatnonzero(np.diff(np.concatenate(([False], self._free, [False])).astype(np.int8)))
            lengths = edges[1::2] - edges[::2]
            longest = int(lengths.argmax()) if len(lengths) else 0
            start, spare = (int(edges[2 * longest]), int(lengths[longest]) - count) if len(lengths) else (0, 0)
            if spare < 0:
                return self._own(np.flatnonzero(self._free)[:count])
            # In the middle, so that the session to the left and this one can both grow; at the left end nobody is.
            start += spare // 2 if start else 0
        return self._own(np.arange(start, start + count))

    def _own(self, blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        self._free[blocks] = False
        return blocks


def _is_run(blocks: NDArray[np.int64]) -> bool:
    return bool((np.diff(blocks) == 1).all())
