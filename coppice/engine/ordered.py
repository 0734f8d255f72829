"""Attention on the CPU whose sums depend on a row's own keys alone, in the order of their positions.

Scores are products of two vectors each. The softmax of a row runs over its keys by position, and their values are
summed in segments of SEGMENT positions, one behind the other, each in one chain of additions: what lies between, and
behind, has weight zero and changes nothing. So it is the same whether ancestors are drafted or committed, and whatever
is beside them. That products do add in such chains is the processor's affair: `check_invariant` asks it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coppice.engine.attention import Attention, Layer, in_groups
from coppice.engine.kv_cache import BlockTable, KVPool
from coppice.engine.modules import derived
from coppice.engine.rows import Bools, Ints, Tail, cutting
from coppice.engine.sdpa import MOST_PADDED

SEGMENT = 128
"""positions whose values are summed by themselves; borders are multiples of it"""
CHAIN = 192
"""keys up to which a product adds up in one chain: a segment's and those between them that are not seen"""
TILE = 128
"""rows of one session that attend at once, at most"""
ROWS = 16
"""rows of a product whose matrix is not packed"""
VECTOR = 64
"""numbers in two vectors, which torch's loops take at once, of any type"""
GRAIN = 1 << 15
"""numbers from which on torch gives parts to several threads"""
LANES = 64
"""numbers of keys that a softmax runs over are multiples of it"""
QUERIES = 4
"""rows of a product are a multiple of it"""


