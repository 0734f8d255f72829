"""What a feature-fed head keeps of a session, and the rows of a forward made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coppice.engine.kv_cache import BlockTable
from coppice.engine.rows import Tail
from coppice.heads.last_draft import LastDraft
from coppice.heads.noise import Noise
from coppice.weights.variants import Choice


@dataclass
class FeatureSession:
    """One session: its text, its KV, and the features of the positions from `first` on."""

    table: BlockTable
    ids: list[int]
    start: int  # position of the first row
    features: Tensor  # in the host's memory
    first: int
    done: int  # rows of the positions before it are in KV
    noise: Noise
    wants_misses: bool = False
    sketch: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    choice: Choice = field(default_factory=Choice)
    last_draft: LastDraft | None = None  # only for a session that wants misses, until ids are committed

    def take(self, upto: int) -> Tensor:
        """Return the (upto - done, F) features of the positions done..upto-1."""
        return self.features[self.done - self.first : upto - self.first]

    def forget(self) -> None:
        """Drop the features of rows that are in KV, save the last one's: the same draft may be asked for again."""
        keep = min(max(self.done - 1, self.first), self.first + len(self.features))
        self.features, self.first = self.features[keep - self.first :], keep


@dataclass(frozen=True)
class Rows:
    """Rows of several sessions for one forward, packed in order: what they read, and what they see."""

    features: (
        Tensor  # (N, F) target features, in the host's memory; or with sources (M, hidden) states of the head's own
    )
    tokens: Sequence[int] | NDArray[np.int64]  # (N,)
    positions: Sequence[int] | NDArray[np.int64]  # (N,) where each row's features stand
    tails: Sequence[Tail]
    kept: Sequence[int] = ()  # rows whose states are read
    sources: Sequence[int] | None = None  # (N,) which of the states each row reads


def join(parts: Sequence[Rows]) -> Rows:
    """Join the rows of several sessions that read target features; of each the last one's state is read."""
    kept = [end - 1 for end in accumulate(len(part.tokens) for part in parts)]
    if len(parts) == 1:
        return replace(parts[0], kept=kept)
    return Rows(
        torch.cat([part.features for part in parts]),
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([part.positions for part in parts]),
        [tail for part in parts for tail in part.tails],
        kept,
    )
