"""The parts that drafters of blocks share: K slots a row, each with condition, token and a position query."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from pydantic import PositiveInt
from torch import Tensor, nn

from coppice.heads.models.layers import MLP, Attend, Attention, DraftModel, HeadConfig, Part, norm_of
from coppice.heads.models.rotary import Rope


class BlockConfig(HeadConfig):
    """Sizes of a head that drafts in blocks."""

    slots: PositiveInt = 4
    """K, positions a block predicts"""
    block_rope_advance: bool = True
    """whether a later block's rotary positions move on by the depth it starts at"""


class Layer(nn.Module):
    """A pre-norm decoder layer."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = norm_of(config), norm_of(config)
        self.self_attn, self.mlp = Attention(config), MLP(config)

    def forward(self, states: Tensor, rope: Rope, attend: Attend, context: Tensor | None = None) -> Tensor:
        """(B, T, hidden) -> (B, T, hidden). (B, C, hidden) `context` rows before them give keys and values alone."""
        states = states + self.self_attn(self.input_layernorm(states), rope, attend, context)
        out: Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return out


class BlockInput(Part):
    """Condition, token and position query of each slot, normalised and fused (SpecBlock, equation 2)."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.condition_proj = nn.Linear(config.feature_width, hidden, bias=False)
        self.condition_norm, self.token_norm, self.query_norm = (norm_of(config) for _ in range(3))
        self.position_queries = nn.Embedding(config.slots, hidden)
        self.fuse = nn.Linear(3 * hidden, hidden, bias=False)
        nn.init.normal_(self.position_queries.weight, std=0.02)

    def forward(self, condition: Tensor, token: Tensor, broadcast: bool = True) -> Tensor:
        """(B, N, hidden) conditions and token embeddings -> (B, N, K, hidden); broadcast: into every slot."""
        shared = self.condition_norm(condition), self.token_norm(token), torch.zeros_like(condition)
        # fuse [c, t, q] = fuse [c, t, 0] + fuse [0, 0, q]: the first term is the same in every slot.
        of_prefix: Tensor = self.fuse(torch.cat(shared, dim=-1))
        of_query = self.constant() if self.kept is None else self.kept
        if broadcast:
            return of_prefix[..., None, :] + of_query
        slots = of_query.expand(*of_prefix.shape[:-1], -1, -1)
        return torch.cat((slots[..., :1, :] + of_prefix[..., None, :], slots[..., 1:, :]), dim=-2)

    def constant(self) -> Tensor:
        """Make the (K, hidden) terms of the position queries."""
        query = self.query_norm(self.position_queries.weight)
        of_query: Tensor = self.fuse(F.pad(query, (2 * query.shape[-1], 0)))
        return of_query


class BlockModel(DraftModel):
    """A model of blocks; a kind adds its layers and `forward`.

    Rows are blocks: a row has K slots, and slot k of a row predicts the token k + 1 places behind the row's token.
    `forward` takes (B, N, hidden) conditions and token embeddings, the rotary factors, and for each layer its attention
    over the N * K slots in row-major order; it returns (B, N, K, hidden) un-normed last-layer states.
    """

    config: BlockConfig
    input_layer: BlockInput

    def condition(self, features: Tensor) -> Tensor:
        """Turn (..., feature width) features into (..., hidden) conditions of first blocks (equation 1)."""
        out: Tensor = self.input_layer.condition_proj(features)
        return out

    def rope(self, positions: Tensor, dtype: torch.dtype) -> Rope:
        """Return the (B, N * K, D) rotary factors of rows at (B, N) positions: slot k stands k + 1 further."""
        slots = positions[..., None] + torch.arange(1, self.config.slots + 1, device=positions.device)
        return self.rotary(slots.flatten(1), dtype)
