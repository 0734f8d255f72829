"""The loss of heads that read features, over the slots of every block or step that they draft."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coppice.heads.models.masked_block import MaskedBlockModel
from coppice.training.data.teacher import Teacher
from coppice.training.losses.objectives import Objective, objective_of, overlap
from coppice.training.losses.walk import Targets, walk

RANK_BOUNDS = (1, 4, 10)
"""The highest rank of buckets 0, 1 and 2; what lies behind is bucket 3."""
DECAY = 0.8
"""weight of an EAGLE-3 step, or of a slot of a head that drafts at once, over the one before"""


@dataclass(frozen=True)
class SlotOutput:
    """A slot's logits (n, D), gold draft ids (n,) and rank logits (n, 4) on the rows that the mask admits."""

    block: int
    slot: int
    logits: Tensor
    gold: Tensor
    outside: int
    """rows, not among the n, whose token is outside the draft vocabulary"""
    ranks: Tensor | None = None


class Student(nn.Module):
    """A draft model in training, and the target's embedding, which is frozen."""

    def __init__(self, model: nn.Module, embedding: Tensor) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("embedding", embedding, persistent=False)


def divergence(logits: Tensor, others: Tensor) -> Tensor:
    """Return the mean KL(p || p') in nats of the distributions of (n, D) logits and (n, D) others."""
    if not len(logits):
        return logits.sum()
    log_probs = logits.float().log_softmax(-1)
    return (log_probs.exp() * (log_probs - others.float().log_softmax(-1))).sum(-1).mean()


@dataclass(frozen=True)
class Anchor:
    """A frozen copy that a student is to stay near: `weight` times the divergence is added to each of its losses."""

    student: Any
    weight: float

    def pull(self, logits: Tensor, states: Tensor, previous: Tensor, slot: int) -> Tensor:
        """Return the nats to add for the student's (n, D) logits and the copy's (n, hidden) states of a slot."""
        with torch.no_grad():
            anchored, _ = self.student.model.read_behind(states, previous, slot)
        return self.weight * divergence(logits, anchored)


def right_rows(admitted: Tensor, logits: Tensor, gold: Tensor) -> Tensor:
    """Return the rows of a (B, n) mask, m in all, whose (m, D) logits are highest at the (m,) gold ids."""
    right = admitted.clone()
    right[admitted] = logits.detach().argmax(-1) == gold
    return right


def bucket_of(logits: Tensor, gold: Tensor) -> Tensor:
    """Return the (n,) buckets of the gold ids' ranks in (n, D) logits."""
    own = logits.gather(-1, gold[:, None])
    rank = 1 + (logits > own).sum(-1)
    return torch.bucketize(rank, torch.tensor(RANK_BOUNDS, device=rank.device))


@dataclass
class HeadLoss:
    """Draft and rank losses over blocks (SpecBlock, section 3.3). A kind of head has its own number of them.

    A step of EAGLE-3 (training-time test) is a block of one slot. Heads that draft at once have a single block.
    """

    teacher: Teacher
    objective: Objective = "soft"
    """how far a slot's logits are from what the target finds likely"""
    blocks: int = 1
    decay: float | None = None
    """weight of a slot over the one before, and the loss is their mean; None: their sum"""
    valid_prefix: bool = False
    """whether only rows that were right so far count"""
    mask_on: Callable[[], bool] = lambda: True
    """whether the valid-prefix mask holds yet"""
    rank_on: Callable[[], bool] = lambda: True
    """whether the rank head or the confidence head, if there is one, learns yet"""
    cut: int = 0
    """every block's cut; 0 draws one for each batch and block"""
    every: int = 1
    """later blocks, and blocks of masks, start from every so many rows: block 1 is what most steps need"""
    restart: bool = True
    """whether a block's mask forgets that the block before went wrong"""
    observe: Callable[[SlotOutput], None] | None = None
    anchor: Anchor | None = None

    def whole(self, slots: int, steps: int) -> HeadLoss:
        """Return the loss over two blocks without cuts, or over so many `steps` of a head with one of the `slots`."""
        return replace(self, blocks=steps if slots == 1 else 2, cut=slots)

    def __call__(self, student: Any, inputs: Tensor, _labels: Tensor) -> Tensor:
        """Return the loss in nats of the texts at (B, N + 1) positions."""
        answer = self.teacher.read(inputs)
        model, targets = student.model, Targets.of(answer, self.teacher)
        # Drawn from the batch itself, so that a resumed run repeats it.
        drawn = int(answer.ids.sum())
        later = targets.rows[drawn % self.every :: self.every]
        if isinstance(model, MaskedBlockModel):
            targets = replace(targets, rows=later)
        cuts = [self.cut or 1 + (drawn + 7919 * block) % model.config.slots for block in range(self.blocks)]
        near: Iterable[Tensor | None] = repeat(None)
        if self.anchor is not None:
            near = torch.no_grad()(walk)(self.anchor.student, answer, targets, later, cuts)
        total, offset, weight, weights = answer.features.new_zeros(()), 0, 1.0, 0.0
        distance = objective_of(self.objective)
        sure = getattr(model, "confidence_head", None) is not None and self.rank_on()
        ranked = hasattr(model, "rank_head") and self.rank_on()
        valid = torch.ones_like(inputs[:, : len(targets.rows)], dtype=torch.bool)
        walked = zip(walk(student, answer, targets, later, cuts), near, strict=False)
        for block, (states, anchored) in enumerate(walked):
            of_block, right = states.new_zeros(()), valid
            for slot in range(states.shape[2]):
                # Only rows that the mask admits are read: the others' logits would be thrown away.
                admitted, gold = targets.admit(right, offset + slot)
                previous = targets.token(offset + slot)[admitted]
                logits, normed = model.read_behind(states[:, :, slot][admitted], previous, slot)
                taught = targets.taught(admitted, offset + slot)
                losses = [distance(logits, taught)]
                if self.anchor is not None and anchored is not None:
                    losses.append(self.anchor.pull(logits, anchored[:, :, slot][admitted], previous, slot))
                if sure and len(gold):
                    chance = overlap(logits.detach(), taught)
                    said = model.confidence(normed.detach(), previous).float()
                    losses.append(F.binary_cross_entropy_with_logits(said, chance))
                ranks = model.rank(normed, logits) if ranked and len(gold) else None
                if ranks is not None:
                    losses.append(F.cross_entropy(ranks.float(), bucket_of(logits.detach(), gold)))
                for loss in losses:
                    of_block = of_block + weight * loss
                weights, weight = weights + weight, weight * (self.decay or 1.0)
                if self.observe is not None:
                    outside = targets.outside(right, offset + slot)
                    self.observe(SlotOutput(block, slot, logits.detach(), gold, outside, ranks))
                if self.valid_prefix and self.mask_on():  # equation 5
                    right = right_rows(admitted, logits, gold)
            total, offset = total + of_block, offset + cuts[block]
            valid = valid if self.restart else right
            if block == 0 and len(targets.rows) > len(later):
                valid, targets = valid[:, later], replace(targets, rows=later)
        return total if self.decay is None else total / weights
