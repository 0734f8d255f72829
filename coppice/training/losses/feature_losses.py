"""Losses of heads that draft step by step: SpecBlock's and Falcon's blocks, EAGLE-3's training-time test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coppice.heads.models.block import BlockModel
from coppice.heads.models.eagle3 import Eagle3Model
from coppice.training.data.target_answers import Answer
from coppice.training.data.teacher import Teaches
from coppice.training.losses.block_masks import PathAttention

RANK_BOUNDS = (1, 4, 10)
"""The highest rank of buckets 0, 1 and 2; what lies behind is bucket 3."""


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


Observer = Callable[[SlotOutput], None]


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

    @torch.no_grad()
    def follow(self, walk: Iterator[Tensor]) -> Iterator[Tensor]:
        """Yield the copy's states, one block or step at a time."""
        while (states := next(walk, None)) is not None:
            yield states

    def pull(self, logits: Tensor, states: Tensor) -> Tensor:
        """Return the nats to add for the student's (n, D) logits and the copy's (n, hidden) states."""
        with torch.no_grad():
            anchored = self.student.model.read(states)
        return self.weight * divergence(logits, anchored[0] if isinstance(anchored, tuple) else anchored)


@dataclass(frozen=True)
class Targets:
    """What some rows of answers are to predict, `offset` tokens further than the next one. Row i has token i + 1."""

    ids: Tensor  # (B, N + 1)
    gold: Tensor  # (B, N + 1) draft ids, -1 outside the draft vocabulary
    log_probs: Tensor  # (B, N + 1, D), of the token behind each position
    rows: Tensor  # (n,)

    @classmethod
    def of(cls, answer: Answer, teacher: Teaches) -> Targets:
        """Take all rows of the answers, with their tokens and distributions in the draft vocabulary."""
        rows = torch.arange(answer.ids.shape[1] - 1, device=answer.ids.device)
        return cls(answer.ids, teacher.draft_number[answer.ids], teacher.draft_log_probs(answer.final), rows)

    def token(self, offset: int) -> Tensor:
        """Return the (B, n) ids offset + 1 behind each row; rows whose text has ended repeat its last one."""
        return self.ids[:, self._at(offset + 1)]

    def behind(self, offset: int) -> Tensor:
        """Return the (B, n) draft ids to predict `offset` places further than the next one; -1 where there is none."""
        return self.gold[:, self._at(offset + 2)].where(self._inside(offset), -1)

    def outside(self, valid: Tensor, offset: int) -> int:
        """Count the valid rows whose token is outside the draft vocabulary."""
        return int((valid & self._inside(offset) & (self.behind(offset) < 0)).sum())

    def admit(self, valid: Tensor, offset: int) -> tuple[Tensor, Tensor]:
        """Return those of the (B, n) valid rows that have a draft id to predict, and the m ids of the rows."""
        gold = self.behind(offset)
        admitted = valid & (gold >= 0)
        return admitted, gold[admitted]

    def taught(self, admitted: Tensor, offset: int) -> Tensor:
        """Return the target's (m, D) log-probabilities for the m admitted rows of a (B, n) mask."""
        text, row = admitted.nonzero(as_tuple=True)
        return self.log_probs[text, self._at(offset + 1)[row]]

    def _inside(self, offset: int) -> Tensor:
        return self.rows + offset + 2 < self.ids.shape[1]

    def _at(self, offset: int) -> Tensor:
        return (self.rows + offset).clamp(max=self.ids.shape[1] - 1)


def right_rows(admitted: Tensor, logits: Tensor, gold: Tensor) -> Tensor:
    """Return the rows of a (B, n) mask, m in all, whose (m, D) logits are highest at the (m,) gold ids."""
    right = admitted.clone()
    right[admitted] = logits.detach().argmax(-1) == gold
    return right


