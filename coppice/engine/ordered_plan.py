"""Attention on the CPU whose sums depend on a row's own keys alone, in the order of their positions.

Scores are products of two vectors each. The softmax of a row runs over its keys by position, and their values are
summed in segments of SEGMENT positions, one behind the other, each in one chain of additions: what lies between, and
behind, has weight zero and changes nothing. So it is the same whether ancestors are drafted or committed, and whatever
is beside them. That products do add in such chains is the processor's affair: `invariant.py` asks it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from coppice.engine.attention import Scoring
from coppice.engine.attention_plan import GroupedPlan, Kind
from coppice.engine.batch import Tail
from coppice.engine.kv_cache import KVPool
from coppice.engine.ordered_tiles import SEGMENT, Tile, tiles_of

ROWS = 16
"""rows of a product whose matrix is not packed"""
VECTOR = 64
"""numbers in two vectors, which torch's loops take at once, of any type"""
GRAIN = 1 << 15
"""numbers from which on torch gives parts to several threads"""


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

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


LANES = 64
"""numbers of keys that a softmax runs over are multiples of it"""
QUERIES = 4
"""rows of a product are a multiple of it"""

Ints = NDArray[np.int64]


class _Room(NamedTuple):
    """What a plan keeps for layers of some heads.

    queries: (S, KVH, G, N, D), zeros where rows are padded. own: those of one tile's rows, (KVH, G, T, D). rows: all of
    them, (S * KVH, M, D). mask: (S * KVH, M, L). sums: (S * KVH, M, V). out: those of the rows, (S, N, KVH, G, V), or
    (1, T, KVH, G, V) of one tile.
    order: (S, KVH, G, N, R') of each segment of positions that is out of order, R + 1 keys. weights: for each of them
    (S, KVH, G, N, R + 1), zeros where no key is seen. flat: (S * KVH * L,), each key among all heads' keys.
    """

    queries: Tensor
    own: Tensor
    rows: Tensor
    mask: Tensor
    sums: Tensor
    out: Tensor
    order: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]
    flat: Tensor


