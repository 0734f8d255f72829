"""How a drafter keeps up with a session of a verifier: it follows the session's features and commits.

A commit comes before the client's step. A head that drafted in the step before drafts on from it at once, and the
client's step only confirms the draft, or asks for another one. A wrong or lost commit costs time, never a token.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

import grpc

from coppice.errors import CoppiceError, InvalidField, Unavailable
from coppice.rpc.channels import Dialer
from coppice.rpc.directory import Directory
from coppice.speculation.tree import DraftTree
from coppice.v1.verifier_pb2_grpc import VerifierServiceStub
from coppice.wire.common import FeatureRef, Features, Fence
from coppice.wire.drafter import Advance, DraftStep, HeadDescription, OpenDraft, TreeDelta
from coppice.wire.verifier import Commit, fetch_to_wire, read_fed

from .session import Session
from .worker import Worker

OPEN_S, STEP_S = 20.0, 1.0  # longest wait for the features of an opening, of a step
_MOST_CHANNELS = 64
_MOST_UNASKED_BYTES = 4 << 20  # of the features of commits behind the last step


class Stream(Protocol):
    """Feature rows of a session, then what each of its steps commits."""

    def __aiter__(self) -> AsyncIterator[Features | Commit]: ...

    def cancel(self) -> object:
        """End it on both sides."""


class LocalVerifier(Protocol):
    """A verifier in the drafter's own process."""

    address: str

    def follow(self, ref: FeatureRef) -> Stream:
        """Follow a session. Iterating raises NotFound, InvalidField, Overloaded."""


class _Call:
    """A stream from another process."""

    def __init__(self, call: grpc.aio.UnaryStreamCall, vocab_size: int) -> None:
        self._call, self._vocab_size = call, vocab_size
        self.cancel = call.cancel

    async def __aiter__(self) -> AsyncIterator[Features | Commit]:
        while (message := await self._call.read()) is not grpc.aio.EOF:
            yield read_fed(message, self._vocab_size)


class Verifiers:
    """The verifiers whose sessions a drafter may follow, over one channel to each."""

    def __init__(self, dialer: Dialer, allowed: Directory | None = None, local: LocalVerifier | None = None) -> None:
        """`allowed` names the addresses that may be dialed; None: all may be."""
        self._dialer, self._directory, self._local = dialer, allowed, local
        self._allowed = frozenset(allowed.addresses if allowed else ())
        self._news = asyncio.Event()  # another one for each list of addresses
        self._stubs: dict[str, VerifierServiceStub] = {}

    async def run(self) -> None:
        """Let what may be dialed be what the directory names, until cancelled."""
        if self._directory is not None:
            await self._directory.run(self._allow)

    def _allow(self, addresses: tuple[str, ...]) -> None:
        self._allowed = frozenset(addresses)
        for gone in self._stubs.keys() - self._allowed:
            del self._stubs[gone]
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def follow(self, ref: FeatureRef, vocab_size: int = 0) -> Stream:
        """Follow a session; vocab_size 0 admits any id. Raises InvalidField for an address that may not be dialed."""
        if self._local is not None and ref.verifier == self._local.address:
            return self._local.follow(ref)
        if self._directory is not None:
            try:
                async with asyncio.timeout(self._directory.news_s):  # an orchestrator may know of it a moment earlier
                    while ref.verifier not in self._allowed:
                        await self._news.wait()
            except TimeoutError:
                raise InvalidField("open.features.ref.verifier", "is not one of drafter.verifiers") from None
        if ref.verifier not in self._stubs:
            if len(self._stubs) == _MOST_CHANNELS:
                del self._stubs[next(iter(self._stubs))]
            self._stubs[ref.verifier] = VerifierServiceStub(self._dialer.open(ref.verifier))
        return _Call(self._stubs[ref.verifier].FetchFeatures(fetch_to_wire(ref)), vocab_size)


