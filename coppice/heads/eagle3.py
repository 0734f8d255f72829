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
from coppice.heads.feature_session import Inputs, Rows
from coppice.heads.last_draft import LastDraft
from coppice.heads.level_tree import LevelTree, row_slices
from coppice.heads.models.eagle3 import Eagle3Model


@dataclass
class _Tree(LevelTree):
    noise: Tensor | None = None  # (depth, draft vocabulary)
    last_draft: LastDraft | None = None


class Eagle3Head(FeatureHead[Eagle3Model]):
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
            rows, ends = self._query_rows([tree.job for tree in active])
            states, logits = self.timed(self._first, self._inputs(rows), ends)
            self._settle([tree.job for tree in active])
        level = 0
        while active:
            level += 1
            self._extend(active, states, logits, level)
            before, active = active, [tree for tree in active if len(tree.frontier)]
            if active:
                rows = self._level_rows(before, states, level)
                states, logits = self.timed(self._next, self._inputs(rows))
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

    def _first(self, inputs: Inputs, ends: Tensor) -> tuple[Tensor, Tensor]:
        """Return states and logits of the rows that read the roots."""
        states = self._states(inputs)[ends]
        return states, self.model.read(states)

    def _next(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Return states and logits of a level's rows."""
        states = self._level(inputs.features, inputs)
        return states, self.model.read(states)

    def _score(self, states: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.model.norm(states)
        return normed, self.model.lm_head(normed)

    def _states(self, inputs: Inputs) -> Tensor:
        """Return (N, hidden) un-normed states of rows of target features."""
        return self._level(self.model.condition(inputs.features), inputs)

    def _level(self, hidden: Tensor, inputs: Inputs) -> Tensor:
        rope = self.model.rope(inputs.positions, self.dtype)
        (attend,) = inputs.attends
        states: Tensor = self.model(hidden[None], inputs.embeddings, rope, attend)
        return states[0]
