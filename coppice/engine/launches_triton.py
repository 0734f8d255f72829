"""The kernels of `launches`: they round where transformers' operators round, and so their bits are the same."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 1024  # of a gate's row that one program computes


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
    """query (1, H, T, D), key (1, KVH, T, D), cos and sin (1, T, D) -> query and key, whose rows lie one behind the
    other.
    """
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


@triton.jit
def _gate(gate, up, out, gate_row, up_row, columns, COLUMNS: tl.constexpr):
    row, at = tl.program_id(0), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = at < columns
    kind = gate.dtype.element_ty
    opened = tl.load(gate + row * gate_row + at, inside).to(tl.float32)
    opened = (opened / (1 + tl.exp(-opened))).to(kind).to(tl.float32)
    values = tl.load(up + row * up_row + at, inside).to(tl.float32)
    tl.store(out + row * columns + at, (opened * values).to(kind), inside)


def gate(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, (..., N) each, whose rows may be parts of wider ones."""
    columns = gate.shape[-1]
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    gate, up = gate.flatten(0, -2), up.flatten(0, -2)
    _gate[gate.shape[0], triton.cdiv(columns, _COLUMNS)](
        gate, up, out, gate.stride(0), up.stride(0), columns, COLUMNS=_COLUMNS, enable_fp_fusion=False
    )
    return out
