"""Packed tree attention for any Hugging Face causal LM that uses the attention interface.

How a forward's plan reaches the layers: a model asks the registered mask function for a mask, once for each kind of
layer, and hands what it gets to every layer's attention. Ours answers with the plan for that kind of layer instead of
a tensor. So the plan reaches every class (keyword arguments do not: StableLM and Nemotron drop them), and a layer's
window is that of its mask, which is what the stock kernels obey (PhiMoE windows its mask and tells its attention
nothing).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

NAME = "coppice_packed"

# They say where the rows are, which the rotary embedding has already used and the plan knows.
_HARMLESS = frozenset({"position_ids", "cache_position"})


class UnsupportedModel(ValueError):
    """The model asks for something that packed attention would get wrong without anybody noticing."""


class LayerPlan(Protocol):
    """How the rows of this forward attend in the layers of one kind."""

    @property
    def window(self) -> int | None:
        """Positions these layers see back, their own included; None is all."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, softcap: float | None
    ) -> Tensor:
        """query (1, H, T, D), key and value (1, KVH, T, D) of the rows -> (1, T, H, D)."""


Plans = Callable[[int | None], LayerPlan]  # sliding window (None: all) -> the plan of the layers that have it

_active: ContextVar[Plans | None] = ContextVar("coppice_packed_plans", default=None)


@contextmanager
def using(plans: Plans) -> Iterator[None]:
    """Models called inside attend by these plans."""
    token = _active.set(plans)
    try:
        yield
    finally:
        _active.reset(token)


def packed_mask(
    *,
    config: Any,
    local_size: int | None = None,
    use_vmap: bool = False,
    allow_is_bidirectional_skip: bool = False,
    **_: object,
) -> LayerPlan:
    """The mask function: the active plan of the layers that see `local_size` positions back (None: all).

    Raises UnsupportedModel when the model's mask is anything but causal, plain or windowed.
    """
    plans = _active.get()
    if plans is None:
        raise RuntimeError("packed attention runs inside Engine.forward only")
    if use_vmap or allow_is_bidirectional_skip:
        raise UnsupportedModel("the model's mask is not the plain causal one")
    if local_size is not None and local_size == getattr(config, "attention_chunk_size", None):
        raise UnsupportedModel("chunked attention is not supported")
    return plans(local_size)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """The attention function: stores the rows' keys and values, and attends over prefix and ancestors.

    query (1, H, T, D), key and value (1, KVH, T, D) -> (1, T, H, D). Raises UnsupportedModel on an argument it does
    not know: an ignored one (attention sinks, a position bias) would change the logits and nothing else.
    """
    for name, argument in others.items():
        if argument is not None and argument is not False and name not in _HARMLESS:
            raise UnsupportedModel(f"unknown attention argument {name!r}")
    if dropout or is_causal is False:
        raise UnsupportedModel("attention with dropout, or not causal")
    if not hasattr(attention_mask, "attend"):
        raise UnsupportedModel("the model does not pass its mask on to its attention")
    if sliding_window is not None and sliding_window != attention_mask.window:
        raise UnsupportedModel(f"a layer's window is {sliding_window}, its mask's {attention_mask.window}")
    return attention_mask.attend(module.layer_idx, query, key, value, scaling, softcap), None


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, packed_mask)


def attend_capped(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None, softcap: float
) -> Tensor:
    """Attention with capped scores over equal numbers of query and key heads; `mask` is added to the scores.

    query (S, KVH, N, D), key and value (S, KVH, L, D), mask (S, 1, N, L) -> (S, KVH, N, D).
    """
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = torch.tanh(scores / softcap) * softcap  # before the mask, as the models that cap do
    if mask is not None:
        scores = scores + mask
    return scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value
