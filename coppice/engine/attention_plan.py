"""Where the rows of one forward write and what they see: indices and masks, made once, used by every layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from coppice.engine.attention import LayerPlan, Scoring, attend
from coppice.engine.batch import PackedBatch, Tail
from coppice.engine.kv_cache import KVPool

MOST_PADDED = 64
"""rows up to which, and up to twice the fewest, sessions are padded to each other: a prompt's chunk has more"""


@dataclass(frozen=True)
class ViewPlan:
    """One session in consecutive blocks: rows are written to, and keys read from, slices of the pool."""

    window: int | None
    group: int  # query heads for each key head
    written: tuple[Tensor, ...]  # key of layer 0, value of layer 0, key of layer 1, ...: (1, KVH, T, D or V) each
    read: tuple[Tensor, ...]  # in the same order, (1, KVH, L, D or V) each
    mask: Tensor | None  # (1, 1, G * T, L), None when everything is seen

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """query (1, H, T, D), key (1, KVH, T, D) and value (1, KVH, T, V) of the rows -> (1, T, H, V)."""
        self.written[2 * layer].copy_(key)
        self.written[2 * layer + 1].copy_(value)
        _, heads, rows, dim = query.shape
        kv_heads = heads // self.group
        # The query heads of one key head become rows of one head, so that keys are never repeated.
        grouped = query.reshape(1, kv_heads, self.group * rows, dim)
        keys, values = self.read[2 * layer], self.read[2 * layer + 1]
        if scoring.plain:
            out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=self.mask, scale=scoring.scaling)
        else:
            out = attend(grouped, keys, values, self.mask, scoring)
        return out.view(1, kv_heads, self.group, rows, -1).permute(0, 3, 1, 2, 4).reshape(1, rows, heads, -1)


@dataclass(frozen=True)
class GatherPlan:
    """Several sessions, or one in scattered blocks: rows padded to (S, N), keys gathered to (S, L)."""

    window: int | None
    group: int
    layers: tuple[tuple[Tensor, Tensor], ...]  # keys (slots, KVH, D) and values (slots, KVH, V) of each layer
    new_slots: Tensor  # (T,)
    key_slots: Tensor  # (S * L,)
    padded_rows: Tensor | None  # (S * N,) the row at each padded place; None when nothing is padded
    row_places: Tensor | None  # (T,) the place of each row
    sessions: int
    mask: Tensor  # (S, 1, G * N, L)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """query (1, H, T, D), key (1, KVH, T, D) and value (1, KVH, T, V) of the rows -> (1, T, H, V)."""
        _, heads, _, dim = query.shape
        kv_heads = heads // self.group
        keys, values = (
            stored.index_copy_(0, self.new_slots, new[0].transpose(0, 1))
            .index_select(0, self.key_slots)
            .view(self.sessions, -1, kv_heads, new.shape[-1])
            .transpose(1, 2)  # (S, KVH, L, D or V)
            for stored, new in zip(self.layers[layer], (key, value), strict=True)
        )
        padded = query if self.padded_rows is None else query.index_select(2, self.padded_rows)
        grouped = (
            padded.reshape(kv_heads, self.group, self.sessions, -1, dim)
            .permute(2, 0, 1, 3, 4)
            .reshape(self.sessions, kv_heads, -1, dim)  # (S, KVH, G * N, D)
        )
        if scoring.plain:
            out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=self.mask, scale=scoring.scaling)
        else:
            out = attend(grouped, keys, values, self.mask, scoring)
        out = (
            out.view(self.sessions, kv_heads, self.group, -1, out.shape[-1])
            .permute(0, 3, 1, 2, 4)
            .reshape(1, -1, heads, out.shape[-1])  # (1, S * N, H, V)
        )
        return out if self.row_places is None else out.index_select(1, self.row_places)


@dataclass(frozen=True)
class GroupedPlan:
    """Sessions whose rows are so many that others would be padded to them attend by themselves."""

    window: int | None
    parts: tuple[tuple[int, LayerPlan], ...]  # in the order of the rows: how many of them, and their plan

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """query (1, H, T, D), key (1, KVH, T, D) and value (1, KVH, T, V) of the rows -> (1, T, H, V)."""
        counts = [rows for rows, _ in self.parts]
        inputs = [states.split_with_sizes(counts, 2) for states in (query, key, value)]
        outs = [plan.attend(layer, q, k, v, scoring) for (_, plan), q, k, v in zip(self.parts, *inputs, strict=True)]
        return torch.cat(outs, dim=1)


Kind = tuple[int | None, int]
"""of a layer: its window, and how many query heads it has for each key head"""

MakePlans = Callable[[Sequence[Tail], KVPool, set[Kind]], Mapping[Kind, Any]]
"""makes the plan of each kind of layer for some rows"""


def plan_tails(tails: Sequence[Tail], pool: KVPool, group: int) -> LayerPlan:
    """The plan of rows that say themselves what they see. group: query heads for each key head."""
    return any_order(tails, pool, {(None, group)})[None, group]


