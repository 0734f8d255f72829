"""The EAGLE-3 drafter as a torch module: one layer over the token embedding beside the fused features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from pydantic import PositiveInt
from torch import Tensor, nn

from coppice.heads.models.layers import MLP, Attend, Attention, DraftModel, HeadConfig, Rope, norm_of


class Eagle3Config(HeadConfig):
    """Sizes of an EAGLE-3 head: it drafts as a head of blocks with one slot each would."""

    kind: ClassVar[str] = "eagle3"
    slots: ClassVar[int] = 1
    block_rope_advance: ClassVar[bool] = True
    num_hidden_layers: PositiveInt = 1
    norm_before_residual: bool = False
    """the residual is the normed hidden state (speculators)"""
    norm_before_fc: bool = False
    """features are normed before they are fused (speculators)"""
    norm_output: bool = False
    """the next level reads the normed state (EAGLE 3.1, speculators)"""


class _MidLayer(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.hidden_norm, self.input_layernorm = norm_of(config), norm_of(config)
        self.post_attention_layernorm = norm_of(config)
        self.self_attn, self.mlp = Attention(config, inputs=2), MLP(config)
        self.normed_residual = config.norm_before_residual

    def forward(self, embedding: Tensor, hidden: Tensor, rope: Rope, attend: Attend) -> Tensor:
        normed = self.hidden_norm(hidden)
        states = torch.cat((self.input_layernorm(embedding), normed), dim=-1)
        hidden = (normed if self.normed_residual else hidden) + self.self_attn(states, rope, attend)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class Eagle3Model(DraftModel):
    """The layer behind the fused features."""

    config: Eagle3Config

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        wide = config.feature_width
        self.fc = nn.Linear(wide, config.hidden_size, bias=False)
        self.input_norm = norm_of(config, wide) if config.norm_before_fc else None
        self.midlayer = _MidLayer(config)
        self.add_output()

    def condition(self, features: Tensor) -> Tensor:
        """Turn (..., feature width) features into (..., hidden) fused ones."""
        out: Tensor = self.fc(features if self.input_norm is None else self.input_norm(features))
        return out

    def forward(self, hidden: Tensor, embedding: Tensor, rope: Rope, attends: Sequence[Attend]) -> Tensor:
        """(B, N, hidden) fused features or own states, and token embeddings -> (B, N, hidden) states.

        The states are un-normed, unless the configuration has `norm_output`.
        """
        (attend,) = attends
        out: Tensor = self.midlayer(embedding, hidden, rope, attend)
        return self.norm(out) if self.config.norm_output else out

    def read(self, states: Tensor, slot: int = 0) -> tuple[Tensor, Tensor]:
        """(..., hidden) states -> (..., draft vocabulary) logits, and (..., hidden) normed states."""
        if not self.config.norm_output:
            return super().read(states, slot)
        logits: Tensor = self.lm_head(states)
        return logits, states
