"""Heads that draft in blocks: K tokens a forward, M forwards a step, the later ones from several nodes at once.

`specblock` branches by a rank head (SpecBlock, section 3 and algorithm 2). `eagle3` has blocks of one token, so that a
forward adds a level (EAGLE-3, EAGLE-2): the best nodes of a level are expanded, and the best of all are kept.

A tree that grows is in lists: for some dozens of nodes a loop costs less than numpy's calls.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby, pairwise
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coppice.config.sections import DrafterSettings
from coppice.engine.rows import Tail
from coppice.heads.base import DraftJob, Growth, with_tree_shape
from coppice.heads.feature_head import FeatureHead, Output
from coppice.heads.models.specblock import BUCKETS
from coppice.heads.ranking import greedy_ids
from coppice.heads.rows import Inputs, LastDraft, Rows
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


@dataclass(eq=False)
class BlockTree:
    """One job's tree over its blocks: the candidates, and which of them were sent. Candidate i is node i + 1.

    What is not among the `budget` best when it comes is no candidate, unless a block goes on behind it.
    """

    job: DraftJob
    number: int
    """of the job in its call"""
    most_starts: int
    """starts of a forward, the likeliest ones"""
    chain: bool = False
    """one branch: a block ends where the noise leaves its greedy chain, and the next one goes on from there"""
    best_child: float = 0.0
    """log-score of a node's best child: there is no start where such a child is not among the `budget` best"""
    noise: Tensor | None = None
    """(depths, draft vocabulary) of the positions below the root; None: its candidates have none"""
    first_row: int = 0
    """of its last block, among the rows of all trees"""
    last_draft: LastDraft | None = None
    """where the draft is noted, in a session that wants misses"""
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
                spine, bucket, ends = spines[slot], buckets[slot], slot == alive - 1
                width = 1 if self.chain else min(widths[bucket], len(tokens[slot]))
                parent, above = node, score
                for place in range(width) if spine < width or self.chain else (*range(width), spine):
                    its_score = above + scores[slot][place]
                    inner = place == spine and not ends  # the block predicts on from it itself
                    if its_score <= self.edge and not inner:
                        continue
                    self._add(tokens[slot][place], parent, its_score)
                    if inner:
                        node, score = len(self.tokens), its_score
                    elif place <= spine or bucket != CONFIDENT:
                        places.append(_Place(its_score, len(self.tokens), row, slot))
            self.block += [-1] * (len(tokens) - alive)
        self._choose_starts(places if deeper else [], len(blocks.tokens[0]))

    def _alive(self, spines: list[int], widths: list[int]) -> int:
        """Return how many slots of a block are in the tree."""
        for slot, width in enumerate(widths):
            if not width or (self.chain and slot and spines[slot - 1]):
                return slot
        return len(widths)

    def grow_level(self, tokens: list[list[int]], scores: list[list[float]], deeper: bool) -> None:
        """Add (S, W) children of the starts, each one's best first: blocks of one slot."""
        count, width = len(tokens), max(map(len, tokens), default=0)
        blocks = Blocks([[its] for its in tokens], [[its] for its in scores], [[0]] * count, [[1]] * count)
        self.grow(blocks, (0, width), deeper)

    def _add(self, token: int, parent: int, score: float) -> None:
        """Append a candidate."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.scores.append(score)

    def _choose_starts(self, places: list[_Place], slots: int) -> None:
        """Let the next forward's blocks, of `slots` entries each, start from the best of the places."""
        budget, before = self.job.budget, self.starts
        if places and len(self.scores) >= budget:
            self.edge = sorted(self.scores)[-budget]
        places.sort(key=lambda place: place.score, reverse=True)  # stable: the same tree on every machine
        best = [place for place in places[: self.most_starts] if place.score + self.best_child > self.edge]
        entries = before.entries
        self.starts = Starts(
            [place.node for place in best],
            [before.depths[place.row] + place.slot + 1 for place in best],
            [place.row for place in best],
            [place.slot for place in best],
            [before.sees[place.row] | ((2 << place.slot) - 1) << (entries + place.row * slots) for place in best],
            entries + len(before) * slots,
        )

    def note(self, states: Tensor) -> None:
        """Keep the (S * K, hidden) states that predicted the last block, in a session that wants misses."""
        if self.last_draft is not None:
            self.last_draft.predictions.append((self.block, states.clone()))

    def send(self, last: bool) -> Growth:
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
        return Growth(self.number, nodes, last)


