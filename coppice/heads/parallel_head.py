"""Heads that predict all of a draft's tokens in one forward, no slot knowing of another."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from coppice.config.sections import DrafterSettings
from coppice.heads.base import DraftJob, Growth
from coppice.heads.feature_head import FeatureHead, M
from coppice.heads.level_tree import LevelTree


class ParallelHead(FeatureHead[M]):
    """The tree is every combination of the slots' `top_k` tokens, pruned to the budget by cumulative probability."""

    scratch: ClassVar[bool] = False
    """whether a draft writes KV entries behind its rows, one for each slot"""

    def __init__(self, settings: DrafterSettings) -> None:
        super().__init__(settings)
        self.deepest = min(self.config.slots, self.settings.depth)

    def draft(self, jobs: Sequence[DraftJob]) -> Iterator[list[Growth]]:
        """All trees, each sent as a whole."""
        yield self._drafted(jobs)

    @torch.inference_mode()
    def _drafted(self, jobs: Sequence[DraftJob]) -> list[Growth]:
        trees = [LevelTree(job) for job in jobs]
        active = [tree for tree in trees if self._room(tree.job, self.deepest if self.scratch else 0)]
        if active:
            self._grow(active)
        return [tree.finish(number) for number, tree in enumerate(trees)]

    def _grow(self, trees: Sequence[LevelTree]) -> None:
        jobs = [tree.job for tree in trees]
        scores = self._predict(jobs).float()
        self._settle(jobs)
        for row, job in enumerate(jobs):
            if job.sampling.temperature:
                scores[row] /= job.sampling.temperature
            if (noise := self._noise(job, self.deepest)) is not None:
                scores[row] += noise
        tokens, values, _ = self._likeliest(scores, self.settings.top_k)
        for tree, slot_tokens, slot_scores in zip(trees, tokens, values, strict=True):
            tree.cross(slot_tokens, slot_scores)

    @abstractmethod
    def _predict(self, jobs: Sequence[DraftJob]) -> Tensor:
        """Return (J, deepest, draft vocabulary) logits of each slot behind each job's root; rows end up in KV."""
