"""The torch twin of `sampling`: the same hashes bit for bit, for several positions at once and on any device.

torch has no unsigned 64-bit arithmetic. Products and sums of int64 wrap to the same bits; right shifts copy the sign
bit and are masked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coppice.speculation.sampling import (
    GAMMA,
    MASK_64,
    MULTIPLIER_1,
    MULTIPLIER_2,
    TOKEN_STREAM,
    TOP_P_SLACK,
    SamplingParams,
    position_key,
    position_keys,
)

_ROWS_AT_ONCE = 64  # that are drawn: their noise is float64 and as wide as the vocabulary


class Draws(NamedTuple):
    """Which rows of a forward are sampled, and how each of these S rows is; those that top_p cuts come first."""

    table: Tensor
    """(6, S) int64 on the device of the logits: the row's number, the bits of its position's key and top_k, 0 for all;
    then the bits of float64: temperature, top_p and the logarithm of min_p"""
    most_k: int
    """the largest top_k"""
    nuclei: int
    """rows that top_p cuts"""


def tabulate(
    asked: Sequence[tuple[NDArray[np.int64], NDArray[np.int64], SamplingParams]], vocab_size: int
) -> tuple[NDArray[np.int64], int, int]:
    """The parts of `Draws`, on the host, for (N,) numbers of rows and (N,) positions of each of the samplings asked
    for; greedy rows are left out.
    """
    sampled = sorted((one for one in asked if one[2].temperature), key=lambda one: one[2].top_p == 1)
    if not sampled:
        return np.zeros((6, 0), np.int64), 0, 0
    rows, positions, laws = zip(*sampled, strict=True)
    counts = [len(one) for one in rows]
    at, top_k = np.concatenate(positions), [law.top_k if law.top_k < vocab_size else 0 for law in laws]
    numbers = [(law.temperature, law.top_p, math.log(law.min_p) if law.min_p else -math.inf) for law in laws]
    table = np.empty((6, len(at)), np.int64)
    table[0], table[1] = np.concatenate(rows), position_keys([law.seed for law in laws], counts, at).view(np.int64)
    table[2], table[3:] = np.repeat(top_k, counts), np.repeat(np.array(numbers), counts, axis=0).T.view(np.int64)
    return table, max(top_k), sum([count for law, count in zip(laws, counts, strict=True) if law.top_p < 1])


def greedy_ids(rows: Tensor) -> Tensor:
    """(...) int64 ids of the largest of (..., V) logits, of several the lowest.

    On a CPU numpy's: torch's takes three to seven times as long there.
    """
    return rows.argmax(-1) if rows.is_cuda else torch.from_numpy(np.asarray(rows.float().numpy().argmax(-1)))


def decode_row(logits_row: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """G of a (V,) row of logits: (K,) int64 ids, ascending, and their (K,) float64 log-probabilities.

    See `sampling.decode_row` for the rules. Raises ValueError on a row with NaN, with +inf or nothing finite.
    """
    best = logits_row.argmax()
    highest = logits_row[best].double()
    if not torch.isfinite(highest):
        raise ValueError(f"the highest logit of the row is {highest.item()}")
    if params.temperature == 0:
        return best.reshape(1), highest.new_zeros(1)
    keep = logits_row > -torch.inf
    if 0 < params.top_k < logits_row.numel():
        keep &= logits_row >= logits_row.topk(params.top_k).values[-1]
    ids = keep.nonzero().squeeze(1)
    scores = (logits_row[ids].double() - highest) / params.temperature
    if params.top_p < 1:
        kept = _nucleus(scores, params.top_p)
        ids, scores = ids[kept], scores[kept]
    if params.min_p > 0:
        likely = scores >= math.log(params.min_p)
        ids, scores = ids[likely], scores[likely]
    log_probs = scores - scores.exp().sum().log()
    possible = log_probs > -torch.inf
    return ids[possible], log_probs[possible]


def _nucleus(scores: Tensor, top_p: float) -> Tensor:
    """Indices, ascending, of the fewest most probable of (K,) scores whose mass reaches top_p."""
    probs = scores.exp()
    probs /= probs.sum()
    likely = (probs > (1 - top_p - TOP_P_SLACK) / probs.numel()).nonzero().squeeze(1)
    sorted_probs, order = probs[likely].sort(descending=True, stable=True)
    mass_before = sorted_probs.cumsum(0) - sorted_probs
    count = max(1, int((mass_before < top_p - TOP_P_SLACK).sum()))
    return likely[order[:count]].sort().values


def hash_u64(seed: int | Tensor, positions: Tensor, token_ids: Tensor, stream: int = TOKEN_STREAM) -> Tensor:
    """(P, K) hashes of (K,) token ids at (P,) absolute positions, as int64 with the bits of the unsigned hash.

    `seed` is one seed for all positions or (P,) int64, a seed's bits for each.
    """
    if isinstance(seed, int) and positions.device.type == "cpu":  # a few integers: operators on tensors cost more
        key = torch.tensor([_signed(position_key(seed, position, stream)) for position in positions.tolist()])
    else:
        if isinstance(seed, int):
            seed = torch.tensor(_signed(seed), device=positions.device)
        key = _mix(seed + _signed(GAMMA))
        key = _mix(key + _signed(stream * GAMMA & MASK_64))
        key = _mix(key + positions * _signed(GAMMA))
    return _hashes(key, token_ids)


def _hashes(keys: Tensor, token_ids: Tensor) -> Tensor:
    """(P, K) hashes of (K,) token ids behind (P,) keys."""
    return _mix(keys[:, None] + token_ids[None, :] * _signed(GAMMA))


def noise(seed: int | Tensor, positions: Tensor, tokens: int | Tensor, stream: int = TOKEN_STREAM) -> Tensor:
    """(P, K) float64 standard Gumbel noise at (P,) positions of (K,) token ids, or of the whole vocabulary 0..K-1."""
    if isinstance(tokens, int):
        tokens = torch.arange(tokens, device=positions.device)
    return _gumbel(hash_u64(seed, positions, tokens, stream))


def _gumbel(hashes: Tensor) -> Tensor:
    """float64 noise of hashes."""
    u = _shift(hashes, 12).double().add_(0.5).mul_(2.0**-52)
    return u.log_().neg_().log_().neg_()


def draw(ids: Tensor, log_probs: Tensor, seed: int | Tensor, positions: Tensor, stream: int = TOKEN_STREAM) -> Tensor:
    """(P,) tokens of (P, K) rows over (K,) ascending ids at (P,) positions; -inf marks what a row does not hold."""
    return ids[(log_probs + noise(seed, positions, ids, stream)).argmax(dim=1)]


def draw_rows(logits: Tensor, draws: Draws) -> Tensor:
    """(R,) int64: the token of each of (R, V) rows of logits, the greedy one of those that are not sampled.

    What `sampling.draw` takes from the row that `sampling.decode_row` makes, -1 where that refuses it. Nothing is
    copied to the host or waited for. A draw depends on its own row alone: without top_p no number is a sum over the
    row, whose rounding would depend on how many rows a device adds up at once. Between devices logarithms may differ in
    their last bit, so that another token is drawn where two sums are within 1e-14 of each other, as often as that.
    """
    best = logits.argmax(-1)
    highest = logits.gather(1, best[:, None])
    ids = torch.where(highest[:, 0].abs() < torch.inf, best, -1)
    table, most_k, nuclei = draws
    if not table.numel():
        return ids
    tokens = torch.arange(logits.shape[1], device=logits.device)
    drawn = []
    for first in range(0, table.shape[1], _ROWS_AT_ONCE):
        some = Draws(table[:, first : first + _ROWS_AT_ONCE], most_k, nuclei - first)
        rows, keys = some.table[0], some.table[1]
        scores = _scores(logits.index_select(0, rows), highest.index_select(0, rows), some)
        drawn.append(scores.add_(_gumbel(_hashes(keys, tokens))).argmax(-1))
    usable = ids.index_select(0, table[0]) >= 0
    return ids.index_copy_(0, table[0], torch.where(usable, torch.cat(drawn), -1))


def _scores(logits: Tensor, highest: Tensor, draws: Draws) -> Tensor:
    """(S, V) float64 log-probabilities of (S, V) logits but for a constant of the row, -inf where G keeps nothing;
    highest: (S, 1), each row's.
    """
    table, most_k, nuclei = draws
    top_k, (temperature, top_p, least) = table[2, :, None], table[3:, :, None].view(torch.float64)
    scores = logits.double().sub_(highest).div_(temperature)
    if most_k:
        kth = logits.topk(most_k).values.gather(1, (top_k - 1).clamp_(min=0))
        logits = logits.masked_fill((logits < kth) & (top_k > 0), -torch.inf)
        scores.masked_fill_(logits == -torch.inf, -torch.inf)
    if nuclei > 0:
        cut = scores[:nuclei]
        probs = cut.exp()
        probs /= probs.sum(-1, keepdim=True)
        # Logits have fewer bits to sort by, and the order is the same.
        order = logits[:nuclei].sort(descending=True, stable=True).indices
        sorted_probs = probs.gather(1, order)
        beyond = sorted_probs.cumsum(-1) - sorted_probs >= top_p[:nuclei] - TOP_P_SLACK
        beyond[:, 0] = False
        cut.masked_fill_(torch.zeros_like(beyond).scatter_(1, order, beyond), -torch.inf)
    return scores.masked_fill_(scores < least, -torch.inf)


def _mix(value: Tensor) -> Tensor:
    """splitmix64's finaliser, elementwise."""
    value = (value ^ _shift(value, 30)) * _signed(MULTIPLIER_1)
    value = (value ^ _shift(value, 27)) * _signed(MULTIPLIER_2)
    return value ^ _shift(value, 31)


def _shift(value: Tensor, bits: int) -> Tensor:
    """Logical right shift."""
    return (value >> bits) & ((1 << 64 - bits) - 1)


def _signed(value: int) -> int:
    """The int64 with the bits of an unsigned 64-bit integer."""
    return value - (1 << 64) if value >> 63 else value
