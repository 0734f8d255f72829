"""Losses of heads that read features: SpecBlock's blocks under the valid-prefix mask, EAGLE-3's training-time test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coppice.nn.eagle3_model import Eagle3Model
from coppice.nn.specblock_model import SpecBlockModel
from coppice.training.paths import PathAttention
from coppice.training.teacher import Lesson, Teacher

RANK_BOUNDS = (1, 4, 10)
"""The highest rank of buckets 0, 1 and 2; what lies behind is bucket 3."""
Heard = Callable[[int, int, Tensor, Tensor], None]
"""(block, slot, logits (n, D), gold draft ids (n,)) of the rows the mask admits; for measuring"""


class Student(nn.Module):
    """A draft model in training, and the target's embedding, which is frozen."""

    def __init__(self, model: nn.Module, embedding: Tensor) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("embedding", embedding, persistent=False)


@dataclass(frozen=True)
class Targets:
    """What the rows of a lesson are to say, `offset` tokens further than the next one."""

    ids: Tensor  # (B, N + 1)
    gold: Tensor  # (B, N + 1) draft ids, -1 outside the draft vocabulary
    log_probs: Tensor  # (B, N + 1, D), of the token behind each position

    @classmethod
    def of(cls, lesson: Lesson, teacher: Teacher) -> Targets:
        """The lesson's tokens and distributions in the draft vocabulary."""
        return cls(lesson.ids, teacher.draft_number[lesson.ids], teacher.draft_log_probs(lesson.final))

    def token(self, offset: int) -> Tensor:
        """(B, N) ids that stand offset + 1 behind each row; rows whose text has ended repeat its last one."""
        return self.ids[:, self._at(offset + 1)]

    def behind(self, offset: int) -> Tensor:
        """(B, N) gold of what a prediction `offset` places further than the next is to be; -1 where there is none."""
        last = self.ids.shape[1] - 1
        row = torch.arange(last, device=self.ids.device)
        return self.gold[:, self._at(offset + 2)].where(row + offset + 2 <= last, -1)

    def taught(self, admitted: Tensor, offset: int) -> Tensor:
        """(n, D) log-probabilities for the admitted rows of a (B, N) mask."""
        text, row = admitted.nonzero(as_tuple=True)
        return self.log_probs[text, self._at(offset + 1)[row]]

    def _at(self, offset: int) -> Tensor:
        last = self.ids.shape[1] - 1
        return (torch.arange(last, device=self.ids.device) + offset).clamp(max=last)


def soft_loss(logits: Tensor, taught: Tensor) -> Tensor:
    """Mean cross-entropy in nats of (n, D) logits to (n, D) log-probabilities (SpecBlock, equation 6)."""
    if not len(logits):
        return logits.sum()
    return -(taught.exp() * logits.float().log_softmax(-1)).sum(-1).mean()


def bucket_of(logits: Tensor, gold: Tensor) -> Tensor:
    """(n,) bucket of the gold id's rank in (n, D) logits."""
    own = logits.gather(-1, gold[:, None])
    rank = 1 + (logits > own).sum(-1)
    return torch.bucketize(rank, torch.tensor(RANK_BOUNDS, device=rank.device))


@dataclass
class SpecBlockLoss:
    """Draft and rank losses over blocks (SpecBlock, section 3.3). Each switch is one ablation."""

    teacher: Teacher
    blocks: int = 3
    """1: no cross-block training"""
    valid_prefix: bool = True
    rank_on: Callable[[], bool] = lambda: True
    """whether the rank head learns yet"""
    heard: Heard | None = None

    def __call__(self, student: Any, inputs: Tensor, _labels: Tensor) -> Tensor:
        """The loss in nats of texts (B, N + 1), summed over slots and blocks."""
        model: SpecBlockModel = student.model
        config, lesson = model.config, self.teacher.read(inputs)
        targets, rows, slots = Targets.of(lesson, self.teacher), inputs.shape[1] - 1, config.slots
        condition, offset = model.condition(lesson.features[:, :rows]), 0
        attention = PathAttention(rows, slots, config.num_hidden_layers)
        position = torch.arange(1, rows + 1, device=inputs.device)[None]
        total = condition.new_zeros(())
        for block in range(self.blocks):
            rope = model.rope(position + (offset if config.block_rope_advance else 0), condition.dtype)
            token = student.embedding[targets.token(offset)]
            states = model(condition, token, rope, attention.attends(inputs.device))
            total = total + self._block(model, states, targets, block, offset)
            cut = 1 + int(inputs.sum() + 7919 * block) % slots  # of this very batch, so that a resumed run repeats it
            condition, offset = states[:, :, cut - 1], offset + cut
            attention.cuts.append(cut)
        return total

    def _block(self, model: SpecBlockModel, states: Tensor, targets: Targets, block: int, offset: int) -> Tensor:
        """A block's losses. Only rows that the mask admits are read: the others' logits would be thrown away."""
        total = states.new_zeros(())
        valid = torch.ones_like(states[:, :, 0, 0], dtype=torch.bool)
        for slot in range(states.shape[2]):
            gold = targets.behind(offset + slot)
            admitted = valid & (gold >= 0)
            logits, normed = model.read(states[:, :, slot][admitted])
            wanted = gold[admitted]
            total = total + soft_loss(logits, targets.taught(admitted, offset + slot))
            if self.rank_on() and len(wanted):
                ranked = model.rank(normed, logits)
                total = total + F.cross_entropy(ranked.float(), bucket_of(logits.detach(), wanted))
            if self.heard is not None:
                self.heard(block, slot, logits.detach(), wanted)
            if self.valid_prefix:  # equation 5
                valid = admitted.clone()
                valid[admitted] = logits.detach().argmax(-1) == wanted
        return total


@dataclass
class Eagle3Loss:
    """The loss over `steps` steps of drafting, each from the states of the one before (training-time test)."""

    teacher: Teacher
    steps: int = 7
    decay: float = 0.8
    """weight of a step over the one before"""
    heard: Heard | None = None

    def __call__(self, student: Any, inputs: Tensor, _labels: Tensor) -> Tensor:
        """The loss in nats of texts (B, N + 1), a weighted mean over steps."""
        model: Eagle3Model = student.model
        lesson = self.teacher.read(inputs)
        targets, rows = Targets.of(lesson, self.teacher), inputs.shape[1] - 1
        hidden = model.condition(lesson.features[:, :rows])
        attention = PathAttention(rows, 1, 1)
        position = torch.arange(rows, device=inputs.device)[None]
        total, weight, weights = hidden.new_zeros(()), 1.0, 0.0
        for step in range(self.steps):
            (attend,) = attention.attends(inputs.device)
            rope = model.rope(position + step, hidden.dtype)
            hidden = model(hidden, student.embedding[targets.token(step)], rope, attend)
            gold = targets.behind(step)
            admitted = gold >= 0
            logits = model.read(hidden[admitted])
            total = total + weight * soft_loss(logits, targets.taught(admitted, step))
            if self.heard is not None:
                self.heard(step, 0, logits.detach(), gold[admitted])
            weights, weight = weights + weight, weight * self.decay
            attention.cuts.append(1)
        return total / weights
