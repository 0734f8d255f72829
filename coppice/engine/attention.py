"""Packed tree attention for any Hugging Face causal LM that uses the attention interface.

An `Attention` knows which keys the rows of one forward see: `Sdpa` here and `Ordered` are those of the CPU, and
`StepInputs` is a device's. It reaches the layers as the mask, for which a model asks once for each kind of layer, and
which it hands to every layer's attention. So it reaches every class (keyword arguments do not: StableLM and Nemotron
drop them), and a layer's window is that of its mask, which is what the stock kernels obey (PhiMoE windows its mask and
tells its attention nothing).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from coppice.engine.kv_cache import KVPool
from coppice.engine.rows import NOTHING, Ints, Tail
from coppice.errors import CoppiceError

NAME = "coppice_packed"

# They say where the rows are, which the rotary embedding has already used and the attention knows.
_HARMLESS = frozenset({"position_ids", "cache_position"})


class UnsupportedModel(CoppiceError):
    """The model asks for something that packed attention would get wrong without anybody noticing."""

    status = "INVALID_ARGUMENT"


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


MOST_TOGETHER = 64
"""rows of a session that attends beside others, padded to the longest; a prompt's chunk, which has more, is alone"""


class _Keys(NamedTuple):
    """What S sessions that attend together see in layers of one window and number of query heads for each key head.

    written, read: views of the rows' slots and of the keys' where one session's blocks are neighbours, else empty: key
    of layer 0, value of layer 0, key of layer 1, and so on. new: (T,) slots of the rows. slots: (S * L,) of the keys.
    padded, places: (S * N,) the row at each padded place and (T,) the place of each row; empty when nothing is padded.
    mask: (S, 1, G * N, L) of 0 and -inf, as SDPA would convert booleans in every layer; None when everything is seen.
    """

    written: tuple[Tensor, ...]
    read: tuple[Tensor, ...]
    new: Tensor
    slots: Tensor
    padded: Tensor
    places: Tensor
    mask: Tensor | None


