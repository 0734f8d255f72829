"""Heads that fill a block of mask tokens in one forward: `dflash`, `jetspec` and `dspark`.

Without a Markov table every slot is the same behind every node, so that the tree is the best of all combinations of the
slots' tokens (DDTree, arXiv 2604.12989). With one, each node's children are scored behind that node (PCTree, arXiv
2608.02123): in a coupled draft behind what the noise chose there, which no slot can know by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from torch import Tensor, cat

from coppice.config.sections import DrafterSettings
from coppice.engine.rows import Tail
from coppice.heads.base import DraftJob
from coppice.heads.feature_head import FeatureHead, FeatureSession, Inputs, Rows
from coppice.heads.tree import BlockTree

PARENTS = 4
"""nodes of a level, the likeliest ones, whose children a Markov table scores (PCTree's k: more gain nothing)"""
BEST_CHILD = -0.7
"""log-score of a child that a node is expanded for: it would have to be in the tree. A level costs as much for one."""


class MaskedBlockHead(FeatureHead):
    """Drafts from one forward over a block, whose rows lie behind the committed ones in KV until the next draft."""

    needs_root = False

    def __init__(self, settings: DrafterSettings) -> None:
        """Draft as `settings.kind` says: dflash, jetspec or dspark."""
        self.kind = settings.kind
        super().__init__(settings)
        self.deepest = min(self.config.slots, self.settings.depth)
        size = self.config.block_size
        self._sees = np.tri(size, dtype=np.bool_) if self.config.causal else np.ones((size, size), np.bool_)

    def plant(self, job: DraftJob, number: int) -> BlockTree:
        """Return a tree whose level has children behind all its nodes, or behind those that a Markov table scores."""
        if self.config.markov_rank:
            return BlockTree(job, number, min(job.budget, self.settings.top_k, PARENTS), BEST_CHILD)
        return BlockTree(job, number, job.budget)

    def scratch(self, tree: BlockTree) -> int:
        """Return one entry for each row of the block."""
        return int(self.config.block_size)

    def prefill(self, session: FeatureSession, upto: int) -> None:
        """Put keys and values of the positions before `upto` into KV."""
        self._store([(session, upto)])

    def _store(self, pieces: Sequence[tuple[FeatureSession, int]]) -> None:
        """Put keys and values of each session's positions up to the one named into KV: they attend to nothing."""
        features = cat([session.take(upto) for session, upto in pieces])
        if len(features):
            positions, entries = list[int](), []
            for session, upto in pieces:
                positions += range(session.done, upto)
                entries.append(session.table.slots(np.arange(session.done, upto) - session.start))
            places = self.tensor(np.array((positions, np.concatenate(entries)), np.int64))
            self.timed(self._write, features.to(self.device), *places)
        for session, upto in pieces:
            session.finish(upto)

    def _write(self, features: Tensor, positions: Tensor, slots: Tensor) -> None:
        rope = self.model.rope(positions[None], self.dtype)
        stored = zip(self.pool.layers, self.model.context_kv(self.model.condition(features)[None], rope), strict=True)
        for layer, new in stored:
            for pool, rows in zip(layer, new, strict=True):
                pool.index_copy_(0, slots, rows[0].transpose(0, 1))

    def _block_rows(self, trees: Sequence[BlockTree]) -> Rows:
        """Make the rows of the trees' blocks: the root, then masks, behind all that is committed."""
        size, jobs = self.config.block_size, [tree.job for tree in trees]
        tokens = np.full((len(jobs), size), self.config.mask_token_id)
        tokens[:, 0] = [job.root for job in jobs]
        positions = np.array([job.committed_len for job in jobs])[:, None] + np.arange(size)
        tails = []
        for job in jobs:
            session = self._sessions[job.key]
            tails.append(Tail(session.table, self.entry(session, job.committed_len), self._sees))
        return Rows(tokens.ravel(), positions.ravel(), tails)

    def _slot_states(self, inputs: Inputs) -> Tensor:
        """Return (J, K, hidden) un-normed states of the slots in use."""
        rope = self.model.rope(inputs.positions, self.dtype)
        states: Tensor = self.model(None, inputs.embeddings, rope, inputs.attends)
        first = self.config.block_size - self.config.slots
        return states.view(-1, self.config.block_size, states.shape[-1])[:, first : first + self.deepest]

    def grow(self, trees: Sequence[BlockTree]) -> Iterator[Sequence[BlockTree]]:
        """Grow all trees from one forward, each sent as a whole."""
        self._store([(self._sessions[tree.job.key], tree.job.committed_len) for tree in trees])
        states = self.timed(self._slot_states, self.inputs(self._block_rows(trees)))
        logits = self.timed(lambda: self.model.read(states)[0]).float()
        self.ranking.couple(trees, self.deepest)
        width = min(self.settings.top_k, max(tree.job.budget for tree in trees))
        if self.config.markov_rank:
            self._grow_by_levels(trees, states, logits, width)
        else:
            self.ranking.cross(trees, logits, width)
        yield trees

    def _grow_by_levels(self, trees: Sequence[BlockTree], states: Tensor, logits: Tensor, width: int) -> None:
        """Score each node's children behind it: (J, K, hidden) states and (J, K, draft vocabulary) logits."""
        previous = [tree.job.root for tree in trees]
        for depth in range(self.deepest):
            rows = [number for number, tree in enumerate(trees) for _ in tree.starts]
            scores = self.timed(self.model.bias, self.tensor(previous)).float()
            scores += logits[:, depth].index_select(0, self.tensor(rows))
            growing = [(number, tree) for number, tree in enumerate(trees) if tree.grows]
            self.ranking.grow([tree for _, tree in growing], scores[:, None], (0, width), depth + 1 < self.deepest)
            previous = []
            for number, tree in growing:
                self.note(tree, states[number, depth].expand(len(tree.block), -1))
                previous += [tree.tokens[start.node - 1] for start in tree.starts]
            if not previous:
                return
