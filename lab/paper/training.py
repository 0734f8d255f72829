"""Training the heads that the SpecBlock paper compares with, which `coppice train head` finds as entry points."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from coppice.training.answers import Answer
from coppice.training.heads import FeatureHeadInTraining, TrainingConfig
from coppice.training.losses import DECAY, LATER_ROWS, Targets, attend_by, walk
from lab.paper.models import MedusaModel, ParallelSpecModel


def groups_visible(rows: int, slots: int) -> Tensor:
    """Return (N + N * K, N + N * K) bool: what a prefix's rows and the K mask tokens behind each of them see.

    A mask sees the rows up to its own and its group up to itself, never another group (SpecBlock, appendix A.4).
    """
    prefix = torch.arange(rows)
    row, slot = prefix.repeat_interleave(slots), torch.arange(slots).repeat(rows)
    causal = torch.cat((prefix, row))[:, None] >= prefix
    own = (row[:, None] == row) & (slot[:, None] >= slot)
    return torch.cat((causal, torch.cat((own.new_zeros(rows, rows * slots), own))), dim=1)


def slot_states(student: Any, answer: Answer, targets: Targets, later: Tensor, cuts: Sequence[int]) -> Iterator[Tensor]:
    """Yield the (B, N, K, hidden) states of all slots behind every row of the answers, of a head that drafts at once.

    The masks of all of ParallelSpec's rows share one forward.
    """
    model: MedusaModel | ParallelSpecModel = student.model
    features = answer.features[:, : len(targets.rows)]
    if isinstance(model, MedusaModel):
        yield model(features)
        return
    rows, slots = targets.rows, model.config.slots
    prefix = model.prefix(features, student.embedding[targets.token(0)])  # (B, N, hidden)
    texts, count, hidden = prefix.shape
    masks = model.mask_tokens.weight.repeat(texts, count, 1)
    positions = torch.cat((rows, (rows[:, None] + 1 + torch.arange(slots, device=rows.device)).flatten()))
    attend = partial(attend_by, groups_visible(count, slots).to(rows.device))
    rope = model.rope(positions[None], prefix.dtype)
    states = model(torch.cat((prefix, masks), dim=1), rope, [attend] * model.config.num_hidden_layers)
    yield states[:, count:].view(texts, count, slots, hidden)


LOSSES: dict[str, dict[str, Any]] = {
    "medusa": {"decay": DECAY, "states": slot_states},
    "parallelspec": {"decay": DECAY, "states": slot_states},
    "falcon": {"blocks": 2, "every": LATER_ROWS, "states": partial(walk, relaxed=True)},
}
"""what a kind of head learns by"""


def begin(model: Any) -> None:
    """Give the parts that are of these kinds alone their first weights."""
    if isinstance(model, MedusaModel):
        for offset in model.heads:
            nn.init.zeros_(cast(Any, offset).residual.weight)
    elif isinstance(model, ParallelSpecModel):
        nn.init.normal_(model.mask_tokens.weight, std=0.02)


def paper_head(config: TrainingConfig) -> FeatureHeadInTraining:
    """Make a head of one of these kinds to be trained. Raises as FeatureHeadInTraining does."""
    head = FeatureHeadInTraining(config, learns_by=LOSSES[config.kind])
    begin(head.model)
    return head
