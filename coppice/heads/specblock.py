"""`specblock`: K dependent tokens a forward, M forwards a step, branching by a rank head (SpecBlock, section 3)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from coppice.heads.block_head import BlockHead
from coppice.heads.models.specblock import BUCKETS, SpecBlockModel


class SpecBlockHead(BlockHead[SpecBlockModel]):
    """A trained SpecBlock drafter; each block is sent as soon as it exists."""

    kind = "specblock"

    def widths(self) -> Sequence[int]:
        """Return the settings' widths, the second of them everywhere where no rank head guides."""
        return self.settings.widths if self.settings.rank_guided else (self.settings.widths[1],) * BUCKETS

    def buckets(self, logits: Tensor, normed: Tensor) -> Tensor:
        """Return the rank head's answers, or bucket 1 everywhere."""
        if not self.settings.rank_guided:
            return torch.ones(logits.shape[:-1], dtype=torch.int64, device=self.device)
        return self.model.rank(normed, logits).argmax(-1)
