"""Attention by torch's own kernel: a session's keys are read as a view of the pool, or gathered for several sessions.

Scores are summed in the order that is fastest, which depends on what is beside a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from coppice.engine.attention import Attention, Layer, in_groups
from coppice.engine.kv_cache import KVPool
from coppice.engine.rows import Bools, Ints, Tail, cutting

MOST_PADDED = 64
"""rows up to which, and up to twice the fewest, sessions are padded to each other: a prompt's chunk has more"""


def sdpa(tails: Sequence[Tail], pool: KVPool) -> Attention:
    """How the rows of one forward attend."""
    counts = [len(tail.visible) for tail in tails]
    return in_groups(tails, counts, max(MOST_PADDED, 2 * min(counts)), lambda some: Sdpa(some, pool))


class _Seen(NamedTuple):
    """What the rows see in layers of one window and number of query heads for each key head.

    keys: of a session in consecutive blocks, views (1, KVH, L, D or V): key of layer 0, value of layer 0, key of layer
    1, and so on. mask: (S, 1, G * N, L), None when everything is seen.
    """

    keys: tuple[Tensor, ...]
    mask: Tensor | None


class Sdpa:
    """S sessions that attend at once: rows padded to (S, N), keys to (S, L).

    One session in consecutive blocks is written to, and read from, slices of the pool.
    """

    def __init__(self, tails: Sequence[Tail], pool: KVPool) -> None:
        self._tails, self._pool = tails, pool
        self._seen: dict[tuple[int | None, int], _Seen] = {}
        self._sessions = len(tails)
        self._padded_rows: Tensor | None = None  # (S * N,) the row at each padded place; None when nothing is padded
        self._viewed = len(tails) == 1 and tails[0].table.consecutive
        if self._viewed:
            (tail,) = tails
            count, self._start = len(tail.visible), int(tail.table.blocks[0]) * pool.block_size
            self._written = pool.read(self._start + tail.length - count, count)
        else:
            self._gather(tails)

    def _gather(self, tails: Sequence[Tail]) -> None:
        counts = np.array([len(tail.visible) for tail in tails])
        lengths = np.array([tail.length for tail in tails])
        most_rows, most_keys = int(counts.max()), int(lengths.max())
        # Shorter sessions repeat their own last row and their own last key: never another session's.
        self._local = np.minimum(np.arange(most_rows), counts[:, None] - 1)  # (S, N)
        keys = np.minimum(np.arange(most_keys), lengths[:, None] - 1)  # (S, L)
        first = np.cumsum(counts) - counts
        session = np.repeat(np.arange(len(counts)), counts)  # (T,)
        row = np.arange(len(session)) - first[session]  # (T,) inside its session
        key_slots = np.stack([tail.table.slots(keys[s]) for s, tail in enumerate(tails)])
        self._new_slots = self._index(key_slots[session, (lengths - counts)[session] + row])
        self._key_slots = self._index(key_slots)
        if most_rows * len(counts) != len(session):
            self._padded_rows = self._index(first[:, None] + self._local)
            self._row_places = self._index(session * most_rows + row)  # (T,) the place of each row

    def attend(self, layer: Layer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query (1, H, T, D), key (1, KVH, T, D) and value (1, KVH, T, V) of the rows -> (1, T, H, V)."""
        number, window, scaling, softcap, sinks = layer
        (_, heads, _, dim), kv_heads, sessions = query.shape, key.shape[1], self._sessions
        group = heads // kv_heads
        seen = self._seen.get((window, group)) or self._see(window, group)
        if self._viewed:
            self._written[2 * number].copy_(key)
            self._written[2 * number + 1].copy_(value)
            keys, values = seen.keys[2 * number], seen.keys[2 * number + 1]
        else:
            keys, values = (
                stored.index_copy_(0, self._new_slots, new[0].transpose(0, 1))
                .index_select(0, self._key_slots)
                .view(sessions, -1, kv_heads, new.shape[-1])
                .transpose(1, 2)  # (S, KVH, L, D or V)
                for stored, new in zip(self._pool.layers[number], (key, value), strict=True)
            )
        if self._padded_rows is not None:
            query = query.index_select(2, self._padded_rows)
        # The query heads of one key head become rows of one head, so that keys are never repeated.
        if sessions > 1:
            query = query.reshape(kv_heads, group, sessions, -1, dim).permute(2, 0, 1, 3, 4)
        query = query.reshape(sessions, kv_heads, -1, dim)  # (S, KVH, G * N, D)
        if softcap is None and sinks is None:
            out = F.scaled_dot_product_attention(query, keys, values, attn_mask=seen.mask, scale=scaling)
        else:
            out = _attend_by_operators(layer, query, keys, values, seen.mask)
        out = out.view(sessions, kv_heads, group, -1, out.shape[-1]).permute(0, 3, 1, 2, 4)
        out = out.reshape(1, -1, heads, out.shape[-1])  # (1, S * N, H, V)
        return out if self._padded_rows is None else out.index_select(1, self._row_places)

    def _see(self, window: int | None, group: int) -> _Seen:
        cut = cutting(window, self._tails)  # layers whose windows hide nothing share a mask
        seen = self._seen.get((cut, group)) or (self._view(cut, group) if self._viewed else self._pad(cut, group))
        self._seen[cut, group] = self._seen[window, group] = seen
        return seen

    def _view(self, window: int | None, group: int) -> _Seen:
        (tail,) = self._tails
        # Keys before every row's window are not even read; then a single row sees all that is left.
        low = 0 if window is None else max(0, tail.prefix + 1 - window)
        visible = tail.visible if window is None else tail.sees(window)[:, low:]
        mask = None if visible.all() else self._mask(visible[None, None], tail.length - low, group)
        return _Seen(self._pool.read(self._start + low, tail.length - low), mask)

    def _pad(self, window: int | None, group: int) -> _Seen:
        keys = len(self._key_slots) // self._sessions
        visible = np.zeros((self._sessions, 1, self._local.shape[1], keys), np.bool_)
        for s, tail in enumerate(self._tails):
            visible[s, 0, :, : tail.length] = tail.sees(window)[self._local[s]]
        return _Seen((), self._mask(visible, keys, group))

    def _mask(self, visible: Bools, keys: int, group: int) -> Tensor:
        """(S, 1, N, K), whether rows see the last K of L keys, as they see the others -> (S, 1, group * N, L) of 0 and
        -inf: SDPA would convert a boolean mask in every layer.
        """
        sessions, _, rows, last = visible.shape
        # Rows are whole vectors apart: CUDA's kernels would copy a mask whose rows are not.
        mask = np.zeros((sessions, 1, group, rows, -(-keys // 8) * 8), np.float32)
        np.copyto(mask[..., keys - last : keys], -np.inf, where=~visible[:, :, None])
        whole = torch.from_numpy(mask.reshape(sessions, 1, group * rows, -1))
        return whole.to(self._pool.device, self._pool.dtype)[..., :keys]

    def _index(self, array: Ints) -> Tensor:
        return torch.from_numpy(array.ravel()).to(self._pool.device)


def _attend_by_operators(layer: Layer, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Attention with a softcap or sinks, which torch's own function does not do: G query heads for each key head, whose
    rows lie one behind the other. `mask` is added to the scores.

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
