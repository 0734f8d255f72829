"""Rows of a session that attend at once, and which keys each of them sees, by position."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coppice.engine.attention_plan import MOST_PADDED
from coppice.engine.batch import Tail
from coppice.engine.kv_cache import BlockTable

SEGMENT = 128
"""positions whose values are summed by themselves; borders are multiples of it"""
CHAIN = 192
"""keys up to which a product adds up in one chain: a segment's and those between them that are not seen"""
TILE = 128
"""rows of one session that attend at once, at most"""

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Tile:
    """Rows of a session, and what each sees.

    visible: (n, E + n) of the tokens behind the prefix. length: (n,) keys of each row. ordered: each row sees all rows
    before it.
    """

    table: BlockTable
    prefix: int
    visible: NDArray[np.bool_]
    length: Ints
    ordered: bool

    @property
    def many(self) -> bool:
        """Whether others would be padded to so many rows."""
        return len(self.length) > MOST_PADDED

    @property
    def new_tokens(self) -> Ints:
        """Where the rows are written, (n,)."""
        count, columns = self.visible.shape
        return self.prefix + np.arange(columns - count, columns)

    def behind(self) -> tuple[Ints, Ints]:
        """Tokens, (R,), from the border on before which all rows see everything, and which of them a row sees at each
        position there, (n, P); -1 for none.
        """
        before = self.prefix % SEGMENT
        used = np.flatnonzero(self.visible.any(axis=0))
        row, column = np.nonzero(self.visible[:, used])
        seen = np.bincount(row, minlength=len(self.length))
        order = np.full((len(self.length), before + int(seen.max())), -1)
        order[:, :before] = np.arange(before)
        order[row, before + np.arange(len(row)) - (np.cumsum(seen) - seen)[row]] = before + column
        return np.concatenate((np.arange(self.prefix - before, self.prefix), self.prefix + used)), order


def tiles_of(tail: Tail) -> Iterator[Tile]:
    """Cut a session's rows: no tile has more than TILE of them, nor more keys behind its border than a chain."""
    (count, columns), visible = tail.visible.shape, tail.visible
    earlier, length = columns - count, tail.prefix + tail.visible.sum(axis=1)
    ordered = bool((length == tail.prefix + earlier + np.arange(1, count + 1)).all())
    first = 0
    while first < count:
        end = min(count, first + TILE)
        if ordered:
            rows = end - first
            prefix, seen = tail.prefix + earlier + first, np.tri(rows, dtype=np.bool_)
        else:
            needed = np.logical_or.accumulate(visible[first:end], axis=0).sum(axis=1)
            end = first + max(1, int(np.searchsorted(needed, CHAIN - tail.prefix % SEGMENT, side="right")))
            prefix, seen = tail.prefix, visible[first:end, : earlier + end]
        yield Tile(tail.table, prefix, seen, length[first:end], ordered)
        first = end
