"""A draft tree grown level by level (EAGLE-2): the best nodes of a level are expanded, the best of all are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from coppice.nn.head import DraftJob, Growth
from coppice.packed.batch import Earlier
from coppice.tree import DraftTree


@dataclass
class Growing:
    """One job's tree while it grows: all candidates so far, and the rows of those that were expanded."""

    job: DraftJob
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    rows: dict[int, int] = field(default_factory=dict)  # expanded node -> its row behind the prefix
    frontier: list[int] = field(default_factory=lambda: [0])  # nodes whose children come next
    places: list[int] = field(default_factory=list)  # candidate -> index of its parent in the frontier that made it
    q_rows: list[NDArray[np.float32]] = field(default_factory=list)

    def path_rows(self, node: int) -> list[int]:
        """Rows of a node's ancestors, the root excluded: they are in KV."""
        rows = []
        while node := self.parents[node - 1] if node else 0:
            rows.append(self.rows[node])
        return rows

    def enter_frontier(self, prefix: int) -> Earlier:
        """Give the frontier its rows; returns what they see of earlier levels. `prefix`: position of depth 1."""
        earlier = len(self.rows)
        visible = np.zeros((len(self.frontier), earlier), np.bool_)
        for row, node in enumerate(self.frontier):
            visible[row, self.path_rows(node)] = True
        depths = np.zeros(earlier, np.int64)
        for node, row in self.rows.items():
            depths[row] = len(self.path_rows(node))
        self.rows |= {node: earlier + row for row, node in enumerate(self.frontier)}
        return Earlier(visible, depths + prefix)

    def extend(self, children: Sequence[Sequence[tuple[int, float]]], width: int, deeper: bool) -> None:
        """Add each frontier node's (token, log-score) children, best first, and choose the next frontier."""
        new: list[int] = []
        for place, (node, candidates) in enumerate(zip(self.frontier, children, strict=True)):
            base = self.scores[node - 1] if node else 0.0
            for token, score in candidates:
                self.tokens.append(token)
                self.parents.append(node)
                self.scores.append(base + min(score, 0.0))
                self.places.append(place)
                new.append(len(self.tokens))
        best = sorted(new, key=lambda node: -self.scores[node - 1])[:width]
        # A node whose score is not among the budget's best has no child that is.
        budget = self.job.budget
        edge = sorted(self.scores, reverse=True)[budget - 1] if len(self.scores) >= budget else -np.inf
        self.frontier = [node for node in best if self.scores[node - 1] > edge] if deeper else []

    def finish(self, number: int) -> Growth:
        """The `budget` best candidates; cumulative scores never rise along a path, so they are closed under parents."""
        order = np.argsort(-np.array(self.scores), kind="stable")[: self.job.budget]
        kept = np.sort(order)
        new_numbers = np.zeros(len(self.tokens) + 1, np.int64)
        new_numbers[kept + 1] = np.arange(1, len(kept) + 1)
        nodes = DraftTree(
            np.array(self.tokens, np.int64)[kept],
            new_numbers[np.array(self.parents, np.int64)[kept]],
            np.array(self.scores, np.float32)[kept],
        )
        return Growth(number, nodes, True, np.stack(self.q_rows) if self.q_rows else None)
