"""Heads that predict all of a draft's tokens in one forward, no slot knowing of another (SpecBlock, appendix A.4).

`medusa` has K independent heads on the target's features; `parallelspec` reads K mask tokens behind the prefix.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from coppice.config.sections import DrafterSettings
from coppice.engine.rows import Tail
from coppice.heads.base import DraftJob, Growth
from coppice.heads.block_tree import BlockTree
from coppice.heads.feature_head import FeatureHead
from coppice.heads.feature_session import FeatureSession, Rows
from coppice.heads.row_inputs import Inputs


class ParallelHead(FeatureHead):
    """The tree is every combination of the slots' `top_k` tokens, pruned to the budget by cumulative probability."""

    def __init__(self, settings: DrafterSettings) -> None:
        super().__init__(settings)
        self.deepest = min(self.config.slots, self.settings.depth)

    @property
    def scratch(self) -> int:
        """KV entries that a draft writes behind its rows."""
        return 0

    def most_starts(self, job: DraftJob) -> int:
        """Return how many nodes of a level have children: all that may be in the tree."""
        return job.budget

    def width(self, jobs: Sequence[DraftJob]) -> int:
        """Return how many tokens of a slot are looked at."""
        return self.settings.top_k

    def _draft(self, jobs: Sequence[DraftJob]) -> Iterator[list[Growth]]:
        """All trees, each sent as a whole."""
        yield self._drafted(jobs)

    @torch.inference_mode()
    def _drafted(self, jobs: Sequence[DraftJob]) -> list[Growth]:
        trees = [BlockTree(job, self.most_starts(job)) for job in jobs]
        active = [tree for tree in trees if self._room(tree.job, self.scratch)]
        if active:
            self._grow(active)
        return [tree.send(number, last=True) for number, tree in enumerate(trees)]

    def _grow(self, trees: Sequence[BlockTree]) -> None:
        jobs = [tree.job for tree in trees]
        scores = self._predict(jobs).float()
        self._settle(jobs)
        for row, job in enumerate(jobs):
            self.ranking.score(scores[row], job, self._noise(job, self.deepest))
        tokens, values, _ = self.ranking.likeliest(scores, self.width(jobs))
        for tree, slot_tokens, slot_scores in zip(trees, tokens.tolist(), values.tolist(), strict=True):
            cross(tree, slot_tokens, slot_scores)

    @abstractmethod
    def _predict(self, jobs: Sequence[DraftJob]) -> Tensor:
        """Return (J, deepest, draft vocabulary) logits of each slot behind each job's root; rows end up in KV."""


class MedusaHead(ParallelHead):
    """A trained set of Medusa heads: they read the last committed position's features alone, and not the root."""

    kind = "medusa"

    def _prefill(self, session: FeatureSession, upto: int) -> None:
        session.done = upto  # nothing is kept of a position

    def _predict(self, jobs: Sequence[DraftJob]) -> Tensor:
        rows = self._query_rows(jobs)
        return self.timed(self._logits, rows.features[list(rows.kept)].to(self.device))

    def _logits(self, features: Tensor) -> Tensor:
        states = self.model(features)
        return torch.stack([self.model.read(states[:, slot], slot)[0] for slot in range(self.deepest)], dim=1)


class ParallelSpecHead(ParallelHead):
    """A trained ParallelSpec drafter. A draft's masks lie behind the rows in KV until later rows take their place."""

    kind = "parallelspec"

    @property
    def scratch(self) -> int:
        """One entry for each mask."""
        return self.deepest

    def _committed_rows(self, session: FeatureSession, upto: int, root: int | None) -> Rows:
        """Add a group of masks behind the root; what a mask reads beside its position is of no account."""
        rows = super()._committed_rows(session, upto, root)
        if root is None:
            return rows
        (tail,), masks = rows.tails, self.deepest
        visible = self._visible(len(rows.tokens) + masks)
        return Rows(
            torch.cat((rows.features, rows.features.new_zeros(masks, rows.features.shape[1]))),
            [*rows.tokens, *[0] * masks],
            np.append(rows.positions, np.arange(masks) + upto),
            (Tail(tail.table, tail.prefix, visible),),
        )

    def _predict(self, jobs: Sequence[DraftJob]) -> Tensor:
        inputs = self.row_inputs.make(self._query_rows(jobs))  # of each job the last mask's row is kept
        masks = inputs.kept[:, None] + torch.arange(1 - self.deepest, 1, device=self.device)
        return self.timed(self._logits, inputs, masks)

    def _logits(self, inputs: Inputs, masks: Tensor) -> Tensor:
        logits: Tensor = self.model.read(self._masked(inputs, masks)[masks])[0]
        return logits

    def _states(self, inputs: Inputs) -> Tensor:
        """Return (N, hidden) un-normed states of rows of target features."""
        return self._masked(inputs, None)

    def _masked(self, inputs: Inputs, masks: Tensor | None) -> Tensor:
        """Return (N, hidden) states of rows of which those at (J, masks) indices are mask tokens."""
        rows = self.model.prefix(inputs.features, inputs.embeddings[0])
        if masks is not None:
            rows[masks] = self.model.mask_tokens.weight[: self.deepest]
        rope = self.model.rope(inputs.positions, self.dtype)
        states: Tensor = self.model(rows[None], rope, inputs.attends)
        return states[0]


def cross(tree: BlockTree, tokens: list[list[int]], scores: list[list[float]]) -> None:
    """Add all paths over slots that know nothing of one another: (K, W) tokens, each slot's best first."""
    for depth, (of_slot, values) in enumerate(zip(tokens, scores, strict=True), start=1):
        count = len(tree.starts)
        tree.grow_level([of_slot] * count, [values] * count, depth < len(tokens))
        if not len(tree.starts):
            return
