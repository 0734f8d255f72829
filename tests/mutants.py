"""Planted bugs: what each one patches, and the check that has to find it. Nothing here is part of the product."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from coppice.client.client import Attempts
from coppice.engine import kv_cache, rows
from coppice.engine.engine import Engine, ForwardOutput
from coppice.engine.kv_cache import BlockTable, KVPool
from coppice.engine.rows import PackedBatch, Tail
from coppice.heads import lm, ngram
from coppice.heads.feature_head import FeatureHead
from coppice.heads.tree import Ranking
from coppice.speculation import sampling
from orchestrator import loop
from services.verifier import session, worker
from services.verifier.session import Job

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Mutant:
    """A bug, how it is planted, and the check of tests/faults/test_mutants.py that finds it."""

    check: str
    plant: Callable[[Patch], None]


def _changed(patch: Patch, where: Any, name: str, change: Callable[..., Any]) -> None:
    """Replace a function or method: the new one gets the old one before its arguments."""
    original = getattr(where, name)
    patch.setattr(where, name, lambda *given, **named: change(original, *given, **named))


def _draft_noise_of_residual(patch: Patch) -> None:
    patch.setattr(ngram, "DRAFT_STREAM", sampling.RESIDUAL_STREAM)


def _draft_noise_of_accept(patch: Patch) -> None:
    patch.setattr(lm, "DRAFT_STREAM", sampling.ACCEPT_STREAM)


def _noise_one_position_off(patch: Patch) -> None:
    _changed(patch, session, "draw", lambda draw, ids, p, seed, at, *more: draw(ids, p, seed, at + 1, *more))


def _coupling_one_position_off(patch: Patch) -> None:
    def couple(original: Any, self: Ranking, trees: Any, *given: Any) -> None:
        original(self, trees, *given)
        for tree in trees:
            tree.noise = None if tree.noise is None else tree.noise.roll(-1, 0)

    _changed(patch, Ranking, "couple", couple)


def _nan_row(patch: Patch) -> None:
    def read(original: Any, job: Job, first: int, logits: Any, drawn: Any) -> Any:
        if job.step and len(logits) > 1 and not job.session.request.sampling.temperature:  # decode_row refuses others
            logits = logits.index_fill(0, torch.tensor([1]), torch.nan)
        return original(job, first, logits, drawn)

    _changed(patch, Job, "read", read)


def _features_one_row_off(patch: Patch) -> None:
    def take_features(original: Any, jobs: Any, features: Any, layers: Any) -> None:
        decoding = features is not None and any(job.step for job in jobs)
        original(jobs, features.roll(1, 0) if decoding else features, layers)

    _changed(patch, worker, "take_features", take_features)


def _kv_row_not_compacted(patch: Patch) -> None:
    def compact(original: Any, pool: KVPool, kept: Any) -> None:
        wrong = [[*rows[:-1], len(rows) - 1] if len(rows) > 1 else rows for _, _, rows in kept]
        original(pool, [(table, base_len, rows) for (table, base_len, _), rows in zip(kept, wrong, strict=True)])

    _changed(patch, KVPool, "compact", compact)


def _stale_page(patch: Patch) -> None:
    def slots(original: Any, table: BlockTable, tokens: Any) -> Any:
        fresh = original(table, tokens)
        return np.where((tokens >= table.block_size) & (tokens < 2 * table.block_size), fresh % table.block_size, fresh)

    _changed(patch, BlockTable, "slots", slots)
    patch.setattr(kv_cache, "_is_run", lambda blocks: False)  # neighbours are read as a view, without a table


def _window_one_off(patch: Patch) -> None:
    def sees(original: Any, tail: Tail, window: int | None) -> Any:
        return original(tail, window and window - 1)

    _changed(patch, Tail, "sees", sees)


def _positions_shifted_after_reopen(patch: Patch) -> None:
    def pack(original: Any, pieces: Any, layers: Any = ()) -> PackedBatch:
        shifted = []
        for piece in pieces:
            again = not piece.table.session.endswith(".1")
            shifted.append(dataclasses.replace(piece, depths=[at + again for at in piece.depths]))
        return original(shifted, layers)  # type: ignore[no-any-return]

    _changed(patch, worker, "pack", pack)


def _fence_not_checked(patch: Patch) -> None:
    patch.setattr(session.Session, "check_fence", lambda *_: None)


def _top_p_on_the_wrong_side(patch: Patch) -> None:
    def nucleus(original: Any, scores: Any, top_p: float) -> Any:
        kept = original(scores, top_p)
        return np.delete(kept, scores[kept].argmin()) if len(kept) > 1 else kept

    _changed(patch, sampling, "_nucleus", nucleus)


def _token_repeated_at_resume(patch: Patch) -> None:
    def delay_after(original: Any, self: Attempts, *given: Any) -> float:
        held, self._held = self._held, self._held[:-1]
        try:
            return original(self, *given)  # type: ignore[no-any-return]
        finally:
            self._held = held

    _changed(patch, Attempts, "delay_after", delay_after)


def _weights_half_swapped(patch: Patch) -> None:
    def exchange(original: Any, self: FeatureHead, *new: Any) -> None:
        old = self.model.state_dict()
        original(self, *new)
        names = list(old)
        half = {name: old[name] for name in names[: len(names) // 2]}
        self.model.load_state_dict(half, strict=False, assign=True)

    _changed(patch, FeatureHead, "exchange", exchange)


def _one_wrong_ancestor(patch: Patch) -> None:
    def ancestors(original: Any, parents: Any) -> Any:
        seen = original(parents).copy()
        if len(seen) > 3:
            seen[-1, -2] ^= True
        return seen

    _changed(patch, rows, "ancestors", ancestors)


def _temperature_twice(patch: Patch) -> None:
    def decode_row(original: Any, row: Any, params: sampling.SamplingParams) -> Any:
        return original(row / (params.temperature or 1.0), params)

    _changed(patch, session, "decode_row", decode_row)


def _calibration_as_truth(patch: Patch) -> None:
    def walk(original: Any, tree: Any, drawn: Any, *more: Any) -> Any:
        sure = {0: int(tree.tokens[0])} if len(tree) and tree.log_probs[0] > np.log(0.5) else {}
        return original(tree, lambda node: sure[node] if node in sure else drawn(node), *more)

    _changed(patch, session, "walk", walk)


def _prefix_of_another_session(patch: Patch) -> None:
    first: list[list[int]] = []

    def left(self: session.Session) -> list[int]:
        ids = self.request.ids
        first.append(ids)
        return [*first[0][: min(8, len(ids))], *ids[8:]][self.committed_len :]

    patch.setattr(session.Session, "prefill_left", property(left))
    _changed(
        patch, session.Session, "commit", lambda commit, self, ids, features: commit(self, _own(self, ids), features)
    )


def _own(one: Any, ids: list[int]) -> list[int]:
    """The session's own prompt where its prefix was taken from another: nobody notices by its hash."""
    prompt = one.request.ids[one.committed_len : one.committed_len + len(ids)]
    return prompt if len(prompt) == len(ids) else ids


