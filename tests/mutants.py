"""Planted bugs: what each one patches, and the check that has to find it. Nothing here is part of the product."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from coppice.client.client import Attempts
from coppice.engine import kv_cache, rows, states
from coppice.engine.engine import Engine, ForwardOutput
from coppice.engine.kv_cache import BlockTable, KVPool
from coppice.engine.rows import PackedBatch, Tail
from coppice.engine.states import Plan, States
from coppice.heads import lm
from coppice.heads.feature_head import FeatureHead
from coppice.heads.tree import Ranking
from coppice.speculation import sampling
from orchestrator import loop
from services.verifier import session, worker
from services.verifier.session import Job, Session


@dataclass(frozen=True)
class Mutant:
    """A bug: what stands for a name of a module or class, and the check of tests/faults/planted.py that finds it.

    A function that stands for another gets that one before its arguments.
    """

    check: str
    where: Any
    name: str
    change: Any
    more: tuple[tuple[Any, str, Any], ...] = ()  # what is replaced beside it, as it is given here

    def plant(self, patch: pytest.MonkeyPatch) -> None:
        """Let it be there until the patches are undone."""
        original, change = getattr(self.where, self.name), self.change
        if callable(change):
            patch.setattr(self.where, self.name, lambda *given, **named: change(original, *given, **named))
        else:
            patch.setattr(self.where, self.name, change)
        for place in self.more:
            patch.setattr(*place)


def _coupling_one_position_off(couple: Any, self: Ranking, trees: Any, *given: Any) -> None:
    couple(self, trees, *given)
    for tree in trees:
        tree.noise = None if tree.noise is None else tree.noise.roll(-1, 0)


def _nan_row(read: Any, job: Job, first: int, logits: Any, drawn: Any) -> Any:
    if job.step and len(logits) > 1 and not job.session.request.sampling.temperature:  # decode_row refuses others
        logits = logits.index_fill(0, torch.tensor([1]), torch.nan)
    return read(job, first, logits, drawn)


def _features_one_row_off(take: Any, jobs: Any, features: Any, layers: Any) -> None:
    decoding = features is not None and any(job.step for job in jobs)
    take(jobs, features.roll(1, 0) if decoding else features, layers)


def _kv_row_not_compacted(compact: Any, pool: KVPool, kept: Any) -> None:
    wrong = [[*rows[:-1], len(rows) - 1] if len(rows) > 1 else rows for _, _, rows in kept]
    compact(pool, [(table, base_len, rows) for (table, base_len, _), rows in zip(kept, wrong, strict=True)])


def _stale_page(slots: Any, table: BlockTable, tokens: Any) -> Any:
    fresh = slots(table, tokens)
    return np.where((tokens >= table.block_size) & (tokens < 2 * table.block_size), fresh % table.block_size, fresh)


def _positions_shifted_after_reopen(pack: Any, pieces: Any, layers: Any = ()) -> Any:
    shifted = []
    for piece in pieces:
        again = not piece.table.session.endswith(".1")
        shifted.append(dataclasses.replace(piece, depths=[at + again for at in piece.depths]))
    return pack(shifted, layers)


def _top_p_on_the_wrong_side(nucleus: Any, scores: Any, top_p: float) -> Any:
    kept = nucleus(scores, top_p)
    return np.delete(kept, scores[kept].argmin()) if len(kept) > 1 else kept


def _token_repeated_at_resume(delay_after: Any, self: Attempts, *given: Any) -> Any:
    held, self._held = self._held, self._held[:-1]
    try:
        return delay_after(self, *given)
    finally:
        self._held = held


def _weights_half_swapped(exchange: Any, self: FeatureHead, *new: Any) -> None:
    old = self.model.state_dict()
    exchange(self, *new)
    names = list(old)
    half = {name: old[name] for name in names[: len(names) // 2]}
    self.model.load_state_dict(half, strict=False, assign=True)


def _one_wrong_ancestor(ancestors: Any, parents: Any) -> Any:
    seen = ancestors(parents).copy()
    if len(seen) > 3:
        seen[-1, -2] ^= True
    return seen


def _calibration_as_truth(walk: Any, tree: Any, drawn: Any, *more: Any) -> Any:
    sure = {0: int(tree.tokens[0])} if len(tree) and tree.log_probs[0] > np.log(0.5) else {}
    return walk(tree, lambda node: sure[node] if node in sure else drawn(node), *more)


_prompts: list[list[int]] = []


def _left_of_another_session(self: Session) -> list[int]:
    """A prompt that begins as the first one of all did."""
    ids = self.request.ids
    _prompts.append(ids)
    return [*_prompts[0][: min(8, len(ids))], *ids[8:]][self.committed_len :]


def _own_prompt(commit: Any, self: Session, ids: list[int], features: Any) -> None:
    """The session's own prompt where its prefix was taken from another: nobody notices by its hash."""
    prompt = self.request.ids[self.committed_len : self.committed_len + len(ids)]
    commit(self, prompt if len(prompt) == len(ids) else ids, features)