def row_slices(trees: Iterable[BlockTree]) -> list[slice]:
    """Return where the rows of each tree's starts lie in a forward over those of all trees."""
    return [slice(start, end) for start, end in pairwise(accumulate((len(tree.starts) for tree in trees), initial=0))]


BLOCKS = 2
"""forwards of a draft"""
MAX_STARTS = 12  # of a block
BUDGET_OF_A_START = 8  # nodes of the tree that a start should be good for; more starts cost time and gain no token
BUDGET_OF_A_NOISY_START = 4  # the same in a coupled draft: noise leaves the greedy chain early and often
WIDTHS = (2, 4, 6, 10)
"""tokens that a slot branches into, by the rank head's bucket"""


class BlockHead(FeatureHead):
    """Drafts block by block; a kind says what a slot branches into."""

    anytime: ClassVar[bool] = True
    """whether a block is sent as soon as it exists, and not the whole tree at its end"""
    tree: ClassVar[type[BlockTree]] = BlockTree
    """how nodes and starts are chosen"""

    def __init__(self, settings: DrafterSettings, widths: Sequence[int], blocks: int = BLOCKS) -> None:
        """A slot branches into widths[bucket] tokens, and ends the block at 0. `blocks` are the forwards of a draft.

        Raises InvalidField on a folder that is not exactly a checkpoint of the kind for this target.
        """
        super().__init__(settings)
        self._widths, self._num_blocks = widths, blocks
        self.deepest = self.slots * blocks
        self._own = [(2 << slot) - 1 for slot in range(self.slots)]  # as bits, which slots of its block a slot sees

    @property
    def slots(self) -> int:
        """Tokens that a block predicts, each with a KV entry."""
        return int(self.model.config.slots)

    def buckets(self, logits: Tensor, normed: Tensor) -> Tensor:
        """Return (S, K) which of the widths holds in each slot: here bucket 1, the second width, everywhere.

        `logits` are (S, K, draft vocabulary), `normed` the (S, K, hidden) normed states. Bucket 0 also says that the
        slot's best token is expected to be the target's.
        """
        return torch.ones(logits.shape[:-1], dtype=torch.int64, device=self.device)

    def most_starts(self, job: DraftJob) -> int:
        """Return how many nodes the blocks of one forward start from at most."""
        return min(MAX_STARTS, max(1, job.budget // (BUDGET_OF_A_NOISY_START if job.noisy else BUDGET_OF_A_START)))

    def _draft(self, jobs: Sequence[DraftJob]) -> Iterator[list[Growth]]:
        """Grow all trees block by block."""
        blocks = self._num_blocks
        trees = [self.tree(job, at, self.most_starts(job), self.settings.chain) for at, job in enumerate(jobs)]
        active = [tree for tree in trees if self._room(tree.job, (blocks - 1) * tree.most_starts * self.slots)]
        if len(active) < len(trees):
            yield [tree.send(last=True) for tree in trees if tree not in active]
        if not active:
            return
        output, noises = self._from_roots([tree.job for tree in active], self.slots * blocks)
        for tree, noise in zip(active, noises, strict=True):
            tree.noise = noise
            tree.last_draft = self._keep_draft(tree.job, tree.tokens, tree.parents)
        for block in range(1, blocks + 1):
            self._grow(active, output, deeper=block < blocks)
            growing = [tree for tree in active if len(tree.starts)]
            if sent := active if self.anytime else [tree for tree in active if not len(tree.starts)]:
                yield [tree.send(last=not len(tree.starts)) for tree in sent]
            active = growing
            if not active:
                return
            output = self._from_states(self._start_rows(active, output[0].flatten(0, 1)))

    def _start_rows(self, active: Sequence[BlockTree], states: Tensor) -> Rows:
        """Make a row of each tree's starts: it reads its own token and the state of the slot that made it.

        It sees what lies on its path.
        """
        sources: list[int] = []
        tokens: list[int] = []
        positions: list[int] = []
        tails: list[Tail] = []
        advance = self.model.config.block_rope_advance
        for tree in active:
            starts, session = tree.starts, self._sessions[tree.job.key]
            first = tree.job.committed_len - 1
            parents = zip(starts.rows, starts.slots, strict=True)
            sources += [(tree.first_row + row) * self.slots + slot for row, slot in parents]
            tokens += [tree.tokens[node - 1] for node in starts.nodes]
            positions += [first + depth for depth in starts.depths] if advance else [first] * len(starts)
            tails.append(Tail(session.table, self._entry(session, first), starts.visible(self._own)))
        return Rows(states, tokens, positions, tails, sources=sources)

    def _read_states(self, states: Tensor) -> Output:
        """Return (S, K, hidden) states with their logits and the (S, K) buckets of their slots."""
        logits, normed = self.model.read(states)
        return states, logits, self.buckets(logits, normed)

    @torch.inference_mode()
    def _grow(self, active: Sequence[BlockTree], output: Output, deeper: bool) -> None:
        """Add the blocks of a forward to the trees."""
        states, logits, branching = output
        scores, slices = logits.float(), row_slices(active)
        # A block goes on from the greedy tokens of its slots, but for the last one.
        coupled = self.slots > 1 and any(tree.noise is not None for tree in active)
        greedy = greedy_ids(scores)[..., None] if coupled else None
        for tree, rows in zip(active, slices, strict=True):
            if tree.noise is None:
                self.ranking.score(scores[rows], tree.job, None)
            else:  # of the positions where each slot's token will stand
                start = rows.start
                for depth, alike in groupby(tree.starts.depths):
                    end = start + len(list(alike))
                    self.ranking.score(scores[start:end], tree.job, tree.noise[depth : depth + self.slots])
                    start = end
            tree.first_row = rows.start
        width = max(1, *self._widths) + coupled  # room for a greedy token that the noise puts behind the others
        tokens, values, more = self.ranking.likeliest(scores, width, branching[..., None], always=greedy)
        buckets, spine = more[-1][..., 0], more[0][..., 0] if coupled else np.zeros(scores.shape[:-1], np.int64)
        blocks = [part.tolist() for part in (tokens, values, spine, buckets)]
        for tree, rows in zip(active, slices, strict=True):
            tree.grow(Blocks(*(part[rows] for part in blocks)), self._widths, deeper)
            tree.note(states[rows].flatten(0, 1))


class SpecBlockHead(BlockHead):
    """A trained SpecBlock drafter; each block is sent as soon as it exists."""

    kind = "specblock"

    def __init__(self, settings: DrafterSettings) -> None:
        """A chain has one token a slot."""
        super().__init__(settings, (1,) * BUCKETS if settings.chain else WIDTHS)

    def buckets(self, logits: Tensor, normed: Tensor) -> Tensor:
        """Return the rank head's answers, which a chain does not need."""
        if self.settings.chain:
            return super().buckets(logits, normed)
        buckets: Tensor = self.model.rank(normed, logits).argmax(-1)
        return buckets


class Eagle3Head(BlockHead):
    """A trained EAGLE-3 drafter: one layer over token embedding and fused features, a forward a level."""

    kind = "eagle3"
    anytime = False  # each part wakes two processes, and there are many levels

    def __init__(self, settings: DrafterSettings) -> None:
        shape = with_tree_shape(settings)
        super().__init__(settings, (shape.top_k,) * BUCKETS, shape.depth)

    def most_starts(self, job: DraftJob) -> int:
        """Return the `top_k` of the settings: so many nodes of a level are expanded."""
        return self.settings.top_k

    def _forward(self, condition: Tensor, inputs: Inputs) -> Tensor:
        """Return the (N, 1, hidden) states of blocks of one slot."""
        return super()._forward(condition, inputs)[:, None]
