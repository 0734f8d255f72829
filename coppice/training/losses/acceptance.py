"""How often a head that reads features would be right: alpha by place, the accepted length, the rank head's table.

alpha_k is the share of rows whose k-th greedy draft token is the text's, among those whose earlier ones were
(SpecBlock, appendix C, figure 5).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from coppice.training.losses.feature_losses import HeadLoss, SlotOutput, bucket_of

BUCKETS = 4


@dataclass
class Acceptance:
    """Counts over held-out rows."""

    hits: Counter[tuple[int, int]] = field(default_factory=Counter)
    """by block and slot"""
    rows: Counter[tuple[int, int]] = field(default_factory=Counter)
    confusion: Tensor = field(default_factory=lambda: torch.zeros(BUCKETS, BUCKETS, dtype=torch.int64))
    """[gold bucket, predicted bucket]"""

    def count(self, output: SlotOutput) -> None:
        """Count the right rows of a slot."""
        place = output.block, output.slot
        self.hits[place] += int((output.logits.argmax(-1) == output.gold).sum())
        self.rows[place] += len(output.gold) + output.outside
        if output.ranks is not None:
            pairs = bucket_of(output.logits, output.gold) * BUCKETS + output.ranks.argmax(-1)
            self.confusion += torch.bincount(pairs.cpu(), minlength=BUCKETS**2).view(BUCKETS, BUCKETS)

    def __add__(self, other: Acceptance) -> Acceptance:
        """Join the counts over other rows."""
        joined = Acceptance(self.hits.copy(), self.rows.copy(), self.confusion + other.confusion)
        joined.hits.update(other.hits)
        joined.rows.update(other.rows)
        return joined

    @property
    def counts(self) -> list[tuple[int, int]]:
        """(right, tried) by place, in drafting order."""
        return [(self.hits[place], self.rows[place]) for place in sorted(self.hits)]

    @property
    def alphas(self) -> dict[tuple[int, int], float]:
        """alpha by (block, slot), in drafting order."""
        return {place: self.hits[place] / max(1, self.rows[place]) for place in sorted(self.hits)}

    @property
    def length(self) -> float:
        """Tokens a step would commit with a greedy chain, the root included."""
        total, reached = 1.0, 1.0
        for alpha in self.alphas.values():
            reached *= alpha
            total += reached
        return total

    def ranks(self) -> list[dict[str, float]]:
        """Return frequency, precision, recall and F1 of each bucket (SpecBlock, table 3)."""
        counts = self.confusion.double()
        right, gold, predicted = counts.diag(), counts.sum(1), counts.sum(0)
        precision, recall = right / predicted.clamp_min(1), right / gold.clamp_min(1)
        columns = {
            "frequency": gold / gold.sum().clamp_min(1),
            "precision": precision,
            "recall": recall,
            "f1": 2 * precision * recall / (precision + recall).clamp_min(1e-9),
        }
        return [{name: float(column[bucket]) for name, column in columns.items()} for bucket in range(BUCKETS)]


@torch.no_grad()
def measure(student: Any, loss: HeadLoss, texts: Sequence[Tensor]) -> Acceptance:
    """Draft greedily behind every token of texts at (N + 1,) positions.

    The drafts are two blocks deep, or 8 EAGLE-3 steps, or all slots of a head that predicts them at once.
    """
    acceptance = Acceptance()
    chain = replace(
        loss.whole(student.model.config.slots, steps=8),
        every=1,
        restart=False,
        valid_prefix=True,
        mask_on=lambda: True,
        rank_on=lambda: True,
        observe=acceptance.count,
    )
    for text in texts:
        chain(student, text[None], text[None])
    return acceptance