def _rows_of_the_next_session(forward: Any, engine: Engine, batch: PackedBatch) -> ForwardOutput:
    output: ForwardOutput = forward(engine, batch)
    return dataclasses.replace(output, logits=output.logits.roll(-1, 0)) if len(batch.tails) > 2 else output


def _next(draw: Any, ids: Any, p: Any, seed: int, at: int, *more: Any) -> Any:
    return draw(ids, p, seed, at + 1, *more)


def _siblings_state(parents_of: Any, tail: Tail) -> Any:
    parents = parents_of(tail).copy()
    for row, parent in enumerate(parents.tolist()):
        others = [other for other in range(parent) if parent > 0 and parents[other] == parents[parent]]
        parents[row] = others[-1] if others else parent
    return parents


def _accepted_last_row_missing(path: Any, text: Any, prefix: int) -> Any:
    return path(text, prefix)[:-1]


def _window_not_shifted(find: Any, plan: Plan, kernel: int) -> Any:
    before, last = find(plan, kernel)
    return before, last.roll(1, 1)


def _rejected_rows_in_the_state(accept: Any, self: States, table: BlockTable, accepted: Any) -> None:
    accept(self, table, range(len(accepted)))


MUTANTS: dict[str, Mutant] = {
    "a p/q draft's noise is the residual's": Mutant("law of p/q, lm", lm, "DRAFT_STREAM", sampling.RESIDUAL_STREAM),
    "a p/q draft's noise is the accept test's": Mutant("law of p/q, lm", lm, "DRAFT_STREAM", sampling.ACCEPT_STREAM),
    "after a rejection p is drawn from, not p - q": Mutant(
        "law of p/q, lm", session, "_residual", lambda residual, row, q_row: row
    ),
    "the walk's noise is one position off": Mutant("single", session, "draw", _next),
    "the root's noise is one position off": Mutant("plain", loop, "draw", _next),
    "coupled drafts' noise is one position off": Mutant("tau", Ranking, "couple", _coupling_one_position_off),
    "a greedy row is NaN": Mutant("single", Job, "read", _nan_row),
    "features are one row off": Mutant("features", worker, "take_features", _features_one_row_off),
    "a KV row is not compacted": Mutant("merge", KVPool, "compact", _kv_row_not_compacted),
    "a page of the KV pool is stale": Mutant(  # neighbours are read as a view, without a table
        "plain", BlockTable, "slots", _stale_page, ((kv_cache, "_is_run", lambda blocks: False),)
    ),
    "a window is one too short": Mutant(
        "plain", Tail, "sees", lambda sees, tail, window: sees(tail, window and window - 1)
    ),
    "positions are shifted after a session is opened again": Mutant(
        "sessions lost", worker, "pack", _positions_shifted_after_reopen
    ),
    "a fence is not checked": Mutant("fence", Session, "check_fence", lambda *_: None),
    "top-p leaves out the token that reaches it": Mutant("plain", sampling, "_nucleus", _top_p_on_the_wrong_side),
    "a token comes twice when a stream is resumed": Mutant(
        "streams lost", Attempts, "delay_after", _token_repeated_at_resume
    ),
    "half of the weights are swapped": Mutant("weights", FeatureHead, "exchange", _weights_half_swapped),
    "a row sees one wrong ancestor": Mutant("merge", rows, "ancestors", _one_wrong_ancestor),
    "temperature is applied twice": Mutant(
        "plain", session, "decode_row", lambda decode, row, params: decode(row / (params.temperature or 1.0), params)
    ),
    "a calibrated probability is taken for the truth": Mutant("merge", session, "walk", _calibration_as_truth),
    "a prompt's prefix is another session's": Mutant(
        "plain", Session, "commit", _own_prompt, ((Session, "prefill_left", property(_left_of_another_session)),)
    ),
    "a row continues its sibling's state": Mutant("states", states, "parents_of", _siblings_state),
    "a state is one row late": Mutant("states", states._Text, "path", _accepted_last_row_missing),
    "a convolution's window is not shifted": Mutant("states", Plan, "_find", _window_not_shifted),
    "a state is not rolled back after a rejection": Mutant("states", States, "accept", _rejected_rows_in_the_state),
    "a session gets the next one's rows": Mutant("plain", Engine, "forward", _rows_of_the_next_session),
}
