"""What a slot's logits are taught: three distances from the target's distribution, all zero where they agree."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

Objective = Literal["soft", "l1", "coupled"]
Distance = Callable[[Tensor, Tensor], Tensor]
_CE, _L1 = 0.1, 0.9
_TINY = 1e-30


def soft_loss(logits: Tensor, taught: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats of (n, D) logits to (n, D) log-probabilities (SpecBlock, equation 6)."""
    if not len(logits):
        return logits.sum()
    return -(taught.exp() * logits.float().log_softmax(-1)).sum(-1).mean()


def overlap(logits: Tensor, taught: Tensor) -> Tensor:
    """Return the (n,) shares 1 - TV of p and q: how often a token drawn from q is accepted (arXiv 2607.05147, s. 3)."""
    return torch.minimum(logits.float().softmax(-1), taught.exp()).sum(-1)


def l1_loss(logits: Tensor, taught: Tensor) -> Tensor:
    """Return 0.1 of the cross-entropy and 0.9 of the L1 distance, 2 TV (DSpark, arXiv 2607.05147, section 5)."""
    if not len(logits):
        return logits.sum()
    return _CE * soft_loss(logits, taught) + _L1 * 2 * (1 - overlap(logits, taught)).mean()


def agreement(logits: Tensor, taught: Tensor) -> Tensor:
    """Return the (n,) chances that both distributions draw the same token from the same Gumbel noise.

    It is the sum over x of 1 / sum over y of max(p(y) / p(x), q(y) / q(x)). Ordered by r = p / q, the inner sum is
    (the q up to x) / q(x) + (the p behind x) / p(x).
    """
    q, p = logits.float().softmax(-1).clamp_min(_TINY), taught.exp().clamp_min(_TINY)
    order = (p / q).argsort(-1)
    p, q = p.gather(-1, order), q.gather(-1, order)
    behind = p.sum(-1, keepdim=True) - p.cumsum(-1)
    return (1 / (q.cumsum(-1) / q + behind.clamp_min(0) / p)).sum(-1)


def coupled_loss(logits: Tensor, taught: Tensor) -> Tensor:
    """Return the mean of -log of the chance that a coupled draft at T = 1 agrees with the target."""
    if not len(logits):
        return logits.sum()
    return -agreement(logits, taught).clamp_min(_TINY).log().mean()


_DISTANCES: Mapping[Objective, Distance] = MappingProxyType({"soft": soft_loss, "l1": l1_loss, "coupled": coupled_loss})


def objective_of(name: Objective) -> Distance:
    """Return the mean distance of (n, D) logits from (n, D) log-probabilities by its name."""
    return _DISTANCES[name]
