"""`specblock`: K dependent tokens a forward, M forwards a step, branching by a rank head (SpecBlock, section 3)."""

from __future__ import annotations

import torch
from torch import Tensor

from coppice.config.sections import DrafterSettings
from coppice.heads.block_head import BlockHead
from coppice.heads.checkpoints import load_specblock
from coppice.heads.models.specblock import BUCKETS, SpecBlockModel


class SpecBlockHead(BlockHead[SpecBlockModel]):
    """A trained SpecBlock drafter; each block is sent as soon as it exists."""

    def __init__(self, settings: DrafterSettings) -> None:
        """Load `settings.path` for the target of `settings.target`, on the thread that will use it.

        Raises InvalidField on a folder that is not exactly a SpecBlock checkpoint for this target.
        """
        settings = settings.of_kind()
        widths = settings.widths if settings.rank_guided else (settings.widths[1],) * BUCKETS
        super().__init__(settings, "specblock", load_specblock(settings.path, settings.target), widths)

    def buckets(self, logits: Tensor, normed: Tensor) -> Tensor:
        """Return the rank head's answers, or bucket 1 everywhere."""
        if not self.settings.rank_guided:
            return torch.ones(logits.shape[:-1], dtype=torch.int64, device=self.device)
        return self.model.rank(normed, logits).argmax(-1)
