"""A draft tree while it grows: which nodes a block adds, where the next block starts (SpecBlock, algorithm 2).

A tree that is grown level by level (EAGLE-2) is one of blocks with a single slot each: the best nodes of a level are
expanded, and the best of all are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from coppice.heads.base import DraftJob, Growth
from coppice.limits import MAX_TREE_NODES
from coppice.speculation.tree import DraftTree

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]

CONFIDENT = 0  # the bucket of a slot whose best token is expected to be the target's


@dataclass(frozen=True)
class Starts:
    """The S nodes that the blocks of one forward start from: slot k of a block predicts depth + k + 1."""

    nodes: Ints  # 0: the root
    depths: Ints
    rows: Ints  # of the forward before, whose state at the slot is the condition
    slots: Ints
    sees: Bools  # (S, E) which KV entries of this step's earlier blocks lie on its path

    def __len__(self) -> int:
        return len(self.nodes)


@dataclass(frozen=True)
class Blocks:
    """What a forward predicts behind each of S starts, in K slots each."""

    tokens: Ints  # (S, K, W) the slot's likeliest ids, best first
    scores: NDArray[np.floating]  # (S, K, W) their log-scores, at most 0
    spine: Ints  # (S, K) which of them is the slot's greedy token, from which the block itself goes on
    buckets: Ints  # (S, K) the rank head's answers
    worth: NDArray[np.floating] | None = (
        None  # (S, K, W) log-scores that nodes and starts are chosen by; None: `scores`
    )


def _none() -> Ints:
    return np.zeros(0, np.int64)


def _starts(count: int) -> Starts:
    """Make the root a start, or nothing."""
    zeros = np.zeros(count, np.int64)
    return Starts(zeros, zeros, zeros, zeros, np.zeros((count, 0), np.bool_))


@dataclass
class BlockTree:
    """One job's tree over its blocks: all candidates so far, and which of them were sent. Candidate i is node i + 1."""

    job: DraftJob
    most_starts: int
    """starts of a forward, the likeliest ones"""
    chain: bool = False
    """one branch: a block ends where the noise leaves its greedy chain, and the next one goes on from there"""
    starts: Starts = field(default_factory=lambda: _starts(1))
    tokens: Ints = field(default_factory=_none)
    parents: Ints = field(default_factory=_none)
    scores: Floats = field(default_factory=lambda: np.zeros(0))  # cumulative
    worth: Floats = field(default_factory=lambda: np.zeros(0))  # cumulative, what is chosen by
    sent: Ints = field(default_factory=_none)  # a candidate's number in what was sent, 0: not sent
    sent_count: int = 0
    block: tuple[Ints, Bools] = field(default_factory=lambda: (_none(), _none().astype(np.bool_)))
    """of the last forward (S, K) the node whose children each slot's tokens are, and whether they are in the tree"""

    def grow(self, blocks: Blocks, widths: Sequence[int], deeper: bool) -> None:
        """Add what a forward predicts behind the starts, and choose the next starts if there is another forward.

        `widths` says how many tokens each bucket branches into; 0 ends the block there. The greedy token is a branch of
        a slot whatever the noise of a coupled draft prefers.
        """
        place = np.arange(blocks.tokens.shape[2])
        on_spine = blocks.spine[..., None] == place
        width = np.asarray(widths)[blocks.buckets]
        alive = np.logical_and.accumulate(width > 0, axis=1)
        if self.chain:
            alive[:, 1:] &= np.logical_and.accumulate(blocks.spine[:, :-1] == 0, axis=1)
            kept = alive[..., None] & (place == 0)
        else:
            kept = alive[..., None] & ((place < width[..., None]) | on_spine)
        scores = self._along(self.scores, blocks.scores, on_spine)
        worth = scores if blocks.worth is None else self._along(self.worth, blocks.worth, on_spine)
        nodes = len(self.tokens) + kept.cumsum().reshape(kept.shape)
        spine_nodes = nodes[on_spine].reshape(blocks.spine.shape)
        parents = np.concatenate((self.starts.nodes[:, None], spine_nodes[:, :-1]), axis=1)
        self.block = parents, alive
        repeated = parents.repeat(kept.sum(axis=2).ravel())
        self._add(blocks.tokens[kept], repeated, scores[kept], None if blocks.worth is None else worth[kept])
        if deeper:
            begins = kept & ((blocks.buckets != CONFIDENT)[..., None] | (place < blocks.spine[..., None]))
            # The greedy tokens inside a chain are no starts: the block predicts on from them itself.
            last = np.arange(1, alive.shape[1] + 1) == alive.sum(axis=1)[:, None]
            begins[on_spine] = (alive & last).ravel()
            self.starts = self._next_starts(np.flatnonzero(begins & kept), worth, nodes)
        else:
            self.starts = _starts(0)

    def grow_level(self, tokens: Ints, scores: NDArray[np.floating], deeper: bool, child: float = 0.0) -> None:
        """Add (S, W) children of the starts, each one's best first, and choose the next starts if it goes deeper.

        A node is no start where a child of log-score `child` would not be among the `budget` best.
        """
        summed = (np.append(self.scores, 0.0)[self.starts.nodes - 1, None] + scores)[:, None]
        self.block = self.starts.nodes[:, None], np.ones((len(tokens), 1), np.bool_)
        numbers = np.arange(summed.size)
        nodes = numbers + (len(self.tokens) + 1)
        self._add(tokens.ravel(), self.starts.nodes.repeat(tokens.shape[1]), summed.ravel())
        self.starts = self._next_starts(numbers, summed, nodes, child) if deeper else _starts(0)

    def _add(self, tokens: Ints, parents: Ints, scores: Floats, worth: Floats | None = None) -> None:
        """Append candidates. They are chosen by their scores unless there is another `worth`."""
        self.tokens = np.concatenate((self.tokens, tokens))
        self.parents = np.concatenate((self.parents, parents))
        self.scores = np.concatenate((self.scores, scores))
        self.worth = self.scores if worth is None else np.concatenate((self.worth, worth))

    def _next_starts(self, places: Ints, worth: Floats, nodes: Ints, child: float = 0.0) -> Starts:
        """Choose the best of the places among (S, K, W) tokens that may begin a block; `nodes` numbers the tokens."""
        candidates = worth.ravel()[places]
        order = (-candidates).argsort(kind="stable")[: self.most_starts]  # stable: the same tree on every machine
        places = places[order[candidates[order] + child > self._edge()]]
        slots_of = worth.shape[1]
        rows, slots, _ = np.unravel_index(places, worth.shape)
        own = np.zeros((len(rows), len(worth), slots_of), np.bool_)
        own[np.arange(len(rows)), rows] = np.arange(slots_of) <= slots[:, None]
        sees = np.concatenate((self.starts.sees[rows], own.reshape(len(rows), len(worth) * slots_of)), axis=1)
        return Starts(nodes.ravel()[places], self.starts.depths[rows] + slots + 1, rows, slots, sees)

    def _along(self, known: Floats, values: NDArray[np.floating], on_spine: Bools) -> Floats:
        """Return (S, K, W) sums of values from the root on, `known` those of the candidates so far."""
        before = np.append(known, 0.0)[self.starts.nodes - 1]  # the root's is the last
        spine = values[on_spine].reshape(on_spine.shape[:2])[:, :-1]
        chain = np.concatenate((before[:, None], spine), axis=1).cumsum(axis=1)
        summed: Floats = chain[..., None] + values
        return summed

    def _edge(self) -> float:
        """Return the worth at or below which a node has no descendant among the `budget` best."""
        budget = self.job.budget
        return float(np.partition(self.worth, -budget)[-budget]) if len(self.worth) >= budget else -np.inf

    def send(self, number: int, last: bool) -> Growth:
        """Return what is new among the `budget` best candidates; a receiver prunes earlier ones that fell out."""
        self.sent = np.concatenate((self.sent, np.zeros(len(self.tokens) - len(self.sent), np.int64)))
        ranking = np.argsort(-self.worth, kind="stable")[: self.job.budget]
        new = np.sort(ranking[self.sent[ranking] == 0][: MAX_TREE_NODES - self.sent_count])
        self.sent[new] = np.arange(1, len(new) + 1) + self.sent_count
        self.sent_count += len(new)
        parents = np.append(self.sent, 0)[self.parents[new] - 1]
        return Growth(number, DraftTree(self.tokens[new], parents, self.scores[new].astype(np.float32)), last)


def row_slices(trees: Iterable[BlockTree]) -> list[slice]:
    """Return where the rows of each tree's starts lie in a forward over those of all trees."""
    return [slice(start, end) for start, end in pairwise(accumulate((len(tree.starts) for tree in trees), initial=0))]