@dataclass(frozen=True)
class OrderedPlan:
    """Some rows of some sessions: S tiles of N rows, padded, G query heads for each key head; M is G * N.

    Of each tile the first keys lie by position, in whole segments. Those behind, R and one that nobody sees, are a
    tree's: `order` says which of them each row sees at each position.
    """

    window: int | None
    group: int
    layers: tuple[tuple[Tensor, Tensor], ...]  # keys (slots, KVH, D) and values (slots, KVH, V) of each layer
    new_slots: Tensor  # (T,)
    written: tuple[Tensor, ...]  # of one tile whose keys lie in a row: key of layer 0, value of layer 0, key of
    read: tuple[Tensor, ...]  # layer 1, ...: (1, KVH, T, D or V) and (1, KVH, L, D or V); else nothing
    key_slots: Tensor  # (S, L)
    padded_rows: Tensor | None  # (S * N,) the row at each padded place; None where all tiles have N rows, or for one
    row_places: Tensor | None  # (T,) the place of each row
    mask: Tensor  # (S, N, L)
    sizes: list[int]  # of the segments in front
    order: Tensor | None  # (S, 1, 1, N, P), of R + 1 keys; None where all lie by position
    rooms: dict[tuple[int, int, int], _Room] = field(default_factory=dict)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """query (1, H, T, D), key (1, KVH, T, D) and value (1, KVH, T, V) of the rows -> (1, T, H, V)."""
        _, heads, count, dim = query.shape
        tiles, rows, _ = self.mask.shape
        kv_heads, group = heads // self.group, self.group
        sizes = kv_heads, dim, value.shape[-1]
        room = self.rooms.get(sizes) or self._prepare(count, *sizes)
        keys, values = self._read(2 * layer, key, room.flat), self._read(2 * layer + 1, value, room.flat)
        if tiles == 1:
            room.own.copy_(query.view(kv_heads, group, count, dim))
        else:
            if self.padded_rows is not None:
                query = query.index_select(2, self.padded_rows)
            room.queries.copy_(query.view(kv_heads, group, tiles, rows, dim).permute(2, 0, 1, 3, 4))
        scale = dim**-0.5 if scoring.scaling is None else scoring.scaling
        if scoring.softcap is None:
            scores = torch.baddbmm(room.mask, room.rows, keys.mT, alpha=scale)
        else:
            scores = torch.bmm(room.rows, keys.mT) * (scale / scoring.softcap)
            scores = by_rows(torch.tanh, scores) * scoring.softcap + room.mask
        if self.order is not None or scoring.sinks is not None:
            scores = self._by_position(scores.view(*room.queries.shape[:4], -1), room, scoring.sinks)
        self._sum(scores.softmax(-1), values, room)
        out = torch.empty(room.out.shape, dtype=query.dtype).copy_(room.out).view(1, -1, heads, sizes[2])
        return out if self.row_places is None else out.index_select(1, self.row_places)

    def _prepare(self, count: int, kv_heads: int, dim: int, value_dim: int) -> _Room:
        tiles, rows, columns = self.mask.shape
        queries = torch.zeros(tiles, kv_heads, self.group, rows, dim)
        mask = self.mask[:, None].expand(-1, self.group, -1, -1).reshape(tiles, 1, -1, columns)
        order: tuple[Tensor, ...] = ()
        weights: tuple[Tensor, ...] = ()
        if self.order is not None:
            order = torch.split(self.order.expand(-1, kv_heads, self.group, -1, -1), SEGMENT, dim=-1)
            behind = columns - sum(self.sizes)
            weights = tuple(torch.zeros(*queries.shape[:4], behind) for _ in order)
        sums = torch.empty(tiles * kv_heads, self.group * rows, value_dim)
        out = sums.view(tiles, kv_heads, self.group, rows, -1).permute(0, 3, 1, 2, 4)
        made = self.rooms[kv_heads, dim, value_dim] = _Room(
            queries=queries,
            own=queries[0, :, :, :count],
            rows=queries.view(tiles * kv_heads, self.group * rows, dim),
            mask=mask.expand(-1, kv_heads, -1, -1).flatten(0, 1),
            sums=sums,
            out=out if tiles > 1 else out[:, :count],
            order=order,
            weights=weights,
            flat=(self.key_slots[:, None] * kv_heads + torch.arange(kv_heads)[:, None]).flatten(),
        )
        return made

    def _read(self, number: int, new: Tensor, flat: Tensor) -> Tensor:
        """Write (1, KVH, T, D) to the key or value of this number, and read (S * KVH, L, D)."""
        if self.read:
            self.written[number].copy_(new)
            return self.read[number][0]
        stored = self.layers[number // 2][number % 2]
        stored.index_copy_(0, self.new_slots, new[0].transpose(0, 1).to(stored.dtype))
        read = stored.view(-1, stored.shape[2]).index_select(0, flat)
        return read.view(-1, self.key_slots.shape[1], stored.shape[2])

    def _by_position(self, scores: Tensor, room: _Room, sinks: Tensor | None) -> Tensor:
        """(S, KVH, G, N, L) by key -> (S, KVH, G, N, P) by position, and what sinks there are behind."""
        if room.order:
            front = sum(self.sizes)
            behind = scores[..., front:]
            scores = torch.cat((scores[..., :front], *(behind.gather(-1, some) for some in room.order)), dim=-1)
        if sinks is not None:
            last = sinks.float().view(1, scores.shape[1], self.group, 1, 1).expand(*scores.shape[:4], 1)
            scores = torch.cat((scores, F.pad(last, (0, LANES - 1), value=-torch.inf)), dim=-1)
        return scores

    def _sum(self, weights: Tensor, values: Tensor, room: _Room) -> None:
        """weights of any shape, of M rows and P positions, and values (S * KVH, L, V) -> room.sums."""
        flat = weights.view(*room.rows.shape[:2], -1)
        sums, front, beta = room.sums, sum(self.sizes), 0
        seen_by, sizes = flat[..., :front], list(self.sizes)
        parts = zip(seen_by.split_with_sizes(sizes, -1), values[:, :front].split_with_sizes(sizes, 1), strict=True)
        for part, seen in parts if front else ():
            torch.baddbmm(sums, part, seen, beta=beta, out=sums)
            beta = 1
        for order, spread in zip(room.order, room.weights, strict=True):
            end = front + order.shape[-1]
            spread.scatter_(-1, order, flat[..., front:end].view(order.shape))  # always to the same places
            part = spread.view(*room.rows.shape[:2], -1)[..., :-1]
            torch.baddbmm(sums, part, values[:, sum(self.sizes) : -1], beta=beta, out=sums)
            front, beta = end, 1


def ordered_plans(tails: Sequence[Tail], pool: KVPool, kinds: set[Kind]) -> Mapping[Kind, OrderedPlan | GroupedPlan]:
    """The plans of some rows; those of many attend by themselves, others together."""
    tiles = [tile for tail in tails for tile in tiles_of(tail)]
    groups = [list(some) for _, some in groupby(tiles, lambda tile: id(tile) if tile.many else 0)]
    made = [
        (sum(len(tile.length) for tile in some), {kind: _plan(some, pool, *kind) for kind in kinds}) for some in groups
    ]
    if len(made) == 1:
        return made[0][1]
    return {kind: GroupedPlan(kind[0], tuple((rows, plans[kind]) for rows, plans in made)) for kind in kinds}


def _plan(tiles: Sequence[Tile], pool: KVPool, window: int | None, group: int) -> OrderedPlan:
    counts = np.array([len(tile.length) for tile in tiles])
    step = QUERIES // math.gcd(group, QUERIES)
    rows = -(-int(counts.max()) // step) * step
    local = np.minimum(np.arange(rows), counts[:, None] - 1)  # (S, N)
    length = np.stack([tile.length[some] for tile, some in zip(tiles, local, strict=True)])  # (S, N)
    low = np.zeros_like(length) if window is None else np.maximum(length - window, 0)
    start = int(low.min()) // SEGMENT * SEGMENT
    order: Ints | None = None
    if all(tile.ordered for tile in tiles):
        tokens = np.arange(start, start + _lanes(int(length.max()) - start))[None].repeat(len(tiles), 0)  # (S, L)
        seen = (tokens[:, None] < length[..., None]) & (tokens[:, None] >= low[..., None])
        front = tokens.shape[1]
    else:
        borders = np.array([[tile.prefix // SEGMENT * SEGMENT] for tile in tiles])
        before = np.arange(start, int(borders.max()))[None]
        front = before.shape[1]
        tokens, order, seen = _behind(tiles, local, low, length)
        seen = np.concatenate(((before < borders)[:, None] & (before[:, None] >= low[..., None]), seen), axis=2)
        tokens = np.concatenate((np.minimum(before, borders), tokens), axis=1)
    new_slots = np.concatenate([tile.table.slots(tile.new_tokens) for tile in tiles])
    table, several = tiles[0].table, len(tiles) > 1 and bool((counts != rows).any())
    at = int(table.blocks[0]) * pool.block_size + start
    run = len(tiles) == 1 and table.consecutive and at + tokens.shape[1] <= pool.spare + 1
    if run and order is not None:
        run = bool((np.diff(tokens[0, :-1]) == 1).all())
    if run:
        key_slots = tokens
    else:
        last = np.array([[tile.new_tokens[-1]] for tile in tiles])
        tokens = np.minimum(tokens, last)
        key_slots = np.stack([tile.table.slots(some) for tile, some in zip(tiles, tokens, strict=True)])
    first = np.cumsum(counts) - counts
    return OrderedPlan(
        window=window,
        group=group,
        layers=pool.layers,
        new_slots=torch.from_numpy(new_slots),
        written=pool.read(int(new_slots[0]), len(new_slots)) if run else (),
        read=pool.read(at, tokens.shape[1]) if run else (),
        key_slots=torch.from_numpy(key_slots),
        padded_rows=torch.from_numpy((first[:, None] + local).ravel()) if several else None,
        row_places=torch.from_numpy(np.flatnonzero(np.arange(rows) < counts[:, None])) if several else None,
        mask=torch.from_numpy(np.where(seen, np.float32(0), np.float32(-np.inf))),
        sizes=[min(SEGMENT, front - some) for some in range(0, front, SEGMENT)],
        order=None if order is None else torch.from_numpy(order[:, None, None]),
    )


def _behind(tiles: Sequence[Tile], local: Ints, low: Ints, length: Ints) -> tuple[Ints, Ints, NDArray[np.bool_]]:
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
