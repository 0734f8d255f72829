"""`medusa`: K independent heads on the target's features, a tree over their likeliest tokens (SpecBlock, A.4)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from coppice.heads.base import DraftJob
from coppice.heads.feature_session import FeatureSession
from coppice.heads.models.medusa import MedusaModel
from coppice.heads.parallel_head import ParallelHead


class MedusaHead(ParallelHead[MedusaModel]):
    """A trained set of Medusa heads: they read the last committed position's features alone, and not the root."""

    kind = "medusa"

    def _prefill(self, session: FeatureSession, upto: int) -> None:
        session.done = upto  # nothing is kept of a position

    def _predict(self, jobs: Sequence[DraftJob]) -> Tensor:
        rows, ends = self._query_rows(jobs)
        return self.timed(self._logits, rows.features[ends])

    def _logits(self, features: Tensor) -> Tensor:
        states = self.model(features)
        return torch.stack([self.model.read(states[:, slot], slot) for slot in range(self.deepest)], dim=1)
