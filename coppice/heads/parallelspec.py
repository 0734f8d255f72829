"""`parallelspec`: K mask tokens behind the prefix, read in one forward of one layer (SpecBlock, appendix A.4)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from coppice.engine.attention_plan import Tail
from coppice.heads.base import DraftJob
from coppice.heads.feature_session import FeatureSession, Inputs, Rows
from coppice.heads.models.parallelspec import ParallelSpecModel
from coppice.heads.parallel_head import ParallelHead


class ParallelSpecHead(ParallelHead[ParallelSpecModel]):
    """A trained ParallelSpec drafter. A draft's masks lie behind the rows in KV until later rows take their place."""

    kind = "parallelspec"
    scratch = True

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
        rows, ends = self._query_rows(jobs)  # of each job the last mask's
        masks = ends[:, None] + torch.arange(1 - self.deepest, 1, device=self.device)
        return self.timed(self._logits, self._inputs(rows), masks)

    def _logits(self, inputs: Inputs, masks: Tensor) -> Tensor:
        return self.model.read(self._forward(inputs, masks)[masks])

    def _states(self, inputs: Inputs) -> Tensor:
        """Return (N, hidden) un-normed states of rows of target features."""
        return self._forward(inputs, None)

    def _forward(self, inputs: Inputs, masks: Tensor | None) -> Tensor:
        """Return (N, hidden) states of rows of which those at (J, masks) indices are mask tokens."""
        rows = self.model.prefix(inputs.features, inputs.embeddings[0])
        if masks is not None:
            rows[masks] = self.model.mask_tokens.weight[: self.deepest]
        rope = self.model.rope(inputs.positions, self.dtype)
        states: Tensor = self.model(rows[None], rope, inputs.attends)
        return states[0]
