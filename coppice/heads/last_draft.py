"""The last draft of a session, kept to say how far it was from the target where the text left it."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from coppice.heads.base import DraftJob
from coppice.wire.drafter import Advance


@dataclass
class LastDraft:
    """One draft: its candidates, sent or not, and the states that their children were predicted from.

    Candidate i is node i + 1, the root is node 0.
    """

    job: DraftJob
    version: int
    """of the weights that drafted"""
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    predictions: list[tuple[list[int], Tensor]] = field(default_factory=list)
    """of each forward (N,) nodes, -1 for none, and the (N, hidden) un-normed states that predicted their children"""

    def state_where_rejected(self, advance: Advance, committed_len: int) -> Tensor | None:
        """Return the (hidden,) state that predicted the token where the target disagreed.

        `committed_len` is that before the advance. None when the rejection is not about this draft, or when no forward
        predicted there.
        """
        rejection = advance.rejection
        if rejection is None or (self.job.committed_len, self.job.root) != (committed_len, advance.ids[0]):
            return None
        depth = rejection.position - committed_len - 1
        if not 0 <= depth < len(advance.ids):
            return None
        known = {pair: node for node, pair in enumerate(zip(self.parents, self.tokens, strict=True), start=1)}
        node = 0
        for token in advance.ids[1 : depth + 1]:
            if (node := known.get((node, token), -1)) < 0:
                return None
        for nodes, states in self.predictions:
            if node in nodes:
                return states[nodes.index(node)]
        return None
