"""Kernels in Triton's language: tree attention and rotary embeddings.

Tree attention is three launches: new keys and values are written, parts of rows' keys summed, parts joined.

A program sums one part for the query heads of one key head in the rows of a tile: they share what is read. A key block
that reaches into a row's tail is a part of its own, summed for that row alone, in a tile of the same shape. Every block
is summed from nothing and then joined, in order, so that sums are the same bits whichever program makes them. All
borders follow from the row's own length and the layer's window: a row's bits depend on the keys it sees alone, not on
the other rows, nor on whether its ancestors are drafted or committed, nor on where they lie.

Rotations round where transformers' operators round, and so their bits are the same.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from coppice.engine.attention import Layer
from coppice.engine.rows import KEY_BLOCK, MOST_SPLITS, TILE, most_splits, tail_blocks

N = tl.constexpr(KEY_BLOCK)
SPLITS = tl.constexpr(MOST_SPLITS)
NEVER = tl.constexpr(float("-inf"))
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def write(
    k, v, keys, values, new_slots, k_row, k_head, v_row, v_head,
    KVH: tl.constexpr, D: tl.constexpr, V: tl.constexpr, KVHP: tl.constexpr, DP: tl.constexpr, VP: tl.constexpr,
):  # fmt: skip
    """One row's keys and values into its slot."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(new_slots + row)
    head = tl.arange(0, KVHP)[:, None]
    d, e = tl.arange(0, DP)[None, :], tl.arange(0, VP)[None, :]
    inside, within = (head < KVH) & (d < D), (head < KVH) & (e < V)
    tl.store(keys + (slot * KVH + head) * D + d, tl.load(k + row * k_row + head * k_head + d, inside), inside)
    tl.store(values + (slot * KVH + head) * V + e, tl.load(v + row * v_row + head * v_head + e, within), within)


