"""A draft tree grown level by level (EAGLE-2): the best nodes of a level are expanded, the best of all are kept."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from coppice.heads.base import DraftJob, Growth
from coppice.speculation.tree import DraftTree

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass
class Growing:
    """One job's tree while it grows: all candidates so far, and the rows of those that were expanded.

    Candidate i is node i + 1. The arrays of the frontier, the nodes whose children come next, have F entries.
    """

    job: DraftJob
    frontier: Ints = field(default_factory=lambda: np.zeros(1, np.int64))
    frontier_tokens: Ints = field(default_factory=lambda: np.zeros(1, np.int64))
    frontier_scores: Floats = field(default_factory=lambda: np.zeros(1))
    places: Ints = field(default_factory=lambda: np.zeros(1, np.int64))  # of the parents in the frontier before
    paths: NDArray[np.bool_] = field(default_factory=lambda: np.zeros((1, 0), np.bool_))
    """(F of the frontier before, E) which of the expanded nodes' rows lead to it, its own included"""
    levels: list[tuple[Ints, Ints, Floats]] = field(default_factory=list)  # candidates: tokens, parents, cumulative
    count: int = 0  # of all candidates
    best: Floats = field(default_factory=lambda: np.zeros(0))  # scores of the budget's best
    q_rows: list[NDArray[np.float32]] = field(default_factory=list)

    def enter_frontier(self) -> NDArray[np.bool_]:
        """Give the frontier its rows; returns (F, E) which of the rows before them each descends from."""
        ancestors = self.paths[self.places]
        self.paths = np.concatenate((ancestors, np.eye(len(ancestors), dtype=np.bool_)), axis=1)
        return ancestors

    def extend(self, tokens: Ints, scores: NDArray[np.floating], width: int, deeper: bool) -> None:
        """Add (F, C) children, each node's best first with log-scores that are at most 0; choose the next frontier."""
        children = tokens.shape[1]
        new = (self.frontier_scores[:, None] + scores).ravel()
        self.levels.append((tokens.ravel(), self.frontier.repeat(children), new))
        chosen = (-new).argsort(kind="stable")[: width if deeper else 0]
        self.best = np.concatenate((self.best, new))
        budget = self.job.budget
        if len(self.best) >= budget:  # a node whose score is not among the budget's best has no child that is
            self.best.partition(-budget)
            self.best = self.best[-budget:]
            chosen = chosen[new[chosen] > self.best[0]]
        self.frontier, self.places = chosen + (self.count + 1), chosen // children
        self.frontier_tokens, self.frontier_scores = self.levels[-1][0][chosen], new[chosen]
        self.count += len(new)

    def cross(self, tokens: Ints, scores: NDArray[np.floating]) -> None:
        """Add all paths over slots that know nothing of one another: (K, W) tokens, each slot's best first."""
        for depth, (of_slot, values) in enumerate(zip(tokens, scores, strict=True), start=1):
            shape = len(self.frontier), tokens.shape[1]
            deeper = depth < min(len(tokens), self.job.budget)
            self.extend(np.broadcast_to(of_slot, shape), np.broadcast_to(values, shape), self.job.budget, deeper)

    def candidates(self) -> tuple[Ints, Ints, Floats]:
        """Tokens, parents and cumulative scores of all candidates; there is at least one level."""
        tokens, parents, scores = zip(*self.levels, strict=True)
        return np.concatenate(tokens), np.concatenate(parents), np.concatenate(scores)

    def finish(self, number: int) -> Growth:
        """The `budget` best candidates; cumulative scores never rise along a path, so they are closed under parents."""
        if not self.levels:
            return Growth(number, DraftTree.empty(), True)
        tokens, parents, scores = self.candidates()
        kept = (-scores).argsort(kind="stable")[: self.job.budget]
        kept.sort()
        new_numbers = np.zeros(self.count + 1, np.int64)
        new_numbers[kept + 1] = np.arange(1, len(kept) + 1)
        nodes = DraftTree(tokens[kept], new_numbers[parents[kept]], scores[kept].astype(np.float32))
        return Growth(number, nodes, True, np.stack(self.q_rows) if self.q_rows else None)
