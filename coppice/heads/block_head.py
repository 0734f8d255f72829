"""Heads that draft in blocks: K tokens a forward, M forwards a step, the later ones from several nodes at once."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coppice.config.sections import DrafterSettings
from coppice.engine.attention_plan import Tail
from coppice.heads.base import DraftJob, Growth
from coppice.heads.block_tree import MAX_STARTS, BlockTree
from coppice.heads.checkpoints import Loaded
from coppice.heads.feature_head import FeatureHead, Inputs, Rows, join
from coppice.heads.last_draft import Recall
from coppice.heads.models.block import BlockModel
from coppice.speculation.sampling_torch import greedy_ids

M = TypeVar("M", bound=BlockModel)


@dataclass
class _Active:
    """A tree that still grows."""

    number: int
    tree: BlockTree
    noise: Tensor | None  # (K * M, draft vocabulary), by depth
    states: Tensor  # (S, K, hidden) of the blocks its starts came from
    recall: Recall | None

    def remember(self) -> None:
        """Note the block just added, if anyone will ask."""
        if self.recall is not None:
            parents, alive = self.tree.block
            self.recall.tokens, self.recall.parents = self.tree.tokens, self.tree.parents
            self.recall.said.append((np.where(alive, parents, -1).ravel(), self.states.flatten(0, 1).clone()))


@dataclass(frozen=True)
class _Said:
    """What a forward says about all trees' starts, in order."""

    states: Tensor  # (S, K, hidden)
    logits: Tensor  # (S, K, draft vocabulary)
    buckets: Tensor  # (S, K)


