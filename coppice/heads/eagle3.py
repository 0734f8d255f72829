"""`eagle3`: one layer over token embedding and fused features, a forward a level, a dynamic tree (EAGLE-3, EAGLE-2)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from coppice.config.sections import DrafterSettings
from coppice.engine.attention_plan import Tail
from coppice.heads.base import DraftJob, Growth
from coppice.heads.checkpoints import load_eagle3
from coppice.heads.feature_head import FeatureHead, Inputs, Rows
from coppice.heads.last_draft import Recall
from coppice.heads.level_tree import Growing
from coppice.heads.models.eagle3 import Eagle3Model


@dataclass
class _Growing(Growing):
    noise: Tensor | None = None  # (depth, draft vocabulary)
    recall: Recall | None = None


class Eagle3Head(FeatureHead[Eagle3Model]):
    """A trained EAGLE-3 drafter."""

    def __init__(self, settings: DrafterSettings) -> None:
        """Load `settings.path` for the target of `settings.target`, on the thread that will use it.

        Raises LayoutError on a folder that is not exactly an EAGLE-3 checkpoint for this target.
        """
        loaded = load_eagle3(settings.path, settings.target)
        super().__init__(settings, "eagle3", loaded.model, loaded.config, loaded.embedding)

    def draft(self, jobs: Sequence[DraftJob]) -> Iterator[list[Growth]]:
        """Grow all trees level by level; each is sent when it is complete, ranked as a whole."""
        yield self._grown(jobs)

    @torch.inference_mode()
    def _grown(self, jobs: Sequence[DraftJob]) -> list[Growth]:
        trees = [_Growing(job) for job in jobs]
        active = [tree for tree in trees if self._room(tree.job, self.settings.top_k * self.settings.depth)]
        for tree in active:
            tree.noise = self._noise(tree.job, min(self.settings.depth, tree.job.budget))
            tree.recall = self._recall(tree.job)
        if active:
            rows, ends = self._query_rows([tree.job for tree in active])
            states, logits = self.timed(self._first, self._inputs(rows), ends)
            self._settle([tree.job for tree in active])
        level = 0
        while active:
            level += 1
            _remember(active, states)
            self._extend(active, logits, level)
            before, active = active, [tree for tree in active if len(tree.frontier)]
            if active:
                rows = self._level_rows(before, states, level)
                states, logits = self.timed(self._next, self._inputs(rows))
        for tree in trees:
            if tree.recall is not None:
                tree.recall.tokens, tree.recall.parents, _ = tree.candidates()
        return [tree.finish(number) for number, tree in enumerate(trees)]

    def _extend(self, active: Sequence[_Growing], logits: Tensor, level: int) -> None:
        """Add the children that the logits of the frontiers' nodes say."""
        scores, at = logits.float(), 0
        for tree in active:
            end, temperature = at + len(tree.frontier), tree.job.sampling.temperature
            if temperature:
                scores[at:end] /= temperature
            if tree.noise is not None:
                scores[at:end] += tree.noise[level - 1]
            at = end
        tokens, values, _ = self._likeliest(scores, self.settings.top_k)
        at = 0
        for tree in active:
            end = at + len(tree.frontier)
            deeper = level < min(self.settings.depth, tree.job.budget)
            tree.extend(tokens[at:end], values[at:end], self.settings.top_k, deeper)
            at = end

    def _level_rows(self, trees: Sequence[_Growing], states: Tensor, level: int) -> Rows:
        """A node reads the state that predicted it and its own token; it sees the committed rows and its ancestors."""
        made_by, at = [], 0
        for tree in trees:
            made_by.append(tree.places + at)
            at += len(tree.paths)
        growing = [tree for tree in trees if len(tree.frontier)]
        tails = []
        for tree in growing:
            session = self._sessions[tree.job.key]
            tree.enter_frontier()
            tails.append(Tail(session.table, self._entry(session, tree.job.committed_len), tree.paths))
        positions = [np.full(len(tree.frontier), tree.job.committed_len - 1 + level) for tree in trees]
        return Rows(
            states.index_select(0, self._tensor(np.concatenate(made_by))),
            np.concatenate([tree.frontier_tokens for tree in trees]),
            np.concatenate(positions),
            tails,
        )

    def _first(self, inputs: Inputs, ends: Tensor) -> tuple[Tensor, Tensor]:
        """States and logits of the rows that read the roots."""
        states = self._states(inputs)[ends]
        return states, self.model.read(states)

    def _next(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """States and logits of a level's rows."""
        states = self._level(inputs.features, inputs)
        return states, self.model.read(states)

    def _score(self, states: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.model.norm(states)
        return normed, self.model.lm_head(normed)

    def _states(self, inputs: Inputs) -> Tensor:
        """(N, hidden) un-normed states of rows of target features."""
        return self._level(self.model.condition(inputs.features), inputs)

    def _level(self, hidden: Tensor, inputs: Inputs) -> Tensor:
        rope = self.model.rope(inputs.positions, self.dtype)
        (attend,) = inputs.attends
        states: Tensor = self.model(hidden[None], inputs.embeddings, rope, attend)
        return states[0]


def _remember(active: Sequence[_Growing], states: Tensor) -> None:
    """Note the states that the frontiers' children come from, for the trees that anyone will ask about."""
    at = 0
    for tree in active:
        end = at + len(tree.frontier)
        if tree.recall is not None:
            tree.recall.said.append((tree.frontier, states[at:end].clone()))
        at = end
