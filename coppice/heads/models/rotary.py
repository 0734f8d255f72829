"""Rotary positions, as transformers computes them for Llama (RoFormer, arXiv 2104.09864)."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt, model_validator
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
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

    @property
    def rope(self) -> dict[str, Any]:
        """How positions are scaled, in transformers' terms, the older `rope_scaling` before `rope_parameters` as there.

        Its type has two names, too: `type` is the older one, which EAGLE's own checkpoints use.
        """
        given = self.rope_scaling or self.rope_parameters or {}
        legacy = given.get("type", "default")
        return {"rope_type": legacy} | {name: value for name, value in given.items() if name != "type"}

    @model_validator(mode="after")
    def _rope_is_known(self) -> RotaryConfig:
        kind, legacy = self.rope["rope_type"], (self.rope_scaling or self.rope_parameters or {}).get("type")
        if legacy not in (None, kind):
            raise ValueError(f"rope_scaling says type {legacy!r} and rope_type {kind!r}")
        turned = {"type": legacy, "rope_theta": self.rope_theta, **self.rope}
        if any(turned.get(name) != value for name, value in (self.rope_parameters or {}).items()):
            raise ValueError("rope_scaling and rope_parameters contradict each other")
        if kind != "default" and kind not in ROPE_INIT_FUNCTIONS:
            raise ValueError(f"rope_scaling has the unknown type {kind!r}")
        if layered := [name for name, value in self.rope.items() if isinstance(value, dict)]:
            raise ValueError(f"rope_parameters of several kinds of layers: {', '.join(layered)}")
        if self.rope.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise ValueError("partial_rotary_factor: heads turn all of a state")
        return self

    def rotary(self, head_dim: int) -> Rotary:
        """Make the rotary embedding of states of `head_dim` values."""
        config = LlamaConfig(
            head_dim=head_dim,
            max_position_embeddings=self.max_position_embeddings,
            rope_parameters={"rope_theta": self.rope_theta, **self.rope},
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
