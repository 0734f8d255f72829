"""The heads that the SpecBlock paper compares with (SpecBlock, appendix A.4), which a drafter finds as entry points.

`medusa` has K independent heads on the target's features, `parallelspec` reads K mask tokens behind the prefix: both
predict all of a draft's tokens in one forward, no slot knowing of another. `falcon` drafts in blocks as SpecBlock does.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coppice.config.sections import DrafterSettings
from coppice.engine.rows import Tail
from coppice.heads.base import DraftJob, with_tree_shape
from coppice.heads.block_head import BlockHead
from coppice.heads.feature_head import FeatureHead, FeatureSession, Inputs, Rows
from coppice.heads.models import BUCKETS
from coppice.heads.tree import Blocks, BlockTree
from lab.paper.models import (
    FalconConfig,
    FalconModel,
    MedusaConfig,
    MedusaModel,
    ParallelSpecConfig,
    ParallelSpecModel,
)

FIRST, OTHERS = 0.6, 0.25
"""how often a slot's best token is the target's and how often one of its others, roughly and of no head in particular:
between what `coppice bench paper rank` prints of two trained heads"""


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


class StaticTree(BlockTree):
    """A tree whose scores are those of `prior`: they follow from the ranks of tokens in their slots alone."""

    def grow(self, blocks: Blocks, widths: Sequence[int], deeper: bool) -> None:
        """Add what a forward predicts behind the starts, whatever scores it gives."""
        by_rank = [[prior(len(slot)) for slot in slots] for slots in blocks.scores]
        super().grow(blocks._replace(scores=by_rank), widths, deeper)


class FalconHead(BlockHead):
    """A trained Falcon drafter: the slots of a block see one another, and its tree is static.

    Which nodes a tree has and where its later blocks start depends on the ranks of tokens in their slots, never on what
    the model gives them: the tree grows as that of a drafter whose slots are all as sure as `prior` says.
    """

    kind = "falcon"
    shape = FalconConfig, FalconModel

    def __init__(self, settings: DrafterSettings) -> None:
        super().__init__(settings, (with_tree_shape(settings).top_k,) * BUCKETS)
        self.own = [(1 << self.slots) - 1] * self.slots

    def plant(self, job: DraftJob, number: int) -> BlockTree:
        """Return a static tree."""
        return StaticTree(job, number, super().plant(job, number).most_starts)

    def visible(self, rows: int) -> NDArray[np.bool_]:
        """Return what a row's entries see: their own row whole."""
        return np.tri(rows, dtype=np.bool_).repeat(self.slots, axis=0).repeat(self.slots, axis=1)


def prior(width: int) -> list[float]:
    """Return the (width,) log-probabilities that the static tree gives to a slot's tokens by rank.

    The others fall as 1 / rank^2. All are in 1024ths, so that sums are exact: of equal ones every machine takes the
    earlier node.
    """
    chances = [FIRST, *(OTHERS / (rank * (rank + 1)) for rank in range(1, width))]
    return [round(math.log(chance) * 1024) / 1024 for chance in chances]
