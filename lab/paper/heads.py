"""The heads that the SpecBlock paper compares with (SpecBlock, appendix A.4), which a drafter finds as entry points.

`medusa` has K independent heads on the target's features, `parallelspec` reads K mask tokens behind the prefix: both
predict all of a draft's tokens in one forward, no slot knowing of another. `falcon` drafts in blocks as SpecBlock does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coppice.config.sections import DrafterSettings
from coppice.engine.rows import Tail
from coppice.heads.base import DraftJob, Growth, with_tree_shape
from coppice.heads.block_head import BLOCKS, BlockHead, Blocks, BlockTree
from coppice.heads.masked_block_head import ParallelHead
from coppice.heads.models.specblock import BUCKETS
from coppice.heads.rows import FeatureSession, Inputs, Rows
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


class MedusaHead(ParallelHead):
    """A trained set of Medusa heads: they read the last committed position's features alone, and not the root."""

    kind = "medusa"
    shape = MedusaConfig, MedusaModel

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
    shape = ParallelSpecConfig, ParallelSpecModel

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


@dataclass(eq=False)
class StaticTree(BlockTree):
    """A tree whose nodes and starts are chosen by the ranks of tokens in their slots, as `prior` has them.

    It sends the scores that the model gives.
    """

    given: list[float] = field(default_factory=list)
    """cumulative log-scores by the model, of each candidate"""

    def grow(self, blocks: Blocks, widths: Sequence[int], deeper: bool) -> None:
        """Add what a forward predicts behind the starts, whatever scores it gives."""
        slot_of, first = {node: (row, 0) for row, node in enumerate(self.starts.nodes)}, len(self.tokens)
        by_rank = [[prior(len(slot)) for slot in slots] for slots in blocks.scores]
        super().grow(blocks._replace(scores=by_rank), widths, deeper)
        for node in range(first + 1, len(self.tokens) + 1):
            parent = self.parents[node - 1]
            row, slot = slot_of[parent]
            place = blocks.tokens[row][slot].index(self.tokens[node - 1])
            self.given.append((self.given[parent - 1] if parent else 0.0) + blocks.scores[row][slot][place])
            if place == blocks.spine[row][slot]:
                slot_of[node] = row, slot + 1

    def send(self, last: bool) -> Growth:
        """Return the best candidates; call it once."""
        growth = super().send(last)
        scores = np.array([score for score, sent in zip(self.given, self.sent, strict=True) if sent], np.float32)
        return replace(growth, nodes=replace(growth.nodes, log_probs=scores))


class FalconHead(BlockHead):
    """A trained Falcon drafter: the slots of a block see one another, and its tree is static.

    Which nodes a tree has and where its later blocks start depends on the ranks of tokens in their slots, never on what
    the model gives them: the tree grows as that of a drafter whose slots are all as sure as `prior` says.
    """

    kind = "falcon"
    shape = FalconConfig, FalconModel
    tree = StaticTree
    anytime = False  # a receiver would prune what a later block displaces by the model's scores

    def __init__(self, settings: DrafterSettings, blocks: int = BLOCKS) -> None:
        super().__init__(settings, (with_tree_shape(settings).top_k,) * BUCKETS, blocks)
        self._own = [(1 << self.slots) - 1] * self.slots

    def _visible(self, rows: int) -> NDArray[np.bool_]:
        return np.tri(rows, dtype=np.bool_).repeat(self.slots, axis=0).repeat(self.slots, axis=1)


def prior(width: int) -> list[float]:
    """Return the (width,) log-probabilities that the static tree gives to a slot's tokens by rank.

    The others fall as 1 / rank^2. All are in 1024ths, so that sums are exact: of equal ones every machine takes the
    earlier node.
    """
    chances = [FIRST, *(OTHERS / (rank * (rank + 1)) for rank in range(1, width))]
    return [round(math.log(chance) * 1024) / 1024 for chance in chances]