class BlockHead(FeatureHead[M]):
    """Drafts block by block; a kind says what a slot branches into."""

    anytime: ClassVar[bool] = True
    """whether a block is sent as soon as it exists, and not the whole tree at its end"""
    worth: NDArray[np.float32] | None = None
    """(W,) log-scores that nodes are chosen by, by their rank in a slot; None: their own"""

    def __init__(self, settings: DrafterSettings, kind: str, loaded: Loaded[M, Any], widths: Sequence[int]) -> None:
        """widths: how many tokens a slot branches into, by what `buckets` says of it."""
        self.slots, self._widths = loaded.model.config.slots, widths
        super().__init__(settings, kind, loaded.model, loaded.config, loaded.embedding)
        self.deepest = self.slots * settings.blocks

    @abstractmethod
    def buckets(self, logits: Tensor, normed: Tensor) -> Tensor:
        """(S, K) which of the widths holds in each slot, of (S, K, draft vocabulary) logits and (S, K, hidden) states.

        1 branches into the second width; 0 also says that the slot's best token is expected to be the target's.
        """

    def draft(self, jobs: Sequence[DraftJob]) -> Iterator[list[Growth]]:
        """Grow all trees block by block."""
        blocks = self.settings.blocks
        fit = [self._room(job, (blocks - 1) * MAX_STARTS * self.slots) for job in jobs]
        yield [BlockTree(job).send(at, last=True) for at, job in enumerate(jobs) if not fit[at]]
        numbers = [at for at in range(len(jobs)) if fit[at]]
        if not numbers:
            return
        said = self._first_block([jobs[at] for at in numbers])
        depths = self.slots * blocks
        trees = {at: BlockTree(jobs[at], self.settings.chain) for at in numbers}
        active = [
            _Active(at, tree, self._noise(jobs[at], depths), said.states[:0], self._recall(jobs[at]))
            for at, tree in trees.items()
        ]
        for block in range(1, blocks + 1):
            self._grow(active, said, deeper=block < blocks)
            growing = [one for one in active if len(one.tree.starts)]
            told = active if self.anytime else [one for one in active if one not in growing]
            yield [one.tree.send(one.number, last=one not in growing) for one in told]
            active = growing
            if not active:
                return
            said = self._next_block(active)

    @torch.inference_mode()
    def _first_block(self, jobs: Sequence[DraftJob]) -> _Said:
        rows, ends = self._query_rows(jobs)
        said = self.timed(self._first, self._inputs(rows), ends)
        self._settle(jobs)
        return said

    @torch.inference_mode()
    def _next_block(self, active: Sequence[_Active]) -> _Said:
        """One forward over the starts of all trees."""
        rows = join([self._start_rows(one) for one in active])
        return self.timed(self._next, self._inputs(rows))

    def _start_rows(self, one: _Active) -> Rows:
        """A start reads the state of the slot that made it and its own token; it sees what lies on its path."""
        starts, job, slots = one.tree.starts, one.tree.job, self.slots
        session, count = self._sessions[job.key], len(starts)
        own = np.zeros((count, slots, count, slots), np.bool_)
        own[np.arange(count), :, np.arange(count)] = self._visible(1)
        sees = (np.repeat(starts.sees, slots, axis=0), own.reshape(count * slots, -1))
        advance = starts.depths if self.model.config.block_rope_advance else np.zeros_like(starts.depths)
        return Rows(
            one.states.flatten(0, 1).index_select(0, self._tensor(starts.rows * slots + starts.slots)),
            one.tree.tokens[starts.nodes - 1],
            advance + job.committed_len - 1,
            (Tail(session.table, self._entry(session, job.committed_len - 1), np.concatenate(sees, axis=1)),),
        )

    def _first(self, inputs: Inputs, ends: Tensor) -> _Said:
        """Of the rows that read the roots."""
        return self._read_states(self._states(inputs)[ends])

    def _next(self, inputs: Inputs) -> _Said:
        """Of the starts' rows."""
        return self._read_states(self._blocks(inputs.features, inputs))

    def _read_states(self, states: Tensor) -> _Said:
        logits, normed = self.model.read(states)
        return _Said(states, logits, self.buckets(logits, normed))

    def _score(self, states: Tensor) -> tuple[Tensor, Tensor]:
        logits, normed = self.model.read(states)
        return normed, logits

    def _states(self, inputs: Inputs) -> Tensor:
        """(N, K, hidden) un-normed states of rows of target features."""
        return self._blocks(self.model.condition(inputs.features), inputs)

    def _blocks(self, condition: Tensor, inputs: Inputs) -> Tensor:
        rope = self.model.rope(inputs.positions + 1, self.dtype)  # slot k of row p stands at p + 1 + k
        states: Tensor = self.model(condition[None], inputs.embeddings, rope, inputs.attends)
        return states[0]

    @torch.inference_mode()
    def _grow(self, active: Sequence[_Active], said: _Said, deeper: bool) -> None:
        """Add what a forward said to the trees."""
        scores, at = said.logits.float(), 0
        coupled = any(one.noise is not None for one in active)
        greedy = greedy_ids(scores)[..., None] if coupled else None
        for one in active:
            end, temperature = at + len(one.tree.starts), one.tree.job.sampling.temperature
            if temperature:
                scores[at:end] /= temperature
            if one.noise is not None:  # of the positions where each slot's token will stand
                for row, depth in enumerate(one.tree.starts.depths.tolist(), at):
                    scores[row] += one.noise[depth : depth + self.slots]
            one.states, at = said.states[at:end], end
        width = max(1, *self._widths) + coupled  # room for a greedy token that the noise puts behind the others
        tokens, values, more = self._likeliest(scores, width, said.buckets[..., None], wanted=greedy)
        buckets, spine = more[..., 0], more[..., 1] if coupled else np.zeros_like(more[..., 0])
        worth = None if self.worth is None else np.broadcast_to(self.worth[:width], values.shape)
        at = 0
        for one in active:
            end = at + len(one.tree.starts)
            of_one = None if worth is None else worth[at:end]
            one.tree.grow(tokens[at:end], values[at:end], spine[at:end], buckets[at:end], self._widths, deeper, of_one)
            one.remember()
            at = end
