"""Packed tree attention for any Hugging Face causal LM that uses the attention interface.

How a forward's plan reaches the layers: a model asks the registered mask function for a mask, once for each kind of
layer, and hands what it gets to every layer's attention. Ours answers with the plan for that kind of layer instead of
a tensor. So the plan reaches every class (keyword arguments do not: StableLM and Nemotron drop them), and a layer's
window is that of its mask, which is what the stock kernels obey (PhiMoE windows its mask and tells its attention
nothing).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from coppice.errors import CoppiceError, Status

NAME = "coppice_packed"

# They say where the rows are, which the rotary embedding has already used and the plan knows.
_HARMLESS = frozenset({"position_ids", "cache_position"})


class UnsupportedModel(CoppiceError):
    """The model asks for something that packed attention would get wrong without anybody noticing."""

    status = Status.INVALID_ARGUMENT


def one_line(error: Exception) -> str:
    """What an error says first: the other lines of transformers' messages are advice, or a list of all it knows."""
    said = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


class Scoring(NamedTuple):
    """How a layer makes weights of query times key."""

    scaling: float | None = None  # factor of the scores; None is 1 / sqrt(D)
    softcap: float | None = None  # scores are squeezed between -softcap and softcap, before the mask
    sinks: Tensor | None = None  # (H,) scores of a key that each query head sees beside the others; its value is zero
    plain: bool = True  # neither a softcap nor sinks


class LayerPlan(Protocol):
    """How the rows of this forward attend in the layers of one kind."""

    @property
    def window(self) -> int | None:
        """Positions these layers see back, their own included; None is all."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """query (1, H, T, D), key (1, KVH, T, D) and value (1, KVH, T, V) of the rows -> (1, T, H, V)."""


Plans = Callable[[int | None], LayerPlan]  # sliding window (None: all) -> the plan of the layers that have it

_active: ContextVar[Plans | None] = ContextVar("coppice_packed_plans", default=None)


class _Traced:
    """The plans of what torch.compile traces, or has traced, and runs now: dynamo reads no ContextVar."""

    def __init__(self) -> None:
        self.plans: Mapping[int | None, LayerPlan] = {}
        self.lock = Lock()


_traced = _Traced()


@contextmanager
def using(plans: Plans) -> Iterator[None]:
    """Models called inside attend by these plans."""
    token = _active.set(plans)
    try:
        yield
    finally:
        _active.reset(token)


@contextmanager
def tracing(plans: Mapping[int | None, LayerPlan]) -> Iterator[None]:
    """Compiled models called inside attend by these plans; a process has one at a time."""
    with _traced.lock:
        _traced.plans = plans
        try:
            yield
        finally:
            _traced.plans = {}


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
    compiling = torch.compiler.is_compiling()
    plans = _traced.plans.__getitem__ if compiling else _active.get()
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
    s_aux: Tensor | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """The attention function: stores the rows' keys and values, and attends over prefix and ancestors.

    query (1, H, T, D), key (1, KVH, T, D), value (1, KVH, T, V), s_aux (H,) the sinks -> (1, T, H, V), contiguous as
    the stock functions' is. Raises UnsupportedModel on an argument it does not know: an ignored one (a position bias)
    would change the logits and nothing else.
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
    scoring = Scoring(scaling, softcap, s_aux, softcap is None and s_aux is None)
    return attention_mask.attend(module.layer_idx, query, key, value, scoring).contiguous(), None


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, packed_mask)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scoring: Scoring) -> Tensor:
    """Attention that torch's own function does not do: G query heads for each key head, whose rows lie one behind the
    other. `mask` is added to the scores.

    query (S, KVH, G * N, D), key (S, KVH, L, D), value (S, KVH, L, V), mask (S, 1, G * N, L) -> (S, KVH, G * N, V).
    """
    scaling, softcap, sinks, _ = scoring
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap  # before the mask, as the models that cap do
    if mask is not None:
        scores = scores + mask
    if sinks is None:
        return scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value
    sessions, kv_heads, rows, _ = scores.shape
    by_head = sinks.view(kv_heads, -1, 1)
    by_row = by_head.expand(-1, -1, rows // by_head.shape[1]).reshape(1, kv_heads, rows, 1)
    with_sink = torch.cat((scores, by_row.to(scores.dtype).expand(sessions, -1, -1, -1)), dim=-1)
    return with_sink.softmax(-1, dtype=torch.float32)[..., :-1].to(value.dtype) @ value