def any_order(
    tails: Sequence[Tail], pool: KVPool, kinds: set[Kind]
) -> Mapping[Kind, ViewPlan | GatherPlan | GroupedPlan]:
    """The plans of rows whose sums are made in the order that is fastest."""
    most = max(MOST_PADDED, 2 * min([len(tail.visible) for tail in tails]))
    groups = [list(some) for _, some in groupby(tails, lambda tail: id(tail) if len(tail.visible) > most else None)]
    if len(groups) > 1:
        parts = [(sum([len(tail.visible) for tail in some]), any_order(some, pool, kinds)) for some in groups]
        return {kind: GroupedPlan(kind[0], tuple((rows, made[kind]) for rows, made in parts)) for kind in kinds}
    if len(tails) > 1 or not tails[0].table.consecutive:
        return _gather_plans(tails, pool, kinds)
    (tail,) = tails
    rows, start, end = len(tail.visible), int(tail.table.blocks[0]) * pool.block_size, tail.length
    written = pool.read(start + end - rows, rows)
    plans: dict[Kind, ViewPlan] = {}
    for window, group in kinds:
        # Keys before every row's window are not even read; then a single row sees all that is left.
        low = 0 if window is None else max(0, tail.prefix + 1 - window)
        visible = tail.visible if window is None else tail.sees(window)[:, low:]
        mask = None if visible.all() else _additive(visible[None, None], end - low, group, pool)
        plans[window, group] = ViewPlan(window, group, written, pool.read(start + low, end - low), mask)
    return plans


def plan_forward(
    batch: PackedBatch, pool: KVPool, groups: Mapping[int | None, int], make: MakePlans = any_order
) -> dict[int | None, LayerPlan]:
    """The plan for each of the model's windows. groups: query heads for each key head in the layers that have it."""
    if set(groups) == {None}:
        return {None: make(batch.tails, pool, {(None, groups[None])})[None, groups[None]]}
    # A window that cuts nothing off is none, and shares its mask.
    reach = int(batch.positions.max()) + 1
    cutting = {
        window: (None if window is None or window >= reach else window, group) for window, group in groups.items()
    }
    made = make(batch.tails, pool, set(cutting.values()))
    return {window: dataclasses.replace(made[cut], window=window) for window, cut in cutting.items()}


def _gather_plans(tails: Sequence[Tail], pool: KVPool, kinds: set[Kind]) -> dict[Kind, GatherPlan]:
    counts = np.array([len(tail.visible) for tail in tails])
    lengths = np.array([tail.length for tail in tails])
    most_rows, most_keys = int(counts.max()), int(lengths.max())
    # Shorter sessions repeat their own last row and their own last key: never another session's.
    local = np.minimum(np.arange(most_rows), counts[:, None] - 1)  # (S, N)
    keys = np.minimum(np.arange(most_keys), lengths[:, None] - 1)  # (S, L)
    first = np.cumsum(counts) - counts
    session = np.repeat(np.arange(len(counts)), counts)  # (T,)
    row = np.arange(len(session)) - first[session]  # (T,) inside its session
    key_slots = np.stack([tail.table.slots(keys[s]) for s, tail in enumerate(tails)])
    new_slots = key_slots[session, (lengths - counts)[session] + row]
    padded = most_rows * len(counts) != len(session)

    def index(array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array.ravel()).to(pool.device)

    def mask(window: int | None, group: int) -> Tensor:
        visible = np.zeros((len(counts), 1, most_rows, most_keys), np.bool_)
        for s, tail in enumerate(tails):
            visible[s, 0, :, : lengths[s]] = tail.sees(window)[local[s]]
        return _additive(visible, most_keys, group, pool)

    plan = GatherPlan(
        window=None,
        group=0,
        layers=pool.layers,
        new_slots=index(new_slots),
        key_slots=index(key_slots),
        padded_rows=index(first[:, None] + local) if padded else None,
        row_places=index(session * most_rows + row) if padded else None,
        sessions=len(counts),
        mask=torch.empty(0),
    )
    return {kind: dataclasses.replace(plan, group=kind[1], mask=mask(*kind)) for kind in kinds}


def _additive(visible: NDArray[np.bool_], keys: int, group: int, pool: KVPool) -> Tensor:
    """(S, 1, N, K), whether rows see the last K of L keys, as they see the others -> (S, 1, group * N, L) of 0 and
    -inf: SDPA would convert a boolean mask in every layer.
    """
    sessions, _, rows, last = visible.shape
    # Rows are whole vectors apart: CUDA's kernels would copy a mask whose rows are not.
    mask = np.zeros((sessions, 1, group, rows, -(-keys // 8) * 8), np.float32)
    np.copyto(mask[..., keys - last : keys], -np.inf, where=~visible[:, :, None])
    whole = torch.from_numpy(mask.reshape(sessions, 1, group * rows, -1))
    return whole.to(pool.device, pool.dtype)[..., :keys]
