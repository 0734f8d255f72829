"""Packed tree attention for any Hugging Face causal LM that uses the attention interface.

An `Attention` knows which keys the rows of one forward see: `Sdpa` here and `Ordered` are those of the CPU, and
`StepInputs` is a device's. It reaches the layers as the mask: a model asks the registered mask function for a
mask, once for each kind of layer, and hands what it gets to every layer's attention. So it reaches every class (keyword
arguments do not: StableLM and Nemotron drop them), and a layer's window is that of its mask, which is what the stock
kernels obey (PhiMoE windows its mask and tells its attention nothing).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from coppice.engine.kv_cache import KVPool, KVShape
from coppice.engine.rows import Tail
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


class _Keys(NamedTuple):
    """A session's keys in layers of one window and number of query heads for each key head.

    written, read: views of its rows' slots and of its keys' where its blocks are neighbours, else empty: key of layer
    0, value of layer 0, key of layer 1, and so on. slots: of its keys, the rows' own last. mask: (G * N, L) of 0 and
    -inf, as SDPA would convert booleans in every layer; None when everything is seen.
    """

    written: tuple[Tensor, ...]
    read: tuple[Tensor, ...]
    slots: Tensor
    mask: Tensor | None


class Sdpa:
    """Attention on the CPU by torch's own kernel, session by session, which sums in whatever order is fastest."""

    def __init__(self, tails: Sequence[Tail], pool: KVPool) -> None:
        self._tails, self._pool = tails, pool
        self._counts = [len(tail.visible) for tail in tails]
        self._keys: dict[tuple[int | None, int], list[_Keys]] = {}

    def attend(self, layer: Layer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """As Attention.attend."""
        at, kv_heads = 2 * layer.number, key.shape[1]
        kind = layer.window, query.shape[1] // kv_heads
        if (sessions := self._keys.get(kind)) is None:
            sessions = self._keys[kind] = [self._keys_of(tail, *kind) for tail in self._tails]
        outputs: list[Tensor] = []
        queries: tuple[Tensor, ...] = (query,)
        news: tuple[tuple[Tensor, ...], ...] = (key,), (value,)
        if len(sessions) > 1:
            queries = query.split_with_sizes(self._counts, 2)
            news = key.split_with_sizes(self._counts, 2), value.split_with_sizes(self._counts, 2)
        for (written, read, slots, mask), q, k, v in zip(sessions, queries, *news, strict=True):
            if written:
                written[at].copy_(k)
                written[at + 1].copy_(v)
                keys, values = read[at], read[at + 1]
            else:
                keys, values = (
                    part.index_copy_(0, slots[-new.shape[2] :], new[0].transpose(0, 1))
                    .index_select(0, slots)
                    .transpose(0, 1)[None]
                    for part, new in zip(self._pool.layers[layer.number], (k, v), strict=True)
                )
            # The query heads of one key head become rows of one head, so that keys are never repeated.
            q = q.reshape(1, kv_heads, -1, q.shape[-1])  # (1, KVH, G * N, D)
            if layer.softcap is None and layer.sinks is None:
                out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=layer.scaling)
            else:
                out = _attend_by_operators(layer, q, keys, values, mask)
            out = out.view(1, kv_heads, kind[1], -1, out.shape[-1])
            outputs.append(out.permute(0, 3, 1, 2, 4).reshape(1, out.shape[3], -1, out.shape[-1]))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def _keys_of(self, tail: Tail, window: int | None, group: int) -> _Keys:
        count, length, table = len(tail.visible), tail.length, tail.table
        low = 0 if window is None else max(0, tail.prefix + 1 - window)  # keys before every row's window are not read
        seen, mask = tail.sees(window)[:, low:], None
        if not seen.all():
            numbers = torch.from_numpy(np.where(seen, np.float32(0), np.float32(-np.inf)))
            mask = numbers.to(self._pool.dtype).repeat(group, 1)
        slots = torch.from_numpy(table.slots(np.arange(low, length)))
        if not table.consecutive:
            return _Keys((), (), slots, mask)
        first = int(slots[0])
        written = self._pool.read(first + length - low - count, count)
        return _Keys(written, self._pool.read(first, length - low), slots, mask)


def _attend_by_operators(layer: Layer, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Attention with a softcap or sinks, which torch's own function does not do: G query heads for each key head, whose
    rows lie one behind the other. `mask` is added to the scores.

    query (1, KVH, G * N, D), key (1, KVH, L, D), value (1, KVH, L, V), mask (G * N, L) -> (1, KVH, G * N, V).
    """
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if layer.scaling is None else layer.scaling)
    if layer.softcap is not None:
        scores = torch.tanh(scores / layer.softcap) * layer.softcap  # before the mask, as the models that cap do
    if mask is not None:
        scores = scores + mask
    if layer.sinks is None:
        return scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value
    _, kv_heads, rows, _ = scores.shape
    by_head = layer.sinks.view(kv_heads, -1, 1)
    by_row = by_head.expand(-1, -1, rows // by_head.shape[1]).reshape(1, kv_heads, rows, 1)
    with_sink = torch.cat((scores, by_row.to(scores.dtype)), dim=-1)
    return with_sink.softmax(-1, dtype=torch.float32)[..., :-1].to(value.dtype) @ value


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
