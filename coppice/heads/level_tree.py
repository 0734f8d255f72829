"""A draft tree grown level by level (EAGLE-2): the best nodes of a level are expanded, the best of all are kept."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from coppice.heads.base import DraftJob, Growth
from coppice.speculation.tree import DraftTree

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass
class LevelTree:
    """One job's tree while it grows: all candidates so far, and which of them were expanded.

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
        """Give the frontier rows of its own; returns (F, E) which of the earlier rows each node descends from."""
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
        """Return the tokens, parents and cumulative scores of all candidates; there is at least one level."""
        tokens, parents, scores = zip(*self.levels, strict=True)
        return np.concatenate(tokens), np.concatenate(parents), np.concatenate(scores)

    def finish(self, number: int) -> Growth:
        """Return the `budget` best candidates: scores never rise along a path, so no kept node lacks its parent."""
        if not self.levels:
            return Growth(number, DraftTree.empty(), True)
        tokens, parents, scores = self.candidates()
        kept = (-scores).argsort(kind="stable")[: self.job.budget]
        kept.sort()
        new_numbers = np.zeros(self.count + 1, np.int64)
        new_numbers[kept + 1] = np.arange(1, len(kept) + 1)
        nodes = DraftTree(tokens[kept], new_numbers[parents[kept]], scores[kept].astype(np.float32))
        return Growth(number, nodes, True, np.stack(self.q_rows) if self.q_rows else None)


def row_slices(counts: Iterable[int]) -> list[slice]:
    """Return where each tree's rows lie in a forward over all of them, given how many each has."""
    return [slice(start, end) for start, end in pairwise(accumulate(counts, initial=0))]
