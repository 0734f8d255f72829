"""What a drafter knows of a session's text, and the step of it that waits to be drafted."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from coppice.errors import InvalidField, StaleFence
from coppice.heads.base import DraftJob, Growth, Miss
from coppice.speculation.sampling import SamplingParams
from coppice.speculation.tree import DraftTree
from coppice.wire.common import Fence, Rejection, committed_hash
from coppice.wire.drafter import Advance, DraftStep

from .samples import Window
from .session import Session


@dataclass(slots=True)
class Text:
    """What a session drafts with, and the ids it has committed."""

    sampling: SamplingParams
    coupled: bool
    want_q_rows: bool
    name: str
    window: Window | None  # what samples are cut from, when any may be wanted
    length: int = 0
    hash: int = committed_hash(())
    too_long: bool = False
    """longer than the head drafts for, so that the head does not hold it"""

    def append(self, ids: Sequence[int]) -> None:
        """Commit ids."""
        self.hash = committed_hash(ids, self.hash)
        self.length += len(ids)

    def advance(self, step: DraftStep, covered: bool) -> None:
        """Commit what a step says was committed. covered: features of it must come along.

        Raises StaleFence when the step is about another text, and InvalidField.
        """
        fence, before = step.fence, self.length
        self.append(step.advance.ids)
        if (fence.committed_len, fence.committed_hash) != (self.length, self.hash):
            raise StaleFence(
                f"step {fence.step} is about {fence.committed_len} tokens with hash {fence.committed_hash:016x}; "
                f"expected {self.length} tokens with hash {self.hash:016x}"
            )
        if step.advance.ids and covered:
            _check_covered(before, step.advance)


@dataclass(frozen=True, slots=True)
class Missed:
    """What the draft before a step missed by, and what a sample of it needs."""

    miss: Miss
    rejection: Rejection
    version: int


@dataclass(slots=True)
class Waiting:
    """A step that is not drafted yet."""

    session: Session
    fence: Fence
    arrived_ns: int
    job: DraftJob
    missed: Missed | None
    held: list[Growth] = field(default_factory=list)  # parts of the tree that go out with the next one
    sent: bool = False  # some of its deltas are out
    done: bool = False

    @property
    def early(self) -> bool:
        """Whether the rest of the tree will be in time too: less than a quarter of the time there is has passed."""
        return time.perf_counter_ns() - self.arrived_ns < self.fence.deadline_ns / 4


def joined(parts: list[Growth]) -> Growth:
    """Parts of one tree, in order, as one."""
    if len(parts) == 1:
        return parts[0]
    nodes = DraftTree(
        np.concatenate([part.nodes.tokens for part in parts]),
        np.concatenate([part.nodes.parents for part in parts]),
        np.concatenate([part.nodes.log_probs for part in parts]),
    )
    q_rows = [part.q_rows for part in parts if part.q_rows is not None]
    predicted = tuple([place for part in parts for place in part.predicted])
    return Growth(parts[0].job, nodes, parts[-1].last, np.concatenate(q_rows) if q_rows else None, predicted)


def _check_covered(start: int, advance: Advance) -> None:
    """Raise InvalidField unless the advance holds features of exactly its ids, the first at position `start`."""
    features, wanted = advance.features, (start, len(advance.ids))
    if features is None or features.inline is None or (features.start, features.count) != wanted:
        raise InvalidField("step.advance.features", f"this head reads those of {wanted[1]} positions from {start}")
