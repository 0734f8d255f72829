"""Training the heads that the SpecBlock paper compares with, which `coppice train head` finds as entry points."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from coppice.training.answers import Answer
from coppice.training.heads import FeatureHeadInTraining
from coppice.training.losses import DECAY, Targets, anchored_visible, attend_by
from lab.paper.heads import MedusaModel, ParallelSpecModel


def slot_states(student: Any, answer: Answer, targets: Targets, later: Tensor, cuts: Sequence[int]) -> Iterator[Tensor]:
    """Yield the (B, N, K, hidden) states of all slots behind every row of the answers, of a head that drafts at once.

    The masks of all of ParallelSpec's rows share one forward, and see one another as SpecBlock's appendix A.4 has it.
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
    causal = torch.ones(count, count, dtype=torch.bool, device=rows.device).tril()
    seen = torch.cat((F.pad(causal, (0, count * slots)), anchored_visible(rows, count, slots, causal=True)))
    rope = model.rope(positions[None], prefix.dtype)
    states = model(torch.cat((prefix, masks), dim=1), rope, [partial(attend_by, seen)] * model.config.num_hidden_layers)
    yield states[:, count:].view(texts, count, slots, hidden)


LOSS: dict[str, Any] = {"decay": DECAY, "states": slot_states}  # what both kinds of head learn by
paper_head = partial(FeatureHeadInTraining, learns_by=LOSS)  # makes a head of one of these kinds to be trained