class Followed:
    """A session of a verifier: its commits as they come, and the feature rows that the head was not given yet."""

    def __init__(
        self, verifiers: Verifiers, ref: FeatureRef, head: HeadDescription, committed: Callable[[Commit], None]
    ) -> None:
        """`committed` is called for each commit. A head that reads no features has rows of none."""
        self._verifiers, self._ref, self._head, self._committed = verifiers, ref, head, committed
        self._rows = bytearray()
        self._dtype = ""
        self._start = self._end = ref.start  # their positions
        self._unasked_bytes = 0
        self._news = asyncio.Event()
        self._stream: Stream | None = None
        self._task: asyncio.Task[None] | None = None
        self._reason: object = "the session has ended"  # of the stream's end
        self._closed = False

    def is_of(self, ref: FeatureRef) -> bool:
        """Whether it is the session that a reference names."""
        return (self._ref.verifier, self._ref.session) == (ref.verifier, ref.session)

    def begin(self, start: int, end: int) -> None:
        """Follow anew, with rows of the positions from `start` on; those up to `end` are committed."""
        self._stop()
        self._rows.clear()
        self._start = self._end = start
        self._unasked_bytes = 0
        ref = replace(self._ref, start=start, count=end - start, layers=self._head.feature_layers)
        self._task = asyncio.create_task(self._read(ref))
        self._task.add_done_callback(lambda _: self._news.set())

    def close(self) -> None:
        """Follow no more."""
        self._closed = True
        self._stop()

    def _stop(self) -> None:
        """End the stream, so that the verifier drops it at once."""
        stream, task = self._stream, self._task
        self._stream = self._task = None
        self._news.set()
        if stream is not None:
            stream.cancel()  # the task ends with it: grpc.aio never frees what belongs to a read that is cancelled
        elif task is not None:
            task.cancel()

    async def rows(self, start: int | None, end: int, within_s: float) -> Features:
        """Features of the positions start..end-1, as soon as they have come; start None: of all that come first.

        A stream that has ended is begun once more behind the opening. Raises Unavailable, InvalidField.
        """
        try:
            async with asyncio.timeout(within_s):
                for _ in range(1 if start is None else 2):
                    if self._end < end and not self._closed and (self._task is None or self._task.done()):
                        self.begin(self._ref.start if start is None else start, end)
                    while self._end < end and self._task is not None and not self._task.done():
                        self._news.clear()
                        await self._news.wait()
                    if (features := self.take(start, end)) is not None:
                        return features
        except TimeoutError:
            self._reason = f"not in {within_s:g} s"
        if isinstance(self._reason, InvalidField) and self._reason.field.startswith("open."):
            raise self._reason
        if self._end >= end:
            raise InvalidField("step.advance", f"the verifier no longer has the features of position {start}")
        raise Unavailable(f"no features from the verifier at {self._ref.verifier}: {self._reason}")

    def take(self, start: int | None, end: int) -> Features | None:
        """Features of the positions start..end-1, which are not kept any longer; None unless all have come."""
        if not self._start < end <= self._end or not self._rows or start not in (None, self._start):
            return None
        count = end - self._start
        size = len(self._rows) // (self._end - self._start) * count
        features = Features(self._start, count, self._dtype, bytes(self._rows[:size]))
        del self._rows[:size]
        self._start, self._unasked_bytes = end, 0
        return features

    async def _read(self, ref: FeatureRef) -> None:
        """Take what the verifier sends, until it ends, or skips positions, or nobody asks for what it sends."""
        stream: Stream | None = None
        try:
            stream = self._stream = await self._verifiers.follow(ref, self._head.vocab_size)
            begun = False
            async for item in stream:
                if self._stream is not stream:
                    return
                features = item.features if isinstance(item, Commit) else item
                if features is not None:
                    self._append(features, begun)
                    begun = True
                elif ref.count:
                    raise InvalidField("features", "do not come with a commit")
                if isinstance(item, Commit):
                    self._unasked_bytes += len(features.inline or b"") if features else 0
                    self._committed(item)
                    if self._unasked_bytes > _MOST_UNASKED_BYTES:
                        return  # the rows can be had again
                self._news.set()
        except grpc.aio.AioRpcError as error:
            self._reason = error.details()
        except CoppiceError as error:
            self._reason = error
        finally:
            if stream is not None and self._stream is stream:
                self._stream = None
                stream.cancel()

    def _append(self, features: Features, begun: bool) -> None:
        """Keep rows behind the others; those of a stream that begins may begin later than was asked for."""
        if features.start != self._end and (begun or features.start < self._end):
            raise InvalidField("features", f"positions from {features.start} on do not follow {self._end}")
        if not begun:
            self._start, self._dtype = features.start, features.dtype
        self._rows += features.inline or b""
        self._end = features.start + features.count


@dataclass(slots=True)
class _Ahead:
    """A draft that the client has not asked for yet."""

    step: DraftStep
    fence: Fence | None = None
    """of the client's step that confirmed it"""
    deltas: list[TreeDelta] = field(default_factory=list)
    """drafted before that"""

    def answers(self, step: DraftStep) -> bool:
        """Whether it is a draft for a step, of about as many nodes."""
        own, fence = self.step, step.fence
        same = (fence.committed_len, fence.committed_hash) == (own.fence.committed_len, own.fence.committed_hash)
        return same and step.root == own.root and 3 * step.budget <= 4 * own.budget and not step.advance.rejection


