"""What one forward pass of the target works on: the rows of all waiting sessions, packed. Knows nothing of models.

Nothing here validates: token ids, tree shapes and lengths were checked where they entered the process
(coppice/limits.py, coppice/speculation/tree.py), and the scheduler made room in the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coppice.engine.kv_cache import BlockTable


@dataclass(frozen=True)
class Earlier:
    """Rows of a tree that earlier forwards wrote behind the prefix: a drafter grows its tree level by level.

    visible: (num_rows, E) bool, which of them each row of the span descends from. positions: (E,) int64, absolute.
    """

    visible: NDArray[np.bool_]
    positions: NDArray[np.int64]


@dataclass(frozen=True)
class Span:
    """One session's rows: first_row .. first_row + num_rows of the batch, after prefix_len tokens already in its KV.

    Row r of the span writes its keys and values at the session's token index start + r, so `table` has room for
    start + num_rows tokens.
    """

    first_row: int
    num_rows: int
    prefix_len: int
    table: BlockTable
    earlier: Earlier | None = None

    @property
    def start(self) -> int:
        """The session's token index of the first row: behind the prefix and the tree's earlier rows."""
        return self.prefix_len + (len(self.earlier.positions) if self.earlier else 0)


@dataclass(frozen=True)
class PackedBatch:
    """Rows of all sessions of one forward, as plain CPU tensors.

    tokens: (T,) int64 ids. positions: (T,) int64, absolute in the session's text. parents: (T,) int64, the row *inside
    its span* that a row continues, always an earlier one; -1 for one that continues the prefix or an earlier row. A
    prefill chunk is a chain, a draft tree is a tree with its root in the first row. logits_to_keep: (R,) int64, the
    rows of the batch whose logits are wanted, ascending. feature_layers: hidden states wanted of every row (index 0 is
    the embeddings); empty for none.
    """

    tokens: Tensor
    positions: Tensor
    parents: Tensor
    spans: tuple[Span, ...]
    logits_to_keep: Tensor
    feature_layers: tuple[int, ...] = ()

    def ancestors(self) -> NDArray[np.bool_]:
        """(T, N) bool, N the longest span: [t, j] says whether row j of t's span is row t itself or an ancestor.

        A row's set is a number whose bit j is row j: its own bit and its parent's set.
        """
        parents = self.parents.tolist()
        longest = max(span.num_rows for span in self.spans)
        bits = bytearray()
        for span in self.spans:
            sets: list[int] = []
            for row, parent in enumerate(parents[span.first_row : span.first_row + span.num_rows]):
                sets.append(1 << row | (sets[parent] if parent >= 0 else 0))
                bits += sets[row].to_bytes(-(-longest // 8), "little")
        packed = np.frombuffer(bits, np.uint8).reshape(len(parents), -1)
        return np.unpackbits(packed, axis=1, count=longest, bitorder="little").view(np.bool_)


@dataclass(frozen=True)
class Piece:
    """One session's part of a batch to be packed; the arrays have one entry a row.

    parents as in PackedBatch; depths counts from 0 at the first row; keep lists the rows of the piece whose logits are
    wanted, ascending.
    """

    table: BlockTable
    prefix_len: int
    tokens: Sequence[int]
    parents: Sequence[int]
    depths: Sequence[int]
    keep: Sequence[int]
    earlier: Earlier | None = None

    @classmethod
    def chain(cls, table: BlockTable, prefix_len: int, tokens: Sequence[int], keep: Sequence[int] = ()) -> Piece:
        """A prefill chunk, or with one token a plain decoding step."""
        rows = len(tokens)
        return cls(table, prefix_len, tokens, range(-1, rows - 1), range(rows), keep)


def pack(pieces: Sequence[Piece], feature_layers: tuple[int, ...] = ()) -> PackedBatch:
    """One batch of the pieces, in their order; the spans and the logits come out in the same order."""
    spans: list[Span] = []
    rows = 0
    for piece in pieces:
        spans.append(Span(rows, len(piece.tokens), piece.prefix_len, piece.table, piece.earlier))
        rows += len(piece.tokens)

    tokens = np.concatenate([np.asarray(piece.tokens, np.int64) for piece in pieces])
    positions = np.concatenate([np.asarray(piece.depths, np.int64) + piece.prefix_len for piece in pieces])
    parents = np.concatenate([np.asarray(piece.parents, np.int64) for piece in pieces])
    kept = [np.asarray(piece.keep, np.int64) + span.first_row for piece, span in zip(pieces, spans, strict=True)]
    return PackedBatch(
        tokens=torch.from_numpy(tokens),
        positions=torch.from_numpy(positions),
        parents=torch.from_numpy(parents),
        spans=tuple(spans),
        logits_to_keep=torch.from_numpy(np.concatenate(kept)),
        feature_layers=feature_layers,
    )