@triton.jit
def span(length, paged, window, part, TAIL: tl.constexpr):
    """The positions start to stop - 1 of a row's part: one of TAIL key blocks that its tail may reach into, or above
    them a split, without such blocks. Also the split that the part's block or blocks are of.
    """
    low = tl.maximum(length - window, 0)
    first = low // N
    blocks = (length + N - 1) // N - first
    size = tl.where(blocks <= 32, 4, tl.where(blocks <= 128, 8, (blocks + 511) // 512 * 16))
    of_tail = part < TAIL
    at = tl.where(of_tail, paged // N + part, first + (part - TAIL) * size)
    # A row without a tail has all its blocks in splits.
    border = tl.where(paged < length, paged // N * N, tl.where(of_tail, 0, length))
    stop = tl.where(of_tail & (paged < length), tl.minimum((at + 1) * N, length), tl.minimum((at + size) * N, border))
    return tl.maximum(at * N, low), stop, (at - first) // size


@triton.jit
def join(top, weight, values, other_top, other_weight, other_values):
    """Two sums of weighted values relative to their highest scores, as one."""
    new = tl.maximum(top, other_top)
    finite = tl.where(new == NEVER, 0.0, new)
    a, b = tl.exp2(top - finite), tl.exp2(other_top - finite)
    # Explicit, so that the compiler contracts it everywhere or nowhere.
    weight = tl.fma(weight, a, other_weight * b)
    return new, weight, tl.fma(values, tl.broadcast_to(a[:, None], values.shape), other_values * b[:, None])


@triton.jit
def sum_parts(
    q, keys, values, session, paged, length, tail, table, tiles, sums, tops, weights, q_row, q_head,
    window, scale, softcap,
    H: tl.constexpr, KVH: tl.constexpr, D: tl.constexpr, V: tl.constexpr, DP: tl.constexpr, VP: tl.constexpr,
    M: tl.constexpr, CUTS: tl.constexpr, W: tl.constexpr, P: tl.constexpr, BS: tl.constexpr, TAIL: tl.constexpr,
    PARTS: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Each listed tile's part for each key head, in turn; M of its queries at a time, in so many cuts."""
    G: tl.constexpr = H // KVH
    m, n = tl.arange(0, M), tl.arange(0, N)
    d, e = tl.arange(0, DP), tl.arange(0, VP)
    for item in tl.range(tl.program_id(0), tl.load(tiles) * KVH * CUTS, tl.num_programs(0), disable_licm=True):
        tile, at = tiles + 3 + item // (KVH * CUTS) * 3, item // KVH % CUTS * M + m
        first, end, part = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
        row, kv_head = first + at // G, item % KVH
        head = kv_head * G + at % G
        live = row < end
        start, stop, _ = span(tl.load(length + row, live, 0), tl.load(paged + row, live, 0), window, part, TAIL)
        live = live & (start < stop)
        begin, limit = tl.min(tl.where(live, start, 2147483647)), tl.max(tl.where(live, stop, 0))
        pages = table + tl.load(session + first) * P
        slots, behind = tail + first.to(tl.int64) * W, tl.load(paged + first)
        behind = tl.where(part < TAIL, behind, limit)
        query = tl.load(
            q + row[:, None].to(tl.int64) * q_row + head[:, None] * q_head + d[None, :],
            live[:, None] & (d < D)[None, :],
            0.0,
        )
        top, weight = tl.full([M], NEVER, tl.float32), tl.zeros([M], tl.float32)
        weighted = tl.zeros([M, VP], tl.float32)
        for block in tl.range(begin // N, (limit + N - 1) // N, num_stages=STAGES):
            key = block * N + n
            slot = tl.load(pages + key // BS, key < tl.minimum(limit, behind), 0) * BS + key % BS
            if W > 0:
                slot = tl.where(key < behind, slot, tl.load(slots + key - behind, (key >= behind) & (key < limit), 0))
            stored = slot.to(tl.int64)[:, None] * KVH + kv_head
            read = (key < limit)[:, None]
            K = tl.load(keys + stored * D + d[None, :], read & (d < D)[None, :], 0.0)
            U = tl.load(values + stored * V + e[None, :], read & (e < V)[None, :], 0.0)
            scores = tl.dot(query, tl.trans(K), input_precision=PRECISION) * scale
            if CAPPED:
                scores = softcap - 2 * softcap / (tl.exp2(scores * (2 * LOG2E / softcap)) + 1)
            seen = (key[None, :] >= start[:, None]) & (key[None, :] < stop[:, None])
            scores = tl.where(seen, scores * LOG2E, NEVER)
            highest = tl.max(scores, 1)
            shares = tl.exp2(scores - tl.where(highest == NEVER, 0.0, highest)[:, None])
            product = tl.dot(shares.to(U.dtype), U, input_precision=PRECISION)
            top, weight, weighted = join(top, weight, weighted, highest, tl.sum(shares, 1), product)
        # Read again: what is kept over the loop would cost registers that the sums need. Who sees a key has a weight.
        at = item // KVH % CUTS * M + m
        row = tl.load(tile, volatile=True) + at // G
        place = (row.to(tl.int64) * H + kv_head * G + at % G) * PARTS + tl.load(tile + 2, volatile=True)
        live = (row < tl.load(tile + 1, volatile=True)) & (weight != 0)
        tl.store(tops + place, top, live)
        tl.store(weights + place, weight, live)
        tl.store(sums + place[:, None] * V + e[None, :], weighted, live[:, None] & (e < V)[None, :])


@triton.jit
def join_parts(
    sums, tops, weights, paged, length, sinks, out, window,
    V: tl.constexpr, VP: tl.constexpr, TAIL: tl.constexpr, PARTS: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """One row and query head: what its tail's blocks and its splits have summed."""
    row, head = tl.program_id(0), tl.program_id(1)
    place = (row.to(tl.int64) * tl.num_programs(1) + head) * PARTS
    ends, pages = tl.load(length + row), tl.load(paged + row)
    split, e = tl.arange(0, SPLITS), tl.arange(0, VP)
    start, stop, _ = span(ends + 0 * split, pages, window, TAIL + split, TAIL)
    live = start < stop
    top = tl.load(tops + place + TAIL + split, live, NEVER)
    weight = tl.load(weights + place + TAIL + split, live, 0.0)
    read = live[:, None] & (e < V)[None, :]
    values = tl.load(sums + (place + TAIL + split)[:, None] * V + e[None, :], read, 0.0)
    for part in tl.static_range(TAIL):
        start, stop, home = span(ends + 0 * split, pages, window, part, TAIL)
        live = (start < stop) & (split == home)
        read = live[:, None] & (e < V)[None, :]
        at = place + part + 0 * split
        more_top, more_weight = tl.load(tops + at, live, NEVER), tl.load(weights + at, live, 0.0)
        more_values = tl.load(sums + at[:, None] * V + e[None, :], read, 0.0)
        top, weight, values = join(top, weight, values, more_top, more_weight, more_values)
    highest = tl.max(top)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        highest = tl.maximum(highest, sink)
    share = tl.exp2(top - tl.where(highest == NEVER, 0.0, highest))
    total = tl.sum(weight * share)
    if SINKS:
        total += tl.exp2(sink - highest)
    result = tl.sum(values * share[:, None], 0) / tl.where(total == 0, 1.0, total)
    at = (row.to(tl.int64) * tl.num_programs(1) + head) * V
    tl.store(out + at + e, result.to(out.dtype.element_ty), e < V)


def shape_of(q: Tensor, values: Tensor, inputs: Any) -> dict[str, Any]:
    """What sum_parts is compiled for, but for scores. inputs: StepInputs."""
    (_, heads, dim), (_, kv_heads, value_dim) = q.shape, values.shape
    _, _, tail, blocks, _ = inputs.bucket
    block_size, most = inputs.pool.block_size, tail_blocks(tail)
    whole, widest = q.dtype == torch.float32, triton.next_power_of_2(max(dim, value_dim))
    cuts = 4 if whole and widest > 64 else 1  # so that no register is spilled
    return {
        "H": heads,
        "KVH": kv_heads,
        "D": dim,
        "V": value_dim,
        "DP": max(16, triton.next_power_of_2(dim)),
        "VP": max(16, triton.next_power_of_2(value_dim)),
        "M": max(TILE, triton.next_power_of_2(heads // kv_heads)) // cuts,
        "CUTS": cuts,
        "W": tail,
        "P": blocks,
        "BS": block_size,
        "TAIL": most,
        "PARTS": most + int(most_splits(-(-blocks * block_size // KEY_BLOCK))),
        "PRECISION": "ieee" if whole else "tf32",  # of float32 alone: no bit is dropped
        "STAGES": 1 if whole else 3,
        "num_warps": 8 if widest > 128 or whole else 4,
    }


def tree_attention(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, inputs: Any, layer: Layer) -> Tensor:
    """Attention of rows that each see a text of their own.

    q (T, H, D), k (T, KVH, D) and v (T, KVH, V) of the rows, whose last dimensions are contiguous, written to a layer's
    keys (slots, KVH, D) and values (slots, KVH, V) first -> (T, H, V), zeros for rows of length 0. inputs: StepInputs,
    of T rows or more.
    """
    shape, sinks, softcap = shape_of(q, values, inputs), layer.sinks, layer.softcap or 0.0
    scale = shape["D"] ** -0.5 if layer.scaling is None else layer.scaling
    session, paged, length = inputs.session, inputs.paged, inputs.length
    rows, heads, kv_heads, value_dim = len(q), shape["H"], shape["KVH"], shape["V"]
    padded = {name: shape[name] for name in ("V", "VP")}
    write[(rows,)](
        k, v, keys, values, inputs.new_slots, *k.stride()[:2], *v.stride()[:2], **padded,
        KVH=kv_heads, D=shape["D"], KVHP=triton.next_power_of_2(kv_heads), DP=shape["DP"],
    )  # fmt: skip
    places = (rows, heads, shape["PARTS"])
    tops, weights = q.new_empty(2, *places, dtype=torch.float32)
    sums = q.new_empty(*places, value_dim, dtype=torch.float32)
    reach = layer.window or 1 << 30
    programs = 3  # under Triton's interpreter
    if q.is_cuda:  # for each processor of the device two rounds of the three that it runs at a time
        programs = 6 * int(torch.cuda.get_device_properties(q.device).multi_processor_count)
    sum_parts[(programs,)](
        q, keys, values, session, paged, length, inputs.tail, inputs.table, inputs.tiles, sums, tops, weights,
        *q.stride()[:2], reach, scale, softcap, **shape, CAPPED=softcap > 0,
    )  # fmt: skip
    out = q.new_empty(rows, heads, value_dim)
    join_parts[(rows, heads)](
        sums, tops, weights, paged, length, sinks, out, reach, **padded,
        TAIL=shape["TAIL"], PARTS=shape["PARTS"], SINKS=sinks is not None,
    )  # fmt: skip
    return out


@triton.jit
def _rotate(
    query, key, cos, sin, query_out, key_out,
    query_row, query_head, key_row, key_head, heads, kv_heads, half, HALF: tl.constexpr,
):  # fmt: skip
    """One row's one head: queries first, then keys."""
    row, head = tl.program_id(0), tl.program_id(1)
    if head < heads:
        source = query + row * query_row + head * query_head
        target = query_out + (row * heads + head) * 2 * half
    else:
        source = key + row * key_row + (head - heads) * key_head
        target = key_out + (row * kv_heads + head - heads) * 2 * half
    at = tl.arange(0, HALF)
    inside = at < half
    kind = source.dtype.element_ty
    first = tl.load(source + at, inside).to(tl.float32)
    second = tl.load(source + half + at, inside).to(tl.float32)
    turned = -second
    for part in tl.static_range(2):
        angle = row * 2 * half + part * half + at
        straight = (first * tl.load(cos + angle, inside).to(tl.float32)).to(kind).to(tl.float32)
        crossed = (turned * tl.load(sin + angle, inside).to(tl.float32)).to(kind).to(tl.float32)
        tl.store(target + part * half + at, (straight + crossed).to(kind), inside)
        first, turned = second, first


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """query (1, H, T, D), key (1, KVH, T, D), cos and sin (1, T, D) -> query and key, (1, T, H or KVH, D) in memory."""
    query, key = (states if states.stride(-1) == 1 else states.contiguous() for states in (query, key))
    (_, heads, rows, dim), kv_heads = query.shape, key.shape[1]
    query_out, key_out = query.new_empty(1, rows, heads, dim), key.new_empty(1, rows, kv_heads, dim)
    half = dim // 2
    _rotate[rows, heads + kv_heads](
        query, key, cos.contiguous(), sin.contiguous(), query_out, key_out,
        query.stride(2), query.stride(1), key.stride(2), key.stride(1), heads, kv_heads, half,
        HALF=triton.next_power_of_2(half), num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return query_out.transpose(1, 2), key_out.transpose(1, 2)
