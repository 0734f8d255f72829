"""The rules of Triton's kernels in torch, and batches of drafted trees to try them on."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from coppice.engine.attention import Layer
from coppice.engine.kv_cache import BlockTable, KVPool, KVShape
from coppice.engine.rows import PackedBatch, Piece, RowTable, ancestors, pack
from coppice.engine.steps import Bucket, StepInputs
from coppice.heads.tree import torch_gumbel, torch_hashes
from services.verifier.device import KEY, LEAST, ROW, TEMPERATURE


@torch.library.custom_op("tests::keyed_argmax", mutates_args=())
def keyed_argmax(logits: Tensor, highest: Tensor, table: Tensor, edges: Tensor, lasts: Tensor) -> Tensor:
    """`services.verifier.device.keyed_argmax` on a CPU, row by row."""
    tokens, drawn = torch.arange(logits.shape[1]), []
    for sampled in range(table.shape[1]):
        row = int(table[ROW, sampled])
        temperature, least = table[[TEMPERATURE, LEAST], sampled].view(torch.float64)
        scores = logits[row].double().sub(highest[row].double()).div(temperature)
        kept = scores >= least
        if sampled < len(edges):
            edge, last = edges[sampled], lasts[sampled]
            kept &= (logits[row] > edge) | ((logits[row] == edge) & (tokens <= last))
        scores.masked_fill_(~kept, -torch.inf)
        best = scores.add_(torch_gumbel(torch_hashes(table[KEY, sampled : sampled + 1], tokens))[0]).argmax()
        drawn.append(int(best) if bool(highest[row].abs() < torch.inf) else -1)
    return torch.tensor(drawn)


@torch.library.custom_op("tests::rotate", mutates_args=())
def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The rule of `kernels.rotate`, which reads one text, in torch's operators: transformers' formula."""
    assert len(query) == len(key) == 1
    return apply_rotary_pos_emb(query, key, cos, sin)  # type: ignore[no-any-return]


def tree_attention(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, inputs: StepInputs, layer: Layer
) -> Tensor:
    """The rule of `kernels.tree_attention`, of which see there, in torch's operators, as one operator."""
    rows = [part[: len(q)] for part in (inputs.new_slots, inputs.session, inputs.paged, inputs.length, inputs.tail)]
    scale = q.shape[-1] ** -0.5 if layer.scaling is None else layer.scaling
    numbers = inputs.pool.block_size, layer.window or 0, scale, layer.softcap or 0.0
    out: Tensor = _tree_attention(q, k, v, keys, values, layer.sinks, *rows, inputs.table, *numbers)
    return out


@torch.library.custom_op("tests::tree_attention", mutates_args=("keys", "values"))
def _tree_attention(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None, new_slots: Tensor,
    session: Tensor, paged: Tensor, length: Tensor, tail: Tensor, table: Tensor, block_size: int, window: int,
    scale: float, softcap: float,
) -> Tensor:  # fmt: skip
    keys.index_copy_(0, new_slots, k)
    values.index_copy_(0, new_slots, v)
    key = torch.arange(max(1, int(length.max())))  # (L,)
    slot = table[session[:, None], key // block_size] * block_size + key % block_size  # (T, L)
    if tail.shape[1]:
        behind = tail.gather(1, (key - paged[:, None]).clamp(0, tail.shape[1] - 1).long())
        slot = torch.where(key < paged[:, None], slot, behind)
    seen = (key < length[:, None]) & (key >= length[:, None] - (window or 1 << 30))
    queries = q.float().reshape(len(q), k.shape[1], -1, q.shape[-1])  # (T, KVH, G, D)
    scores = queries @ keys[slot].permute(0, 2, 3, 1).float() * scale  # (T, KVH, G, L)
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
    if sinks is not None:
        sink = sinks.float().view(1, k.shape[1], -1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sink), dim=-1)
    weights = scores.softmax(-1)[..., : len(key)].nan_to_num()  # of rows that see nothing zeros
    return (weights @ values[slot].transpose(1, 2).float()).flatten(1, 2).to(q.dtype)


# Batches of drafted trees over pools of scattered blocks, and tree attention over them.

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
    inputs = StepInputs(bucket or Bucket.of(table, len(batch.logits_to_keep)), group, pool)
    inputs.fill(batch, table)
    return inputs


Rows = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""of one forward: q (T, H, D), k (T, KVH, D), v (T, KVH, V), sinks (H,)"""


def random_rows(shape: Shape, rows: int) -> Rows:
    """Rows of normal numbers."""
    kv_heads, dim, value_dim = shape.kv
    sizes = (shape.heads, dim), (kv_heads, dim), (kv_heads, value_dim)
    q, k, v = (torch.randn(rows, *size).to(shape.dtype) for size in sizes)
    return q, k, v, torch.randn(shape.heads).to(shape.dtype) if shape.sinks else None


def attend(function: Callable[..., Tensor], batch: PackedBatch, rows: Rows, pool: KVPool, shape: Shape) -> Tensor:
    """The rows' attention by an implementation of the kernel, padded to a bucket: (T, H, V)."""
    inputs, count = filled_inputs(batch, pool, shape.heads // shape.kv.kv_heads), len(batch.tokens)
    *states, sinks = rows
    padded = (torch.cat((part, part.new_ones(inputs.bucket.rows - count, *part.shape[1:]))) for part in states)
    layer = Layer(0, shape.window, None, shape.softcap, sinks)
    return function(*padded, *pool.layers[0], inputs, layer)[:count]