def by_rows(function: Callable[[Tensor], Tensor], states: Tensor) -> Tensor:
    """A function of single numbers, (..., N) -> (..., N), whose rows do not depend on one another's number."""
    width, numbers = states.shape[-1], states.numel()
    padding = -width % VECTOR
    threads = min(torch.get_num_threads(), -(-numbers // GRAIN)) or 1
    if not padding and not -(-numbers // threads) % VECTOR:
        return function(states)
    rows = F.pad(states.reshape(-1, width), (0, padding))
    most = max(1, (GRAIN - 1) // (width + padding))
    return torch.cat([function(some) for some in torch.split(rows, most)])[:, :width].view(states.shape)


class RowsLinear(nn.Linear):
    """A linear layer that multiplies ROWS rows at a time."""

    def forward(self, input: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)."""
        rows = input.reshape(-1, input.shape[-1])
        padded = F.pad(rows, (0, 0, 0, -len(rows) % ROWS))
        out = torch.cat([F.linear(some, self.weight, self.bias) for some in torch.split(padded, ROWS)])
        return out[: len(rows)].view(*input.shape[:-1], self.out_features)


def by_row(model: nn.Module) -> None:
    """Have a model's functions and products, those that are not packed yet, compute every row by itself."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = RowsLinear
        elif type(module).__module__ in ("torch.nn.modules.activation", "transformers.activations"):
            kind: Any = type(module)
            module.__class__ = _by_rows(kind)


@cache
def _by_rows(kind: Any) -> Any:
    """The class of a function of single numbers, by rows."""

    def forward(self: Any, states: Tensor) -> Tensor:
        """(..., N) -> (..., N)."""
        return by_rows(lambda some: kind.forward(self, some), states)

    return derived(kind, forward=forward)


@dataclass(frozen=True)
class Tile:
    """Rows of a session, and what each sees.

    visible: (n, E + n) of the tokens behind the prefix. length: (n,) keys of each row. ordered: each row sees all rows
    before it.
    """

    table: BlockTable
    prefix: int
    visible: Bools
    length: Ints
    ordered: bool

    @property
    def new_tokens(self) -> Ints:
        """Where the rows are written, (n,)."""
        count, columns = self.visible.shape
        return self.prefix + np.arange(columns - count, columns)

    def behind(self) -> tuple[Ints, Ints]:
        """Tokens, (R,), from the border on before which all rows see everything, and which of them a row sees at each
        position there, (n, P); -1 for none.
        """
        before = self.prefix % SEGMENT
        used = np.flatnonzero(self.visible.any(axis=0))
        row, column = np.nonzero(self.visible[:, used])
        seen = np.bincount(row, minlength=len(self.length))
        order = np.full((len(self.length), before + int(seen.max())), -1)
        order[:, :before] = np.arange(before)
        order[row, before + np.arange(len(row)) - (np.cumsum(seen) - seen)[row]] = before + column
        return np.concatenate((np.arange(self.prefix - before, self.prefix), self.prefix + used)), order


def tiles_of(tail: Tail) -> Iterator[Tile]:
    """Cut a session's rows: no tile has more than TILE of them, nor more keys behind its border than a chain."""
    (count, columns), visible = tail.visible.shape, tail.visible
    earlier, length = columns - count, tail.prefix + tail.visible.sum(axis=1)
    ordered = bool((length == tail.prefix + earlier + np.arange(1, count + 1)).all())
    first = 0
    while first < count:
        end = min(count, first + TILE)
        if ordered:
            rows = end - first
            prefix, seen = tail.prefix + earlier + first, np.tri(rows, dtype=np.bool_)
        else:
            needed = np.logical_or.accumulate(visible[first:end], axis=0).sum(axis=1)
            end = first + max(1, int(np.searchsorted(needed, CHAIN - tail.prefix % SEGMENT, side="right")))
            prefix, seen = tail.prefix, visible[first:end, : earlier + end]
        yield Tile(tail.table, prefix, seen, length[first:end], ordered)
        first = end


def ordered(tails: Sequence[Tail], pool: KVPool) -> Attention:
    """How the rows of one forward attend."""
    tiles = [tile for tail in tails for tile in tiles_of(tail)]
    counts = [len(tile.length) for tile in tiles]
    return in_groups(tiles, counts, MOST_PADDED, lambda some: Ordered(some, tails, pool))


class Ordered:
    """Tiles that attend at once."""

    def __init__(self, tiles: Sequence[Tile], tails: Sequence[Tail], pool: KVPool) -> None:
        self._tiles, self._tails, self._pool = tiles, tails, pool
        self._plans: dict[tuple[int | None, ...], _Plan] = {}

    def attend(self, layer: Layer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query (1, H, T, D), key (1, KVH, T, D) and value (1, KVH, T, V) of the rows -> (1, T, H, V)."""
        (_, heads, _, dim), (_, kv_heads, _, value_dim) = query.shape, value.shape
        kind = layer.window, heads // kv_heads, kv_heads, dim, value_dim
        if (plan := self._plans.get(kind)) is None:
            window, *sizes = kind
            cut = cutting(window, self._tails)
            plan = self._plans.get((cut, *sizes)) or _Plan(self._tiles, self._pool, cut, *sizes)
            self._plans[kind] = self._plans[(cut, *sizes)] = plan
        return plan.attend(layer, query, key, value)


class _Plan:
    """Some rows in layers of one window and shape: S tiles of N rows, padded, with G query heads for each key head.

    Of each tile the first keys lie by position, in whole segments. Those behind, R and one that nobody sees, are a
    tree's: `order` says which of them each row sees at each position. L: keys in all. M: G * N.
    """

    def __init__(
        self,
        tiles: Sequence[Tile],
        pool: KVPool,
        window: int | None,
        group: int,
        kv_heads: int,
        dim: int,
        value_dim: int,
    ) -> None:
        self._group, self._kv_heads, self._layers = group, kv_heads, pool.layers
        counts = np.array([len(tile.length) for tile in tiles])
        step = QUERIES // math.gcd(group, QUERIES)
        rows = -(-int(counts.max()) // step) * step
        local = np.minimum(np.arange(rows), counts[:, None] - 1)  # (S, N)
        tokens, seen, order, self._front = _keys(tiles, local, window)
        self._locate(tiles, tokens, order, pool)
        # (T,) the place of each row, and (S * N,) the row at each padded place; None where all tiles have N rows.
        self._padded_rows: Tensor | None = None
        if len(tiles) > 1 and bool((counts != rows).any()):
            first = np.cumsum(counts) - counts
            self._padded_rows = torch.from_numpy((first[:, None] + local).ravel())
            self._row_places = torch.from_numpy(np.flatnonzero(np.arange(rows) < counts[:, None]))
        self._sizes = [min(SEGMENT, self._front - some) for some in range(0, self._front, SEGMENT)]
        count, columns = len(tiles), tokens.shape[1]
        # Of all padded rows, zeros where nothing is written, (S, KVH, G, N, D); of one tile's own; and as (S * KVH, M).
        self._queries = torch.zeros(count, kv_heads, group, rows, dim)
        self._own = self._queries[0, :, :, : counts[0]]
        self._rows = self._queries.view(count * kv_heads, group * rows, dim)
        mask = torch.from_numpy(np.where(seen, np.float32(0), np.float32(-np.inf)))
        mask = mask[:, None].expand(-1, group, -1, -1).reshape(count, 1, -1, columns)
        self._mask = mask.expand(-1, kv_heads, -1, -1).flatten(0, 1)  # (S * KVH, M, L)
        self._order: tuple[Tensor, ...] = ()  # (S, KVH, G, N, R') of each segment that is out of order
        self._weights: tuple[Tensor, ...] = ()  # for each of them (S, KVH, G, N, R + 1), zeros where no key is seen
        if order is not None:
            whole = torch.from_numpy(order[:, None, None]).expand(-1, kv_heads, group, -1, -1)
            self._order = torch.split(whole, SEGMENT, dim=-1)
            behind = columns - self._front
            self._weights = tuple(torch.zeros(*self._queries.shape[:4], behind) for _ in self._order)
        self._sums = torch.empty(count * kv_heads, group * rows, value_dim)
        out = self._sums.view(count, kv_heads, group, rows, -1).permute(0, 3, 1, 2, 4)
        self._out = out if count > 1 else out[:, : counts[0]]  # (S, N, KVH, G, V), or (1, T, KVH, G, V) of one tile

    def _locate(self, tiles: Sequence[Tile], tokens: Ints, order: Ints | None, pool: KVPool) -> None:
        """Find the slots of new rows, and of keys by token (S, L): of one tile whose keys lie in a row, as views."""
        new_slots = np.concatenate([tile.table.slots(tile.new_tokens) for tile in tiles])
        self._new_slots = torch.from_numpy(new_slots)
        table, columns = tiles[0].table, tokens.shape[1]
        at = int(table.blocks[0]) * pool.block_size + int(tokens[0, 0])
        in_a_row = order is None or bool((np.diff(tokens[0, :-1]) == 1).all())
        self._viewed = len(tiles) == 1 and table.consecutive and at + columns <= pool.spare + 1 and in_a_row
        if self._viewed:
            # Key of layer 0, value of layer 0, key of layer 1, ...: (1, KVH, T, D or V) and (1, KVH, L, D or V).
            self._written, self._read = pool.read(int(new_slots[0]), len(new_slots)), pool.read(at, columns)
            return
        tokens = np.minimum(tokens, np.array([[tile.new_tokens[-1]] for tile in tiles]))
        slots = torch.from_numpy(np.stack([tile.table.slots(some) for tile, some in zip(tiles, tokens, strict=True)]))
        # (S * KVH * L,), each key among all heads' keys.
        self._flat = (slots[:, None] * self._kv_heads + torch.arange(self._kv_heads)[:, None]).flatten()

    def attend(self, layer: Layer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """As Ordered.attend."""
        _, heads, count, dim = query.shape
        tiles, kv_heads, group, rows, _ = self._queries.shape
        keys, values = self._store(2 * layer.number, key), self._store(2 * layer.number + 1, value)
        if tiles == 1:
            self._own.copy_(query.view(kv_heads, group, count, dim))
        else:
            if self._padded_rows is not None:
                query = query.index_select(2, self._padded_rows)
            self._queries.copy_(query.view(kv_heads, group, tiles, rows, dim).permute(2, 0, 1, 3, 4))
        scale = dim**-0.5 if layer.scaling is None else layer.scaling
        if layer.softcap is None:
            scores = torch.baddbmm(self._mask, self._rows, keys.mT, alpha=scale)
        else:
            scores = torch.bmm(self._rows, keys.mT) * (scale / layer.softcap)
            scores = by_rows(torch.tanh, scores) * layer.softcap + self._mask
        if self._order or layer.sinks is not None:
            scores = self._by_position(scores.view(*self._queries.shape[:4], -1), layer.sinks)
        self._sum(scores.softmax(-1), values)
        out = torch.empty(self._out.shape, dtype=query.dtype).copy_(self._out).view(1, -1, heads, value.shape[-1])
        return out if self._padded_rows is None else out.index_select(1, self._row_places)

    def _store(self, number: int, new: Tensor) -> Tensor:
        """Write (1, KVH, T, D) to the key or value of this number, and read (S * KVH, L, D)."""
        if self._viewed:
            self._written[number].copy_(new)
            return self._read[number][0]
        stored = self._layers[number // 2][number % 2]
        stored.index_copy_(0, self._new_slots, new[0].transpose(0, 1).to(stored.dtype))
        read = stored.view(-1, stored.shape[2]).index_select(0, self._flat)
        return read.view(len(self._mask), -1, stored.shape[2])

    def _by_position(self, scores: Tensor, sinks: Tensor | None) -> Tensor:
        """(S, KVH, G, N, L) by key -> (S, KVH, G, N, P) by position, and what sinks there are behind."""
        if self._order:
            behind = scores[..., self._front :]
            parts = (behind.gather(-1, order) for order in self._order)
            scores = torch.cat((scores[..., : self._front], *parts), dim=-1)
        if sinks is not None:
            last = sinks.float().view(1, scores.shape[1], self._group, 1, 1).expand(*scores.shape[:4], 1)
            scores = torch.cat((scores, F.pad(last, (0, LANES - 1), value=-torch.inf)), dim=-1)
        return scores

    def _sum(self, weights: Tensor, values: Tensor) -> None:
        """weights of any shape, of M rows and P positions, and values (S * KVH, L, V) -> self._sums."""
        flat = weights.view(*self._rows.shape[:2], -1)
        sums, front, beta = self._sums, self._front, 0
        of_weights = flat[..., :front].split_with_sizes(self._sizes, -1) if front else ()
        of_values = values[:, :front].split_with_sizes(self._sizes, 1) if front else ()
        for part, seen in zip(of_weights, of_values, strict=True):
            torch.baddbmm(sums, part, seen, beta=beta, out=sums)
            beta = 1
        for order, spread in zip(self._order, self._weights, strict=True):
            end = front + order.shape[-1]
            spread.scatter_(-1, order, flat[..., front:end].view(order.shape))  # always to the same places
            part = spread.view(*self._rows.shape[:2], -1)[..., :-1]
            torch.baddbmm(sums, part, values[:, self._front : -1], beta=beta, out=sums)
            front, beta = end, 1


def _keys(tiles: Sequence[Tile], local: Ints, window: int | None) -> tuple[Ints, Bools, Ints | None, int]:
    """The tokens of tiles' keys, (S, L); which of them each row sees, (S, N, L); of those behind the last whole
    segment, if they are a tree's, which one a row sees at each position, (S, N, P); and how many are in front of these.
    """
    length = np.stack([tile.length[some] for tile, some in zip(tiles, local, strict=True)])  # (S, N)
    low = np.zeros_like(length) if window is None else np.maximum(length - window, 0)
    start = int(low.min()) // SEGMENT * SEGMENT
    if all(tile.ordered for tile in tiles):
        tokens = np.arange(start, start + _lanes(int(length.max()) - start))[None].repeat(len(tiles), 0)  # (S, L)
        seen = (tokens[:, None] < length[..., None]) & (tokens[:, None] >= low[..., None])
        return tokens, seen, None, tokens.shape[1]
    borders = np.array([[tile.prefix // SEGMENT * SEGMENT] for tile in tiles])
    before = np.arange(start, int(borders.max()))[None]
    tokens, order, seen = _behind(tiles, local, low, length)
    seen = np.concatenate(((before < borders)[:, None] & (before[:, None] >= low[..., None]), seen), axis=2)
    return np.concatenate((np.minimum(before, borders), tokens), axis=1), seen, order, before.shape[1]


def _behind(tiles: Sequence[Tile], local: Ints, low: Ints, length: Ints) -> tuple[Ints, Ints, Bools]:
    """Of each tile behind its border: the tokens, (S, R + 1), the last one not seen; which one a row sees at each
    position, (S, N, P); and which it sees at all, (S, N, R + 1).
    """
    parts = [tile.behind() for tile in tiles]
    most = max(len(tokens) for tokens, _ in parts)
    tokens = np.zeros((len(tiles), most + 1), np.int64)
    order = np.full((*local.shape, _lanes(max(order.shape[1] for _, order in parts))), most)
    for s, (some, own) in enumerate(parts):
        tokens[s, : len(some)] = some
        order[s, :, : own.shape[1]] = np.where(own < 0, most, own)[local[s]]
    positions = np.array([[[tile.prefix // SEGMENT * SEGMENT]] for tile in tiles]) + np.arange(order.shape[2])
    seen = np.zeros((*local.shape, most + 1), np.bool_)
    np.put_along_axis(seen, np.where((positions >= low[..., None]) & (order < most), order, most), True, axis=2)
    seen[..., most] = False
    return tokens, order, seen


def _lanes(keys: int) -> int:
    return -(-keys // LANES) * LANES
