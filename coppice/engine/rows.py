"""What one forward works on: the rows of all waiting sessions, packed, and which keys each row sees.

Nothing here validates: token ids, tree shapes and lengths were checked where they entered the process
(coppice/limits.py, coppice/speculation/tree.py), and the scheduler made room in the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coppice.engine.kv_cache import BlockTable

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
NOTHING: Ints = np.zeros(0, np.int64)

# How a device cuts the keys of rows into parts.
KEY_BLOCK = 64  # positions whose scores are made together; borders are multiples of it
MOST_SPLITS = 32  # parts that a row's key blocks are cut into at most
TILE = 64  # queries, of rows of one session, that share the keys they read


@dataclass(frozen=True)
class Tail:
    """One session's rows in a forward, behind `prefix` tokens that all of them see unless a window hides some.

    visible: (N, E + N) bool, which of the E tokens behind the prefix and of the N rows each row sees. Row r writes its
    keys and values at the session's token index prefix + E + r, for which `table` has room. positions: (E + N,)
    absolute, of these tokens and rows; windows alone ask for them. certain: the rows stay, whatever their logits are.
    """

    table: BlockTable
    prefix: int
    visible: Bools
    positions: Ints | None = None
    certain: bool = False

    @property
    def length(self) -> int:
        """Keys that the session has, its rows' own last."""
        return self.prefix + int(self.visible.shape[1])

    def sees(self, window: int | None) -> Bools:
        """Which of the session's keys each row sees, (N, length), `window` positions back (None: all)."""
        rows = len(self.visible)
        seen = np.concatenate((np.ones((rows, self.prefix), np.bool_), self.visible), axis=1)
        if window is not None and self.positions is not None:
            # In the prefix a token's index is its position; in a tree it is not.
            keys = np.concatenate((np.arange(self.prefix), self.positions))
            seen &= keys > self.positions[-rows:, None] - window
        return seen


@dataclass(frozen=True)
class PackedBatch:
    """Rows of all sessions of one forward, as plain CPU tensors.

    tokens: (T,) int64 ids. positions: (T,) int64, absolute in the session's text. tails: what each session's rows see,
    in the order of the rows. logits_to_keep: (R,) int64, the rows of the batch whose logits are wanted, ascending.
    feature_layers: hidden states wanted of every row, see Engine.forward; empty for none.
    """

    tokens: Tensor
    positions: Tensor
    tails: tuple[Tail, ...]
    logits_to_keep: Tensor
    feature_layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Piece:
    """One session's part of a batch to be packed; the arrays have one entry a row.

    parents: the row *of the piece* that a row continues, always an earlier one; -1 for one that continues the prefix or
    an earlier forward's row. A prefill chunk is a chain, a draft tree is a tree with its root in the first row. depths
    counts from 0 at the first row; keep lists the rows of the piece whose logits are wanted, ascending.

    certain: no row will be rejected.

    A drafter grows its tree level by level. earlier: which of the E rows that earlier forwards wrote behind the prefix
    each row descends from, (N, E) bool, and their absolute positions, (E,) int64.
    """

    table: BlockTable
    prefix_len: int
    tokens: Sequence[int]
    parents: Sequence[int]
    depths: Sequence[int]
    keep: Sequence[int]
    earlier: tuple[Bools, Ints] | None = None
    certain: bool = False

    @classmethod
    def chain(cls, table: BlockTable, prefix_len: int, tokens: Sequence[int], keep: Sequence[int] = ()) -> Piece:
        """A prefill chunk, or with one token a plain decoding step."""
        rows = len(tokens)
        return cls(table, prefix_len, tokens, range(-1, rows - 1), range(rows), keep, certain=True)


