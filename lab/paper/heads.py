"""The heads that the SpecBlock paper compares with (SpecBlock, appendix A.4), which a drafter finds as entry points.

`medusa` has K independent heads on the target's features, `parallelspec` reads K mask tokens behind the prefix: both
predict all of a draft's tokens in one forward, no slot knowing of another.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from coppice.config.sections import DrafterSettings
from coppice.engine.rows import Tail
from coppice.heads.base import DraftJob
from coppice.heads.feature_head import FeatureHead, FeatureSession, Inputs, Rows
from coppice.heads.tree import BlockTree
from lab.paper.models import MedusaConfig, MedusaModel, ParallelSpecConfig, ParallelSpecModel


class AtOnceHead(FeatureHead):
    """Predicts all of a draft's tokens in one forward: the tree is every combination of the slots' `top_k` tokens."""

    def __init__(self, settings: DrafterSettings) -> None:
        super().__init__(settings)
        self.deepest = min(self.config.slots, self.settings.depth)

    def plant(self, job: DraftJob, number: int) -> BlockTree:
        """Return a tree whose level has children behind all its nodes."""
        return BlockTree(job, number, job.budget)

    def grow(self, trees: Sequence[BlockTree]) -> Iterator[Sequence[BlockTree]]:
        """Grow all trees, each sent as a whole."""
        logits = self.predict(trees).float()
        for tree in trees:
            self._sessions[tree.job.key].finish(tree.job.committed_len)
        self.ranking.couple(trees, self.deepest)
        self.ranking.cross(trees, logits, self.settings.top_k)
        yield trees

    @abstractmethod
    def predict(self, trees: Sequence[BlockTree]) -> Tensor:
        """Return (J, deepest, draft vocabulary) logits of each slot behind each job's root; rows end up in KV."""


class MedusaHead(AtOnceHead):
    """A trained set of Medusa heads: they read the last committed position's features alone, and not the root."""

    kind = "medusa"
    shape = MedusaConfig, MedusaModel

    def prefill(self, session: FeatureSession, upto: int) -> None:
        """Keep nothing of a position."""
        session.finish(upto)

    def predict(self, trees: Sequence[BlockTree]) -> Tensor:
        """Read the features of the last rows."""
        rows = self.root_rows(trees)
        assert rows.features is not None
        states = self.timed(self.model, rows.features[list(rows.outputs)].to(self.device))
        slots = range(self.deepest)
        return self.timed(lambda: torch.stack([self.model.read(states[:, slot], slot)[0] for slot in slots], dim=1))


class ParallelSpecHead(AtOnceHead):
    """A trained ParallelSpec drafter. A draft's masks lie behind the rows in KV until later rows take their place."""

    kind = "parallelspec"
    shape = ParallelSpecConfig, ParallelSpecModel

    def scratch(self, tree: BlockTree) -> int:
        """Return one entry for each mask."""
        return self.deepest

    def committed_rows(self, session: FeatureSession, upto: int, root: int | None) -> Rows:
        """Add a group of masks behind the root; what a mask reads beside its position is of no account."""
        rows = super().committed_rows(session, upto, root)
        if root is None or rows.features is None:
            return rows
        (tail,), masks = rows.tails, self.deepest
        visible = self.visible(len(rows.tokens) + masks)
        return Rows(
            [*rows.tokens, *[0] * masks],
            np.append(rows.positions, np.arange(masks) + upto),
            (Tail(tail.table, tail.prefix, visible),),
            torch.cat((rows.features, rows.features.new_zeros(masks, rows.features.shape[1]))),
        )

    def predict(self, trees: Sequence[BlockTree]) -> Tensor:
        """Read the masks' states."""
        inputs = self.inputs(self.root_rows(trees))  # of each job the last mask's row is kept
        masks = inputs.outputs[:, None] + torch.arange(1 - self.deepest, 1, device=self.device)
        return self.timed(self._logits, inputs, masks)

    def _logits(self, inputs: Inputs, masks: Tensor) -> Tensor:
        logits: Tensor = self.model.read(self.run(inputs, masks)[masks])[0]
        return logits

    def run(self, inputs: Inputs, masks: Tensor | None = None) -> Tensor:
        """Return (N, hidden) un-normed states of rows of target features, but that those at (J, masks) are masks."""
        rows = self.model.prefix(inputs.features, inputs.embeddings[0])
        if masks is not None:
            rows[masks] = self.model.mask_tokens.weight[: self.deepest]
        rope = self.model.rope(inputs.positions, self.dtype)
        states: Tensor = self.model(rows[None], rope, inputs.attends)
        return states[0]
