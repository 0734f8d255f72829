"""The keys and values of all sessions: one tensor cut into blocks, and who owns which block."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from torch import Tensor

from coppice.errors import Overloaded
from coppice.limits import BLOCK_SIZE


class KVShape(NamedTuple):
    """What one layer keeps of a token: `kv_heads` keys of `key_dim` and values of `value_dim` numbers."""

    kv_heads: int
    key_dim: int
    value_dim: int


class OutOfBlocks(Overloaded):
    """The pool has too few free blocks; nothing was changed."""


@dataclass
class BlockTable:
    """Where one session's tokens lie: token i is in slot blocks[i // block_size] * block_size + i % block_size.

    num_tokens: tokens the session holds. consecutive: the blocks are neighbours in order, so that slots of
    consecutive tokens are consecutive too. Other tables may have the first blocks too. Made and changed by KVPool only.
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

    A block may be in several tables. One that is kept keeps what it holds when it is in none any more, and counts as
    free: room is taken from the kept blocks when there is no other.
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
        self._prefers_runs = self.device.type == "cpu"  # a GPU reads through the table
        self.block_size = block_size
        self._owners = np.zeros(blocks, dtype=np.int64)  # tables that have the block
        self._used_at = np.zeros(blocks)  # of kept blocks: the higher, the later they are given up; 0: not kept
        self._tables: dict[str, BlockTable] = {}
        self.moves: list[NDArray[np.int64]] | None = None
        """(2, n) each, what `move` was called with since somebody emptied the list; None while nobody does"""
        self.states: Any = None  # what else is kept for as long as a session has a table: coppice.engine.states.States

    @property
    def free_tokens(self) -> int:
        """Tokens that fit in the blocks nobody owns."""
        return int(np.count_nonzero(self._owners == 0)) * self.block_size

    @property
    def used_tokens(self) -> int:
        """Tokens held by sessions."""
        return sum([table.num_tokens for table in self._tables.values()])

    def read(self, start: int, count: int) -> tuple[Tensor, ...]:
        """Views (1, kv_heads, count, dim) of slots: key of layer 0, value of layer 0, key of layer 1, and so on."""
        if len(self._views) == 1:
            return self._views[0].narrow(3, start, count).unbind(0)
        parts = [view.narrow(3, start, count).unbind(0) for view in self._views]
        return tuple(parts[slab][place] for slab, place in self._places)

    def allocate(self, session: str, num_tokens: int, prefix: Sequence[int] = ()) -> BlockTable:
        """Room for a new session's first tokens, the first of them in kept blocks, those of `prefix` in order.

        The blocks are shared where the others can lie right behind them, and wherever a table is as good as a view. On
        a CPU they are copied otherwise, as long as there is room. Raises OutOfBlocks, and ValueError when the session
        has a table.
        """
        if session in self._tables:
            raise ValueError(f"session {session} already has a block table")
        shared = np.array(prefix, np.int64)
        self._owners[shared] += 1  # before the search, so that they are not found
        try:
            blocks = self._lay(shared, -(-num_tokens // self.block_size))
        except OutOfBlocks:
            self._owners[shared] -= 1
            raise
        table = BlockTable(session, self.block_size, blocks, num_tokens, _is_run(blocks))
        self._tables[session] = table
        if self.states is not None:
            self.states.open(table)
        return table

    @contextmanager
    def borrow(self, session: str, num_tokens: int) -> Iterator[BlockTable]:
        """A table that is freed at the end. Raises OutOfBlocks."""
        table = self.allocate(session, num_tokens)
        try:
            yield table
        finally:
            self.free(table)

    def keep(self, block: int, used_at: float) -> None:
        """Keep what a block holds until room is needed; those with the lowest `used_at`, above 0, are taken first."""
        self._used_at[block] = used_at

    def give_up(self) -> int | None:
        """Keep the block no more that is taken first; returns it, None when all that are kept are in tables."""
        cost = np.where((self._owners == 0) & (self._used_at > 0), self._used_at, np.inf)
        block = int(cost.argmin())
        if cost[block] == np.inf:
            return None
        self._used_at[block] = 0
        return block

    def extend(self, table: BlockTable, num_tokens: int) -> None:
        """Let the table hold num_tokens tokens in all, committed ones and rows in flight. Raises OutOfBlocks."""
        missing = -(-num_tokens // self.block_size) - len(table.blocks)
        if missing > 0:
            last = int(table.blocks[-1]) if len(table.blocks) else None
            table.blocks = np.concatenate([table.blocks, self._own(self._find(missing, after=last))])
            table.consecutive = _is_run(table.blocks)
        table.num_tokens = num_tokens

    def free(self, table: BlockTable) -> None:
        """Give all blocks of a session back. Raises ValueError when that was done before."""
        if self._tables.get(table.session) is not table:
            raise ValueError(f"session {table.session} has no such block table")
        del self._tables[table.session]
        if self.states is not None:
            self.states.close(table)
        self._owners[table.blocks] -= 1
        table.blocks = table.blocks[:0]
        table.num_tokens = 0

    def compact(self, kept: Iterable[tuple[BlockTable, int, Sequence[int]]]) -> None:
        """After a step of some sessions: keep the KV of their accepted paths and forget the other rows.

        For each session its table; base_len, the tokens committed before the step, whose rows lie at base_len,
        base_len + 1, ...; and the accepted rows of the piece in order, the root's 0 first. They move to base_len ..;
        the table then holds base_len + len(rows) tokens and keeps its blocks, which the next step needs again.
        """
        moved: list[NDArray[np.int64]] = []
        for table, base_len, rows in kept:
            accepted = np.asarray(rows, np.int64)
            elsewhere = np.flatnonzero(accepted != np.arange(len(accepted)))
            if len(elsewhere):  # else the path is a prefix of the rows and lies right already
                start = elsewhere[0]
                tokens = np.stack([accepted[start:], np.arange(start, len(accepted))])
                moved.append(table.slots(base_len + tokens))
            table.num_tokens = base_len + len(accepted)
            if self.states is not None:
                self.states.accept(table, rows)
        if moved:
            self.move(np.concatenate(moved, axis=1))

    def move(self, slots: NDArray[np.int64]) -> None:
        """Copy the KV of the slots `slots[0]` to `slots[1]`, which may overlap; slots: (2, n)."""
        if self.moves is not None:
            self.moves.append(slots)
        source, target = torch.from_numpy(slots).to(self.device)
        with torch.inference_mode():
            # The gather copies, so that overlapping source and target do no harm.
            for slab in self._slabs:
                slab.index_copy_(1, target, slab.index_select(1, source))

    def _lay(self, shared: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        """Own blocks behind the `shared` ones, which are owned, or blocks that hold copies of these: `count` in all."""
        last = int(shared[-1]) if len(shared) else None
        behind = self._find(count - len(shared), after=last)
        blocks = np.concatenate([shared, behind])
        if last is not None and self._prefers_runs and not _is_run(blocks):
            with suppress(OutOfBlocks):
                own = self._find(count)
                if _is_run(own):
                    both = np.stack([shared, own[: len(shared)]])[..., None] * self.block_size
                    self.move((both + np.arange(self.block_size)).reshape(2, -1))
                    self._owners[shared] -= 1
                    return self._own(own)
        self._own(behind)
        return blocks

    def _find(self, count: int, after: int | None = None) -> NDArray[np.int64]:
        """`count` blocks that nobody owns: those right after `after` if they are free and not kept, else inside the
        longest such run, else neighbours whose last use is longest ago, else any.
        """
        idle = self._owners == 0
        if count > (left := int(np.count_nonzero(idle))):
            raise OutOfBlocks(f"{count} blocks of {self.block_size} tokens needed, {left} free")
        free = idle & (self._used_at == 0)
        if after is not None and free[after + 1 : after + 1 + count].sum() == count:
            return np.arange(after + 1, after + 1 + count)
        edges = np.flatnonzero(np.diff(np.concatenate(([False], free, [False])).astype(np.int8)))
        lengths = edges[1::2] - edges[::2]
        longest = int(lengths.argmax()) if len(lengths) else 0
        start, spare = (int(edges[2 * longest]), int(lengths[longest]) - count) if len(lengths) else (0, -count)
        if spare >= 0:
            # In the middle, so that the session to the left and this one can both grow; at the left end nobody is.
            start += spare // 2 if start else 0
            return np.arange(start, start + count)
        cost = np.where(idle, self._used_at, np.inf)
        if self._prefers_runs and self._used_at.any():
            highest = sliding_window_view(cost, count).max(axis=1)
            start = int(highest.argmin())
            if highest[start] < np.inf:
                return np.arange(start, start + count)
        return np.sort(cost.argsort(kind="stable")[:count])

    def _own(self, blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        self._owners[blocks] = 1
        self._used_at[blocks] = 0
        return blocks


def _is_run(blocks: NDArray[np.int64]) -> bool:
    return bool((np.diff(blocks) == 1).all())
