"""Heads that draft in blocks: K tokens a forward, M forwards a step, the later ones from several nodes at once.

`specblock` branches by a rank head (SpecBlock, section 3).
`eagle3` has blocks of one token, so that a forward adds a level (EAGLE-3, EAGLE-2).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from coppice.config.sections import DrafterSettings
from coppice.engine.rows import Tail
from coppice.heads.base import DraftJob, Growth, with_tree_shape
from coppice.heads.block_tree import Blocks, BlockTree, row_slices
from coppice.heads.feature_head import FeatureHead, Output
from coppice.heads.feature_session import Rows
from coppice.heads.last_draft import LastDraft
from coppice.heads.models.specblock import BUCKETS
from coppice.heads.row_inputs import Inputs
from coppice.speculation.sampling_torch import greedy_ids

BLOCKS = 2
"""forwards of a draft"""
MAX_STARTS = 12  # of a block
BUDGET_OF_A_START = 8  # nodes of the tree that a start should be good for; more starts cost time and gain no token
BUDGET_OF_A_NOISY_START = 4  # the same in a coupled draft: noise leaves the greedy chain early and often
WIDTHS = (2, 4, 6, 10)
"""tokens that a slot branches into, by the rank head's bucket"""


@dataclass
class _Active:
    """A tree that still grows."""

    number: int
    tree: BlockTree
    noise: Tensor | None  # (K * M, draft vocabulary), by depth
    states: Tensor  # (S, K, hidden) of the blocks its starts came from
    last_draft: LastDraft | None
    first: int = 0  # of these blocks, among those of all trees

    def remember(self) -> None:
        """Note the block just added, in a session that wants misses."""
        if self.last_draft is not None:
            self.last_draft.tokens, self.last_draft.parents = self.tree.tokens, self.tree.parents
            self.last_draft.predictions.append((self.tree.block, self.states.flatten(0, 1).clone()))


class BlockHead(FeatureHead):
    """Drafts block by block; a kind says what a slot branches into."""

    anytime: ClassVar[bool] = True
    """whether a block is sent as soon as it exists, and not the whole tree at its end"""
    tree: ClassVar[type[BlockTree]] = BlockTree

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

        It is told by (S, K, draft vocabulary) logits and (S, K, hidden) normed states. Bucket 0 also says that the
        slot's best token is expected to be the target's.
        """
        return torch.ones(logits.shape[:-1], dtype=torch.int64, device=self.device)

    def most_starts(self, job: DraftJob) -> int:
        """Return how many nodes the blocks of one forward start from at most."""
        return min(MAX_STARTS, max(1, job.budget // (BUDGET_OF_A_NOISY_START if job.noisy else BUDGET_OF_A_START)))

    def _draft(self, jobs: Sequence[DraftJob]) -> Iterator[list[Growth]]:
        """Grow all trees block by block."""
        blocks = self._num_blocks
        fit = [self._room(job, (blocks - 1) * self.most_starts(job) * self.slots) for job in jobs]
        if not all(fit):
            yield [BlockTree(job, 0).send(at, last=True) for at, job in enumerate(jobs) if not fit[at]]
        numbers = [at for at in range(len(jobs)) if fit[at]]
        if not numbers:
            return
        output, noise = self._from_roots([jobs[at] for at in numbers], self.slots * blocks)
        active = [
            _Active(
                at,
                self.tree(jobs[at], self.most_starts(jobs[at]), self.settings.chain),
                its_noise,
                output[0][:0],
                self._keep_draft(jobs[at]),
            )
            for at, its_noise in zip(numbers, noise, strict=True)
        ]
        for block in range(1, blocks + 1):
            self._grow(active, output, deeper=block < blocks)
            growing = [one for one in active if len(one.tree.starts)]
            if sent := active if self.anytime else [one for one in active if one not in growing]:
                yield [one.tree.send(one.number, last=one not in growing) for one in sent]
            active = growing
            if not active:
                return
            output = self._from_states(self._start_rows(active, output[0].flatten(0, 1)))

    def _start_rows(self, active: Sequence[_Active], states: Tensor) -> Rows:
        """Make a row of each tree's starts: it reads its own token and the state of the slot that made it.

        It sees what lies on its path.
        """
        sources: list[int] = []
        tokens: list[int] = []
        positions: list[int] = []
        tails: list[Tail] = []
        advance = self.model.config.block_rope_advance
        for one in active:
            tree, starts, session = one.tree, one.tree.starts, self._sessions[one.tree.job.key]
            first = tree.job.committed_len - 1
            made_by = zip(starts.rows, starts.slots, strict=True)
            sources += [(one.first + row) * self.slots + slot for row, slot in made_by]
            tokens += [tree.tokens[node - 1] for node in starts.nodes]
            positions += [first + depth for depth in starts.depths] if advance else [first] * len(starts)
            tails.append(Tail(session.table, self._entry(session, first), starts.visible(self._own)))
        return Rows(states, tokens, positions, tails, sources=sources)

    def _read_states(self, states: Tensor) -> Output:
        """Return (S, K, hidden) states with their logits and the (S, K) buckets of their slots."""
        logits, normed = self.model.read(states)
        return states, logits, self.buckets(logits, normed)

    @torch.inference_mode()
    def _grow(self, active: Sequence[_Active], output: Output, deeper: bool) -> None:
        """Add the blocks of a forward to the trees."""
        states, logits, branching = output
        scores, slices = logits.float(), row_slices(one.tree for one in active)
        # A block goes on from the greedy tokens of its slots, but for the last one.
        coupled = self.slots > 1 and any(one.noise is not None for one in active)
        greedy = greedy_ids(scores)[..., None] if coupled else None
        for one, rows in zip(active, slices, strict=True):
            if one.noise is None:
                self.ranking.score(scores[rows], one.tree.job, None)
            else:  # of the positions where each slot's token will stand
                start = rows.start
                for depth, alike in groupby(one.tree.starts.depths):
                    end = start + len(list(alike))
                    self.ranking.score(scores[start:end], one.tree.job, one.noise[depth : depth + self.slots])
                    start = end
            one.states, one.first = states[rows], rows.start
        width = max(1, *self._widths) + coupled  # room for a greedy token that the noise puts behind the others
        tokens, values, more = self.ranking.likeliest(scores, width, branching[..., None], wanted=greedy)
        buckets, spine = more[-1][..., 0], more[0][..., 0] if coupled else np.zeros(scores.shape[:-1], np.int64)
        blocks = [part.tolist() for part in (tokens, values, spine, buckets)]
        for one, rows in zip(active, slices, strict=True):
            self._add(one.tree, Blocks(*(part[rows] for part in blocks)), deeper)
            one.remember()

    def _add(self, tree: BlockTree, blocks: Blocks, deeper: bool) -> None:
        """Add what a forward predicts behind a tree's starts."""
        tree.grow(blocks, self._widths, deeper)


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

    def _add(self, tree: BlockTree, blocks: Blocks, deeper: bool) -> None:
        """Add a level."""
        tree.grow_level([slots[0] for slots in blocks.tokens], [slots[0] for slots in blocks.scores], deeper)
