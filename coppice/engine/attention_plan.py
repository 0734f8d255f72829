"""Where the rows of one forward write and what they see: indices and masks, made once, used by every layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from coppice.engine.attention import LayerPlan, Scoring, attend
from coppice.engine.batch import PackedBatch, Span
from coppice.engine.kv_cache import BlockTable, KVPool


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
class Tail:
    """One session's rows in a draft head's forward, behind `prefix` tokens that all of them see.

    visible: (N, E + N) bool, which of the E tokens behind the prefix and of the N rows each row sees. Row r writes its
    keys and values at the session's token index prefix + E + r, for which `table` has room.
    """

    table: BlockTable
    prefix: int
    visible: NDArray[np.bool_]


def plan_tails(tails: Sequence[Tail], pool: KVPool, group: int) -> LayerPlan:
    """The plan of rows that say themselves what they see. group: query heads for each key head."""
    if len(tails) > 1 or not tails[0].table.consecutive:
        counts = np.array([len(tail.visible) for tail in tails])
        lengths = np.array([tail.prefix + tail.visible.shape[1] for tail in tails])
        plan, local = _gather_plan([tail.table for tail in tails], counts, lengths, pool)
        visible = np.zeros((len(tails), 1, local.shape[1], lengths.max()), np.bool_)
        for s, tail in enumerate(tails):
            visible[s, 0, :, : tail.prefix] = True
            visible[s, 0, :, tail.prefix : lengths[s]] = tail.visible[local[s]]
        return dataclasses.replace(plan, group=group, mask=_additive(visible, group, pool))
    (tail,) = tails
    rows, behind = tail.visible.shape
    start, end = int(tail.table.blocks[0]) * pool.block_size, tail.prefix + behind
    mask = None
    if rows > 1 or not tail.visible.all():
        hidden = np.zeros((1, 1, group, rows, end), np.float32)
        hidden[..., tail.prefix :] = np.where(tail.visible, np.float32(0), np.float32(-np.inf))
        mask = torch.from_numpy(hidden).view(1, 1, group * rows, end).to(pool.device, pool.dtype)
    return ViewPlan(None, group, pool.read(start + end - rows, rows), pool.read(start, end), mask)


def plan_forward(batch: PackedBatch, pool: KVPool, groups: Mapping[int | None, int]) -> dict[int | None, LayerPlan]:
    """The plan for each of the model's windows. groups: query heads for each key head in the layers that have it."""
    single = len(batch.spans) == 1 and batch.spans[0].table.consecutive
    make = _view_plans if single else _gather_plans
    # A window that cuts nothing off is none, and shares its mask.
    reach = int(batch.positions.max()) + 1
    cutting = {
        window: (None if window is None or window >= reach else window, group) for window, group in groups.items()
    }
    made = make(batch, pool, set(cutting.values()))
    return {window: dataclasses.replace(made[cut], window=window) for window, cut in cutting.items()}


Kind = tuple[int | None, int]
"""of a layer: its window, and how many query heads it has for each key head"""


def _view_plans(batch: PackedBatch, pool: KVPool, kinds: set[Kind]) -> dict[Kind, ViewPlan]:
    span = batch.spans[0]
    rows = span.num_rows
    start = int(span.table.blocks[0]) * pool.block_size
    ancestors = batch.ancestors() if rows > 1 or span.earlier else None
    written = pool.read(start + span.start, rows)
    plans: dict[Kind, ViewPlan] = {}
    for window, group in kinds:
        # Keys before every row's window are not even read; then a single row sees all that is left.
        low = 0 if window is None else max(0, span.prefix_len + 1 - window)
        mask = None
        if ancestors is not None:
            mask = _additive(_visible(batch, span, ancestors, window)[None, None, :, low:], group, pool)
        read = pool.read(start + low, span.start + rows - low)
        plans[window, group] = ViewPlan(window, group, written, read, mask)
    return plans


def _gather_plans(batch: PackedBatch, pool: KVPool, kinds: set[Kind]) -> dict[Kind, GatherPlan]:
    counts = np.array([span.num_rows for span in batch.spans])
    lengths = np.array([span.start for span in batch.spans]) + counts
    plan, local = _gather_plan([span.table for span in batch.spans], counts, lengths, pool)
    ancestors = batch.ancestors()
    plans: dict[Kind, GatherPlan] = {}
    for window, group in kinds:
        visible = np.zeros((len(counts), 1, local.shape[1], lengths.max()), dtype=np.bool_)
        for s, span in enumerate(batch.spans):
            visible[s, 0, :, : lengths[s]] = _visible(batch, span, ancestors, window)[local[s]]
        plans[window, group] = dataclasses.replace(plan, group=group, mask=_additive(visible, group, pool))
    return plans


def _gather_plan(
    tables: Sequence[BlockTable], counts: NDArray[np.int64], lengths: NDArray[np.int64], pool: KVPool
) -> tuple[GatherPlan, NDArray[np.int64]]:
    """A plan without its group and mask, and the (S, N) row inside its session at each padded place.

    counts: (S,) rows of each session. lengths: (S,) its keys, the rows' own last.
    """
    most_rows, most_keys = int(counts.max()), int(lengths.max())
    # Shorter sessions repeat their own last row and their own last key: never another session's.
    local = np.minimum(np.arange(most_rows), counts[:, None] - 1)  # (S, N)
    keys = np.minimum(np.arange(most_keys), lengths[:, None] - 1)  # (S, L)
    first = np.cumsum(counts) - counts
    session = np.repeat(np.arange(len(counts)), counts)  # (T,)
    row = np.arange(len(session)) - first[session]  # (T,) inside its session
    key_slots = np.stack([table.slots(keys[s]) for s, table in enumerate(tables)])
    new_slots = key_slots[session, (lengths - counts)[session] + row]
    padded = most_rows * len(counts) != len(session)

    def index(array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array.ravel()).to(pool.device)

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
    return plan, local


def _visible(batch: PackedBatch, span: Span, ancestors: NDArray[np.bool_], window: int | None) -> NDArray[np.bool_]:
    """(n, start + n): which of the session's keys each row of the span sees."""
    rows = slice(span.first_row, span.first_row + span.num_rows)
    visible = np.ones((span.num_rows, span.start + span.num_rows), dtype=np.bool_)
    if span.earlier:
        visible[:, span.prefix_len : span.start] = span.earlier.visible
    visible[:, span.start :] = ancestors[rows, : span.num_rows]
    if window is not None:
        positions = batch.positions.numpy()[rows]
        # In the prefix a token's index is its position; in a tree it is not.
        tree = [span.earlier.positions] if span.earlier else []
        keys = np.concatenate([np.arange(span.prefix_len), *tree, positions])
        visible &= keys > positions[:, None] - window
    return visible


def _additive(visible: NDArray[np.bool_], group: int, pool: KVPool) -> Tensor:
    """(S, 1, N, L) visible -> (S, 1, group * N, L) of 0 and -inf: SDPA would convert a boolean mask in every layer."""
    sessions, _, rows, keys = visible.shape
    hidden = torch.from_numpy(~visible)[:, :, None].expand(sessions, 1, group, rows, keys).flatten(2, 3)
    mask = torch.zeros(hidden.shape, dtype=pool.dtype).masked_fill_(hidden, float("-inf"))
    return mask.to(pool.device)
