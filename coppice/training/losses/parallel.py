"""The loss of heads that predict a draft's tokens all at once: Medusa's and ParallelSpec's."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from coppice.heads.models.medusa import MedusaModel
from coppice.heads.models.parallelspec import ParallelSpecModel
from coppice.training.data.target_answers import Answer
from coppice.training.data.teacher import Teaches
from coppice.training.losses.block_masks import attend_by, groups_visible
from coppice.training.losses.feature_losses import Observer, SlotOutput, Targets, right_rows, soft_loss


@dataclass
class ParallelLoss:
    """The cross-entropy of each slot behind every row, a weighted mean over slots, as Medusa weights its heads."""

    teacher: Teaches
    decay: float = 0.8
    """weight of a slot over the one before"""
    valid_prefix: bool = False
    """whether only rows that were right so far count; for measuring"""
    observe: Observer | None = None

    def __call__(self, student: Any, inputs: Tensor, _labels: Tensor) -> Tensor:
        """Return the loss in nats of the texts at (B, N + 1) positions."""
        answer = self.teacher.read(inputs)
        targets = Targets.of(answer, self.teacher)
        states = slot_states(student, answer, targets)
        total, weight, weights = answer.features.new_zeros(()), 1.0, 0.0
        valid = torch.ones_like(inputs[:, : len(targets.rows)], dtype=torch.bool)
        for slot in range(states.shape[2]):
            admitted, gold = targets.admit(valid, slot)
            logits = student.model.read(states[:, :, slot][admitted], slot)
            total = total + weight * soft_loss(logits, targets.taught(admitted, slot))
            if self.observe is not None:
                self.observe(SlotOutput(0, slot, logits.detach(), gold, targets.outside(valid, slot)))
            if self.valid_prefix:
                valid = right_rows(admitted, logits, gold)
            weights, weight = weights + weight, weight * self.decay
        return total / weights


def slot_states(student: Any, answer: Answer, targets: Targets) -> Tensor:
    """Return the (B, N, K, hidden) states of the slots behind every row of the answers."""
    model: MedusaModel | ParallelSpecModel = student.model
    features = answer.features[:, : len(targets.rows)]
    if isinstance(model, MedusaModel):
        states: Tensor = model(features)
        return states
    rows, slots = targets.rows, model.config.slots
    prefix = model.prefix(features, student.embedding[targets.token(0)])  # (B, N, hidden)
    texts, count, hidden = prefix.shape
    masks = model.mask_tokens.weight.repeat(texts, count, 1)
    positions = torch.cat((rows, (rows[:, None] + 1 + torch.arange(slots, device=rows.device)).flatten()))
    attend = partial(attend_by, groups_visible(count, slots).to(rows.device))
    rope = model.rope(positions[None], prefix.dtype)
    states = model(torch.cat((prefix, masks), dim=1), rope, [attend] * model.config.num_hidden_layers)
    return states[:, count:].view(texts, count, slots, hidden)
