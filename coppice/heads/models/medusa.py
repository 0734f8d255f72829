"""Medusa's heads as a torch module (SpecBlock, appendix A.4): each predicts one offset, knowing of no other.

Medusa reads the target's last hidden state. Ours reads the features of the layers that it names; they are fused first,
as EAGLE-3 does it.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import NonNegativeInt, PositiveInt
from torch import Tensor, nn

from coppice.heads.models.layers import DraftModel, HeadConfig, norm_of


class MedusaConfig(HeadConfig):
    """Sizes of a Medusa head: it has no attention and no KV."""

    kind: ClassVar[str] = "medusa"
    num_hidden_layers: NonNegativeInt = 0
    slots: PositiveInt = 5
    """K, how many offsets there is a head for"""


class _Offset(nn.Module):
    """A residual layer and an output layer."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.residual = nn.Linear(config.hidden_size, config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        nn.init.zeros_(self.residual.bias)

    def forward(self, fused: Tensor) -> Tensor:
        """(..., hidden) -> (..., hidden)."""
        return fused + F.silu(self.residual(fused))


class MedusaModel(DraftModel):
    """The features fused, and K heads on them. Head k predicts the token k + 2 places behind the features' own."""

    config: MedusaConfig

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config)
        self.fc = nn.Linear(config.feature_width, config.hidden_size, bias=False)
        self.norm = norm_of(config)
        self.heads = nn.ModuleList(_Offset(config) for _ in range(config.slots))
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))

    def forward(self, features: Tensor) -> Tensor:
        """(..., feature width) features -> (..., K, hidden) states, one for each offset."""
        fused = self.norm(self.fc(features))
        return torch.stack([head(fused) for head in self.heads], dim=-2)

    def read(self, states: Tensor, slot: int = 0) -> tuple[Tensor, Tensor]:
        """(..., hidden) states of one offset -> (..., draft vocabulary) logits, and the states."""
        offset: Any = self.heads[slot]
        return offset.lm_head(states), states
