"""Keyed draws on CUDA, in two launches: the best token of each part of a row, and the best of the parts.

The hash is splitmix64 as in `coppice.speculation.sampling`, the noise float64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from coppice.speculation import sampling

PART = 2048  # tokens of a row that a program looks at

_GAMMA, _FIRST, _SECOND = (
    tl.constexpr(number) for number in (sampling.GAMMA, sampling.MULTIPLIER_1, sampling.MULTIPLIER_2)
)
_NEVER, _NONE = tl.constexpr(float("-inf")), tl.constexpr(2147483647)

# What differs from step to step, of which no kernel is compiled anew.
_NUMBERS, _POINTERS = ["count", "cut"], ["table", "edges", "lasts"]


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=[*_NUMBERS, *_POINTERS])
def best_of_parts(
    logits, highest, table, edges, lasts, bests, tokens, count, cut, vocab, stride,
    KEY: tl.constexpr, TEMPERATURE: tl.constexpr, LEAST: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """One part of one sampled row: its largest sum of score and noise, and the lowest token that has it.

    KEY, TEMPERATURE, LEAST: rows of the table.
    """
    draw, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    row = tl.load(table + draw)
    key = tl.load(table + KEY * count + draw).to(tl.uint64, bitcast=True)
    temperature = tl.load(table + TEMPERATURE * count + draw).to(tl.float64, bitcast=True)
    least = tl.load(table + LEAST * count + draw).to(tl.float64, bitcast=True)
    edge = tl.load(edges + draw, draw < cut, _NEVER)
    last = tl.load(lasts + draw, draw < cut, vocab)
    token = part * N + tl.arange(0, N)
    logit = tl.load(logits + row * stride + token, token < vocab, _NEVER)
    score = (logit.to(tl.float64) - tl.load(highest + row).to(tl.float64)) / temperature
    inside = (token < vocab) & (score >= least) & ((logit > edge) | ((logit == edge) & (token <= last)))
    value = key + token.to(tl.uint64) * _GAMMA
    value = (value ^ (value >> 30)) * _FIRST
    value = (value ^ (value >> 27)) * _SECOND
    value = value ^ (value >> 31)
    u = ((value >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2 ** -52
    total = tl.where(inside, score - tl.log(-tl.log(u)), _NEVER)
    best = tl.max(total, 0)
    tl.store(bests + draw * parts + part, best)
    tl.store(tokens + draw * parts + part, tl.min(tl.where(total == best, token, _NONE), 0))


@triton.jit
def best_of_all(highest, table, bests, tokens, drawn, parts, N: tl.constexpr):
    """One sampled row: the best of its parts, of several the first; -1 where the row is refused."""
    draw, part = tl.program_id(0).to(tl.int64), tl.arange(0, N)
    best = tl.load(bests + draw * parts + part, part < parts, _NEVER)
    token = tl.load(tokens + draw * parts + part, part < parts, _NONE)
    best_token = tl.min(tl.where(best == tl.max(best, 0), token, _NONE), 0)
    usable = tl.abs(tl.load(highest + tl.load(table + draw)).to(tl.float32)) < float("inf")
    tl.store(drawn + draw, tl.where(usable, best_token, -1))


def draw(
    logits: Tensor, highest: Tensor, table: Tensor, edges: Tensor, lasts: Tensor, *, columns: tuple[int, int, int]
) -> Tensor:
    """What `device.keyed_argmax` answers. columns: the rows of the table that hold key, temperature and least."""
    count, vocab, stride = table.shape[1], logits.shape[1], logits.stride(0)
    parts = triton.cdiv(vocab, PART)
    bests, drawn = table.new_empty(count, parts, dtype=torch.float64), table.new_empty(count)
    tokens = table.new_empty(count, parts, dtype=torch.int32)
    best_of_parts[(count, parts)](
        logits, highest, table, edges, lasts, bests, tokens, count, len(edges), vocab, stride, *columns, N=PART
    )
    best_of_all[(count,)](highest, table, bests, tokens, drawn, parts, N=triton.next_power_of_2(parts))
    return drawn