def ancestors(parents: Sequence[int]) -> Bools:
    """(N, N) bool: [i, j] says whether row j is row i itself or an ancestor. parents: (N,), as a piece has them.

    A row's set is a number whose bit j is row j: its own bit and its parent's set.
    """
    rows = len(parents)
    bits = bytearray()
    sets: list[int] = []
    for row, parent in enumerate(parents):
        sets.append(1 << row | (sets[parent] if parent >= 0 else 0))
        bits += sets[row].to_bytes(-(-rows // 8), "little")
    packed = np.frombuffer(bits, np.uint8).reshape(rows, -1)
    return np.unpackbits(packed, axis=1, count=rows, bitorder="little").view(np.bool_)


def pack(pieces: Sequence[Piece], feature_layers: tuple[int, ...] = ()) -> PackedBatch:
    """One batch of the pieces, in their order; the tails and the logits come out in the same order."""
    tails, positions, tokens, kept = list[Tail](), list[Ints](), list[int](), list[int]()
    for piece in pieces:
        kept += [len(tokens) + row for row in piece.keep]
        tokens += piece.tokens
        visible, at = ancestors(piece.parents), np.array(piece.depths, np.int64) + piece.prefix_len
        positions.append(at)
        if piece.earlier is not None:
            visible = np.concatenate((piece.earlier[0], visible), axis=1)
            at = np.concatenate((piece.earlier[1], at))
        tails.append(Tail(piece.table, piece.prefix_len, visible, at, piece.certain))
    return PackedBatch(
        tokens=torch.from_numpy(np.array(tokens, np.int64)),
        positions=torch.from_numpy(positions[0] if len(positions) == 1 else np.concatenate(positions)),
        tails=tuple(tails),
        logits_to_keep=torch.from_numpy(np.array(kept, np.int64)),
        feature_layers=feature_layers,
    )


class RowTable(NamedTuple):
    """What each row of some tails sees, as numbers; T rows of S sessions. Nothing in it is rows times context.

    A key's index is its position in the row's own text. A row sees keys 0 to length - 1: the first `paged` lie in the
    session's blocks, in order, and the others, the row's tail, wherever its ancestors among the rows of this forward
    and of earlier ones were written. A row that sees all rows before it, as in a prompt, has no tail.

    session, paged, length, new_slots: (T,). table: (S, P), the blocks in use. tail: the row, the place there, and the
    slot of every entry of the rows' tails.
    """

    session: Ints
    paged: Ints
    length: Ints
    new_slots: Ints
    table: Ints
    tail: tuple[Ints, Ints, Ints]

    @classmethod
    def of(cls, tails: Sequence[Tail]) -> RowTable:
        """Read the tails: all sessions at once but for copies."""
        counts, columns = np.array([tail.visible.shape for tail in tails], np.int64).T
        block_size = tails[0].table.block_size
        used = [-(-tail.length // block_size) for tail in tails]
        first = np.cumsum(counts) - counts
        # One column more, which nobody sees, so that every row has a first one that it does not.
        seen = np.zeros((counts.sum(), columns.max() + 1), np.bool_)
        table = np.zeros((len(tails), max(used)), np.int64)
        for s, tail in enumerate(tails):
            seen[first[s] : first[s] + counts[s], : columns[s]] = tail.visible
            table[s, : used[s]] = tail.table.blocks[: used[s]]
        session = np.repeat(np.arange(len(tails)), counts)
        prefix = np.array([tail.prefix for tail in tails], np.int64)

        def slots(session: Ints, column: Ints) -> Ints:
            block, inside = np.divmod(prefix[session] + column, block_size)
            return table[session, block] * block_size + inside

        leading = seen.argmin(axis=1)
        seen &= np.arange(seen.shape[1]) >= leading[:, None]
        row, column = np.divmod(np.flatnonzero(seen), seen.shape[1])
        later = np.bincount(row, minlength=len(seen))
        place = np.arange(len(row)) - (np.cumsum(later) - later)[row]
        paged = prefix[session] + leading
        new_slots = slots(session, np.arange(len(seen)) + (columns - counts - first)[session])
        return cls(session, paged, paged + later, new_slots, table, (row, place, slots(session[row], column)))


def tail_blocks(tail: int) -> int:
    """Key blocks that the last `tail` positions of a text touch at most."""
    return -(-(tail - 1) // KEY_BLOCK) + 1 if tail else 0


def most_splits(blocks: Ints | int) -> Ints:
    """Splits of a row of so many key blocks, and at least those of a row of fewer, as a window leaves it.

    A split is 4 key blocks in a text of 32, 8 in one of 128, and 16 for every 512 in a longer one: short texts are read
    by many programs, and the partial sums of long ones stay small beside their keys.
    """
    fours, eights, sixteens = (-(-blocks // size) for size in (4, 8, 16))
    splits: Ints = np.minimum(np.minimum(fours, np.maximum(eights, 8)), np.clip(sixteens, 16, MOST_SPLITS))
    return splits
