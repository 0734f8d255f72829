"""Heads that draft in blocks: K tokens a forward, M forwards a step, the later ones from several nodes at once."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coppice.config.sections import DrafterSettings
from coppice.engine.attention_plan import Tail
from coppice.heads.base import DraftJob, Growth
from coppice.heads.block_tree import MAX_STARTS, Blocks, BlockTree
from coppice.heads.feature_head import FeatureHead
from coppice.heads.feature_session import Inputs, Rows, join
from coppice.heads.last_draft import LastDraft
from coppice.heads.level_tree import row_slices
from coppice.heads.models.block import BlockModel
from coppice.speculation.sampling_torch import greedy_ids

M = TypeVar("M", bound=BlockModel)

BLOCKS = 2
"""forwards of a draft"""


@dataclass
class _Active:
    """A tree that still grows."""

    number: int
    tree: BlockTree
    noise: Tensor | None  # (K * M, draft vocabulary), by depth
    states: Tensor  # (S, K, hidden) of the blocks its starts came from
    last_draft: LastDraft | None

    def remember(self) -> None:
        """Note the block just added, in a session that wants misses."""
        if self.last_draft is not None:
            parents, alive = self.tree.block
            self.last_draft.tokens, self.last_draft.parents = self.tree.tokens, self.tree.parents
            nodes = np.where(alive, parents, -1).ravel()
            self.last_draft.predictions.append((nodes, self.states.flatten(0, 1).clone()))


@dataclass(frozen=True)
class _Output:
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

    def __init__(self, settings: DrafterSettings, widths: Sequence[int], blocks: int = BLOCKS) -> None:
        """A slot branches into widths[bucket] tokens, and ends the block at 0. `blocks` are the forwards of a draft.

        Raises InvalidField on a folder that is not exactly a checkpoint of the kind for this target.
        """
        super().__init__(settings)
        self._widths, self._num_blocks = widths, blocks
        self.deepest = self.slots * blocks

    @property
    def slots(self) -> int:
        """Tokens that a block predicts, each with a KV entry."""
        return self.model.config.slots

    @abstractmethod
    def buckets(self, logits: Tensor, normed: Tensor) -> Tensor:
        """Return (S, K) which of the widths holds in each slot.

        It is told by (S, K, draft vocabulary) logits and (S, K, hidden) normed states.

        Bucket 1 branches into the second width; 0 also says that the slot's best token is expected to be the target's.
        """

    def draft(self, jobs: Sequence[DraftJob]) -> Iterator[list[Growth]]:
        """Grow all trees block by block."""
        blocks = self._num_blocks
        fit = [self._room(job, (blocks - 1) * MAX_STARTS * self.slots) for job in jobs]
        yield [BlockTree(job).send(at, last=True) for at, job in enumerate(jobs) if not fit[at]]
        numbers = [at for at in range(len(jobs)) if fit[at]]
        if not numbers:
            return
        output = self._first_block([jobs[at] for at in numbers])
        active = [
            _Active(
                at,
                BlockTree(jobs[at], self.settings.chain),
                self._noise(jobs[at], self.slots * blocks),
                output.states[:0],
                self._keep_draft(jobs[at]),
            )
            for at in numbers
        ]
        for block in range(1, blocks + 1):
            self._grow(active, output, deeper=block < blocks)
            growing = [one for one in active if len(one.tree.starts)]
            sent = active if self.anytime else [one for one in active if one not in growing]
            yield [one.tree.send(one.number, last=one not in growing) for one in sent]
            active = growing
            if not active:
                return
            output = self._next_block(active)

    @torch.inference_mode()
    def _first_block(self, jobs: Sequence[DraftJob]) -> _Output:
        rows, ends = self._query_rows(jobs)
        output = self.timed(self._first, self._inputs(rows), ends)
        self._settle(jobs)
        return output

    @torch.inference_mode()
    def _next_block(self, active: Sequence[_Active]) -> _Output:
        """Run one forward over the starts of all trees."""
        rows = join([self._start_rows(one) for one in active])
        return self.timed(self._next, self._inputs(rows))

    def _start_rows(self, one: _Active) -> Rows:
        """Make a row of each start: it reads its own token and the state of the slot that made it.

        It sees what lies on its path.
        """
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

    def _first(self, inputs: Inputs, ends: Tensor) -> _Output:
        """Read the rows of the roots."""
        return self._read_states(self._states(inputs)[ends])

    def _next(self, inputs: Inputs) -> _Output:
        """Read the starts' rows."""
        return self._read_states(self._blocks(inputs.features, inputs))

    def _read_states(self, states: Tensor) -> _Output:
        logits, normed = self.model.read(states)
        return _Output(states, logits, self.buckets(logits, normed))

    def _score(self, states: Tensor) -> tuple[Tensor, Tensor]:
        logits, normed = self.model.read(states)
        return normed, logits

    def _states(self, inputs: Inputs) -> Tensor:
        """Return (N, K, hidden) un-normed states of rows of target features."""
        return self._blocks(self.model.condition(inputs.features), inputs)

    def _blocks(self, condition: Tensor, inputs: Inputs) -> Tensor:
        rope = self.model.rope(inputs.positions + 1, self.dtype)  # slot k of row p stands at p + 1 + k
        states: Tensor = self.model(condition[None], inputs.embeddings, rope, inputs.attends)
        return states[0]

    @torch.inference_mode()
    def _grow(self, active: Sequence[_Active], output: _Output, deeper: bool) -> None:
        """Add the blocks of a forward to the trees."""
        scores, slices = output.logits.float(), row_slices(len(one.tree.starts) for one in active)
        coupled = any(one.noise is not None for one in active)
        greedy = greedy_ids(scores)[..., None] if coupled else None
        for one, rows in zip(active, slices, strict=True):
            if one.tree.job.sampling.temperature:
                scores[rows] /= one.tree.job.sampling.temperature
            if one.noise is not None:  # of the positions where each slot's token will stand
                for row, depth in enumerate(one.tree.starts.depths.tolist(), rows.start):
                    scores[row] += one.noise[depth : depth + self.slots]
            one.states = output.states[rows]
        width = max(1, *self._widths) + coupled  # room for a greedy token that the noise puts behind the others
        tokens, values, more = self._likeliest(scores, width, output.buckets[..., None], wanted=greedy)
        buckets, spine = more[..., 0], more[..., 1] if coupled else np.zeros_like(more[..., 0])
        worth = None if self.worth is None else np.broadcast_to(self.worth[:width], values.shape)
        for one, rows in zip(active, slices, strict=True):
            parts = tokens[rows], values[rows], spine[rows], buckets[rows], None if worth is None else worth[rows]
            one.tree.grow(Blocks(*parts), self._widths, deeper)
            one.remember()
