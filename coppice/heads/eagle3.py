"""`eagle3`: one layer over token embedding and fused features, a forward a level, a dynamic tree (EAGLE-3, EAGLE-2)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from coppice.engine.attention_plan import Tail
from coppice.heads.base import DraftJob, Growth
from coppice.heads.feature_head import FeatureHead
from coppice.heads.feature_session import Rows
from coppice.heads.last_draft import LastDraft
from coppice.heads.level_tree import LevelTree, row_slices


@dataclass
class _Tree(LevelTree):
    noise: Tensor | None = None  # (depth, draft vocabulary)
    last_draft: LastDraft | None = None


class Eagle3Head(FeatureHead):
    """A trained EAGLE-3 drafter."""

    kind = "eagle3"

    def draft(self, jobs: Sequence[DraftJob]) -> Iterator[list[Growth]]:
        """Grow all trees level by level; each is sent when it is complete, ranked as a whole."""
        yield self._grown(jobs)

    @torch.inference_mode()
    def _grown(self, jobs: Sequence[DraftJob]) -> list[Growth]:
        trees = [_Tree(job) for job in jobs]
        active = [tree for tree in trees if self._room(tree.job, self.settings.top_k * self.settings.depth)]
        for tree in active:
            tree.noise = self._noise(tree.job, min(self.settings.depth, tree.job.budget))
            tree.last_draft = self._keep_draft(tree.job)
        if active:
            states, logits, _ = self._from_roots([tree.job for tree in active])
        level = 0
        while active:
            level += 1
            self._extend(active, states, logits, level)
            before, active = active, [tree for tree in active if len(tree.frontier)]
            if active:
                states, logits, _ = self._from_states(self._level_rows(before, states, level))
        for tree in trees:
            if tree.last_draft is not None:
                tree.last_draft.tokens, tree.last_draft.parents, _ = tree.candidates()
        return [tree.finish(number) for number, tree in enumerate(trees)]

    def _extend(self, active: Sequence[_Tree], states: Tensor, logits: Tensor, level: int) -> None:
        """Add the children of the frontiers' nodes, whose states and logits these are."""
        scores, slices = logits.float(), row_slices(len(tree.frontier) for tree in active)
        for tree, rows in zip(active, slices, strict=True):
            if tree.job.sampling.temperature:
                scores[rows] /= tree.job.sampling.temperature
            if tree.noise is not None:
                scores[rows] += tree.noise[level - 1]
        tokens, values, _ = self._likeliest(scores, self.settings.top_k)
        for tree, rows in zip(active, slices, strict=True):
            if tree.last_draft is not None:
                tree.last_draft.predictions.append((tree.frontier, states[rows].clone()))
            deeper = level < min(self.settings.depth, tree.job.budget)
            tree.extend(tokens[rows], values[rows], self.settings.top_k, deeper)

    def _level_rows(self, trees: Sequence[_Tree], states: Tensor, level: int) -> Rows:
        """Make a row of each node: it reads its own token and the state that predicted it.

        It sees the committed rows and its ancestors. `states` are those of the frontiers before.
        """
        slices = row_slices(len(tree.paths) for tree in trees)
        predicted_by = [tree.places + rows.start for tree, rows in zip(trees, slices, strict=True)]
        tails = []
        for tree in trees:
            if len(tree.frontier):
                session = self._sessions[tree.job.key]
                tree.enter_frontier()
                tails.append(Tail(session.table, self._entry(session, tree.job.committed_len), tree.paths))
        positions = [np.full(len(tree.frontier), tree.job.committed_len - 1 + level) for tree in trees]
        return Rows(
            states.index_select(0, self._tensor(np.concatenate(predicted_by))),
            np.concatenate([tree.frontier_tokens for tree in trees]),
            np.concatenate(positions),
            tails,
        )
