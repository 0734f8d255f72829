"""What the verifier knows of its own speed, and the cut through all packed trees that follows from it."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from coppice.engine.engine import Engine
from coppice.engine.rows import Piece
from coppice.speculation.tree import DraftTree, path_scores, prune
from coppice.wire.verifier import VerifyStep

from .node_budget import CostCurve, Profile, share
from .session import Session


@dataclass
class Job:
    """What one session waits for; a step's tree loses the nodes there is no room for and those that do not pay."""

    answer: asyncio.Future[Any]
    arrived: int
    session: Session | None = None
    step: VerifyStep | None = None
    """None for the opening of a session"""
    started: int = 0
    forward_ns: int = 0
    tree: DraftTree = field(default_factory=DraftTree.empty)
    verified: tuple[int, ...] = ()
    """the sender's numbers of the tree's nodes, when some were left out"""
    answered: bool = False

    @property
    def opened(self) -> Session:
        """The session. Raises ValueError before it was admitted."""
        if self.session is None:
            raise ValueError("the session is not open yet")
        return self.session

    @property
    def prefill_left(self) -> list[int]:
        """Prompt ids whose KV is still missing (prefill only)."""
        return self.opened.request.ids[self.opened.committed_len :]

    @property
    def whole(self) -> bool:
        """Whether no node may be left out: the sender says so, or sampled them, and a choice would change their law."""
        return self.step is not None and (self.step.whole_tree or self.step.q_rows is not None)

    def cut(self, budget: int) -> None:
        """Leave out all but the `budget` likeliest nodes."""
        if budget < len(self.tree):
            numbers = self.verified or range(1, len(self.tree) + 1)
            self.tree, kept = prune(self.tree, budget)
            self.verified = tuple(map(numbers.__getitem__, (kept - 1).tolist()))

    def piece(self) -> Piece:
        """Root and tree as rows: node i is row i, so parents are the tree's own numbers."""
        assert self.step
        assert self.session
        return Piece(
            table=self.session.table,
            prefix_len=self.session.committed_len,
            tokens=[self.step.root, *self.tree.tokens.tolist()],
            parents=[-1, *self.tree.parents.tolist()],
            depths=self.tree.depths().tolist(),
            keep=range(len(self.tree) + 1),
        )


_ROWS = (1, 16, 64, 4, 256, 2, 8, 32, 128, 512)  # the first ones say most, should time run out
_LEAST_POINTS = 3
_MEASURE_S = 0.5
_CONTEXT, _REPEATS = 64, 3
_RATE = 0.1  # of the average of what a step takes beside its forward
_MOST_BESIDE = 4.0  # times a step so far: longer is a stall


def measure(engine: Engine, kv_tokens: int) -> CostCurve:
    """Time forwards of several numbers of rows, for about half a second, at least three of them.

    `kv_tokens`: the size of the pool. Runs where the engine runs, while it serves nobody.
    """
    most = min(kv_tokens, engine.info.max_context) - _CONTEXT
    found: dict[int, float] = {}
    began = time.perf_counter()
    for rows in _ROWS:
        # One row always: a small pool or context has room for no more.
        if rows == 1 or (rows <= most and (len(found) < _LEAST_POINTS or time.perf_counter() - began < _MEASURE_S)):
            found[rows] = engine.timings((rows,), context=_CONTEXT, repeats=_REPEATS)[rows] / 1e9
    return CostCurve(found)


class Pruner:
    """Cuts the trees of one forward after another, and learns from each what the next one will cost."""

    def __init__(self, curve: CostCurve) -> None:
        self.curve = curve
        self._profile = Profile()
        self._beside_s = 0.0  # from a forward's end to the next one's start while sessions are on their way back
        self._ended = 0.0
        self._rows = 0  # of the forward under way, draft nodes left out

    def cut(self, steps: Sequence[Job], prefill_rows: int) -> None:
        """Leave out of all steps of the next forward the nodes that would cost more than they promise."""
        self._rows = len(steps) + prefill_rows
        grown = [job for job in steps if len(job.tree)]
        open_ = [job for job in grown if not job.whole]
        if not open_:
            return
        scores = [path_scores(job.tree).tolist() for job in open_]
        for found in scores:
            self._profile.observe(found)
        whole = [score for job in grown if job.whole for score in path_scores(job.tree).tolist()]
        gain = len(steps) + sum(map(math.exp, whole))
        for job, budget in zip(open_, share(scores, self._rows + len(whole), gain, self._seconds), strict=True):
            job.cut(budget)

    def hint(self, sessions: int) -> int | None:
        """How many nodes each of the sessions should draft for the next forward; None: any number."""
        return self._profile.hint(sessions, self._rows, self._seconds)

    def ran(self, rows: int, began: float, ended: float, *, decoded: bool, awaited: bool) -> float:
        """Learn from a forward; returns what share of it there would have been without a draft node.

        began, ended: seconds on one clock. decoded: it held no prompt, whose rows are cheaper. awaited: some session of
        the forward before was in it, so that the time between was a step's and not a rest.
        """
        if decoded:
            self.curve.observe(rows, ended - began)
        plain_s, whole_s = self.curve((self._rows, rows))
        if awaited:
            most = _MOST_BESIDE * (self._beside_s + whole_s)
            self._beside_s += _RATE * (min(began - self._ended, most) - self._beside_s)
        self._ended = ended
        return plain_s / whole_s

    def _seconds(self, rows: Sequence[int]) -> list[float]:
        return [self._beside_s + seconds for seconds in self.curve(rows)]
