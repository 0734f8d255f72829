"""`eagle3`: one layer over token embedding and fused features, a forward a level, a dynamic tree (EAGLE-3, EAGLE-2)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from coppice.config import DrafterSettings
from coppice.nn.eagle3_model import Eagle3Model
from coppice.nn.features import FeatureHead, Rows, join, scores_of
from coppice.nn.growth import Growing
from coppice.nn.head import DraftJob, Growth
from coppice.nn.layouts import load_eagle3


@dataclass
class _Growing(Growing):
    noise: Tensor | None = field(kw_only=True)  # (depth, draft vocabulary)


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
        depth, width = self.settings.depth, self.settings.top_k
        trees = [_Growing(job, noise=self._noise(job, depth)) for job in jobs]
        active = [tree for tree in trees if self._room(tree.job, width * depth)]
        if active:
            rows, ends = self._query_rows([tree.job for tree in active])
            states = self._timed(lambda: self._states(rows)[ends])
            self._settle([tree.job for tree in active])
        level = 0
        while active:
            level += 1
            counts = [len(tree.frontier) for tree in active]
            self._grow(active, counts, states, level)
            of_trees = torch.split(states, counts)
            growing = [(tree, part) for tree, part in zip(active, of_trees, strict=True) if tree.frontier]
            active = [tree for tree, _ in growing]
            if active:
                states = self._next_level(join([self._level_rows(tree, part, level) for tree, part in growing]))
        yield [tree.finish(number) for number, tree in enumerate(trees)]

    def _grow(self, active: Sequence[_Growing], counts: list[int], states: Tensor, level: int) -> None:
        logits: Tensor = self._timed(lambda: self.model.read(states))
        scores = [
            scores_of(part, tree.job.sampling.temperature, None if tree.noise is None else tree.noise[level - 1])
            for tree, part in zip(active, torch.split(logits, counts), strict=True)
        ]
        top = torch.cat(scores).topk(self.settings.top_k, dim=-1)
        values, ids = top.values.tolist(), self.target_ids[top.indices].tolist()
        children = [list(zip(*pair, strict=True)) for pair in zip(ids, values, strict=True)]
        at = 0
        for tree, count in zip(active, counts, strict=True):
            deeper = level < min(self.settings.depth, tree.job.budget)
            tree.extend(children[at : at + count], self.settings.top_k, deeper)
            at += count

    def _level_rows(self, tree: _Growing, states: Tensor, level: int) -> Rows:
        """A node reads the state that predicted it and its own token; it sees the committed rows and its ancestors."""
        session, nodes = self._sessions[tree.job.key], tree.frontier
        made_by = torch.tensor([tree.places[node - 1] for node in nodes], device=self.device)
        prefix = self._entry(session, tree.job.committed_len)
        return Rows(
            states[made_by],
            torch.tensor([tree.tokens[node - 1] for node in nodes], device=self.device),
            torch.full((len(nodes),), tree.job.committed_len - 1 + level, device=self.device),
            (self._tree_piece(session, prefix, [-1] * len(nodes), tree.enter_frontier(prefix)),),
        )

    def _next_level(self, rows: Rows) -> Tensor:
        return self._timed(lambda: self._level(rows.features, rows))

    def _states(self, rows: Rows) -> Tensor:
        """(N, hidden) un-normed states of rows of target features."""
        return self._level(self.model.condition(rows.features), rows)

    def _level(self, hidden: Tensor, rows: Rows) -> Tensor:
        rope = self.model.rope(rows.positions[None], self.dtype)
        (attend,) = self._attends(rows)
        states: Tensor = self.model(hidden[None], self.embedding[rows.tokens][None], rope, attend)
        return states[0]
