"""A drafting session: its text, what a client waits for, and the step of it that waits to be drafted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from coppice import failpoints
from coppice.errors import CoppiceError, Overloaded, StaleFence
from coppice.heads.base import DraftJob, Growth
from coppice.speculation.tree import DraftTree
from coppice.wire.common import Fence, committed_hash
from coppice.wire.drafter import DraftOpened, DraftStep, OpenDraft, TreeDelta

MAX_BACKLOG = 32  # steps not taken and answers not sent; a client that reads its answers has a few


Answer = DraftOpened | TreeDelta | Exception


@dataclass(eq=False, slots=True)
class Session:
    """What lies above `taken` belongs to the event loop, the rest to the worker's thread."""

    key: int
    answers: asyncio.Queue[Answer | None] = field(default_factory=asyncio.Queue)
    """what to send; None only wakes the sender"""
    sent: int = 0
    """steps handed to the worker"""
    newest: int | None = None
    """number of the newest step while it is not answered"""
    ended: bool = False
    """no further step comes"""
    end: CoppiceError | None = None
    """why, unless the client closed its side"""
    taken: int = 0
    """steps the worker took; the event loop reads it"""
    drafting: tuple[int, int] = 0, 0
    """when the step that is drafted for came, and when the thread began, of `perf_counter_ns`; the loop reads it"""
    opening: OpenDraft | None = None
    """without ids and features"""
    length: int = 0
    hash: int = committed_hash(())
    too_long: bool = False
    """longer than the head drafts for, so that the head does not hold it"""

    @property
    def finished(self) -> bool:
        """No further step comes and the last one is answered."""
        return self.ended and self.newest is None

    def check_backlog(self) -> None:
        """Raise Overloaded when the client sends steps faster than it reads answers or the head drafts."""
        if self.sent - self.taken + self.answers.qsize() > MAX_BACKLOG:
            raise Overloaded(f"more than {MAX_BACKLOG} steps or answers are waiting")

    def finish(self, end: CoppiceError | None) -> None:
        """End after the current step, with `end` as the status."""
        self.ended, self.end = True, end
        self.answers.put_nowait(None)

    def append(self, ids: Sequence[int]) -> None:
        """Commit ids."""
        self.hash = committed_hash(ids, self.hash)
        self.length += len(ids)

    def advance(self, step: DraftStep) -> None:
        """Commit what a step says was committed. Raises StaleFence when the step is about another text."""
        fence = step.fence
        self.append(step.advance.ids)
        if (fence.committed_len, fence.committed_hash) != (self.length, self.hash):
            raise StaleFence(
                f"step {fence.step} is about {fence.committed_len} tokens with hash {fence.committed_hash:016x}; "
                f"expected {self.length} tokens with hash {self.hash:016x}"
            )


@dataclass(slots=True)
class Waiting:
    """A step that is not drafted yet, and the parts of its tree that were not sent yet."""

    session: Session
    fence: Fence
    arrived_ns: int
    job: DraftJob
    miss: float | None
    """1 - r of the draft before it"""
    parts: list[Growth] = field(default_factory=list)
    is_sent: bool = False
    """in part"""
    is_done: bool = False

    @property
    def is_early(self) -> bool:
        """Whether under a quarter of the deadline has passed, so that the rest of the tree will be in time too."""
        return time.perf_counter_ns() - self.arrived_ns < self.fence.deadline_ns / 4

    def delta(self, weights_version: int, forward_ns: int) -> TreeDelta:
        """The parts as one message; they are kept no longer."""
        parts, fence = self.parts, self.fence
        nodes, last = _joined([part.nodes for part in parts]), parts[-1].last
        step = fence.step - failpoints.hit("drafter.stale")
        q_rows = [part.q_rows for part in parts if part.q_rows is not None]
        delta = TreeDelta(
            fence=Fence(step, fence.committed_len, fence.committed_hash, weights_version, fence.deadline_ns),
            nodes=garbage(nodes) if failpoints.hit("drafter.garbage") else nodes,
            last=last,
            forward_ns=forward_ns,
            total_ns=time.perf_counter_ns() - self.arrived_ns,
            q_rows=np.concatenate(q_rows) if q_rows else None,
            miss=None if self.is_sent else self.miss,
            predicted=tuple([place for part in parts for place in part.predicted]),
            made=tuple([len(part.nodes) for part in parts]) if len(parts) > 1 else (),
        )
        parts.clear()
        self.is_sent, self.is_done = True, last
        return delta


def _joined(trees: list[DraftTree]) -> DraftTree:
    """Parts of one tree, in order, as one."""
    if len(trees) == 1:
        return trees[0]
    names = ("tokens", "parents", "log_probs")
    return DraftTree(*(np.concatenate([getattr(tree, name) for tree in trees]) for name in names))


def garbage(tree: DraftTree) -> DraftTree:
    """An invalid tree of n >= 1 nodes: a parent that comes later, an id outside the vocabulary, or a NaN score."""
    n = max(1, len(tree))
    tokens = np.resize(tree.tokens, n) if len(tree) else np.zeros(n, np.int64)
    spoiled = DraftTree(tokens, np.arange(n), np.full(n, -0.5, np.float32))
    faults = ((spoiled.parents, n), (spoiled.tokens, 2**31 - 1), (spoiled.log_probs, np.nan))
    array, value = faults[int(tokens.sum()) % 3]
    array[-1] = value
    return spoiled
