"""The SpecBlock drafter as a torch module (SpecBlock, sections 3.1 and 3.2, appendix B), for training and serving."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from coppice.nn.decoder import MLP, Attend, Attention, HeadConfig, Rope, largest, norm_of

RANK_FEATURES = 15
RANK_HIDDEN = 256
BUCKETS = 4
_TOP = 10


class SpecBlockConfig(HeadConfig):
    """Sizes of a SpecBlock head."""

    num_hidden_layers: PositiveInt = 2
    slots: PositiveInt = Field(4, alias="diffspec_draft_token_num", description="K, positions a block predicts")
    rank_norm_topk: PositiveInt | None = 20
    """the rank features are normalised over the so many most probable ids, None: over all; as released: 20"""
    block_rope_advance: bool = False
    """whether a later block's rotary positions move on by the depth it starts at; the released weights' do not"""
    prefix_broadcast: bool = True
    """whether every slot reads condition and token, not the first alone (ablation)"""
    layer_shift: bool = True
    """whether slot k - 1 is mixed into slot k between layers (ablation)"""


class _Layer(nn.Module):
    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = norm_of(config), norm_of(config)
        self.self_attn, self.mlp = Attention(config), MLP(config)

    def forward(self, states: Tensor, rope: Rope, attend: Attend) -> Tensor:
        states = states + self.self_attn(self.input_layernorm(states), rope, attend)
        out: Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return out


class _Input(nn.Module):
    """Condition, token and position query of each slot, normalised and fused (equation 2)."""

    def __init__(self, config: SpecBlockConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.condition_proj = nn.Linear(3 * config.target_hidden_size, hidden, bias=False)
        self.condition_norm, self.token_norm, self.query_norm = (norm_of(config) for _ in range(3))
        self.position_queries = nn.Embedding(config.slots, hidden)
        self.fuse = nn.Linear(3 * hidden, hidden, bias=False)
        nn.init.normal_(self.position_queries.weight, std=0.02)

    def forward(self, condition: Tensor, token: Tensor, broadcast: bool) -> Tensor:
        hidden = condition.shape[-1]
        shared = torch.cat((self.condition_norm(condition), self.token_norm(token)), dim=-1)
        # fuse [c, t, q] = A [c, t] + B q: the first term is the same in every slot.
        of_prefix: Tensor = shared @ self.fuse.weight[:, : 2 * hidden].T
        of_query: Tensor = self.query_norm(self.position_queries.weight) @ self.fuse.weight[:, 2 * hidden :].T
        if broadcast:
            return of_prefix[..., None, :] + of_query
        slots = of_query.expand(*of_prefix.shape[:-1], -1, -1)
        return torch.cat((slots[..., :1, :] + of_prefix[..., None, :], slots[..., 1:, :]), dim=-2)


class SpecBlockModel(nn.Module):
    """Everything but the token embedding, which is the target's and frozen.

    Rows are blocks: a row has K slots, and slot k of a row predicts the token k + 1 places behind the row's token.
    """

    def __init__(self, config: SpecBlockConfig) -> None:
        super().__init__()
        self.config = config
        hidden, layers = config.hidden_size, config.num_hidden_layers
        self.input_layer = _Input(config)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(layers))
        self.shift_proj = nn.ModuleList(
            nn.Linear(2 * hidden, hidden, bias=False) for _ in range(layers - 1 if config.layer_shift else 0)
        )
        self.norm = norm_of(config)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        self.rank_head = nn.Sequential(
            nn.Linear(hidden + RANK_FEATURES, RANK_HIDDEN, bias=False),
            nn.SiLU(),
            nn.Linear(RANK_HIDDEN, BUCKETS, bias=False),
        )
        self.rotary = config.rotary()
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))

    def condition(self, features: Tensor) -> Tensor:
        """(..., 3 * target hidden) features to (..., hidden) conditions of first blocks (equation 1)."""
        out: Tensor = self.input_layer.condition_proj(features)
        return out

    def rope(self, positions: Tensor, dtype: torch.dtype) -> Rope:
        """The rotary factors of (B, N) first-slot positions: slot k stands k further; (B, N * K, D) each."""
        slots = positions[..., None] + torch.arange(self.config.slots, device=positions.device)
        return self.rotary(slots.flatten(1), dtype)

    def forward(self, condition: Tensor, token: Tensor, rope: Rope, attends: Sequence[Attend]) -> Tensor:
        """Blocks of (B, N, hidden) conditions and token embeddings -> (B, N, K, hidden) un-normed last-layer states.

        attends: one for each layer, over the N * K slots in row-major order.
        """
        states: Tensor = self.input_layer(condition, token, self.config.prefix_broadcast)
        shape = states.shape
        for number, (layer, attend) in enumerate(zip(self.layers, attends, strict=True)):
            if number and self.config.layer_shift:
                before = torch.cat((states[..., :1, :], states[..., :-1, :]), dim=-2)
                states = self.shift_proj[number - 1](torch.cat((states, before), dim=-1))  # equation 3
            states = layer(states.reshape(shape[0], -1, shape[-1]), rope, attend).view(shape)
        return states

    def read(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """(..., hidden) states -> (..., draft vocabulary) logits, and (..., hidden) normed states."""
        normed = self.norm(states)
        logits: Tensor = self.lm_head(normed)
        return logits, normed

    def rank(self, normed: Tensor, logits: Tensor) -> Tensor:
        """(..., 4) bucket logits; no gradient reaches the trunk (equation 4)."""
        features = rank_features(logits.detach(), self.config.rank_norm_topk)
        out: Tensor = self.rank_head(torch.cat((normed.detach(), features.to(normed.dtype)), dim=-1))
        return out


def rank_features(logits: Tensor, norm_topk: int | None = None) -> Tensor:
    """(..., 15) float32 summary of draft distributions (appendix B).

    Log-probabilities of the ten most probable ids, logit gaps 1-2, 1-3 and 1-5, p(top-1), entropy in nats.
    """
    logits = logits.float()
    top, _ = largest(logits, max(_TOP, norm_topk or 0))
    log_probs = (logits if norm_topk is None else top[..., :norm_topk]).log_softmax(-1)
    best = top[..., :_TOP] - top[..., :1] + log_probs.amax(-1, keepdim=True)
    gaps = top[..., :1] - top[..., [1, 2, 4]]
    entropy = -(log_probs.exp() * log_probs).sum(-1, keepdim=True)
    return torch.cat((best, gaps, best[..., :1].exp(), entropy), dim=-1)
