"""The ParallelSpec drafter as a torch module (SpecBlock, appendix A.4): one layer, K mask tokens behind the prefix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from pydantic import PositiveInt
from torch import Tensor, nn

from coppice.heads.models.block import Layer
from coppice.heads.models.layers import Attend, DraftModel, HeadConfig, norm_of
from coppice.heads.models.rotary import Rope


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
