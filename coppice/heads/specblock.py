"""`specblock`: K dependent tokens a forward, M forwards a step, branching by a rank head (SpecBlock, section 3)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from coppice.config.sections import DrafterSettings
from coppice.heads.block_head import BLOCKS, BlockHead
from coppice.heads.models.specblock import BUCKETS, SpecBlockModel

WIDTHS = (2, 4, 6, 10)
"""tokens that a slot branches into, by the rank head's bucket"""


class SpecBlockHead(BlockHead[SpecBlockModel]):
    """A trained SpecBlock drafter; each block is sent as soon as it exists."""

    kind = "specblock"

    def __init__(
        self, settings: DrafterSettings, widths: Sequence[int] = WIDTHS, rank_guided: bool = True, blocks: int = BLOCKS
    ) -> None:
        """Unless `rank_guided`, every slot branches into widths[1] tokens. A chain has one token a slot."""
        if settings.chain:
            widths, rank_guided = (1,) * BUCKETS, False
        self._rank_guided = rank_guided
        super().__init__(settings, widths if rank_guided else (widths[1],) * BUCKETS, blocks)

    def buckets(self, logits: Tensor, normed: Tensor) -> Tensor:
        """Return the rank head's answers, or bucket 1 everywhere."""
        if not self._rank_guided:
            return torch.ones(logits.shape[:-1], dtype=torch.int64, device=self.device)
        return self.model.rank(normed, logits).argmax(-1)
