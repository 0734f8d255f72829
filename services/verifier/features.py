"""The target's features of a session's positions: which are kept, and how they leave the process."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from coppice.errors import InvalidField


@dataclass
class FeatureWindow:
    """The features of a session's latest positions, model dtype, at most `most` rows and a chunk."""

    most: int
    end: int = 0  # one behind the last position held
    starts: list[int] = field(default_factory=list)  # of the chunks
    chunks: list[Tensor] = field(default_factory=list)

    @property
    def start(self) -> int:
        """The first position held."""
        return self.starts[0] if self.starts else self.end

    def append(self, rows: Tensor) -> None:
        """Add (n, F) rows of the next positions and forget what lies before the window. Nobody writes to them again."""
        self.starts.append(self.end)
        self.chunks.append(rows)
        self.end += len(rows)
        while len(self.chunks) > 1 and self.end - self.starts[1] >= self.most:
            del self.starts[0], self.chunks[0]

    def read(self, start: int, count: int) -> tuple[int, list[Tensor]]:
        """Rows of the last of `count` positions from `start`, as many as are still here, at most `most` in all: how
        many they are, and the rows as they lie, chunk by chunk.

        Raises InvalidField when the last position is not here.
        """
        end = start + count
        first = max(start, self.start, end - self.most)
        if not first < end <= self.end:
            raise InvalidField("ref", f"positions {start}..{end - 1} are not in {self.start}..{self.end - 1}")
        low, high = bisect_right(self.starts, first) - 1, bisect_left(self.starts, end)
        chunks = self.chunks[low:high]
        chunks[-1] = chunks[-1][: end - self.starts[high - 1]]
        chunks[0] = chunks[0][first - self.starts[low] :]
        return end - first, chunks


@dataclass(frozen=True, slots=True)
class FeatureRows:
    """Rows of consecutive positions that are about to be sent."""

    count: int
    chunks: list[Tensor]
    """(n, F) each, on the CPU, with the columns of `layers`"""
    layers: tuple[int, ...]
    wanted: tuple[int, ...]
    """those that are sent, in this order"""

    def parts(self, most_bytes: int) -> Iterator[tuple[int, bytes]]:
        """Number and bytes of the rows, in parts of at most `most_bytes`, or of one row; each is made when its turn
        comes.
        """
        if not self.chunks:
            return
        row = self.chunks[0][0]
        most = max(1, most_bytes * len(self.layers) // (row.nbytes * len(self.wanted)))
        part: list[bytes] = []
        count = 0
        for chunk in self.chunks:
            left = chunk
            while len(left):
                some, left = left[: most - count], left[most - count :]
                part.append(feature_bytes(some, self.layers, self.wanted))
                count += len(some)
                if count == most:
                    yield count, b"".join(part)
                    part, count = [], 0
        if count:
            yield count, b"".join(part)


def columns(rows: Tensor, layers: tuple[int, ...], wanted: tuple[int, ...]) -> Tensor:
    """The columns of the `wanted` layers, in their order, of (n, F) features that hold those of `layers`."""
    if wanted == layers:
        return rows
    by_layer = rows.chunk(len(layers), dim=-1)
    return torch.cat([by_layer[layers.index(layer)] for layer in wanted], dim=-1)


def feature_bytes(rows: Tensor, layers: tuple[int, ...], wanted: tuple[int, ...]) -> bytes:
    """Row-major little-endian bytes of what `columns` gives of a CPU tensor (numpy has no bfloat16: its bits travel as
    int16). The event loop calls it: torch would copy with threads, and they are the target's.
    """
    numbers = (rows.view(torch.int16) if rows.dtype is torch.bfloat16 else rows).numpy()
    if wanted != layers:
        by_layer = np.split(numbers, len(layers), axis=1)
        numbers = np.concatenate([by_layer[layers.index(layer)] for layer in wanted], axis=1)
    return numbers.tobytes()
