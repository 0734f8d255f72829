"""A head's tensors by their public names. Projections of one input are one matrix in the model alone."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn

from coppice.engine.linear import SIBLINGS
from coppice.heads.models.layers import HeadConfig

_FUSED = MappingProxyType(dict(zip(("qkv_proj", "gate_up_proj"), SIBLINGS, strict=True)))


def public_names(name: str) -> tuple[str, ...]:
    """Return the public names of what one tensor of a model's state holds, in order along its first dimension."""
    module, _, kind = name.rpartition(".")
    owner, _, module = module.rpartition(".")
    if module not in _FUSED:
        return (name,)
    return tuple(f"{owner}.{part}.{kind}" for part in _FUSED[module])


def public_state(model: nn.Module, config: HeadConfig) -> dict[str, Tensor]:
    """Return views of the model's tensors by their public names."""
    query, key = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    sizes = {3: (query, key, key), 2: (config.intermediate_size,) * 2}
    public: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        names = public_names(name)
        pieces = tensor.split(sizes[len(names)]) if len(names) > 1 else (tensor,)
        public |= zip(names, pieces, strict=True)
    return public


def fused_tensor(public: Mapping[str, Tensor], name: str) -> Tensor:
    """Return the tensor `name` of a model's state, made of public ones."""
    pieces = [public[part] for part in public_names(name)]
    return torch.cat(pieces) if len(pieces) > 1 else pieces[0]


def public_weights(model: nn.Module, config: HeadConfig) -> dict[str, Tensor]:
    """Return the public tensors that may be trained and replaced: those that hold numbers, not ids, as float32."""
    return {name: tensor.float() for name, tensor in public_state(model, config).items() if tensor.is_floating_point()}
