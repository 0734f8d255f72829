"""`falcon`: blocks of K tokens a forward, verified as a static tree (SpecBlock, appendix A.4)."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coppice.config.sections import DrafterSettings
from coppice.heads.base import with_tree_shape
from coppice.heads.block_head import BLOCKS, BlockHead
from coppice.heads.models.falcon import FalconModel
from coppice.heads.models.specblock import BUCKETS

FIRST, OTHERS = 0.6, 0.25
"""how often a slot's best token is the target's and how often one of its others, roughly and of no head in particular:
between what `coppice bench paper rank` prints of two trained heads"""


def prior(width: int) -> NDArray[np.float32]:
    """Return the (width,) log-probabilities that the static tree gives to a slot's tokens by rank.

    The others fall as 1 / rank^2. All are in 1024ths, so that sums are exact: of equal ones every machine takes the
    earlier node.
    """
    rank = np.arange(1, width)
    chances = np.concatenate(([FIRST], OTHERS / (rank * (rank + 1))))
    return (np.round(np.log(chances) * 1024) / 1024).astype(np.float32)


class FalconHead(BlockHead[FalconModel]):
    """A trained Falcon drafter.

    Which nodes a tree has and where its later blocks start depends on the ranks of tokens in their slots, never on what
    the model gives them: the tree grows as that of a drafter whose slots are all as sure as `prior` says.
    """

    kind = "falcon"
    anytime = False  # a receiver would prune what a later block displaces by the model's scores

    def __init__(self, settings: DrafterSettings, blocks: int = BLOCKS) -> None:
        width = with_tree_shape(settings).top_k
        super().__init__(settings, (width,) * BUCKETS, blocks)
        self.worth = prior(width + 1)  # one more for a greedy token that noise puts behind the others

    def buckets(self, logits: Tensor, normed: Tensor) -> Tensor:
        """Return the same bucket everywhere."""
        return torch.ones(logits.shape[:-1], dtype=torch.int64, device=self.device)

    def _visible(self, rows: int) -> NDArray[np.bool_]:
        """Return the relaxed causal mask: all slots of the rows so far, the later ones of the same row too."""
        return np.tri(rows, dtype=np.bool_).repeat(self.slots, axis=0).repeat(self.slots, axis=1)
