"""What a head remembers of a session's last draft, to say how far it was from the target where it missed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from coppice.heads.base import DraftJob

Ints = NDArray[np.int64]


def _none() -> Ints:
    return np.zeros(0, np.int64)


@dataclass
class Recall:
    """One draft: all its candidates, sent or not, and the states that their children were predicted from.

    Candidate i is node i + 1, the root is node 0.
    """

    job: DraftJob
    version: int
    """of the weights that drafted"""
    tokens: Ints = field(default_factory=_none)
    parents: Ints = field(default_factory=_none)
    said: list[tuple[Ints, Tensor]] = field(default_factory=list)
    """of each forward (N,) nodes, -1 for none, and the (N, hidden) un-normed states that predicted their children"""

    def state(self, path: Sequence[int]) -> Tensor | None:
        """(hidden,) what the token behind `path`, tokens below the root, was predicted from; None when nothing was."""
        node = 0
        for token in path:
            found = np.flatnonzero((self.parents == node) & (self.tokens == token))
            if not len(found):
                return None
            node = int(found[0]) + 1
        for nodes, states in self.said:
            found = np.flatnonzero(nodes == node)
            if len(found):
                return states[int(found[0])]
        return None
