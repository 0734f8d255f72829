"""Attention of rows that each see a text of their own, as one operator: its rule in torch, and where CUDA's kernel is.

Scores are made for KEY_BLOCK positions at a time, and a row's sums are joined block by block, then split by split. All
borders follow from the row's own length and the layer's window, so that what a row computes depends on the keys it sees
alone: not on the other rows, nor on whether its ancestors are drafted or committed, nor on where they lie.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from coppice.engine.ragged import KEY_BLOCK


@torch.library.custom_op("coppice::tree_attention", mutates_args=("keys", "values"), device_types="cpu")
def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    sinks: Tensor | None,
    new_slots: Tensor,
    session: Tensor,
    paged: Tensor,
    length: Tensor,
    tail: Tensor,
    table: Tensor,
    tiles: Tensor,
    block_size: int,
    window: int,
    scale: float,
    softcap: float,
) -> Tensor:
    """q (T, H, D), k (T, KVH, D) and v (T, KVH, V) of the rows, written to a layer's keys (slots, KVH, D) and values
    (slots, KVH, V) first -> (T, H, V), zeros for rows of length 0.

    sinks: (H,) scores of a key of value zero. window: positions seen back, the row's own included; 0 is all. softcap: 0
    is none. The others are those of StepInputs; this form has no use for its tiles.
    """
    keys.index_copy_(0, new_slots, k)
    values.index_copy_(0, new_slots, v)
    queries = q.float().reshape(len(q), k.shape[1], -1, q.shape[-1])  # (T, KVH, G, D)
    low = (length - window).clamp(min=0) if window else torch.zeros_like(length)
    first = low // KEY_BLOCK
    blocks = (length + KEY_BLOCK - 1) // KEY_BLOCK - first
    size = split_size(blocks)
    total = _nothing(queries, v.shape[-1])
    for split in range(int(((blocks + size - 1) // size).max())):
        part = _nothing(queries, v.shape[-1])
        for block in range(int(size.max())):
            at = first + split * size + block
            key = at[:, None] * KEY_BLOCK + torch.arange(KEY_BLOCK)  # (T, KEY_BLOCK)
            seen = (key >= low[:, None]) & (key < length[:, None]) & (block < size[:, None])
            if not seen.any():
                break
            page = table[session[:, None], (key // block_size).clamp(max=table.shape[1] - 1)]
            slot = page * block_size + key % block_size
            if tail.shape[1]:
                behind = tail.gather(1, (key - paged[:, None]).clamp(0, tail.shape[1] - 1).long())
                slot = torch.where(key < paged[:, None], slot, behind)
            scores = _product(queries, keys[slot].permute(0, 2, 3, 1)) * scale  # (T, KVH, G, KEY_BLOCK)
            if softcap:
                scores = torch.tanh(scores / softcap) * softcap
            part = _join(part, _sums(scores.masked_fill(~seen[:, None, None], -torch.inf), values[slot]))
        total = _join(total, part)
    if sinks is not None:
        sink = sinks.float().view(1, k.shape[1], -1, 1).expand_as(total.top)
        total = _join(total, _Sums(sink, torch.ones_like(sink), torch.zeros_like(total.values)))
    return (total.values / total.weight.clamp(min=torch.finfo(torch.float32).tiny)).flatten(1, 2).to(q.dtype)


@tree_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
    return q.new_empty(*q.shape[:2], v.shape[-1])


@tree_attention.register_kernel("cuda")
def _(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, *rest: Any) -> Tensor:
    from coppice.engine.tree_attention_triton import attend  # Triton comes with torch for CUDA only

    return attend(q, k, v, keys, values, *rest)


def split_size(blocks: Tensor) -> Tensor:
    """Key blocks of a split of rows that see keys of so many: see most_splits."""
    long = (blocks + 511) // 512 * 16
    return torch.where(blocks <= 32, 4, torch.where(blocks <= 128, 8, long))


class _Sums(NamedTuple):
    """Of a row's keys up to some block, for each query head: the highest score, (T, KVH, G, 1), and relative to it the
    sum of the weights, of the same shape, and of the weighted values, (T, KVH, G, V).
    """

    top: Tensor
    weight: Tensor
    values: Tensor


def _nothing(queries: Tensor, value_dim: int) -> _Sums:
    zero = queries.new_zeros(*queries.shape[:-1], 1)
    return _Sums(zero - torch.inf, zero, zero.expand(*zero.shape[:-1], value_dim))


def _sums(scores: Tensor, values: Tensor) -> _Sums:
    """scores (T, KVH, G, N), values (T, N, KVH, V) -> those of a block alone."""
    top = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - top.clamp(min=torch.finfo(torch.float32).min))
    weighted = _product(weights.to(values.dtype), values.transpose(1, 2))
    return _Sums(top, weights.sum(-1, keepdim=True), weighted)


def _product(one: Tensor, other: Tensor) -> Tensor:
    """The matrices' product in float32. Its sums are made in float64: in which order, the number of rows decides."""
    return (one.double() @ other.double()).float()


def _join(one: _Sums, other: _Sums) -> _Sums:
    top = torch.maximum(one.top, other.top)
    finite = top.clamp(min=torch.finfo(torch.float32).min)
    a, b = torch.exp(one.top - finite), torch.exp(other.top - finite)
    return _Sums(top, one.weight * a + other.weight * b, one.values * a + other.values * b)
