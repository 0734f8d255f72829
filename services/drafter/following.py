"""How a session keeps up with its text: by what its verifier commits, and by what its client asks.

The verifier's commit comes first. A head that was asked in the step before drafts on from it at once; the client's
question then only confirms the draft, or asks another one. What a verifier says wrongly, or does not say, costs time.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace

from coppice.errors import CoppiceError, InvalidField
from coppice.rpc.nearby import Subscription
from coppice.speculation.tree import DraftTree
from coppice.wire.common import FeatureRef, Features, Fence
from coppice.wire.drafter import Advance, DraftStep, TreeDelta
from coppice.wire.verifier import Commit

from .features import FETCH_S, FeatureSource
from .session import Session
from .worker import Worker

STEP_S = 1.0  # to fetch what a step misses: no draft is waited for longer
_MOST_UNASKED, _MOST_UNASKED_BYTES = 512, 4 << 20  # commits and their features, behind the last step that was asked for


@dataclass(slots=True)
class _Ahead:
    """A draft that nobody has asked for yet."""

    step: DraftStep
    fence: Fence | None = None
    """of the question that confirmed it"""
    held: list[TreeDelta] = field(default_factory=list)

    def answers(self, step: DraftStep) -> bool:
        """Whether it is a draft of a step, of about as many nodes."""
        mine, fence = self.step, step.fence
        same = (fence.committed_len, fence.committed_hash) == (mine.fence.committed_len, mine.fence.committed_hash)
        return same and step.root == mine.root and 3 * step.budget <= 4 * mine.budget and not step.advance.rejection


class Following:
    """One session's text on the event loop, and the questions that the worker is asked about it."""

    def __init__(self, worker: Worker, session: Session, source: FeatureSource) -> None:
        self._worker, self._session, self._source = worker, session, source
        self._head = worker.description
        self._may_lead = False
        self._length = 0
        """ids that the head was given"""
        self._last: DraftStep | None = None
        """the client's last question"""
        self._at: tuple[str, str] | None = None
        self._subscription: Subscription | None = None
        self._trying: asyncio.Task[None] | None = None
        self._commits: list[Commit] = []
        """what the head was not given yet, without gaps"""
        self._ahead: _Ahead | None = None
        self._numbers = 0

    async def open(self, ids: list[int], features: Features | None, leads: bool) -> Features | None:
        """The features of the opening, inline, if the head reads any. leads: whether drafts may be begun unasked.

        Raises InvalidField, Unavailable.
        """
        self._may_lead, self._length = leads, len(ids)
        head = self._head
        if not head.feature_layers:
            return features
        if features is None or (features.inline is None and features.ref is None):
            raise InvalidField("open.features", f"a {head.kind} head reads the target's features")
        window = features.ref or features
        if not window.count or window.start + window.count != len(ids):
            end = window.start + window.count
            raise InvalidField("open.features", f"end at position {end} of {len(ids)} committed ids")
        return features if features.ref is None else await self._follow(features.ref, "open.features.ref")

    async def ask(self, step: DraftStep, arrived: int) -> None:
        """Take the client's question, which came at `arrived` of `perf_counter_ns`.

        Raises InvalidField, Unavailable.
        """
        self._last, ahead, fence = step, self._ahead, step.fence
        if ahead is not None and ahead.answers(step):
            ahead.fence = fence
            for delta in ahead.held:
                self._session.answers.put_nowait(delta)
            ahead.held.clear()
            return
        self._ahead = None
        new = fence.committed_len - self._length
        if new < 0:
            self._session.answers.put_nowait(TreeDelta(fence, DraftTree.empty(), last=True))  # the text has gone on
            return
        ids = step.advance.ids[max(0, len(step.advance.ids) - new) :]
        features = await self._features(ids, step.advance.features)
        self._length = fence.committed_len
        self._commits = [commit for commit in self._commits if commit.start >= self._length]
        self._work(replace(step, advance=Advance(ids, features, step.advance.rejection)), arrived)

    def answer(self, delta: TreeDelta) -> TreeDelta | None:
        """A part of a draft as the client is to have it; None while it has not asked, or when it asked another one."""
        if delta.fence.step >= 0:
            return delta
        ahead = self._ahead
        if ahead is None or delta.fence.step != ahead.step.fence.step:
            return None
        if ahead.fence is None:
            ahead.held.append(delta)
            return None
        return replace(delta, fence=replace(ahead.fence, weights_version=delta.fence.weights_version))

    def close(self) -> None:
        """Hear no more of the text."""
        if self._trying is not None and self._trying is not asyncio.current_task():
            self._trying.cancel()
        if self._subscription is not None:
            self._subscription.close()
        self._subscription = self._at = None
        self._commits.clear()

    async def _features(self, ids: list[int], told: Features | None) -> Features | None:
        """The features of the next ids, inline: what was told, what the verifier said, or what it is asked for."""
        ref = told.ref if told else None
        if ref is None:
            return told
        moved = self._at != (ref.verifier, ref.session)
        if not self._head.feature_layers:
            if moved:
                self._at = ref.verifier, ref.session
                self._trying = asyncio.create_task(self._try_following(replace(ref, count=0)))
            return None
        end = self._length + len(ids)
        heard = [commit for commit in self._commits if commit.start < end]
        self._commits = self._commits[len(heard) :]
        if ids and heard and (heard[0].start, heard[-1].fence.committed_len) == (self._length, end):
            return _joined([commit.features for commit in heard if commit.features])
        if not ids:
            return None
        self._commits.clear()
        window = replace(ref, start=self._length, count=len(ids))
        return await self._follow(window, "step.advance.features.ref")

    async def _try_following(self, ref: FeatureRef) -> None:
        """Follow a session for its commits alone; without them the head still drafts when it is asked."""
        with suppress(CoppiceError):
            await self._follow(ref, "step.advance.features.ref")
        self._at = ref.verifier, ref.session  # if it failed, not once more in each step

    async def _follow(self, ref: FeatureRef, field: str) -> Features | None:
        layers = self._head.feature_layers
        if layers and ref.layers not in ((), layers):
            raise InvalidField(f"{field}.layers", f"are {ref.layers}, this head reads those of {layers}")
        self.close()
        within_s = FETCH_S if self._last is None else STEP_S
        features, self._subscription = await self._source.follow(ref, self._heard, within_s)
        self._at = ref.verifier, ref.session
        return features

    def _heard(self, commit: Commit) -> None:
        """Take what the verifier committed, and draft on from it if the last step was asked for a draft."""
        if self._commits and commit.start != self._commits[-1].fence.committed_len:
            self._commits.clear()
        self._commits.append(commit)
        last = self._last
        asked = last is not None and last.fence.committed_len == commit.start == self._length
        complete = commit.features is not None or not self._head.feature_layers
        if self._may_lead and asked and complete and commit.root is not None and last is not None and last.budget:
            self._lead(commit, commit.root, last)
        elif len(self._commits) > _MOST_UNASKED or sum(map(_size, self._commits)) > _MOST_UNASKED_BYTES:
            self.close()  # the rows can be had again

    def _lead(self, commit: Commit, root: int, last: DraftStep) -> None:
        """Draft from a commit before the client asks."""
        self._numbers -= 1
        fence = replace(commit.fence, step=self._numbers, deadline_ns=last.fence.deadline_ns)
        step = DraftStep(fence, root, last.budget, Advance(list(commit.ids), commit.features))
        self._ahead = _Ahead(step)
        self._commits.clear()
        self._length = fence.committed_len
        self._work(step, time.perf_counter_ns())

    def _work(self, step: DraftStep, arrived: int) -> None:
        self._session.sent += 1
        self._worker.step(self._session, step, arrived)


def _size(commit: Commit) -> int:
    return len(commit.features.inline or b"") if commit.features else 0


def _joined(parts: list[Features]) -> Features:
    """The rows of several commits, one behind the other."""
    rows = b"".join([part.inline or b"" for part in parts])
    return Features(parts[0].start, sum(part.count for part in parts), parts[0].dtype, rows)
