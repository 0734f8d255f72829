"""The parts of feature-fed draft heads: a configuration, rotary positions, pre-norm attention, a gated MLP.

Shaped as the layers of Llama, Qwen3 and Mistral are. Projections that read the same input are one matrix here; the
public layouts keep them apart (coppice/heads/checkpoints.py).
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from pydantic import BaseModel, Field, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError, model_validator
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from coppice import limits
from coppice.config.model import Expectation
from coppice.engine import attention as packed
from coppice.engine.kv_cache import KVShape
from coppice.errors import InvalidField

Rope = tuple[Tensor, Tensor]  # cosines and sines, (B, T, D) each


class Rotary:
    """Rotary factors as of transformers' Llama. No module: the frequencies stay float32 in models of any dtype."""

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


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""query (B, H, T, D), key and value (B, KVH, T, D) of the rows -> (B, T, H, D)"""

_MANY_ROWS, _PART = 16, 64
_DEFAULT_LAYERS = 3  # as many as `default_feature_layers` names


class HeadConfig(BaseModel, frozen=True, extra="ignore"):
    """A draft head's sizes and how it turns positions, under the names of the public checkpoints' config.json."""

    kind: ClassVar[str]  # kind of head
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt = 0  # filled in: num_attention_heads
    head_dim: PositiveInt = 0  # filled in: hidden_size / num_attention_heads
    num_hidden_layers: PositiveInt
    vocab_size: PositiveInt
    draft_vocab_size: PositiveInt = 0  # filled in: vocab_size
    target_hidden_size: PositiveInt = 0  # filled in: hidden_size
    rms_norm_eps: PositiveFloat = 1e-6
    attention_bias: bool = False
    qk_norm: bool = False
    """whether each head's queries and keys are normed before they are turned, as in Qwen3's layers"""
    hidden_act: str = Field("silu", pattern="^silu$")
    feature_layers: tuple[NonNegativeInt, ...] = Field((), max_length=limits.MAX_FEATURE_LAYERS)
    """target layers the head reads; empty: `default_feature_layers` of the target's"""
    scaled_features: bool = False
    """whether features are multiplied by numbers of the file's first: a target's values may differ by thousands"""
    shared_output: bool = False
    """whether the output layer is the target's rows of the draft vocabulary, frozen, which the file leaves out"""
    max_position_embeddings: PositiveInt = 4096
    rope_theta: PositiveFloat = 10_000.0
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    acceptance: Expectation | None = None  # how often its drafts are right, at least

    @classmethod
    def checked(cls, values: Mapping[str, Any], field: str, place: str = "") -> Self:
        """Return the configuration with these values. Raises InvalidField about `field` that names the wrong one."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "sizes"
            raise InvalidField(field, f"{place}{where}: {first['msg']}") from None

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: Any) -> Any:
        if isinstance(data, dict):
            heads, hidden = data.get("num_attention_heads"), data.get("hidden_size")
            filled = {
                "num_key_value_heads": heads,
                "head_dim": hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads else None,
                "draft_vocab_size": data.get("vocab_size"),
                "target_hidden_size": hidden,
            }
            data = data | {name: value for name, value in filled.items() if data.get(name) is None and value}
        return data

    @property
    def rope(self) -> dict[str, Any]:
        """How positions are scaled, in transformers' words; `rope_scaling` and its `type` are older and count."""
        given = self.rope_scaling or self.rope_parameters or {}
        legacy = given.get("type", "default")
        return {"rope_type": legacy} | {name: value for name, value in given.items() if name != "type"}

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("num_attention_heads is no multiple of num_key_value_heads")
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError("draft_vocab_size is larger than vocab_size")
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

    @property
    def feature_width(self) -> int:
        """Values of a row of features: those of each layer that the head reads, one behind the other."""
        return (len(self.feature_layers) or _DEFAULT_LAYERS) * self.target_hidden_size


