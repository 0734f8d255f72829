"""Packed tree attention for any Hugging Face causal LM that uses the attention interface.

An `Attention` knows which keys the rows of one forward see; `sdpa`, `ordered` and `steps` have one each. It reaches the
layers as the mask: a model asks the registered mask function for a mask, once for each kind of layer, and hands what it
gets to every layer's attention. So it reaches every class (keyword arguments do not: StableLM and Nemotron drop them),
and a layer's window is that of its mask, which is what the stock kernels obey (PhiMoE windows its mask and tells its
attention nothing).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from coppice.engine.kv_cache import KVShape
from coppice.errors import CoppiceError, Status

NAME = "coppice_packed"

# They say where the rows are, which the rotary embedding has already used and the attention knows.
_HARMLESS = frozenset({"position_ids", "cache_position"})


class UnsupportedModel(CoppiceError):
    """The model asks for something that packed attention would get wrong without anybody noticing."""

    status = Status.INVALID_ARGUMENT


def one_line(error: Exception) -> str:
    """The first line of an error: the others of transformers' messages are advice, or a list of all it knows."""
    message = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


class Layer(NamedTuple):
    """A layer, and how it makes weights of query times key."""

    number: int
    window: int | None = None  # positions seen back, the row's own included; None is all
    scaling: float | None = None  # factor of the scores; None is 1 / sqrt(D)
    softcap: float | None = None  # scores are squeezed between -softcap and softcap, before the mask
    sinks: Tensor | None = None  # (H,) scores of a key that each query head sees beside the others; its value is zero


class Attention(Protocol):
    """How the rows of one forward attend; what it needs of them is made once, and used by every layer."""

    def attend(self, layer: Layer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store the rows' keys and values, and attend.

        query (1, H, T, D), key (1, KVH, T, D) and value (1, KVH, T, V) of the rows -> (1, T, H, V).
        """


S = TypeVar("S")


def in_groups(
    sessions: Sequence[S], counts: Sequence[int], most: int, make: Callable[[Sequence[S]], Attention]
) -> Attention:
    """Sessions that attend at once, but those of more than `most` rows alone: others would be padded to them.

    counts: their rows. make: how a group attends.
    """
    if len(sessions) == 1 or max(counts) <= most:
        return make(sessions)
    alone = [number if count > most else -1 for number, count in enumerate(counts)]
    groups = [list(numbers) for _, numbers in groupby(range(len(counts)), alone.__getitem__)]
    parts = [make([sessions[number] for number in numbers]) for numbers in groups]
    return _Parts(parts, [sum([counts[number] for number in numbers]) for numbers in groups])


class _Parts:
    """Groups of sessions that attend one by one, in the order of the rows."""

    def __init__(self, parts: Sequence[Attention], counts: Sequence[int]) -> None:
        self._parts, self._counts = parts, counts

    def attend(self, layer: Layer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """As Attention.attend."""
        inputs = [states.split_with_sizes(self._counts, 2) for states in (query, key, value)]
        return torch.cat([part.attend(layer, *some) for part, *some in zip(self._parts, *inputs, strict=True)], dim=1)


@dataclass(frozen=True)
class LayerMask:
    """What a model takes for the mask of the layers that see `window` positions back."""

    attention: Attention
    window: int | None


_active: ContextVar[Attention | None] = ContextVar("coppice_packed_attention", default=None)


@contextmanager
def using(attention: Attention) -> Iterator[None]:
    """Models called inside attend by this."""
    token = _active.set(attention)
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
) -> LayerMask:
    """The mask function, of the layers that see `local_size` positions back (None: all).

    Raises UnsupportedModel when the model's mask is anything but causal, plain or windowed.
    """
    attention = _active.get()
    if attention is None:
        raise RuntimeError("packed attention runs inside Engine.forward only")
    if use_vmap or allow_is_bidirectional_skip:
        raise UnsupportedModel("the model's mask is not the plain causal one")
    if local_size is not None and local_size == getattr(config, "attention_chunk_size", None):
        raise UnsupportedModel("chunked attention is not supported")
    return LayerMask(attention, local_size)


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
    if type(attention_mask) is not LayerMask:
        raise UnsupportedModel("the model does not pass its mask on to its attention")
    window = attention_mask.window
    if sliding_window is not None and sliding_window != window:
        raise UnsupportedModel(f"a layer's window is {sliding_window}, its mask's {window}")
    number: Any = module.layer_idx
    layer = Layer(number, window, scaling, softcap, s_aux)
    return attention_mask.attention.attend(layer, query, key, value).contiguous(), None


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, packed_mask)


@dataclass(frozen=True)
class KVLayout:
    """What a model's attention needs of the pool, read off a forward instead of guessed from its config.

    layers: what each layer keeps of a token. windows: those that some layer has, None being none. group: the most query
    heads that a layer has for each key head. vocab_size: the width of the logits.
    """

    layers: tuple[KVShape, ...]
    windows: frozenset[int | None]
    group: int
    vocab_size: int


class _Recorder:
    """Notes what the layers keep, and answers zeros."""

    def __init__(self) -> None:
        self.layers: list[Layer] = []
        self.shapes: list[KVShape] = []
        self.group = 1

    def attend(self, layer: Layer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        (_, heads, rows, dim), (_, kv_heads, *kept) = query.shape, key.shape
        if value.shape[1] != kv_heads or heads % kv_heads or kept != [rows, dim] or value.shape[2] != rows:
            raise UnsupportedModel(f"layer {layer.number} attends with {heads} heads from {key.shape} to {value.shape}")
        self.layers.append(layer)
        self.shapes.append(KVShape(kv_heads, dim, value.shape[3]))
        self.group = max(self.group, heads // kv_heads)
        return value.new_zeros(1, rows, heads, value.shape[3])


def read_layout(model: PreTrainedModel) -> KVLayout:
    """Run one row through a model, which may be on the meta device. Raises UnsupportedModel where a pool cannot serve
    it; what kept it from running is the cause.
    """
    name = type(model).__name__
    if getattr(model, "_is_stateful", False):  # of transformers: a text's state cannot be taken back to an earlier row
        raise UnsupportedModel(f"{name} keeps a state of the text beside its keys and values")
    model.set_attn_implementation(NAME)
    recorder = _Recorder()
    row = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    try:
        with torch.inference_mode(), using(recorder):
            present = torch.ones_like(row, dtype=torch.bool)
            logits = model(
                input_ids=row, attention_mask=present, position_ids=row, use_cache=False, logits_to_keep=0
            ).logits
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{name}: {error}") from None
    except Exception as error:
        reads = isinstance(error, AttributeError | TypeError) and LayerMask.__name__ in str(error)
        reason = "it computes with its mask" if reads else one_line(error)
        raise UnsupportedModel(f"{name} cannot run packed: {reason}") from error
    layers = model.config.get_text_config().num_hidden_layers
    if [layer.number for layer in recorder.layers] != list(range(layers)):
        raise UnsupportedModel(f"{name} does not attend exactly once in each of its {layers} layers")
    windows = frozenset(layer.window for layer in recorder.layers)
    return KVLayout(tuple(recorder.shapes), windows, recorder.group, logits.shape[-1])
