"""The torch twin of `sampling`'s noise: the same hashes bit for bit, for several positions at once and on any device.

torch has no unsigned 64-bit arithmetic. Products and sums of int64 wrap to the same bits; right shifts copy the sign
bit and are masked.
"""

from __future__ import annotations

from torch import Tensor

from coppice.speculation.sampling import GAMMA, MASK_64, MULTIPLIER_1, MULTIPLIER_2, TOKEN_STREAM


def noise(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """(P, K) float64 standard Gumbel noise of (K,) token ids at (P,) absolute positions of texts.

    seeds: (P,) int64, the bits of each text's seed.
    """
    keys = _mix(_mix(seeds + _signed(GAMMA)) + _signed(TOKEN_STREAM * GAMMA & MASK_64))
    return gumbel(hashes(_mix(keys + positions * _signed(GAMMA)), token_ids))


def hashes(keys: Tensor, token_ids: Tensor) -> Tensor:
    """(P, K) hashes of (K,) token ids behind (P,) keys, as int64 with the bits of the unsigned ones."""
    return _mix(keys[:, None] + token_ids[None, :] * _signed(GAMMA))


def gumbel(hashes: Tensor) -> Tensor:
    """float64 noise of hashes."""
    u = _shift(hashes, 12).double().add_(0.5).mul_(2.0**-52)
    return u.log_().neg_().log_().neg_()


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