class Sdpa:
    """Attention on the CPU by torch's own kernel, which sums in whatever order is fastest."""

    def __init__(self, tails: Sequence[Tail], pool: KVPool) -> None:
        self._pool = pool
        self._groups: list[list[Tail]] = []
        for short, run in groupby(tails, lambda tail: len(tail.visible) <= MOST_TOGETHER):
            together = list(run)
            self._groups += [together] if short else [[tail] for tail in together]
        self._counts = [sum(len(tail.visible) for tail in group) for group in self._groups]
        self._keys: dict[tuple[int | None, int], list[_Keys]] = {}

    def attend(self, layer: Layer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        kind = layer.window, query.shape[1] // key.shape[1]
        if (keys := self._keys.get(kind)) is None:
            keys = self._keys[kind] = self._share(*kind)
        kv_heads, dim, outputs = key.shape[1], query.shape[3], list[Tensor]()
        inputs: tuple[tuple[Tensor, ...], ...] = ((query,), (key,), (value,))
        if len(keys) > 1:
            inputs = tuple(states.split_with_sizes(self._counts, 2) for states in (query, key, value))
        for sessions, seen, q, k, v in zip(map(len, self._groups), keys, *inputs, strict=True):
            if seen.read:
                at = 2 * layer.number
                seen.written[at].copy_(k)
                seen.written[at + 1].copy_(v)
                ks, vs = seen.read[at], seen.read[at + 1]
            else:
                ks, vs = [
                    stored.index_copy_(0, seen.new, new[0].transpose(0, 1))
                    .index_select(0, seen.slots)
                    .view(sessions, -1, kv_heads, new.shape[-1])
                    .transpose(1, 2)  # (S, KVH, L, D or V)
                    for stored, new in zip(self._pool.layers[layer.number], (k, v), strict=True)
                ]
            if len(seen.padded):
                q = q.index_select(2, seen.padded)
            # The query heads of one key head become rows of one head, so that keys are never repeated.
            if sessions > 1:
                q = q.reshape(kv_heads, kind[1], sessions, -1, dim).permute(2, 0, 1, 3, 4)
            q = q.reshape(sessions, kv_heads, -1, dim)  # (S, KVH, G * N, D)
            if layer.softcap is None and layer.sinks is None:
                out = F.scaled_dot_product_attention(q, ks, vs, attn_mask=seen.mask, scale=layer.scaling)
            else:
                out = _attend_by_operators(layer, q, ks, vs, seen.mask)
            out = out.view(sessions, kv_heads, kind[1], -1, out.shape[-1]).permute(0, 3, 1, 2, 4)
            out = out.reshape(1, -1, query.shape[1], out.shape[-1])  # (1, S * N, H, V)
            outputs.append(out.index_select(1, seen.places) if len(seen.padded) else out)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def _share(self, window: int | None, group: int) -> list[_Keys]:
        if window is not None and all(tail.length <= window for tails in self._groups for tail in tails):
            window = None  # layers whose windows hide nothing share what they see
        seen = self._keys.get((window, group)) or [self._keys_of(tails, window, group) for tails in self._groups]
        return self._keys.setdefault((window, group), seen)

    def _keys_of(self, tails: Sequence[Tail], window: int | None, group: int) -> _Keys:
        counts = np.array([len(tail.visible) for tail in tails])
        # Keys before every row's window are not read. Shorter sessions repeat their own last row and last key.
        low = 0 if window is None else max(0, min(tail.prefix for tail in tails) + 1 - window)
        rows = np.minimum(np.arange(counts.max()), counts[:, None] - 1)  # (S, N)
        lengths = [tail.length for tail in tails]
        keys = np.arange(low, max(lengths))
        slots, new = list[Ints](), list[Ints]()
        seen = np.zeros((len(tails), 1, rows.shape[1], len(keys)), np.bool_)
        for number, (tail, length) in enumerate(zip(tails, lengths, strict=True)):
            slots.append(tail.table.slots(np.minimum(keys, length - 1)))
            new.append(tail.table.slots(np.arange(length - counts[number], length)))
            seen[number, 0, :, : length - low] = tail.sees(window)[rows[number], low:]
        mask: Tensor | None = None
        if not seen.all():
            numbers = torch.from_numpy(np.where(seen, np.float32(0), np.float32(-np.inf)))
            mask = numbers.to(self._pool.dtype).repeat(1, 1, group, 1)
        written: tuple[Tensor, ...] = ()
        read: tuple[Tensor, ...] = ()
        if len(tails) == 1 and tails[0].table.consecutive:
            written, read = self._pool.read(int(new[0][0]), counts[0]), self._pool.read(int(slots[0][0]), len(keys))
        padded, places = NOTHING, NOTHING
        if rows.size != counts.sum():
            padded = ((np.cumsum(counts) - counts)[:, None] + rows).ravel()
            places = np.flatnonzero(np.arange(rows.shape[1]) < counts[:, None])
        of_rows, of_keys = torch.from_numpy(np.concatenate(new)), torch.from_numpy(np.concatenate(slots))
        return _Keys(written, read, of_rows, of_keys, torch.from_numpy(padded), torch.from_numpy(places), mask)


def _attend_by_operators(layer: Layer, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Attention with a softcap or sinks, which torch's own function does not do; `mask` is added to the scores.

    query (S, KVH, G * N, D), key (S, KVH, L, D), value (S, KVH, L, V), mask (S, 1, G * N, L) -> (S, KVH, G * N, V).
    """
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if layer.scaling is None else layer.scaling)
    if layer.softcap is not None:
        scores = torch.tanh(scores / layer.softcap) * layer.softcap  # before the mask, as the models that cap do
    if mask is not None:
        scores = scores + mask
    if layer.sinks is None:
        return scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value
    sessions, kv_heads, rows, _ = scores.shape
    by_head = layer.sinks.view(kv_heads, -1, 1)
    by_row = by_head.expand(-1, -1, rows // by_head.shape[1]).reshape(1, kv_heads, rows, 1)
    with_sink = torch.cat((scores, by_row.to(scores.dtype).expand(sessions, -1, -1, -1)), dim=-1)
    return with_sink.softmax(-1, dtype=torch.float32)[..., :-1].to(value.dtype) @ value


@dataclass(frozen=True)
class LayerMask:
    """What a model takes for the mask of the layers that see `window` positions back."""

    attention: Attention
    window: int | None


_active: ContextVar[Attention] = ContextVar("coppice_packed_attention")


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
    if use_vmap or allow_is_bidirectional_skip:
        raise UnsupportedModel("the model's mask is not the plain causal one")
    if local_size is not None and local_size == getattr(config, "attention_chunk_size", None):
        raise UnsupportedModel("chunked attention is not supported")
    return LayerMask(_active.get(), local_size)


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
