"""A teacher reads a target's answers and gives its distributions in a head's draft vocabulary."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from coppice.training.data.answerer import Answer


class Teacher:
    """A reader of answers and the draft vocabulary that they are taught in."""

    draft_number: Tensor
    """(V,) draft id of each target id, -1 outside the draft vocabulary"""

    def __init__(self, read: Callable[[Tensor], Answer], output: Tensor, draft_ids: Tensor) -> None:
        """`output` is the target's (V, hidden) layer, `draft_ids` the (D,) ascending ids of the draft vocabulary."""
        self._read = read
        self.draft_ids = draft_ids.to(output.device)
        self.draft_output = output[self.draft_ids].float()
        self.draft_number = torch.full((len(output),), -1, device=output.device)
        self.draft_number[self.draft_ids] = torch.arange(len(draft_ids), device=output.device)

    def read(self, positions: Tensor) -> Answer:
        """Return the answers at (B, T) positions."""
        return self._read(positions)

    @torch.no_grad()
    def draft_log_probs(self, final: Tensor) -> Tensor:
        """Return (..., D) log-probabilities, renormalised over the draft vocabulary, from an answer's `final`."""
        log_probs: Tensor = (final @ self.draft_output.T).log_softmax(-1)
        return log_probs
