"""Attention on the CPU whose sums depend on a row's own keys alone, in the order of their positions.

Scores are products of two vectors each. The softmax of a row runs over its keys by position, and their values are
summed in segments of SEGMENT positions, one behind the other, each in one chain of additions: what lies between, and
behind, has weight zero and changes nothing. So it is the same whether ancestors are drafted or committed, and whatever
is beside them. That products do add in such chains is the processor's affair: `check_invariant` asks it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coppice.engine.attention import Layer
from coppice.engine.kv_cache import KVPool
from coppice.engine.modules import PAIRED, FusedLinear, PackedLinear
from coppice.engine.rows import Bools, Ints, Tail

SEGMENT = 128  # positions whose values are summed by themselves; borders are multiples of it
CHAIN = 192  # keys up to which a product adds up in one chain: a segment's and those between them that are not seen
TILE = 128  # rows of one session that attend at once, at most
ROWS = 16  # rows of a product whose matrix is not packed
VECTOR = 64  # numbers in two vectors, which torch's loops take at once, of any type
GRAIN = 1 << 15  # numbers from which on torch gives parts to several threads
LANES = 64  # numbers of keys that a softmax runs over are multiples of it
QUERIES = 4  # rows of a product are a multiple of it


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
        rows = input.reshape(-1, input.shape[-1])
        padded = F.pad(rows, (0, 0, 0, -len(rows) % ROWS))
        out = torch.cat([F.linear(some, self.weight, self.bias) for some in torch.split(padded, ROWS)])
        return out[: len(rows)].view(*input.shape[:-1], self.out_features)


def by_row(model: nn.Module) -> None:
    """Have a model's functions and products compute every row by itself."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = RowsLinear
        elif isinstance(module, (PackedLinear, FusedLinear)):
            module.padding = PAIRED
        elif type(module).__module__ in ("torch.nn.modules.activation", "transformers.activations"):
            module.forward = partial(by_rows, module.forward)


def _sees_all(visible: Bools) -> bool:
    """Whether each row sees all rows before it, as in a prompt."""
    rows, columns = visible.shape
    return bool((visible.sum(axis=1) == np.arange(columns - rows + 1, columns + 1)).all())


def tiles_of(tail: Tail) -> Iterator[Tail]:
    """Cut a session's rows: no tile has more than TILE of them, nor more keys behind its border than a chain."""
    (count, columns), visible = tail.visible.shape, tail.visible
    earlier, ordered, first = columns - count, _sees_all(visible), 0
    while first < count:
        end = min(count, first + TILE)
        if ordered:
            yield Tail(tail.table, tail.prefix + earlier + first, np.tri(end - first, dtype=np.bool_))
        else:
            needed = np.logical_or.accumulate(visible[first:end], axis=0).sum(axis=1)
            end = first + max(1, int(np.searchsorted(needed, CHAIN - tail.prefix % SEGMENT, side="right")))
            yield Tail(tail.table, tail.prefix, visible[first:end, : earlier + end])
        first = end