def soft_loss(logits: Tensor, taught: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats of (n, D) logits to (n, D) log-probabilities (SpecBlock, equation 6)."""
    if not len(logits):
        return logits.sum()
    return -(taught.exp() * logits.float().log_softmax(-1)).sum(-1).mean()


def bucket_of(logits: Tensor, gold: Tensor) -> Tensor:
    """Return the (n,) buckets of the gold ids' ranks in (n, D) logits."""
    own = logits.gather(-1, gold[:, None])
    rank = 1 + (logits > own).sum(-1)
    return torch.bucketize(rank, torch.tensor(RANK_BOUNDS, device=rank.device))


@dataclass
class SpecBlockLoss:
    """Draft and rank losses over blocks (SpecBlock, section 3.3). Each switch is one ablation.

    Falcon's blocks learn by the same losses without the mask; they have no rank head.
    """

    teacher: Teaches
    blocks: int = 3
    """1: no cross-block training"""
    valid_prefix: bool = True
    mask_on: Callable[[], bool] = lambda: True
    """whether the valid-prefix mask holds yet"""
    rank_on: Callable[[], bool] = lambda: True
    """whether the rank head learns yet"""
    cut: int = 0
    """every block's cut; 0 draws one for each batch and block"""
    every: int = 1
    """later blocks start from every so many rows: block 1 is what most steps need"""
    restart: bool = True
    """whether a block's mask forgets that the block before went wrong"""
    observe: Observer | None = None
    anchor: Anchor | None = None

    def __call__(self, student: Any, inputs: Tensor, _labels: Tensor) -> Tensor:
        """Return the loss in nats of the texts at (B, N + 1) positions, summed over slots and blocks."""
        answer = self.teacher.read(inputs)
        targets, slots = Targets.of(answer, self.teacher), student.model.config.slots
        # Drawn from the batch itself, so that a resumed run repeats it.
        drawn = int(answer.ids.sum())
        later = targets.rows[drawn % self.every :: self.every]
        cuts = [self.cut or 1 + (drawn + 7919 * block) % slots for block in range(self.blocks)]
        near = None
        if self.anchor is not None:
            near = self.anchor.follow(self._walk(self.anchor.student, answer, targets, later, cuts))
        total, offset = answer.features.new_zeros(()), 0
        valid = torch.ones_like(inputs[:, : len(targets.rows)], dtype=torch.bool)
        for block, states in enumerate(self._walk(student, answer, targets, later, cuts)):
            of_anchor = None if near is None else next(near)
            loss, ended = self._block(student.model, states, of_anchor, targets, block, offset, valid)
            offset, total = offset + cuts[block], total + loss
            valid = valid if self.restart else ended
            if block == 0:
                valid, targets = valid[:, later], replace(targets, rows=later)
        return total

    def _walk(self, student: Any, answer: Answer, targets: Targets, later: Tensor, cuts: list[int]) -> Iterator[Tensor]:
        """Yield a block's (B, n, K, hidden) states behind every row, then of blocks behind the cuts of `later` rows."""
        model: BlockModel = student.model
        config, rows = model.config, len(targets.rows)
        condition, offset = model.condition(answer.features[:, :rows]), 0
        attention = PathAttention(rows, config.slots, config.num_hidden_layers, later, config.relaxed)
        for block, cut in enumerate(cuts):
            position = targets.rows[None] + 1 + (offset if config.block_rope_advance else 0)
            token = student.embedding[targets.token(offset)]
            rope = model.rope(position, condition.dtype)
            states = model(condition, token, rope, attention.attends(condition.device))
            yield states
            condition, offset = states[:, :, cut - 1], offset + cut
            if block == 0:
                condition, targets = condition[:, later], replace(targets, rows=later)
            attention.cuts.append(cut)

    def _block(
        self,
        model: Any,
        states: Tensor,
        of_anchor: Tensor | None,
        targets: Targets,
        block: int,
        offset: int,
        valid: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return a block's losses and the (B, n) rows that were right to its end.

        Only rows that the mask admits are read: the others' logits would be thrown away.
        """
        total = states.new_zeros(())
        for slot in range(states.shape[2]):
            admitted, gold = targets.admit(valid, offset + slot)
            logits, normed = model.read(states[:, :, slot][admitted])
            total = total + soft_loss(logits, targets.taught(admitted, offset + slot))
            if self.anchor is not None and of_anchor is not None:
                total = total + self.anchor.pull(logits, of_anchor[:, :, slot][admitted])
            ranks = model.rank(normed, logits) if self.rank_on() and len(gold) else None
            if ranks is not None:
                total = total + F.cross_entropy(ranks.float(), bucket_of(logits.detach(), gold))
            if self.observe is not None:
                outside = targets.outside(valid, offset + slot)
                self.observe(
                    SlotOutput(block, slot, logits.detach(), gold, outside, None if ranks is None else ranks.detach())
                )
            if self.valid_prefix and self.mask_on():  # equation 5
                valid = right_rows(admitted, logits, gold)
        return total, valid


@dataclass
class Eagle3Loss:
    """The loss over `steps` steps of drafting, each from the states of the one before (training-time test)."""

    teacher: Teaches
    steps: int = 7
    decay: float = 0.8
    """weight of a step over the one before"""
    valid_prefix: bool = False
    """whether only rows that were right so far count; for measuring"""
    observe: Observer | None = None
    anchor: Anchor | None = None

    def __call__(self, student: Any, inputs: Tensor, _labels: Tensor) -> Tensor:
        """Return the loss in nats of the texts at (B, N + 1) positions, a weighted mean over steps."""
        model: Eagle3Model = student.model
        answer, rows = self.teacher.read(inputs), inputs.shape[1] - 1
        targets = Targets.of(answer, self.teacher)
        near = None
        if self.anchor is not None:
            near = self.anchor.follow(self._walk(self.anchor.student, answer, targets))
        total, weight, weights = answer.features.new_zeros(()), 1.0, 0.0
        valid = torch.ones_like(inputs[:, :rows], dtype=torch.bool)
        for step, states in enumerate(self._walk(student, answer, targets)):
            admitted, gold = targets.admit(valid, step)
            logits = model.read(states[admitted])
            loss = soft_loss(logits, targets.taught(admitted, step))
            if self.anchor is not None and near is not None:
                loss = loss + self.anchor.pull(logits, next(near)[admitted])
            total = total + weight * loss
            if self.observe is not None:
                self.observe(SlotOutput(step, 0, logits.detach(), gold, targets.outside(valid, step)))
            if self.valid_prefix:
                valid = right_rows(admitted, logits, gold)
            weights, weight = weights + weight, weight * self.decay
        return total / weights

    def _walk(self, student: Any, answer: Answer, targets: Targets) -> Iterator[Tensor]:
        """Yield the (B, N, hidden) states of each step behind every row."""
        model: Eagle3Model = student.model
        rows = len(targets.rows)
        states = model.condition(answer.features[:, :rows])
        attention = PathAttention(rows, 1, 1)
        for step in range(self.steps):
            (attend,) = attention.attends(states.device)
            rope = model.rope(targets.rows[None] + step, states.dtype)
            states = model(states, student.embedding[targets.token(step)], rope, attend)
            yield states
            attention.cuts.append(1)
