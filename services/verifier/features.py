"""The target's features of a session's positions: which are kept, and how they leave the process."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from coppice.errors import InvalidField


@dataclass
class FeatureWindow:
    """The features of a session's latest positions, model dtype, at most `most` rows and a chunk."""

    most: int
    start: int = 0
    end: int = 0  # one behind the last position held
    chunks: list[Tensor] = field(default_factory=list)

    def append(self, rows: Tensor) -> None:
        """Add (n, F) rows of the next positions and forget what lies before the window."""
        self.chunks.append(rows)
        self.end += len(rows)
        while len(self.chunks) > 1 and self.end - self.start - len(self.chunks[0]) >= self.most:
            self.start += len(self.chunks.pop(0))

    def read(self, start: int, count: int) -> Tensor:
        """(n, F) rows of the last n of `count` positions from `start`: as many as are still here, at most `most`.

        Raises InvalidField when the last position is not here.
        """
        end = start + count
        first = max(start, self.start, end - self.most)
        if not first < end <= self.end:
            raise InvalidField("ref", f"positions {start}..{end - 1} are not in {self.start}..{self.end - 1}")
        return torch.cat(self.chunks)[first - self.start : end - self.start]


def columns(rows: Tensor, layers: tuple[int, ...], wanted: tuple[int, ...]) -> Tensor:
    """The columns of the `wanted` layers, in their order, of (n, F) features that hold those of `layers`."""
    if wanted == layers:
        return rows
    by_layer = rows.chunk(len(layers), dim=-1)
    return torch.cat([by_layer[layers.index(layer)] for layer in wanted], dim=-1)


def feature_bytes(rows: Tensor) -> bytes:
    """Row-major little-endian bytes of a CPU tensor (numpy has no bfloat16: its bits travel as int16)."""
    plain = rows.contiguous()
    return (plain.view(torch.int16) if plain.dtype is torch.bfloat16 else plain).numpy().tobytes()
