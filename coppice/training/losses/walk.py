"""What a head drafts behind every row of a text in training, and what it is to predict there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from coppice.heads.models.masked_block import MaskedBlockModel
from coppice.heads.models.medusa import MedusaModel
from coppice.heads.models.parallelspec import ParallelSpecModel
from coppice.training.data.answerer import Answer
from coppice.training.data.teacher import Teacher
from coppice.training.losses.block_masks import PathAttention, anchored_visible, attend_by, groups_visible


@dataclass(frozen=True)
class Targets:
    """What some rows of answers are to predict, `offset` tokens further than the next one. Row i has token i + 1."""

    ids: Tensor  # (B, N + 1)
    gold: Tensor  # (B, N + 1) draft ids, -1 outside the draft vocabulary
    log_probs: Tensor  # (B, N + 1, D), of the token behind each position
    rows: Tensor  # (n,)

    @classmethod
    def of(cls, answer: Answer, teacher: Teacher) -> Targets:
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


def walk(student: Any, answer: Answer, targets: Targets, later: Tensor, cuts: Sequence[int]) -> Iterator[Tensor]:
    """Yield a block's (B, n, K, hidden) states behind every row, then of blocks behind the cuts of `later` rows.

    Heads that draft at once have the first alone.
    """
    model, rows = student.model, len(targets.rows)
    if isinstance(model, MaskedBlockModel):
        yield block_states(student, answer, targets)
        return
    if isinstance(model, MedusaModel | ParallelSpecModel):
        yield slot_states(student, answer, targets)
        return
    config = model.config
    condition, offset = model.condition(answer.features[:, :rows]), 0
    attention = PathAttention(rows, config.slots, config.num_hidden_layers, later, config.relaxed)
    for block, cut in enumerate(cuts):
        position = targets.rows[None] + (offset if config.block_rope_advance else 0)
        token = student.embedding[targets.token(offset)]
        rope = model.rope(position, condition.dtype)
        states = model(condition, token, rope, attention.attends(condition.device))
        states = states.view(*condition.shape[:2], config.slots, -1)
        yield states
        condition, offset = states[:, :, cut - 1], offset + cut
        if block == 0:
            condition, targets = condition[:, later], replace(targets, rows=later)
        attention.cuts.append(cut)


def slot_states(student: Any, answer: Answer, targets: Targets) -> Tensor:
    """Return the (B, N, K, hidden) states of all slots behind every row of the answers, of a head that drafts at once.

    The masks of all of ParallelSpec's rows share one forward.
    """
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


def block_states(student: Any, answer: Answer, targets: Targets) -> Tensor:
    """Return the (B, n, K, hidden) states of the blocks of masks behind the answers' (n,) rows, all in one forward."""
    model: MaskedBlockModel = student.model
    config, rows, count = model.config, targets.rows, answer.ids.shape[1] - 1
    context = model.condition(answer.features[:, :count])
    blocks = student.embedding[config.mask_token_id].repeat(len(context), len(rows), config.block_size, 1)
    blocks[:, :, 0] = student.embedding[targets.token(0)]
    inside = torch.arange(config.block_size, device=rows.device)
    positions = torch.cat((torch.arange(count, device=rows.device), (rows[:, None] + 1 + inside).flatten()))
    seen = anchored_visible(rows, count, config.block_size, config.causal)
    attends = [partial(attend_by, seen)] * config.num_hidden_layers
    states: Tensor = model(context, blocks.flatten(1, 2), model.rope(positions[None], context.dtype), attends)
    return states.view(*blocks.shape)[:, :, config.block_size - config.slots :]
