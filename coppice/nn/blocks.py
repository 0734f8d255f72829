"""The tree of a SpecBlock draft: which nodes a block adds, where the next block starts (SpecBlock, algorithm 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from coppice.limits import MAX_HEAD_NODES
from coppice.nn.head import DraftJob, Growth
from coppice.tree import DraftTree

MAX_STARTS = 12  # of a block, the likeliest ones
BUDGET_OF_A_START = 3  # nodes of the tree that a start should be good for; fewer starts, smaller forwards
CONFIDENT = 0  # the bucket of a slot whose best token is expected to be the target's


@dataclass(frozen=True)
class Start:
    """A node a block starts from: slot k of the block predicts depth + k + 1."""

    node: int  # 0: the root
    depth: int
    row: int  # of the forward before, whose state at `slot` is the condition
    slot: int
    sees: NDArray[np.bool_]  # which KV entries of this step's earlier blocks lie on its path


@dataclass
class BlockTree:
    """One job's tree over its blocks: all candidates so far, and which of them were sent."""

    job: DraftJob
    slots: int
    starts: list[Start] = field(default_factory=lambda: [Start(0, 0, 0, 0, np.zeros(0, np.bool_))])
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    sent: dict[int, int] = field(default_factory=lambda: {0: 0})  # candidate -> its number in what was sent

    def grow(
        self,
        top: Sequence[Sequence[Sequence[tuple[int, float]]]],
        buckets: Sequence[Sequence[int]],
        widths: Sequence[int],
        guided: bool = True,
    ) -> None:
        """Add the block that each start began, and choose the starts of the next one.

        top: for each start and slot the likeliest (token, log-score), best first. buckets: the rank head's answer for
        each. widths: how many tokens a bucket branches into, the greedy one included; 0 ends the block there. Not
        guided: every slot has widths[0] tokens, and every alternative may start a block.
        """
        entries = len(self.starts[0].sees)  # of earlier blocks
        following: list[tuple[float, Start]] = []
        for row, start in enumerate(self.starts):
            chain, cumulative = start.node, self.scores[start.node - 1] if start.node else 0.0
            end: Start | None = None
            for slot, (candidates, bucket) in enumerate(zip(top[row], buckets[row], strict=True)):
                width = widths[bucket if guided else 0]
                if not width:
                    break
                sees = np.zeros(entries + len(self.starts) * self.slots, np.bool_)
                sees[:entries] = start.sees
                own = entries + row * self.slots
                sees[own : own + slot + 1] = True
                first = len(self.tokens) + 1
                for token, score in candidates[:width]:
                    self.tokens.append(token)
                    self.parents.append(chain)
                    self.scores.append(cumulative + min(score, 0.0))
                end = Start(first, start.depth + slot + 1, row, slot, sees)
                if not guided or bucket != CONFIDENT:
                    following += (
                        (self.scores[node - 1], Start(node, end.depth, row, slot, sees))
                        for node in range(first + 1, len(self.tokens) + 1)
                    )
                chain, cumulative = first, self.scores[first - 1]
            if end is not None:
                following.append((cumulative, end))
        edge = self._edge()
        following.sort(key=lambda scored: -scored[0])  # stable: the tree is the same on every machine
        most = min(MAX_STARTS, max(1, self.job.budget // BUDGET_OF_A_START))
        self.starts = [start for score, start in following[:most] if score > edge]

    def _edge(self) -> float:
        """A node no likelier than this has no descendant among the `budget` likeliest."""
        if len(self.scores) < self.job.budget:
            return -np.inf
        return sorted(self.scores, reverse=True)[self.job.budget - 1]

    def send(self, number: int, last: bool) -> Growth:
        """What is new among the `budget` likeliest candidates; a receiver prunes earlier ones that fell out."""
        ranking = np.argsort(-np.array(self.scores), kind="stable")[: self.job.budget]
        new = [int(node) for node in np.sort(ranking + 1) if int(node) not in self.sent]
        room = MAX_HEAD_NODES - (len(self.sent) - 1)
        if len(new) > room:
            new = sorted(sorted(new, key=lambda node: -self.scores[node - 1])[:room])
        for node in new:
            self.sent[node] = len(self.sent)
        index = np.array(new, np.int64) - 1
        nodes = DraftTree(
            np.array(self.tokens, np.int64)[index],
            np.array([self.sent[self.parents[at]] for at in index], np.int64),
            np.array(self.scores, np.float32)[index],
        )
        return Growth(number, nodes, last)
