"""The drafters that the SpecBlock paper compares with, as torch modules (SpecBlock, appendix A.4).

Medusa reads the target's last hidden state. Ours reads the features of the layers that it names; they are fused first,
as EAGLE-3 does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import NonNegativeInt, PositiveInt
from torch import Tensor, nn

from coppice.heads.layers import Attend, DraftModel, HeadConfig, Layer, Rope, norm_of


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


class ParallelSpecConfig(HeadConfig):
    """Sizes of a ParallelSpec head."""

    kind: ClassVar[str] = "parallelspec"
    num_hidden_layers: PositiveInt = 1
    slots: PositiveInt = 5
    """K, how many mask tokens follow the prefix"""


class ParallelSpecModel(DraftModel):
    """The layers over prefix rows and mask tokens.

    A row of the prefix is the features of a position beside the token behind it. Mask k of the group behind a row
    predicts the token k + 1 places behind the row's token; it stands k + 1 places behind the row.
    """

    config: ParallelSpecConfig

    def __init__(self, config: ParallelSpecConfig) -> None:
        super().__init__(config)
        hidden = config.hidden_size
        self.condition_proj = nn.Linear(config.feature_width, hidden, bias=False)
        self.condition_norm, self.token_norm = norm_of(config), norm_of(config)
        self.fuse = nn.Linear(2 * hidden, hidden, bias=False)
        self.mask_tokens = nn.Embedding(config.slots, hidden)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.add_output()

    def prefix(self, features: Tensor, token: Tensor) -> Tensor:
        """(..., feature width) features and (..., hidden) token embeddings -> (..., hidden) rows of the prefix."""
        condition = self.condition_norm(self.condition_proj(features))
        out: Tensor = self.fuse(torch.cat((condition, self.token_norm(token)), dim=-1))
        return out

    def forward(self, rows: Tensor, rope: Rope, attends: Sequence[Attend]) -> Tensor:
        """(B, T, hidden) rows of prefixes and mask tokens -> (B, T, hidden) un-normed states."""
        for layer, attend in zip(self.layers, attends, strict=True):
            rows = layer(rows, rope, attend)
        return rows