class Ordered:
    """Attention on the CPU, tile by tile: a tile reads what earlier ones of its session stored."""

    def __init__(self, tails: Sequence[Tail], pool: KVPool) -> None:
        self._tiles, self._pool = [tile for tail in tails for tile in tiles_of(tail)], pool
        self._counts = [len(tile.visible) for tile in self._tiles]
        self._plans: dict[tuple[int | None, ...], list[_Plan]] = {}

    def attend(self, layer: Layer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        (_, heads, _, dim), (_, kv_heads, _, value_dim) = query.shape, value.shape
        kind = layer.window, heads // kv_heads, kv_heads, dim, value_dim
        if (plans := self._plans.get(kind)) is None:
            plans = self._plans[kind] = [_Plan(tile, self._pool, *kind) for tile in self._tiles]
        output = query.new_empty(1, query.shape[2], heads, value_dim)
        inputs = [states.split_with_sizes(self._counts, 2) for states in (query, key, value)]
        for plan, *rows, out in zip(plans, *inputs, output.split_with_sizes(self._counts, 1), strict=True):
            plan.attend(layer, *rows, out)
        return output


class _Plan:
    """A tile in layers of one window and shape: N rows, padded, with G query heads for each key head.

    The first keys lie by position, in whole segments. Those behind, R and one that nobody sees, are a tree's: `order`
    says which of them each row sees at each position. L: keys in all. M: G * N.
    """

    def __init__(
        self, tile: Tail, pool: KVPool, window: int | None, group: int, kv_heads: int, dim: int, value_dim: int
    ) -> None:
        self._layers, count = pool.layers, len(tile.visible)
        step = QUERIES // math.gcd(group, QUERIES)
        rows = -(-count // step) * step
        local = np.minimum(np.arange(rows), count - 1)  # (N,)
        tokens, seen, order, self._front = _keys(tile, window)
        self._locate(tile, tokens, pool)
        self._sizes = [min(SEGMENT, self._front - some) for some in range(0, self._front, SEGMENT)]
        # Zeros where nothing is written, (KVH, G, N, D); the tile's own; and as (KVH, M, D).
        self._queries = torch.zeros(kv_heads, group, rows, dim)
        self._own, self._rows = self._queries[:, :, :count], self._queries.view(kv_heads, group * rows, dim)
        mask = torch.from_numpy(np.where(seen[local], np.float32(0), np.float32(-np.inf)))
        self._mask = mask.repeat(group, 1).expand(kv_heads, -1, -1)  # (KVH, M, L)
        self._order: tuple[Tensor, ...] = ()  # (KVH, G, N, R') of each segment that is out of order
        self._weights: tuple[Tensor, ...] = ()  # for each of them (KVH, G, N, R + 1), zeros where no key is seen
        if order is not None:
            whole = torch.from_numpy(order[local]).expand(kv_heads, group, -1, -1)
            self._order = torch.split(whole, SEGMENT, dim=-1)
            behind = len(tokens) - self._front
            self._weights = tuple(torch.zeros(kv_heads, group, rows, behind) for _ in self._order)
        self._sums = torch.empty(kv_heads, group * rows, value_dim)
        # (1, n, KVH, G, V)
        self._out = self._sums.view(1, kv_heads, group, rows, -1).permute(0, 3, 1, 2, 4)[:, :count]

    def _locate(self, tile: Tail, tokens: Ints, pool: KVPool) -> None:
        """Find the slots of new rows, and of keys by token (L,): as views where they lie in a row."""
        count, table = len(tile.visible), tile.table
        new_slots = table.slots(np.arange(tile.length - count, tile.length))
        at = int(table.blocks[0]) * pool.block_size + int(tokens[0])
        self._viewed = (
            table.consecutive and at + len(tokens) <= pool.spare + 1 and bool((np.diff(tokens[:-1]) == 1).all())
        )
        if self._viewed:
            # Key of layer 0, value of layer 0, key of layer 1, ...: (1, KVH, n, D or V) and (1, KVH, L, D or V).
            self._written, self._read = pool.read(int(new_slots[0]), count), pool.read(at, len(tokens))
            return
        self._new_slots = torch.from_numpy(new_slots)
        self._slots = torch.from_numpy(table.slots(np.minimum(tokens, tile.length - 1)))

    def attend(self, layer: Layer, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
        """As Attention.attend, of these rows, into `out`."""
        dim = query.shape[3]
        keys, values = self._store(2 * layer.number, key), self._store(2 * layer.number + 1, value)
        self._own.copy_(query.view(self._own.shape))
        scale = dim**-0.5 if layer.scaling is None else layer.scaling
        if layer.softcap is None:
            scores = torch.baddbmm(self._mask, self._rows, keys.mT, alpha=scale)
        else:
            scores = torch.bmm(self._rows, keys.mT) * (scale / layer.softcap)
            scores = by_rows(torch.tanh, scores) * layer.softcap + self._mask
        if self._order or layer.sinks is not None:
            scores = self._by_position(scores.view(*self._queries.shape[:3], -1), layer.sinks)
        self._sum(scores.softmax(-1), values)
        out.view(self._out.shape).copy_(self._out)

    def _store(self, number: int, new: Tensor) -> Tensor:
        """Write (1, KVH, n, D) to the key or value of this number, and read (KVH, L, D)."""
        if self._viewed:
            self._written[number].copy_(new)
            return self._read[number][0]
        stored = self._layers[number // 2][number % 2]
        stored.index_copy_(0, self._new_slots, new[0].transpose(0, 1).to(stored.dtype))
        return stored.index_select(0, self._slots).transpose(0, 1).contiguous()

    def _by_position(self, scores: Tensor, sinks: Tensor | None) -> Tensor:
        """(KVH, G, N, L) by key -> (KVH, G, N, P) by position, and what sinks there are behind."""
        if self._order:
            behind = scores[..., self._front :]
            parts = (behind.gather(-1, order) for order in self._order)
            scores = torch.cat((scores[..., : self._front], *parts), dim=-1)
        if sinks is not None:
            last = sinks.float().view(*scores.shape[:2], 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat((scores, F.pad(last, (0, LANES - 1), value=-torch.inf)), dim=-1)
        return scores

    def _sum(self, weights: Tensor, values: Tensor) -> None:
        """weights of any shape, of M rows and P positions, and values (KVH, L, V) -> self._sums."""
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


def _keys(tile: Tail, window: int | None) -> tuple[Ints, Bools, Ints | None, int]:
    """Return the tokens of a tile's keys, (L,); which of them each row sees, (n, L); of those behind the last whole
    segment, if they are a tree's, which one a row sees at each position, (n, P); and how many are in front of these.
    """
    length = tile.prefix + tile.visible.sum(axis=1, keepdims=True)
    low = np.zeros_like(length) if window is None else np.maximum(length - window, 0)
    start, border = int(low.min()) // SEGMENT * SEGMENT, tile.prefix // SEGMENT * SEGMENT
    if _sees_all(tile.visible):
        tokens = np.arange(start, start + _lanes(int(length.max()) - start))
        return tokens, (tokens < length) & (tokens >= low), None, len(tokens)
    used = np.flatnonzero(tile.visible.any(axis=0))
    before = tile.prefix - border
    hidden = before + len(used)  # behind all others, and seen by no row
    row, column = np.nonzero(tile.visible[:, used])
    counts = np.bincount(row, minlength=len(length))
    order = np.full((len(length), _lanes(before + int(counts.max()))), hidden)
    order[:, :before] = np.arange(before)
    order[row, before + np.arange(len(row)) - (np.cumsum(counts) - counts)[row]] = before + column
    seen = np.zeros((len(length), hidden + 1), np.bool_)
    np.put_along_axis(seen, np.where(border + np.arange(order.shape[1]) >= low, order, hidden), True, axis=1)
    seen[:, hidden] = False
    front = np.arange(start, border)
    tokens = np.concatenate((front, np.arange(border, tile.prefix), tile.prefix + used, [0]))
    return tokens, np.concatenate((front >= low, seen), axis=1), order, len(front)


def _lanes(keys: int) -> int:
    return -(-keys // LANES) * LANES
