"""Batches of drafted trees over pools of scattered blocks, and tree attention over them, for tests of the engine."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from coppice.engine.attention import Layer
from coppice.engine.kv_cache import BlockTable, KVPool, KVShape
from coppice.engine.rows import PackedBatch, Piece, RowTable, ancestors, pack
from coppice.engine.steps import Bucket, StepInputs

BLOCK_SIZE = 8
KV = KVShape(2, 16, 16)


@dataclass(frozen=True)
class Shape:
    """Of a layer's attention."""

    heads: int = 4
    kv: KVShape = KV
    dtype: torch.dtype = torch.float32
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


def random_tree(rows: int, rng: random.Random) -> list[int]:
    """Parents of a tree whose root is row 0."""
    return [-1, *(rng.randrange(max(0, row - 9), row) for row in range(1, rows))]


def filled_pool(shape: Shape, tokens: int) -> KVPool:
    """A pool of one layer and of random contents, cut up so that blocks scatter."""
    pool = KVPool(layers=[shape.kv], tokens=tokens, block_size=BLOCK_SIZE, dtype=shape.dtype)
    for part in pool.layers[0]:
        part.normal_()
    held = [pool.allocate(f"held {place}", BLOCK_SIZE) for place in range(16)]
    for table in held[::2]:
        pool.free(table)
    return pool


def tree_piece(table: BlockTable, prefix: int, parents: Sequence[int], earlier: int = 0) -> Piece:
    """Rows of a tree behind `prefix` tokens, of which earlier forwards wrote the first `earlier`."""
    depths = (ancestors(parents).sum(1) - 1).tolist()
    return Piece(
        table=table,
        prefix_len=prefix,
        tokens=[1] * (len(parents) - earlier),
        parents=[max(-1, parent - earlier) for parent in parents[earlier:]],
        depths=depths[earlier:],
        keep=[0],
        earlier=(ancestors(parents)[earlier:, :earlier], np.array(depths[:earlier], np.int64) + prefix),
    )


def random_batch(pool: KVPool, sizes: Sequence[tuple[int, int, int]], rng: random.Random) -> PackedBatch:
    """Sessions of (prefix, rows, earlier rows): a tree each, but every third one a chain."""
    pieces = []
    for session, (prefix, rows, earlier) in enumerate(sizes):
        table = pool.allocate(str(session), (prefix + rows) // 2)
        pool.extend(table, prefix + rows + earlier)
        parents = list(range(-1, rows + earlier - 1)) if session % 3 == 2 else random_tree(rows + earlier, rng)
        pieces.append(tree_piece(table, prefix, parents, earlier))
    return pack(pieces)


def filled_inputs(batch: PackedBatch, pool: KVPool, group: int, bucket: Bucket | None = None) -> StepInputs:
    """A batch in its own bucket, or in a larger one, of a model of `group` query heads a key head."""
    table = RowTable.of(batch.tails)
    inputs = StepInputs(bucket or Bucket.of(batch, table), group, pool)
    inputs.fill(batch, table)
    return inputs


@dataclass(frozen=True)
class Inputs:
    """The rows of one forward: q (T, H, D), k (T, KVH, D), v (T, KVH, V), sinks (H,)."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None

    @classmethod
    def random(cls, shape: Shape, rows: int) -> Inputs:
        """Of normal numbers."""
        kv_heads, dim, value_dim = shape.kv
        sizes = (shape.heads, dim), (kv_heads, dim), (kv_heads, value_dim)
        q, k, v = (torch.randn(rows, *size).to(shape.dtype) for size in sizes)
        return cls(q, k, v, torch.randn(shape.heads).to(shape.dtype) if shape.sinks else None)


def attend(function: Callable[..., Tensor], batch: PackedBatch, rows: Inputs, pool: KVPool, shape: Shape) -> Tensor:
    """The rows' attention by an implementation of the kernel, padded to a bucket: (T, H, V)."""
    inputs, count = filled_inputs(batch, pool, shape.heads // shape.kv.kv_heads), len(batch.tokens)
    padded = (
        torch.cat((part, part.new_ones(inputs.bucket.rows - count, *part.shape[1:])))
        for part in (rows.q, rows.k, rows.v)
    )
    layer = Layer(0, shape.window, None, shape.softcap, rows.sinks)
    return function(*padded, *pool.layers[0], inputs, layer)[:count]
