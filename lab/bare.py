"""Bare loops in this process: a forward of the target and a draft of each head, without services around them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from coppice.engine.loading import load_engine
from coppice.engine.rows import Piece, pack
from coppice.heads.base import DraftJob, Head
from coppice.heads.registry import served_head
from coppice.limits import MAX_TREE_NODES
from coppice.speculation.sampling import SamplingParams
from coppice.stack.spec import COUNTING_KINDS, StackSpec
from coppice.wire.common import Features
from coppice.wire.drafter import Advance, OpenDraft

STRIDE = 3  # tokens committed between two timed drafts, about what a draft is good for


class Bare:
    """The target and the heads of a stack, set up as its services are. Belongs to the thread that makes it."""

    def __init__(self, spec: StackSpec, sessions: int, longest: int) -> None:
        """`sessions`: at once, at most; `longest`: tokens of the longest text. Heads that only count are not timed."""
        settings = spec.settings()
        verifier, kv_tokens = settings.verifier, sessions * (longest + 2 * MAX_TREE_NODES)
        self._threads, self._drafter_threads = verifier.threads, settings.drafter.threads
        self.engine = load_engine(spec.target, device=verifier.device, dtype=verifier.dtype, kv_tokens=kv_tokens)
        shared = settings.drafter.model_copy(update={"target": str(spec.target), "kv_tokens": kv_tokens})
        self._heads: dict[str, Head] = {}
        with self._drafting():
            for head in spec.heads:
                own = {"name": head.name, "kind": head.kind, "path": str(head.path or "")}
                if head.kind not in COUNTING_KINDS:
                    self._heads[head.name] = served_head(shared.model_copy(update=own))

    def forward_ms(self, rows: int, context: int, sessions: int = 1) -> float:
        """Median milliseconds of one forward over `rows` rows a session behind `context` tokens."""
        self.engine.timings((rows,), sessions=sessions, context=context, repeats=3)  # warm-up
        return self.engine.timings((rows,), sessions=sessions, context=context)[rows] / 1e6

    def draft_ms(
        self, name: str, prompt: Sequence[int], answer: Sequence[int], budget: int, sessions: int = 1
    ) -> tuple[float, float]:
        """Median milliseconds of one head's greedy drafts along a recorded answer, of so many sessions at once: of its
        forwards alone, and with the tree. Zeros for a head that counts.
        """
        if name not in self._heads:
            return 0.0, 0.0
        head, text, sampling = self._heads[name], [*prompt, *answer], SamplingParams()
        features, took = self._features(text, head.description.feature_layers), []
        with self._drafting():
            try:
                for key in range(sessions):
                    read = wire_features(features, 0, len(prompt))
                    for _ in head.open(key, OpenDraft(str(key), list(prompt), sampling, features=read)):
                        pass
                for at in range(len(prompt), len(text), STRIDE):
                    jobs = [DraftJob(key, text[at], at, budget, sampling) for key in range(sessions)]
                    before, began = head.forward_ns, time.perf_counter_ns()
                    for _ in head.draft(jobs):
                        pass
                    took.append((head.forward_ns - before, time.perf_counter_ns() - began))
                    step = Advance(text[at : at + STRIDE], wire_features(features, at, at + STRIDE))
                    for key in range(sessions):
                        head.advance(key, step)
            finally:
                for key in range(sessions):
                    head.close(key)
        forward_ns, total_ns = np.median(took, axis=0)
        return float(forward_ns) / 1e6, float(total_ns) / 1e6

    def _features(self, text: Sequence[int], layers: tuple[int, ...]) -> torch.Tensor | None:
        """The target's features of every position of a text; None for a head that reads none."""
        if not layers:
            return None
        pool = self.engine.pool
        table = pool.allocate("features", len(text))
        try:
            return self.engine.forward(pack([Piece.chain(table, 0, text)], layers)).features
        finally:
            pool.free(table)

    @contextmanager
    def _drafting(self) -> Iterator[None]:
        """Give torch the drafters' threads meanwhile; 0 leaves them as they are."""
        torch.set_num_threads(self._drafter_threads or torch.get_num_threads())
        try:
            yield
        finally:
            torch.set_num_threads(self._threads or torch.get_num_threads())


def wire_features(rows: torch.Tensor | None, start: int, end: int) -> Features | None:
    """Positions start..end-1 of (N, F) features of a text as they go over the wire; None of None."""
    if rows is None:
        return None
    part = rows[start:end].cpu().contiguous()
    dtype = str(part.dtype).removeprefix("torch.")
    return Features(start, len(part), dtype, part.view(torch.uint8).numpy().tobytes())
