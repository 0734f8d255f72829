"""The torch twin of `sampling`: the same hashes bit for bit, for several positions at once and on any device.

torch has no unsigned 64-bit arithmetic. Products and sums of int64 wrap to the same bits; right shifts copy the sign
bit and are masked.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from coppice.speculation.sampling import (
    GAMMA,
    MASK_64,
    MULTIPLIER_1,
    MULTIPLIER_2,
    TOKEN_STREAM,
    position_key,
)


def greedy_ids(rows: Tensor) -> Tensor:
    """(...) int64 ids of the largest of (..., V) logits, of several the lowest.

    On a CPU numpy's: torch's takes three to seven times as long there.
    """
    return rows.argmax(-1) if rows.is_cuda else torch.from_numpy(np.asarray(rows.float().numpy().argmax(-1)))


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
    return hashes(key, token_ids)


def hashes(keys: Tensor, token_ids: Tensor) -> Tensor:
    """(P, K) hashes of (K,) token ids behind (P,) keys."""
    return _mix(keys[:, None] + token_ids[None, :] * _signed(GAMMA))


def noise(seed: int | Tensor, positions: Tensor, tokens: int | Tensor, stream: int = TOKEN_STREAM) -> Tensor:
    """(P, K) float64 standard Gumbel noise at (P,) positions of (K,) token ids, or of the whole vocabulary 0..K-1."""
    if isinstance(tokens, int):
        tokens = torch.arange(tokens, device=positions.device)
    return gumbel(hash_u64(seed, positions, tokens, stream))


def gumbel(hashes: Tensor) -> Tensor:
    """float64 noise of hashes."""
    u = _shift(hashes, 12).double().add_(0.5).mul_(2.0**-52)
    return u.log_().neg_().log_().neg_()


def draw(ids: Tensor, log_probs: Tensor, seed: int | Tensor, positions: Tensor, stream: int = TOKEN_STREAM) -> Tensor:
    """(P,) tokens of (P, K) rows over (K,) ascending ids at (P,) positions; -inf marks what a row does not hold."""
    return ids[(log_probs + noise(seed, positions, ids, stream)).argmax(dim=1)]


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