class DraftModel(nn.Module):
    """Everything of a draft head but the token embedding, which is frozen."""

    own_embedding: Tensor | None = None
    """(vocabulary, hidden) of a head that brings a token embedding, on the CPU; None: it reads the target's"""
    own_output = True
    """whether the output layer is the head's, also where the configuration has the target's"""
    embedding_scale = 1.0
    """what the target's embedding module multiplies its rows by, where the head reads what that gives"""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        # What each layer keeps of a row.
        shape = KVShape(config.num_key_value_heads, config.head_dim, config.head_dim)
        self.kv_shapes = [shape] * config.num_hidden_layers

    @torch.no_grad()
    def freeze(self) -> None:
        """Let its parts keep what they make of their weights alone, which do not change from now on."""
        part: Any
        for part in self.modules():
            if hasattr(part, "constant"):
                part.frozen = part.constant()

    def add_output(self) -> None:
        """Add the last norm, the output layer, rotary factors, and d2t: (draft vocabulary,) offsets to target ids."""
        config = self.config
        self.norm = norm_of(config)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        if config.shared_output:  # it moves with the model, but is neither trained nor part of its state
            self.own_output, weight = False, self.lm_head.weight.detach()
            del self.lm_head.weight
            self.lm_head.register_buffer("weight", weight, persistent=False)
        if config.scaled_features:
            self.register_buffer("feature_scale", torch.ones(config.feature_width))
        like = LlamaConfig(
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters={"rope_theta": config.rope_theta, **config.rope},
        )
        self.rotary = Rotary(LlamaRotaryEmbedding(like))
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))

    def attends(self, attention: packed.Attention) -> list[Any]:
        """Return how each layer attends in a forward."""
        return [partial(attention.attend, packed.Layer(number)) for number in range(self.config.num_hidden_layers)]

    @property
    def target_ids(self) -> Tensor:
        """The (draft vocabulary,) int64 target id of each draft id."""
        offsets = self.get_buffer("d2t").cpu()
        return torch.arange(len(offsets)) + offsets

    def scaled(self, features: Tensor) -> Tensor:
        """Return (..., feature width) features as the first matrix reads them."""
        return features * self.get_buffer("feature_scale") if self.config.scaled_features else features

    def rope(self, positions: Tensor, dtype: torch.dtype) -> Rope:
        """Return the rotary factors of (B, N) positions, (B, N, D) each."""
        return self.rotary(positions, dtype)

    def read(self, states: Tensor, slot: int = 0) -> tuple[Tensor, Tensor]:
        """(..., hidden) states of any slot -> (..., draft vocabulary) logits, and (..., hidden) normed states."""
        normed = self.norm(states)
        logits: Tensor = self.lm_head(normed)
        return logits, normed

    def read_behind(self, states: Tensor, previous: Tensor, slot: int = 0) -> tuple[Tensor, Tensor]:
        """Read (..., hidden) states of a slot behind (...) target ids, which only a Markov table asks for."""
        return self.read(states, slot)


class Attention(nn.Module):
    """Grouped-query attention whose inputs are `inputs` times as wide as its output."""

    frozen: Tensor | None = None

    def __init__(self, config: HeadConfig, inputs: int = 1) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        width, hidden = (self.heads + 2 * self.kv_heads) * self.dim, config.hidden_size
        self.qkv_proj = nn.Linear(inputs * hidden, width, bias=config.attention_bias)
        self.o_proj = nn.Linear(self.heads * self.dim, hidden, bias=config.attention_bias)
        self.normed = config.qk_norm
        if self.normed:
            self.q_norm, self.k_norm = norm_of(config, self.dim), norm_of(config, self.dim)

    def forward(self, states: Tensor, rope: Rope, attend: Attend, context: Tensor | None = None) -> Tensor:
        """(B, T, inputs * hidden) -> (B, T, hidden). `context` rows, as wide, give keys and values alone."""
        rows = states if context is None else torch.cat((context, states), dim=1)
        query, key, value = self.project(rows, rope)
        if context is not None:
            query = query[:, :, -states.shape[1] :]
        out: Tensor = self.o_proj(attend(query, key, value).flatten(2))
        return out

    def project(self, states: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T, inputs * hidden) -> queries (B, H, T, D), keys and values (B, KVH, T, D), those but values turned."""
        rows, length = states.shape[:2]
        qkv = self.qkv_proj(states).view(rows, length, -1, self.dim).transpose(1, 2)
        value = qkv[:, -self.kv_heads :]
        turned = qkv[:, : -self.kv_heads]
        weights = self.constant() if self.frozen is None else self.frozen
        if weights is not None:  # as one: a norm costs as much for both
            turned = F.rms_norm(turned, (self.dim,), None, self.q_norm.eps) * weights.to(turned.dtype)
        turned = rotate(turned, rope)
        return turned[:, : self.heads], turned[:, self.heads :], value

    def constant(self) -> Tensor | None:
        """Make the (heads, 1, D) weights of the norms of queries and keys."""
        if not self.normed:
            return None
        weights = self.q_norm.weight.expand(self.heads, -1), self.k_norm.weight.expand(self.kv_heads, -1)
        return torch.cat(weights)[:, None]


class MLP(nn.Module):
    """The gated MLP."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(states).chunk(2, dim=-1)
        out: Tensor = self.down_proj(F.silu(gate) * up)
        return out


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


class RMSNorm(nn.RMSNorm):
    """torch's norm with its weights cast to the states' dtype: the fused kernel wants both alike."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


def norm_of(config: HeadConfig, size: int = 0) -> RMSNorm:
    """Make an RMS norm over `size` (0: the hidden size) values."""
    return RMSNorm(size or config.hidden_size, eps=config.rms_norm_eps)


def largest(rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the (..., count) largest of (..., V) values, best first, and where they are.

    `topk` on a CPU walks every row value by value. Of many rows, find the parts with the largest maxima first, which is
    vectorised: no other part holds one of the `count` largest.
    """
    width = rows.shape[-1]
    if rows.is_cuda or rows.numel() < _MANY_ROWS * width or width % _PART or width < count * _PART:
        best = rows.topk(count, dim=-1)
        return best.values, best.indices
    parts = rows.reshape(-1, width // _PART, _PART)
    near = parts.amax(-1).topk(count, dim=-1).indices  # (N, count)
    first = torch.arange(0, len(parts) * parts.shape[1], parts.shape[1])[:, None]
    held = parts.flatten(0, 1).index_select(0, (near + first).flatten()).view(len(parts), -1)
    values, at = held.topk(count, dim=-1)
    places = near.gather(-1, at // _PART) * _PART + at % _PART
    shape = (*rows.shape[:-1], count)
    return values.view(shape), places.view(shape)
