"""`specblock`: K dependent tokens a forward, M forwards a step, branching by a rank head (SpecBlock, section 3)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from coppice.config import DrafterSettings
from coppice.nn.blocks import MAX_STARTS, BlockTree
from coppice.nn.features import FeatureHead, Rows, join, scores_of
from coppice.nn.head import DraftJob, Growth
from coppice.nn.layouts import load_specblock
from coppice.nn.specblock_model import SpecBlockModel
from coppice.packed.batch import Earlier


@dataclass
class _Active:
    """A tree that still grows, and what the last forward said about its starts."""

    number: int
    tree: BlockTree
    noise: Tensor | None  # (K * M, draft vocabulary), by depth
    states: Tensor  # (S, K, hidden)


class SpecBlockHead(FeatureHead[SpecBlockModel]):
    """A trained SpecBlock drafter."""

    def __init__(self, settings: DrafterSettings) -> None:
        """Load `settings.path` for the target of `settings.target`, on the thread that will use it.

        Raises LayoutError on a folder that is not exactly a SpecBlock checkpoint for this target.
        """
        loaded = load_specblock(settings.path, settings.target)
        self.slots = loaded.model.config.slots
        super().__init__(settings, "specblock", loaded.model, loaded.config, loaded.embedding)
        self.deepest = self.slots * settings.blocks

    def draft(self, jobs: Sequence[DraftJob]) -> Iterator[list[Growth]]:
        """Grow all trees block by block; each block is sent as soon as it exists."""
        blocks = self.settings.blocks
        fit = [self._room(job, (blocks - 1) * MAX_STARTS * self.slots) for job in jobs]
        yield [BlockTree(job, self.slots).send(at, last=True) for at, job in enumerate(jobs) if not fit[at]]
        active = self._first_block([at for at in range(len(jobs)) if fit[at]], jobs)
        for block in range(1, blocks + 1):
            if not active:
                return
            self._grow(active)
            growing = [one for one in active if one.tree.starts and block < blocks]
            yield [one.tree.send(one.number, last=one not in growing) for one in active]
            active = growing
            if active:
                self._next_block(active)

    def _first_block(self, numbers: Sequence[int], jobs: Sequence[DraftJob]) -> list[_Active]:
        if not numbers:
            return []
        chosen = [jobs[number] for number in numbers]
        rows, ends = self._query_rows(chosen)
        states = self._timed(lambda: self._states(rows)[ends])
        self._settle(chosen)
        depths = self.slots * self.settings.blocks
        return [
            _Active(number, BlockTree(job, self.slots), self._noise(job, depths), states[at : at + 1])
            for at, (number, job) in enumerate(zip(numbers, chosen, strict=True))
        ]

    def _next_block(self, active: Sequence[_Active]) -> None:
        """One forward over the starts of all trees."""
        rows = join([self._start_rows(one) for one in active])
        states = self._timed(lambda: self._blocks(rows.features, rows))
        for one, of_tree in zip(active, torch.split(states, [len(one.tree.starts) for one in active]), strict=True):
            one.states = of_tree

    def _start_rows(self, one: _Active) -> Rows:
        """A start reads the state of the slot that made it and its own token; it sees what lies on its path."""
        starts, job, slots = one.tree.starts, one.tree.job, self.slots
        session = self._sessions[job.key]
        made_by = torch.tensor([(start.row, start.slot) for start in starts], device=self.device)
        advance = [start.depth if self.model.config.block_rope_advance else 0 for start in starts]
        sees = np.repeat(np.stack([start.sees for start in starts]), slots, axis=0)
        parents = [row - 1 if row % slots else -1 for row in range(len(starts) * slots)]
        prefix = self._entry(session, job.committed_len - 1)
        return Rows(
            one.states[made_by[:, 0], made_by[:, 1]],
            torch.tensor([one.tree.tokens[start.node - 1] for start in starts], device=self.device),
            torch.tensor(advance, device=self.device) + job.committed_len - 1,
            (self._tree_piece(session, prefix, parents, Earlier(sees, np.zeros(sees.shape[1], np.int64))),),
        )

    def _states(self, rows: Rows) -> Tensor:
        """(N, K, hidden) un-normed states of rows of target features."""
        return self._blocks(self.model.condition(rows.features), rows)

    def _blocks(self, condition: Tensor, rows: Rows) -> Tensor:
        rope = self.model.rope(rows.positions[None] + 1, self.dtype)  # slot k of row p stands at p + 1 + k
        states: Tensor = self.model(condition[None], self.embedding[rows.tokens][None], rope, self._attends(rows))
        return states[0]

    def _grow(self, active: Sequence[_Active]) -> None:
        """Read the states of all starts and add what they say to their trees."""
        joined = torch.cat([one.states for one in active])
        logits, buckets = self._timed(lambda: self._said(joined))
        widest = max(self.settings.widths)
        scores = [
            scores_of(part, one.tree.job.sampling.temperature, self._noise_of(one))
            for one, part in zip(active, torch.split(logits, [len(one.states) for one in active]), strict=True)
        ]
        top = torch.cat(scores).topk(widest, dim=-1)
        # One transfer: ids and buckets are small enough to be exact in float64.
        said = torch.cat((self.target_ids[top.indices], buckets[..., None], top.values.double()), dim=-1).tolist()
        at = 0
        for one in active:
            mine, at = said[at : at + len(one.states)], at + len(one.states)
            candidates = [
                [[(int(slot[w]), slot[widest + 1 + w]) for w in range(widest)] for slot in block] for block in mine
            ]
            expected = [[int(slot[widest]) for slot in block] for block in mine]
            one.tree.grow(candidates, expected, self.settings.widths, self.settings.rank_guided)

    def _said(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """(S, K, draft vocabulary) logits and (S, K) buckets."""
        logits, normed = self.model.read(states)
        return logits, self.model.rank(normed, logits).argmax(-1)

    def _noise_of(self, one: _Active) -> Tensor | None:
        """(S, K, draft vocabulary) noise where each slot's token will stand."""
        if one.noise is None:
            return None
        first = torch.tensor([start.depth for start in one.tree.starts], device=self.device)
        return one.noise[first[:, None] + torch.arange(self.slots, device=self.device)]