class Following:
    """One session's text on the event loop, and the steps that the worker is given."""

    def __init__(self, worker: Worker, session: Session, verifiers: Verifiers) -> None:
        self._worker, self._session, self._verifiers = worker, session, verifiers
        self._head = worker.description
        self._may_lead = False
        self._length = 0  # ids that the head was given
        self._last: DraftStep | None = None  # the client's
        self._ahead: _Ahead | None = None
        self._numbers = 0
        self._followed: Followed | None = None
        self._closed = False

    async def open(self, opening: OpenDraft, leads: bool) -> OpenDraft:
        """The opening with rows of features, if the head reads any. leads: whether drafts may be begun unasked.

        Raises InvalidField, Unavailable.
        """
        self._may_lead, self._length = leads, len(opening.ids)
        ref = opening.features.ref if opening.features else None
        if ref is not None:
            self._follow(ref, ref.start, "open.features.ref")
        if not self._head.feature_layers:
            return replace(opening, features=None)
        if ref is None or self._followed is None:
            raise InvalidField("open.features", f"a {self._head.kind} head reads the target's features")
        if ref.start >= self._length:
            raise InvalidField("open.features", f"begin at position {ref.start} of {self._length} committed ids")
        return replace(opening, features=await self._followed.rows(None, self._length, OPEN_S))

    def _follow(self, ref: FeatureRef, start: int, field: str) -> None:
        """Follow a session from a position on, instead of another one. Raises InvalidField."""
        layers = self._head.feature_layers
        if layers and ref.layers not in ((), layers):
            raise InvalidField(f"{field}.layers", f"are {ref.layers}, this head reads those of {layers}")
        if self._followed is not None:
            self._followed.close()
        self._followed = Followed(self._verifiers, replace(ref, start=start), self._head, self._lead)
        if not layers:
            self._followed.begin(start, start)

    async def ask(self, step: DraftStep, arrived: int) -> None:
        """Take the client's step, which came at `arrived` of `perf_counter_ns`.

        Raises InvalidField, Unavailable.
        """
        if self._closed:
            return
        ref = step.advance.features.ref if step.advance.features else None
        if ref is not None and not (self._followed and self._followed.is_of(ref)):
            self._follow(ref, self._length, "step.advance.features.ref")
        self._last, ahead, fence = step, self._ahead, step.fence
        if ahead is not None and ahead.answers(step):
            ahead.fence = fence
            for delta in ahead.deltas:
                self._session.answers.put_nowait(delta)
            ahead.deltas.clear()
            return
        self._ahead = None
        new = fence.committed_len - self._length
        if new < 0:
            self._session.answers.put_nowait(TreeDelta(fence, DraftTree.empty(), last=True))  # the text has gone on
            return
        ids = step.advance.ids[max(0, len(step.advance.ids) - new) :]
        features = None
        if ids and self._followed is not None and self._head.feature_layers:
            features = await self._followed.rows(self._length, self._length + len(ids), STEP_S)
        self._length = fence.committed_len
        self._give(replace(step, advance=Advance(ids, features, step.advance.rejection)), arrived)

    def answer(self, delta: TreeDelta) -> TreeDelta | None:
        """A part of a draft as the client is to have it; None while it has not asked, or when it asked another one."""
        if delta.fence.step >= 0:
            return delta
        ahead = self._ahead
        if ahead is None or delta.fence.step != ahead.step.fence.step:
            return None
        if ahead.fence is None:
            ahead.deltas.append(delta)
            return None
        return replace(delta, fence=replace(ahead.fence, weights_version=delta.fence.weights_version))

    def close(self) -> None:
        """Follow no more."""
        self._closed = True
        if self._followed is not None:
            self._followed.close()

    def _lead(self, commit: Commit) -> None:
        """Draft on from a commit, if the last step was asked for a draft of the text before it."""
        last = self._last
        if not self._may_lead or last is None or not last.budget or commit.root is None:
            return
        if not last.fence.committed_len == commit.start == self._length:
            return
        features, end = None, commit.fence.committed_len
        if self._head.feature_layers and self._followed is not None:
            features = self._followed.take(self._length, end)
            if features is None:
                return
        self._numbers -= 1
        fence = replace(commit.fence, step=self._numbers, deadline_ns=last.fence.deadline_ns)
        step = DraftStep(fence, commit.root, last.budget, Advance(list(commit.ids), features))
        self._ahead, self._length = _Ahead(step), end
        self._give(step, time.perf_counter_ns())

    def _give(self, step: DraftStep, arrived: int) -> None:
        self._session.sent += 1
        self._worker.step(self._session, step, arrived)
