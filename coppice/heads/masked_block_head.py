"""Heads that fill a block of mask tokens in one forward: `dflash`, `jetspec` and `dspark`.

Without a Markov table every slot is the same behind every node, so that the tree is the best of all combinations of the
slots' tokens (DDTree, arXiv 2604.12989). With one, each node's children are scored behind that node (PCTree, arXiv
2608.02123): in a coupled draft behind what the noise chose there, which no slot can know by itself.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from coppice.config.sections import DrafterSettings
from coppice.engine.attention import Layer
from coppice.engine.rows import Tail
from coppice.engine.sdpa import sdpa
from coppice.heads.base import DraftJob, Growth
from coppice.heads.block_head import BlockTree, row_slices
from coppice.heads.feature_head import FeatureHead
from coppice.heads.models.layers import Attend
from coppice.heads.models.masked_block import MaskedBlockModel
from coppice.heads.rows import FeatureSession

PARENTS = 4
"""nodes of a level, the likeliest ones, whose children a Markov table scores (PCTree's k: more gain nothing)"""
BEST_CHILD = -0.7
"""log-score of a child that a node is expanded for: it would have to be in the tree. A level costs as much for one."""


class ParallelHead(FeatureHead):
    """A head that predicts all of a draft's tokens in one forward.

    The tree is every combination of the slots' `top_k` tokens, pruned to the budget by cumulative probability.
    """

    def __init__(self, settings: DrafterSettings) -> None:
        super().__init__(settings)
        self.deepest = min(self.config.slots, self.settings.depth)

    @property
    def scratch(self) -> int:
        """KV entries that a draft writes behind its rows."""
        return 0

    def most_starts(self, job: DraftJob) -> int:
        """Return how many nodes of a level have children: all that may be in the tree."""
        return job.budget

    def width(self, jobs: Sequence[DraftJob]) -> int:
        """Return how many tokens of a slot are looked at."""
        return self.settings.top_k

    def _draft(self, jobs: Sequence[DraftJob]) -> Iterator[list[Growth]]:
        """All trees, each sent as a whole."""
        yield self._drafted(jobs)

    @torch.inference_mode()
    def _drafted(self, jobs: Sequence[DraftJob]) -> list[Growth]:
        trees = [BlockTree(job, number, self.most_starts(job)) for number, job in enumerate(jobs)]
        active = [tree for tree in trees if self._room(tree.job, self.scratch)]
        if active:
            self._grow(active)
        return [tree.send(last=True) for tree in trees]

    def _grow(self, trees: Sequence[BlockTree]) -> None:
        jobs = [tree.job for tree in trees]
        scores = self._predict(jobs).float()
        self._settle(jobs)
        for row, job in enumerate(jobs):
            self.ranking.score(scores[row], job, self._noise(job, self.deepest))
        tokens, values, _ = self.ranking.likeliest(scores, self.width(jobs))
        for tree, slot_tokens, slot_scores in zip(trees, tokens.tolist(), values.tolist(), strict=True):
            cross(tree, slot_tokens, slot_scores)

    @abstractmethod
    def _predict(self, jobs: Sequence[DraftJob]) -> Tensor:
        """Return (J, deepest, draft vocabulary) logits of each slot behind each job's root; rows end up in KV."""


def cross(tree: BlockTree, tokens: list[list[int]], scores: list[list[float]]) -> None:
    """Add all paths over slots that know nothing of one another: (K, W) tokens, each slot's best first."""
    for depth, (of_slot, values) in enumerate(zip(tokens, scores, strict=True), start=1):
        count = len(tree.starts)
        tree.grow_level([of_slot] * count, [values] * count, depth < len(tokens))
        if not len(tree.starts):
            return


@dataclass(frozen=True)
class _Block:
    """What a forward takes: C committed rows of all jobs, then the R rows of their blocks."""

    features: Tensor  # (C, F)
    embeddings: Tensor  # (1, R, hidden)
    positions: Tensor  # (1, C + R)
    attends: list[Attend]  # one for each layer


class MaskedBlockHead(ParallelHead):
    """Drafts from one forward over new committed rows and a block, whose rows lie behind them in KV until the next."""

    needs_root = False
    model: MaskedBlockModel

    def __init__(self, settings: DrafterSettings) -> None:
        super().__init__(settings)
        self._mask: int = self.config.mask_token_id
        rows = self.config.block_size
        self._sees = np.tri(rows, dtype=np.bool_) if self.config.causal else np.ones((rows, rows), np.bool_)

    @property
    def scratch(self) -> int:
        """One entry for each row of the block."""
        return int(self.config.block_size)

    def most_starts(self, job: DraftJob) -> int:
        """Return how many nodes of a level are expanded."""
        if not self.config.markov_rank:
            return super().most_starts(job)
        return min(job.budget, self.settings.top_k, PARENTS)

    def width(self, jobs: Sequence[DraftJob]) -> int:
        """Return how many tokens of a slot are looked at: no more than a tree has nodes."""
        return min(super().width(jobs), max(job.budget for job in jobs))

    # --- rows ---

    @torch.inference_mode()
    def _prefill(self, session: FeatureSession, upto: int) -> None:
        positions = torch.arange(session.done, upto, device=self.device)[None]
        self.timed(self._store, session, session.take(upto).to(self.device), positions)
        session.done = upto

    def _store(self, session: FeatureSession, features: Tensor, positions: Tensor) -> None:
        """Put the keys and values of committed rows into KV: nothing of them attends."""
        entries = np.arange(self._entry(session, session.done), self._entry(session, session.done) + len(features))
        slots = self._tensor(session.table.slots(entries))
        rope = self.model.rope(positions, self.dtype)
        stored = zip(self.pool.layers, self.model.context_kv(self.model.condition(features)[None], rope), strict=True)
        for layer, new in stored:
            for pool, rows in zip(layer, new, strict=True):
                pool.index_copy_(0, slots, rows[0].transpose(0, 1))

    def _rows(self, jobs: Sequence[DraftJob]) -> _Block:
        """Take what each job has new, and its block."""
        size = self.config.block_size
        sessions = [self._sessions[job.key] for job in jobs]
        counts = [job.committed_len - session.done for job, session in zip(jobs, sessions, strict=True)]
        tails = [
            Tail(session.table, self._entry(session, session.done), self._visible_with(count))
            for session, count in zip(sessions, counts, strict=True)
        ]
        context = [
            np.arange(job.committed_len - count, job.committed_len) for job, count in zip(jobs, counts, strict=True)
        ]
        blocks = [np.arange(job.committed_len, job.committed_len + size) for job in jobs]
        tokens = np.full((len(jobs), size), self._mask)
        tokens[:, 0] = [job.root for job in jobs]
        return _Block(
            torch.cat([session.take(job.committed_len) for job, session in zip(jobs, sessions, strict=True)]).to(
                self.device
            ),
            self.row_inputs.embedding.index_select(0, self._tensor(tokens.ravel()))[None],
            self._tensor(np.concatenate((*context, *blocks)))[None],
            self._attends(tails, counts),
        )

    def _visible_with(self, count: int) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
        """Return what `count` committed rows and the block behind them see of one another; only the block attends."""
        size = len(self._sees)
        visible = np.eye(count + size, dtype=np.bool_)
        visible[count:, :count] = True
        visible[count:, count:] = self._sees
        return visible

    def _attends(self, tails: Sequence[Tail], counts: Sequence[int]) -> list[Attend]:
        """Return each layer's attention. It wants a session's rows side by side, and a query of each."""
        attention = sdpa(tails, self.pool)
        size, before = len(self._sees), sum(counts)
        starts = np.cumsum([0, *counts])
        order = [
            index
            for job, count in enumerate(counts)
            for index in (
                *range(starts[job], starts[job] + count),
                *range(before + job * size, before + (job + 1) * size),
            )
        ]
        moved = self._tensor(order) if len(tails) > 1 else None
        back = self._tensor(np.argsort(order)[before:]) if len(tails) > 1 else None

        def attend_in(layer: int) -> Attend:
            def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
                if before:
                    query = torch.cat((query.new_zeros(*query.shape[:2], before, query.shape[-1]), query), dim=2)
                if moved is not None:
                    query, key, value = (part.index_select(2, moved) for part in (query, key, value))
                out = attention.attend(Layer(layer), query, key, value)
                return out[:, before:] if back is None else out.index_select(1, back)

            return attend

        return [attend_in(layer) for layer in range(self.config.num_hidden_layers)]

    def _states(self, block: _Block) -> Tensor:  # type: ignore[override]
        """Return (J, K, hidden) un-normed states of the slots in use."""
        context = self.model.condition(block.features)[None]
        states = self.model(context, block.embeddings, self.model.rope(block.positions, self.dtype), block.attends)
        of_slots: Tensor = states.view(-1, self.config.block_size, states.shape[-1])
        first = self.config.block_size - self.config.slots
        return of_slots[:, first : first + self.deepest]

    # --- trees ---

    def _predict(self, jobs: Sequence[DraftJob]) -> Tensor:
        logits: Tensor = self.timed(lambda block: self.model.read(self._states(block))[0], self._rows(jobs))
        return logits

    def _grow(self, trees: Sequence[BlockTree]) -> None:
        if not self.config.markov_rank:
            super()._grow(trees)
            return
        jobs = [tree.job for tree in trees]
        states = self.timed(self._states, self._rows(jobs))
        logits = self.timed(lambda: self.model.read(states)[0]).float()
        self._settle(jobs)
        for tree in trees:
            tree.best_child, tree.noise = BEST_CHILD, self._noise(tree.job, self.deepest)
            tree.last_draft = self._keep_draft(tree.job, tree.tokens, tree.parents)
        previous = [job.root for job in jobs]
        wide = self.width(jobs)
        for depth in range(self.deepest):
            rows = [number for number, tree in enumerate(trees) for _ in tree.starts.nodes]
            if not rows:
                break
            scores = self.timed(self._biased, self._tensor(previous))
            scores += logits[:, depth].index_select(0, self._tensor(rows))
            slices = row_slices(trees)
            for tree, part in zip(trees, slices, strict=True):
                self.ranking.score(scores[part], tree.job, None if tree.noise is None else tree.noise[depth])
            best, values, _ = self.ranking.likeliest(scores, wide)
            tokens, log_scores = best.tolist(), values.tolist()
            previous = []
            for number, (tree, part) in enumerate(zip(trees, slices, strict=True)):
                if not len(tree.starts):
                    continue
                tree.grow_level(tokens[part], log_scores[part], depth + 1 < self.deepest)
                tree.note(states[number, depth].expand(len(tree.block), -1))
                previous += [tree.tokens[node - 1] for node in tree.starts.nodes]

    def _biased(self, previous: Tensor) -> Tensor:
        bias = self.model.bias(previous)
        assert bias is not None
        return bias.float()


class DFlashHead(MaskedBlockHead):
    """A trained DFlash drafter: the rows of its block see one another."""

    kind = "dflash"


class JetSpecHead(MaskedBlockHead):
    """A trained JetSpec drafter: a row of its block sees the earlier ones."""

    kind = "jetspec"


class DSparkHead(MaskedBlockHead):
    """A trained DSpark drafter: a Markov table behind the block says what follows a token."""

    kind = "dspark"
