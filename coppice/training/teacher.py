"""What a feature-fed head learns from: the target's features and next-token distribution at every position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Lesson:
    """A batch of texts as the target reads them."""

    ids: Tensor  # (B, T)
    features: Tensor  # (B, T, F)
    final: Tensor  # (B, T, hidden), what the target's output layer reads


class Teacher:
    """A frozen target and the draft vocabulary it teaches in."""

    def __init__(self, target: Any, feature_layers: tuple[int, ...], draft_ids: Tensor) -> None:
        """draft_ids: (D,) ascending target ids of the draft vocabulary."""
        self.target, self.feature_layers = target, feature_layers
        output = target.get_output_embeddings().weight
        self.draft_ids = draft_ids.to(output.device)
        self.draft_output = output[self.draft_ids]
        self.draft_number = torch.full((len(output),), -1, device=output.device)  # target id -> draft id
        self.draft_number[self.draft_ids] = torch.arange(len(draft_ids), device=output.device)

    @torch.no_grad()
    def read(self, ids: Tensor) -> Lesson:
        """The lesson of (B, T) ids."""
        out = self.target.model(input_ids=ids, use_cache=False, output_hidden_states=True)
        features = torch.cat([out.hidden_states[layer] for layer in self.feature_layers], dim=-1)
        return Lesson(ids, features.float(), out.last_hidden_state.float())

    @torch.no_grad()
    def draft_log_probs(self, final: Tensor) -> Tensor:
        """(..., D) log-probabilities of the draft vocabulary, renormalised over it."""
        log_probs: Tensor = (final @ self.draft_output.float().T).log_softmax(-1)
        return log_probs
