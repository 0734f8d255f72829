"""Heads that draft in blocks.

K tokens a forward, M forwards a step, the later ones from several nodes at once: `specblock` branches by a rank head
(SpecBlock, section 3 and algorithm 2). `eagle3` has blocks of one token, so that a forward adds a level (EAGLE-3,
EAGLE-2): the best nodes of a level are expanded, and the best of all are kept. `mtp` drafts so, too.

`dflash`, `jetspec` and `dspark` fill a block of mask tokens in one forward. Without a Markov table every slot is the
same behind every node, so that the tree is the best of all combinations of the slots' tokens (DDTree, arXiv
2604.12989). With one, each node's children are scored behind that node (PCTree, arXiv 2608.02123): in a coupled draft
behind what the noise chose there, which no slot can know by itself.
"""

from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np
from torch import Tensor, cat

from coppice.config.sections import DrafterSettings
from coppice.engine.rows import Tail
from coppice.heads.base import DraftJob
from coppice.heads.feature_head import FeatureHead, FeatureSession, Inputs, Rows
from coppice.heads.models import BUCKETS
from coppice.heads.tree import BlockTree

BLOCKS = 2  # forwards of a draft
MAX_STARTS = 12  # of a block
BUDGET_OF_A_START = 8  # nodes of the tree that a start should be good for; more starts cost time and gain no token
BUDGET_OF_A_NOISY_START = 4  # the same in a coupled draft: noise leaves the greedy chain early and often
WIDTHS = (2, 4, 6, 10)  # tokens that a slot branches into, by the rank head's bucket
PARENTS = 4
"""nodes of a level, the likeliest ones, whose children a Markov table scores (PCTree's k: more gain nothing)"""
BEST_CHILD = -0.7
"""log-score of a child that a node is expanded for: it would have to be in the tree. A level costs as much for one."""


class SpecBlockHead(FeatureHead):
    """A trained SpecBlock drafter: it drafts block by block, and each block is sent as soon as it exists."""

    kind = "specblock"
    row_is_block = True
    anytime: ClassVar[bool] = True  # whether a block is sent as soon as it exists, and not the whole tree at its end

    def __init__(self, settings: DrafterSettings) -> None:
        """`top_k` 1 makes a chain. Raises InvalidField unless the folder is a checkpoint of the kind for its target."""
        super().__init__(settings)
        self._branch((1,) * BUCKETS if settings.top_k == 1 else WIDTHS, BLOCKS)

    def _branch(self, widths: Sequence[int], blocks: int) -> None:
        """A slot branches into widths[bucket] tokens, and ends the block at 0. `blocks` are the forwards of a draft."""
        self.widths, self._blocks = widths, blocks
        self.deepest = self.slots * blocks
        self.own = [(2 << slot) - 1 for slot in range(self.slots)]
        """as bits, which slots of its block a slot sees"""

    def plant(self, job: DraftJob, number: int) -> BlockTree:
        """Return a tree whose starts are worth their time."""
        most = job.budget // (BUDGET_OF_A_NOISY_START if job.noisy else BUDGET_OF_A_START)
        return BlockTree(job, number, min(MAX_STARTS, max(1, most)))

    def scratch(self, tree: BlockTree) -> int:
        """Return the entries of the blocks behind the first one."""
        return (self._blocks - 1) * tree.most_starts * self.slots

    def buckets(self, logits: Tensor, normed: Tensor) -> Tensor | None:
        """Return (S, K) which of the widths holds in each slot; None, as for a chain: the second one everywhere.

        `logits` are (S, K, draft vocabulary), `normed` the (S, K, hidden) normed states. Bucket 0 also says that the
        slot's best token is expected to be the target's.
        """
        return None if self.widths[0] == 1 else self.model.rank(normed, logits).argmax(-1)

    def grow(self, trees: Sequence[BlockTree]) -> Iterator[Sequence[BlockTree]]:
        """Grow all trees block by block."""
        states, logits, buckets = self.timed(self._forward, self.inputs(self.root_rows(trees)), True)
        for tree in trees:
            self._sessions[tree.job.key].finish(tree.job.committed_len)
        self.ranking.couple(trees, self.deepest)
        for block in range(1, self._blocks + 1):
            self.ranking.grow(trees, logits.float(), self.widths, block < self._blocks, buckets)
            for tree in trees:
                self.note(tree, states[tree.first_row : tree.first_row + len(tree.block) // self.slots].flatten(0, 1))
            if sent := trees if self.anytime else [tree for tree in trees if not tree.grows]:
                yield sent
            trees = [tree for tree in trees if tree.grows]
            if not trees:
                return
            inputs = self.inputs(self._start_rows(trees, states.flatten(0, 1)))
            states, logits, buckets = self.timed(self._forward, inputs, False)

    def _forward(self, inputs: Inputs, roots: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the (S, K, hidden) states of blocks behind roots or starts, their logits and (S, K) buckets."""
        states = self.run(inputs).index_select(0, inputs.outputs) if roots else self.run_behind(inputs, inputs.features)
        logits, normed = self.model.read(states)
        return states, logits, self.buckets(logits, normed)

    def _start_rows(self, trees: Sequence[BlockTree], states: Tensor) -> Rows:
        """Make a row of each tree's starts: it reads its token and the state that made it, and sees its path."""
        starts, tails = [(tree, start) for tree in trees for start in tree.starts], list[Tail]()
        for tree in trees:
            session, first = self._sessions[tree.job.key], tree.job.committed_len - 1
            tails.append(Tail(session.table, self.entry(session, first), tree.visible(self.own)))
        return Rows(
            [tree.tokens[start.node - 1] for tree, start in starts],
            [tree.job.committed_len - 1 + start.depth * self.config.block_rope_advance for tree, start in starts],
            tails,
            states,
            sources=[(tree.first_row + start.row) * self.slots + start.slot for tree, start in starts],
        )


class Eagle3Head(SpecBlockHead):
    """A trained EAGLE-3 drafter: blocks of one token, so that a forward adds a level, of which `top_k` are expanded."""

    anytime = False  # each part wakes two processes, and there are many levels

    def __init__(self, settings: DrafterSettings) -> None:
        self.kind = settings.kind  # eagle3 or mtp
        super().__init__(settings)
        self._branch((self.settings.top_k,) * BUCKETS, self.settings.depth)

    def plant(self, job: DraftJob, number: int) -> BlockTree:
        return BlockTree(job, number, self.settings.top_k)

    def buckets(self, logits: Tensor, normed: Tensor) -> None:
        """Return None: every node has as many children."""

    def run_behind(self, inputs: Inputs, condition: Tensor) -> Tensor:
        """Return the (N, 1, hidden) states of blocks of one slot."""
        return super().run_behind(inputs, condition)[:, None]


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
        """Return a tree whose levels have children behind all nodes, or those that a Markov table scores."""
        if not self.config.markov_rank:
            return super().plant(job, number)
        return BlockTree(job, number, min(job.budget, self.settings.top_k, PARENTS), BEST_CHILD)

    def scratch(self, tree: BlockTree) -> int:
        return int(self.config.block_size)

    def prefill(self, session: FeatureSession, upto: int) -> None:
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
