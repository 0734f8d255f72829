"""Learning a variant of a head from whole texts, in short steps, so that it can give way to what serves beside it.

Every token of a text teaches once a pass, by its cross-entropy: what the target said is certain.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from coppice.adaptation.records import Sample
from coppice.machine import this_machine
from coppice.training.losses import Acceptance, measure

from .learner import BETAS, Interrupted, Learner, differing
from .windows import Windows

RATE = 2e-3
BATCH = 4
"""texts of each optimiser step"""
TEXTS = 192
"""texts to read in all, as often as it takes"""
PASSES = 4
"""times at most that a text is read"""
_BFLOAT16 = {"avx512_bf16", "amx_bf16"}  # of a processor that multiplies in bfloat16


@dataclass(frozen=True)
class Fit:
    """The result of learning. Lengths are those of chains drafted greedily on texts that nothing was learnt from."""

    texts: int
    before: float
    after: float
    seconds: float
    tensors: dict[str, Tensor]
    """all that differ from the deployed weights"""


def passes_over(texts: int) -> int:
    """Return how often to read so many texts."""
    return max(1, min(PASSES, TEXTS // max(1, texts)))


def fit(
    learner: Learner,
    begin: Mapping[str, Tensor],
    texts: Sequence[Sample],
    held_out: Sequence[Sample],
    rest: Callable[[], None],
    *,
    rate: float = RATE,
    batch: int = BATCH,
) -> Fit:
    """Learn from texts, beginning with the deployed weights and the tensors of `begin` in the place of their own.

    `rest` is called after every step. Raises FloatingPointError when a weight is not finite, and Interrupted once the
    learner was stopped.
    """
    began = time.perf_counter()
    learner.revert(begin)
    model: Any = learner.student.model
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimiser = torch.optim.AdamW(weights, lr=rate, betas=BETAS, weight_decay=0.0)
    order, fast = torch.Generator().manual_seed(len(texts)), not _BFLOAT16.isdisjoint(this_machine().features)
    before = _length(learner, held_out, rest)
    for _ in range(passes_over(len(texts))):
        for numbers in torch.split(torch.randperm(len(texts), generator=order), batch):
            if learner.stopped.is_set():
                raise Interrupted("an update was given up")
            windows = Windows([texts[number] for number in numbers], learner.vocabulary)
            with torch.autocast("cpu", torch.bfloat16, enabled=fast):
                loss = learner.loss_on(windows)(learner.student, windows.positions, windows.positions)
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(weights, learner.recipe.clip, foreach=True)
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
            rest()
    learner.student.zero_grad(set_to_none=True)
    tensors = differing(learner.deployed(), learner.tensors())
    if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values()):
        raise FloatingPointError(f"an update of {len(texts)} texts is not finite")
    return Fit(len(texts), before, _length(learner, held_out, rest), time.perf_counter() - began, tensors)


def _length(learner: Learner, texts: Sequence[Sample], rest: Callable[[], None]) -> float:
    """Return the mean length of chains that are drafted greedily behind every token of some texts."""
    acceptance = Acceptance()
    for text in texts:
        windows = Windows([text], learner.vocabulary)
        acceptance += measure(learner.student, learner.loss_on(windows), list(windows.positions))
        rest()
    return acceptance.length
