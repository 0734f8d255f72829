"""Rotary positions, as transformers computes them for Llama (RoFormer, arXiv 2104.09864)."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

Rope = tuple[Tensor, Tensor]
"""cosines and sines, (B, T, D) each"""


class RotaryConfig(BaseModel):
    """How positions turn states, under the names of the public checkpoints' config.json."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    max_position_embeddings: PositiveInt = 4096
    rope_theta: PositiveFloat = 10_000.0
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None

    def rotary(self, head_dim: int) -> Rotary:
        """Make the rotary embedding of states of `head_dim` values."""
        rope = self.rope_parameters or {"rope_type": "default", **(self.rope_scaling or {})}
        config = LlamaConfig(
            head_dim=head_dim,
            max_position_embeddings=self.max_position_embeddings,
            rope_parameters={"rope_theta": self.rope_theta, **rope},
        )
        return Rotary(LlamaRotaryEmbedding(config))


class Rotary:
    """Rotary factors. No module: the frequencies stay float32 when a model is moved to another dtype."""

    def __init__(self, like: LlamaRotaryEmbedding) -> None:
        self._frequencies: Tensor = torch.cat((like.inv_freq, like.inv_freq)).float()  # (D,)
        self._scaling: float = like.attention_scaling

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> Rope:
        """Turn (B, T) positions into (B, T, D) factors."""
        self._frequencies = self._frequencies.to(positions.device)
        angles = positions[..., None] * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        if self._scaling != 1.0:
            cos, sin = cos * self._scaling, sin * self._scaling
        return cos.to(dtype), sin.to(dtype)


def rotate(states: Tensor, rope: Rope) -> Tensor:
    """Rotate (B, H, T, D) states to their positions."""
    cos, sin = rope[0][:, None], rope[1][:, None]
    first, second = states.chunk(2, dim=-1)
    return states * cos + torch.cat((-second, first), dim=-1) * sin