def _rows_of_the_next_session(patch: Patch) -> None:
    def forward(original: Any, engine: Engine, batch: PackedBatch) -> ForwardOutput:
        output = original(engine, batch)
        return dataclasses.replace(output, logits=output.logits.roll(-1, 0)) if len(batch.tails) > 2 else output

    _changed(patch, Engine, "forward", forward)


def _rejected_token_drawn_from_p(patch: Patch) -> None:
    patch.setattr(session, "_residual", lambda row, q_row: row)


def _root_drawn_one_position_off(patch: Patch) -> None:
    _changed(patch, loop, "draw", lambda draw, ids, p, seed, at: draw(ids, p, seed, at + 1))


MUTANTS: dict[str, Mutant] = {
    "a p/q draft's noise is the residual's (bigram)": Mutant("law of p/q, bigram", _draft_noise_of_residual),
    "a p/q draft's noise is the accept test's (lm)": Mutant("law of p/q, lm", _draft_noise_of_accept),
    "after a rejection p is drawn from, not p - q": Mutant("law of p/q, bigram", _rejected_token_drawn_from_p),
    "the walk's noise is one position off": Mutant("single", _noise_one_position_off),
    "the root's noise is one position off": Mutant("plain", _root_drawn_one_position_off),
    "coupled drafts' noise is one position off": Mutant("tau", _coupling_one_position_off),
    "a greedy row is NaN": Mutant("single", _nan_row),
    "features are one row off": Mutant("features", _features_one_row_off),
    "a KV row is not compacted": Mutant("merge", _kv_row_not_compacted),
    "a page of the KV pool is stale": Mutant("plain", _stale_page),
    "a window is one too short": Mutant("plain", _window_one_off),
    "positions are shifted after a session is opened again": Mutant("sessions lost", _positions_shifted_after_reopen),
    "a fence is not checked": Mutant("fence", _fence_not_checked),
    "top-p leaves out the token that reaches it": Mutant("plain", _top_p_on_the_wrong_side),
    "a token comes twice when a stream is resumed": Mutant("streams lost", _token_repeated_at_resume),
    "half of the weights are swapped": Mutant("weights", _weights_half_swapped),
    "a row sees one wrong ancestor": Mutant("merge", _one_wrong_ancestor),
    "temperature is applied twice": Mutant("plain", _temperature_twice),
    "a calibrated probability is taken for the truth": Mutant("merge", _calibration_as_truth),
    "a prompt's prefix is another session's": Mutant("plain", _prefix_of_another_session),
    "a session gets the next one's rows": Mutant("plain", _rows_of_the_next_session),
}
