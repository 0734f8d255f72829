"""Samples as target answers: what the losses of training read, made of what a drafter saw."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from coppice.adaptation.records import Sample
from coppice.training.answers import Answer
from coppice.training.losses import Teacher

NOTHING = -1
"""Stands behind the end of a window; no draft id"""


class DraftVocabulary:
    """The target ids that a head can predict, and the distributions of samples over them."""

    def __init__(self, draft_ids: Tensor, vocab: int) -> None:
        """draft_ids: (D,) target ids. vocab: the target's V."""
        self.size, self.target_ids = len(draft_ids), frozenset(draft_ids.tolist())
        # One entry more: NOTHING finds it from behind.
        self.number = torch.full((vocab + 1,), NOTHING, dtype=torch.int64, device=draft_ids.device)
        self.number[draft_ids] = torch.arange(self.size, device=draft_ids.device)

    def number_of(self, token: int) -> int:
        """Return the draft id of a target id, or -1."""
        return int(self.number[token]) if token < len(self.number) - 1 else NOTHING

    def log_probs(self, sample: Sample) -> Tensor:
        """Return (D,) log-probabilities of the target where the draft missed.

        They are of its top ids that are draft ids, renormalised, so the tail is shared out in proportion. Where no top
        id is a draft id the missed token is certain.
        """
        known = sample.top_ids < len(self.number) - 1
        numbers = self.number[torch.from_numpy(sample.top_ids[known].astype(np.int64)).to(self.number.device)]
        log_probs = torch.from_numpy(sample.top_log_probs[known].astype(np.float32)).to(self.number.device)
        inside = numbers >= 0
        if not bool(inside.any()):
            return self.certain(torch.tensor(self.number_of(sample.target_id), device=self.number.device))
        row = log_probs.new_full((self.size,), -torch.inf)
        row[numbers[inside]] = log_probs[inside].log_softmax(0)
        return row

    def certain(self, numbers: Tensor) -> Tensor:
        """Return (..., D) log-probabilities of (...) draft ids that are certain. Rows of -1 mean nothing."""
        rows = torch.full((*numbers.shape, self.size), -torch.inf, device=numbers.device)
        return rows.scatter(-1, numbers.clamp(min=0)[..., None], 0.0)


class Windows(Teacher):
    """Full samples as texts: their own tokens are certain, the missed one is what the target found likely.

    Rotary attention sees differences of positions alone, so every text starts at 0. Shorter ones end early.
    """

    def __init__(self, samples: Sequence[Sample], vocabulary: DraftVocabulary) -> None:
        device, longest = vocabulary.number.device, max(len(sample.tokens) for sample in samples)
        rows = [sample.feature_rows() for sample in samples]
        self.vocabulary, self.samples, self.draft_number = vocabulary, samples, vocabulary.number
        self.ids = torch.full((len(samples), longest), NOTHING, dtype=torch.int64, device=device)
        self.features = torch.zeros(len(samples), longest - 1, rows[0].shape[1], device=device)
        for number, sample in enumerate(samples):
            end = len(sample.tokens)
            self.ids[number, :end] = torch.from_numpy(sample.tokens.astype(np.int64))
            self.features[number, : end - 1] = torch.from_numpy(rows[number])

    @property
    def positions(self) -> Tensor:
        """Return (S, T) positions of every text, as `read` takes them."""
        return torch.arange(self.ids.numel(), device=self.ids.device).view_as(self.ids)

    def read(self, positions: Tensor) -> Answer:
        """Return the samples at (B, T) positions.

        `final` is the taught log-probabilities themselves, of the token behind each position.
        """
        texts = positions[:, 0] // self.ids.shape[1]
        ids = self.ids[texts]
        final = self.vocabulary.certain(self.draft_number[ids.roll(-1, dims=1)])
        for row, number in enumerate(texts.tolist()):
            sample = self.samples[number]
            final[row, len(sample.tokens) - 2] = self.vocabulary.log_probs(sample)
        return Answer(ids, self.features[texts], final)

    def draft_log_probs(self, final: Tensor) -> Tensor:
        """Return `final` as `read` made it."""
        return final
