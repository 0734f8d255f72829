"""A draft tree while it grows: which nodes a block adds, where the next block starts (SpecBlock, algorithm 2).

A tree that is grown level by level (EAGLE-2) is one of blocks with a single slot each: the best nodes of a level are
expanded, and the best of all are kept.

All is in lists: for some dozens of nodes a loop costs less than numpy's calls.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coppice.heads.base import DraftJob, Growth
from coppice.limits import MAX_TREE_NODES
from coppice.speculation.tree import DraftTree

CONFIDENT = 0  # the bucket of a slot whose best token is expected to be the target's


@dataclass(frozen=True, slots=True)
class Starts:
    """The S nodes that the blocks of one forward start from: slot k of a block predicts depth + k + 1."""

    nodes: list[int]  # 0: the root
    depths: list[int]
    rows: list[int]  # of the forward before, whose state at the slot is the condition
    slots: list[int]
    sees: list[int]  # bit e: whether entry e of the KV of this step's earlier blocks lies on its path
    entries: int  # E

    def __len__(self) -> int:
        return len(self.nodes)

    def visible(self, own: Sequence[int] = ()) -> NDArray[np.bool_]:
        """Return (S * K, E + S * K): what the rows of the blocks see, `own` (K,) of their own block as bits.

        Without `own` (S, E): which earlier entries lie on the paths.
        """
        width, sees = self.entries + len(self) * len(own), self.sees
        if own:
            firsts = range(self.entries, width, len(own))
            sees = [seen | its << first for seen, first in zip(self.sees, firsts, strict=True) for its in own]
        size = -(-width // 8)
        packed = np.frombuffer(b"".join([seen.to_bytes(size, "little") for seen in sees]), np.uint8)
        return np.unpackbits(packed.reshape(-1, size), axis=1, count=width, bitorder="little").view(np.bool_)


class Blocks(NamedTuple):
    """What a forward predicts behind each of S starts, in K slots each."""

    tokens: list[list[list[int]]]  # (S, K, W) the slot's likeliest ids, best first
    scores: list[list[list[float]]]  # (S, K, W) their log-scores, at most 0
    spine: list[list[int]]  # (S, K) which of them is the slot's greedy token, from which the block itself goes on
    buckets: list[list[int]]  # (S, K) the rank head's answers


class _Place(NamedTuple):
    """Where a block may start: a node, its score, and which slot made it."""

    score: float
    node: int
    row: int
    slot: int


def _starts(count: int) -> Starts:
    """Make the root a start, or nothing."""
    zeros = [0] * count
    return Starts(zeros, zeros, zeros, zeros, zeros, 0)


@dataclass
class BlockTree:
    """One job's tree over its blocks: the candidates, and which of them were sent. Candidate i is node i + 1.

    What is not among the `budget` best when it comes is no candidate, unless a block goes on behind it.
    """

    job: DraftJob
    most_starts: int
    """starts of a forward, the likeliest ones"""
    chain: bool = False
    """one branch: a block ends where the noise leaves its greedy chain, and the next one goes on from there"""
    starts: Starts = field(default_factory=lambda: _starts(1))
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)  # cumulative
    edge: float = -math.inf
    """score at or below which a node to come is not among the `budget` best"""
    sent: list[int] = field(default_factory=list)  # a candidate's number in what was sent, 0: not sent
    sent_count: int = 0
    block: list[int] = field(default_factory=list)
    """of the last forward (S * K,) the node whose children each slot's tokens are, -1 where they are not in the tree"""

    def grow(self, blocks: Blocks, widths: Sequence[int], deeper: bool) -> None:
        """Add what a forward predicts behind the starts, and choose the next starts if there is another forward.

        `widths` says how many tokens each bucket branches into; 0 ends the block there. The greedy token is a branch of
        a slot whatever the noise of a coupled draft prefers.
        """
        self.block = []
        places: list[_Place] = []
        for row, (node, tokens, scores, spines, buckets) in enumerate(zip(self.starts.nodes, *blocks, strict=True)):
            score = self.scores[node - 1] if node else 0.0
            alive = self._alive(spines, [widths[bucket] for bucket in buckets])
            for slot in range(alive):
                self.block.append(node)
                spine, bucket = spines[slot], buckets[slot]
                width = 1 if self.chain else min(widths[bucket], len(tokens[slot]))
                parent, above = node, score
                for place in range(width) if spine < width or self.chain else (*range(width), spine):
                    its_score = above + scores[slot][place]
                    if place == spine:
                        # The greedy tokens inside a chain are no starts: the block predicts on from them itself.
                        begins = slot == alive - 1
                        node, score = len(self.tokens) + 1, its_score
                    elif its_score <= self.edge:
                        continue
                    else:
                        begins = bucket != CONFIDENT or place < spine
                    self._add(tokens[slot][place], parent, its_score)
                    if begins:
                        places.append(_Place(its_score, len(self.tokens), row, slot))
            self.block += [-1] * (len(tokens) - alive)
        self._choose_starts(places if deeper else [], len(blocks.tokens[0]))

    def _alive(self, spines: list[int], widths: list[int]) -> int:
        """Return how many slots of a block are in the tree."""
        for slot, width in enumerate(widths):
            if not width or (self.chain and slot and spines[slot - 1]):
                return slot
        return len(widths)

    def grow_level(self, tokens: list[list[int]], scores: list[list[float]], deeper: bool, child: float = 0.0) -> None:
        """Add (S, W) children of the starts, each one's best first, and choose the next starts if it goes deeper.

        A node is no start where a child of log-score `child` would not be among the `budget` best.
        """
        self.block = self.starts.nodes
        places: list[_Place] = []
        for row, (parent, its_tokens, values) in enumerate(zip(self.starts.nodes, tokens, scores, strict=True)):
            above = self.scores[parent - 1] if parent else 0.0
            for token, value in zip(its_tokens, values, strict=True):
                score = above + value
                if score <= self.edge:
                    break
                self._add(token, parent, score)
                places.append(_Place(score, len(self.tokens), row, 0))
        self._choose_starts(places if deeper else [], 1, child)

    def _add(self, token: int, parent: int, score: float) -> None:
        """Append a candidate."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.scores.append(score)

    def _choose_starts(self, places: list[_Place], slots: int, child: float = 0.0) -> None:
        """Let the next forward's blocks, of `slots` entries each, start from the best of the places."""
        budget, before = self.job.budget, self.starts
        if places and len(self.scores) >= budget:
            self.edge = sorted(self.scores)[-budget]
        places.sort(key=lambda place: place.score, reverse=True)  # stable: the same tree on every machine
        best = [place for place in places[: self.most_starts] if place.score + child > self.edge]
        entries = before.entries
        self.starts = Starts(
            [place.node for place in best],
            [before.depths[place.row] + place.slot + 1 for place in best],
            [place.row for place in best],
            [place.slot for place in best],
            [before.sees[place.row] | ((2 << place.slot) - 1) << (entries + place.row * slots) for place in best],
            entries + len(before) * slots,
        )

    def send(self, number: int, last: bool) -> Growth:
        """Return what is new among the `budget` best candidates; a receiver prunes earlier ones that fell out."""
        sent = self.sent = self.sent + [0] * (len(self.tokens) - len(self.sent))
        best = sorted(range(len(sent)), key=self.scores.__getitem__, reverse=True)[: self.job.budget]
        new = sorted([at for at in best if not sent[at]][: MAX_TREE_NODES - self.sent_count])
        for at in new:
            self.sent_count += 1
            sent[at] = self.sent_count
        nodes = DraftTree(
            np.array([self.tokens[at] for at in new], np.int64),
            np.array([sent[parent - 1] if (parent := self.parents[at]) else 0 for at in new], np.int64),
            np.array([self.scores[at] for at in new], np.float32),
        )
        return Growth(number, nodes, last)


def row_slices(trees: Iterable[BlockTree]) -> list[slice]:
    """Return where the rows of each tree's starts lie in a forward over those of all trees."""
    return [slice(start, end) for start, end in pairwise(accumulate((len(tree.starts) for tree in trees), initial=0))]
