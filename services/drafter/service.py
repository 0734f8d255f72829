"""DrafterService on the wire: sessions live on links. And `drafting`, which serves the heads of a process.

A drafter keeps up with a session of a verifier: it follows the session's features and commits. A commit comes before
the client's step. A head that drafted in the step before drafts on from it at once, and the client's step only confirms
the draft, or asks for another one. A wrong or lost commit costs time, never a token.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, Protocol

import grpc.aio
import structlog

from coppice.adaptation.signals import Producer
from coppice.config.settings import Settings
from coppice.engine.batching import BatchingThread, settle
from coppice.errors import CoppiceError, InvalidField, Overloaded, Unavailable
from coppice.heads.base import served_head
from coppice.limits import Limits
from coppice.rpc import tracing
from coppice.rpc.channels import HEAD, Dialer, Stub
from coppice.rpc.directory import Directory, directory
from coppice.rpc.link import Context, Inbox
from coppice.rpc.server import within
from coppice.speculation.tree import DraftTree
from coppice.telemetry import SessionMetrics
from coppice.v1 import drafter_pb2, verifier_pb2
from coppice.wire import drafter
from coppice.wire.common import FeatureRef, Features, Fence
from coppice.wire.drafter import Advance, DraftOpened, DraftStep, OpenDraft, TreeDelta
from coppice.wire.verifier import Commit, fetch_to_wire, read_fed

from .worker import Answer, Samples, Session, Worker

log = structlog.get_logger()

PART_S = 30.0  # longest wait for a part of it: others wait for its end
DROP_S = 5.0  # longest wait for the end of a push that is refused or needless
OPEN_S, STEP_S = 20.0, 1.0  # longest wait for the features of an opening, of a step
_MOST_CHANNELS = 64
_MOST_UNASKED = 128  # positions behind those of the last step whose features are kept
_LOOK_S = 0.02  # between two looks into the directory for an address that it does not name yet


class Stream(Protocol):
    """Feature rows of a session, then what each of its steps commits."""

    def __aiter__(self) -> AsyncIterator[Features | Commit]: ...

    def cancel(self) -> object:
        """End it on both sides."""


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

    def __init__(self, dialer: Dialer, allowed: Directory | None = None, local: Any = None) -> None:
        """allowed: what may be dialed; None: anything. local: this process's, with `address` and `follow(ref)`."""
        self._directory, self._local = allowed, local
        self._stub = lru_cache(_MOST_CHANNELS)(lambda address: Stub(dialer.open(address), verifier_pb2))

    async def follow(self, ref: FeatureRef, vocab_size: int = 0) -> Stream:
        """Follow a session; vocab_size 0 admits any id. Raises InvalidField for an address that may not be dialed."""
        if self._local is not None and ref.verifier == self._local.address:
            stream: Stream = self._local.follow(ref)
            return stream
        if self._directory is not None:
            clock = asyncio.get_running_loop().time
            latest = clock() + self._directory.news_s  # an orchestrator may know of it a moment earlier
            while ref.verifier not in self._directory.addresses:
                if clock() >= latest:
                    raise InvalidField("open.features.ref.verifier", "is not one of drafter.verifiers")
                await asyncio.sleep(_LOOK_S)
        return _Call(self._stub(ref.verifier).FetchFeatures(fetch_to_wire(ref)), vocab_size)


@dataclass(slots=True)
class _Ahead:
    """A draft that the client has not asked for yet."""

    step: DraftStep
    fence: Fence | None = None  # of the client's step that confirmed it
    deltas: list[TreeDelta] = field(default_factory=list)  # drafted before that

    def answers(self, step: DraftStep) -> bool:
        """Whether it is a draft for a step, of about as many nodes."""
        own, fence = self.step, step.fence
        same = (fence.committed_len, fence.committed_hash) == (own.fence.committed_len, own.fence.committed_hash)
        return same and step.root == own.root and 3 * step.budget <= 4 * own.budget and not step.advance.rejection


class Following:
    """One session on the event loop: the verifier's session that it follows, and the steps that the worker is given."""

    def __init__(self, worker: Worker, session: Session, verifiers: Verifiers) -> None:
        self._worker, self._session, self._verifiers = worker, session, verifiers
        self._head = worker.description
        self._may_lead = False
        self._given = 0  # positions that the head was given or does without
        self._last: DraftStep | None = None  # the client's
        self._ahead: _Ahead | None = None
        self._leads = 0  # drafts begun unasked
        self._asked = deque[tuple[DraftStep, int]]()  # steps that wait for features, and those behind
        self._asking: asyncio.Task[None] | None = None
        self._ref = FeatureRef("", "", 0, 0)  # the session that is followed, if it has a name
        self._rows = bytearray()  # features of the positions _given.._end-1, if the head reads any
        self._end = 0
        self._dtype = ""
        self._news = asyncio.Event()
        self._stream: Stream | None = None
        self._task: asyncio.Task[None] | None = None
        self._reason: object = ""  # of the stream's end
        self._opened = False  # the head was given the prompt
        self._closed = False

    async def open(self, opening: OpenDraft, leads: bool) -> OpenDraft:
        """The opening with the features that the head reads; `leads`: drafts may begin unasked. Raises CoppiceError."""
        self._may_lead, self._given, end = leads, len(opening.ids), len(opening.ids)
        ref = opening.features.ref if opening.features else None
        reads = bool(self._head.feature_layers)
        if ref is None:
            if reads:
                raise InvalidField("open.features", f"a {self._head.kind} head reads the target's features")
            return replace(opening, features=None)
        if reads and ref.start >= end:
            raise InvalidField("open.features", f"begin at position {ref.start} of {end} committed ids")
        self._given = ref.start if reads else end
        self._follow(ref, "open.features.ref")
        if reads:
            await self._come(end, OPEN_S)
        self._opened = True
        return replace(opening, features=self._take(end) if reads else None)

    def ask(self, step: DraftStep, arrived: int) -> None:
        """Take the client's step, which came at `arrived` and may wait for features. Raises InvalidField."""
        self._asked.append((step, arrived))
        if (self._asking is None or self._asking.done()) and (end := self._take_asked()):
            self._asking = asyncio.create_task(self._catch_up(end))

    async def _catch_up(self, end: int) -> None:
        """Wait for the features up to `end` that a step needs, then give it to the worker."""
        try:
            while end:
                await self._come(end, STEP_S)
                end = self._take_asked()
        except Exception as error:
            self._session.answer(error)

    def _take_asked(self) -> int:
        """Do what waiting steps ask; up to where one of them needs features, 0: none does. Raises InvalidField."""
        while self._asked and not self._closed:
            if end := self._ask(*self._asked[0]):
                return end
            self._asked.popleft()
        return 0

    def _ask(self, step: DraftStep, arrived: int) -> int:
        ref, own = step.advance.features.ref if step.advance.features else None, self._ref
        if ref is not None and (own.verifier, own.session) != (ref.verifier, ref.session):
            self._follow(ref, "step.advance.features.ref")
        self._last, ahead, fence = step, self._ahead, step.fence
        if ahead is not None and ahead.answers(step):
            ahead.fence = fence
            for delta in ahead.deltas:
                self._session.answer(delta)
            ahead.deltas.clear()
            return 0
        self._ahead = None
        new = fence.committed_len - self._given
        if new < 0:
            self._session.answer(TreeDelta(fence, DraftTree.empty(), last=True))  # the text has gone on
            return 0
        ids = step.advance.ids[max(0, len(step.advance.ids) - new) :]
        features = None
        if ids and self._head.feature_layers:
            end = self._given + len(ids)
            if self._end < end:
                return end
            features = self._take(end)
        self._given = fence.committed_len
        self._give(replace(step, advance=Advance(ids, features, step.advance.rejection)), arrived)
        return 0

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
        self._stop()
        if self._asking is not None:
            self._asking.cancel()

    def _give(self, step: DraftStep, arrived: int) -> None:
        self._session.sent += 1
        self._worker.step(self._session, step, arrived)

    def _lead(self, commit: Commit) -> None:
        """Draft on from a commit, if the last step was asked for a draft of the text before it."""
        last, end = self._last, commit.fence.committed_len
        if not self._may_lead or last is None or not last.budget or commit.root is None:
            return
        if not last.fence.committed_len == commit.start == self._given:
            return
        features = self._take(end) if self._head.feature_layers else None
        self._given = end
        self._leads += 1
        fence = replace(commit.fence, step=-self._leads, deadline_ns=last.fence.deadline_ns)
        self._ahead = _Ahead(DraftStep(fence, commit.root, last.budget, Advance(list(commit.ids), features)))
        self._give(self._ahead.step, time.perf_counter_ns())

    def _follow(self, ref: FeatureRef, field: str) -> None:
        """Follow this session, and no other one. Raises InvalidField."""
        layers = self._head.feature_layers
        if layers and ref.layers not in ((), layers):
            raise InvalidField(f"{field}.layers", f"are {ref.layers}, this head reads those of {layers}")
        self._stop()
        self._ref = ref
        if not layers:
            self._begin(self._given)

    def _begin(self, end: int) -> None:
        """Follow anew, with rows of the positions that the head was not given; those up to `end` are committed."""
        self._stop()
        start, layers = self._given, self._head.feature_layers
        ref = replace(self._ref, start=start, count=end - start if layers else 0, layers=layers)
        self._reason = "the session has ended"
        self._task = asyncio.create_task(self._read(ref))
        self._task.add_done_callback(lambda _: self._news.set())

    def _stop(self) -> None:
        """End the stream, so that the verifier drops it at once, and forget what it brought."""
        stream, task = self._stream, self._task
        self._stream = self._task = None
        self._rows.clear()
        self._end = self._given
        self._news.set()
        if stream is not None:
            stream.cancel()  # the task ends with it: grpc.aio never frees what belongs to a read that is cancelled
        elif task is not None:
            task.cancel()

    async def _come(self, end: int, within_s: float) -> None:
        """Wait for features before `end`, also from a new stream. Raises Unavailable, InvalidField."""
        try:
            async with asyncio.timeout(within_s):
                for _ in range(2 if self._opened else 1):
                    if self._end < end and not self._closed and (self._task is None or self._task.done()):
                        self._begin(end)
                    while self._end < end and self._task is not None and not self._task.done():
                        self._news.clear()
                        await self._news.wait()
        except TimeoutError:
            self._reason = f"not in {within_s:g} s"
        if self._end >= end > self._given:  # else the first rows that there are lie behind them
            return
        if isinstance(self._reason, InvalidField) and self._reason.field.startswith(("open.", "step.")):
            raise self._reason
        raise Unavailable(f"no features from the verifier at {self._ref.verifier}: {self._reason}")

    def _take(self, end: int) -> Features:
        """Features of the positions up to `end`, which have come; they are kept no longer."""
        start, count = self._given, end - self._given
        rows, size = self._rows, len(self._rows) // (self._end - start) * count
        self._rows = rows[size:]
        del rows[size:]
        self._given = end
        return Features(start, count, self._dtype, bytes(rows))

    async def _read(self, ref: FeatureRef) -> None:
        """Take what the verifier sends, until it ends, or skips positions, or nobody asks for what it sends."""
        stream: Stream | None = None
        try:
            stream = self._stream = await self._verifiers.follow(ref, self._head.vocab_size)
            async for item in stream:
                if self._stream is not stream:
                    return
                features = item.features if isinstance(item, Commit) else item
                if features is not None:
                    self._append(features)
                elif ref.count:
                    raise InvalidField("features", "do not come with a commit")
                if isinstance(item, Commit):
                    self._lead(item)
                    if self._opened and self._end - self._given > _MOST_UNASKED:
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

    def _append(self, features: Features) -> None:
        """Keep rows behind the others. Those of an opening may begin later than was asked for."""
        if features.start > self._end and not self._rows:
            if self._opened:
                raise InvalidField("step.advance", f"the verifier no longer has the features of position {self._given}")
            self._given = features.start
        elif features.start != self._end:
            raise InvalidField("features", f"positions from {features.start} on do not follow {self._end}")
        self._dtype = features.dtype
        self._rows += features.inline or b""
        self._end = features.start + features.count


class DrafterServicer:
    """Checks what comes in, hands it to a head's worker, sends what comes back."""

    def __init__(self, workers: Mapping[str, Worker], limits: Limits, verifiers: Verifiers) -> None:
        """workers: of the heads, by their pools' names."""
        self.workers, self._limits, self._verifiers = workers, limits, verifiers

    def _named(self, context: grpc.aio.ServicerContext) -> str:
        """The head that a call's metadata name, or the only one. Raises InvalidField, Unavailable."""
        name = next(iter(self.workers))
        if len(self.workers) > 1:
            metadata = context.invocation_metadata() or ()
            name = next((value.decode(errors="replace") for key, value in metadata if key == HEAD), "")
        if name not in self.workers:
            raise InvalidField(HEAD, f"names {name!r}; here are {', '.join(self.workers)}")
        if self.workers[name].failed.is_set():
            raise Unavailable(f"the head {name} has failed")
        return name

    async def Draft(self, requests: Inbox, context: Context) -> AsyncIterator[Any]:
        """One session: `open`, then steps. A newer step supersedes an older one that is not drafted yet."""
        message = await anext(requests, None)
        if message is None:
            return
        worker = self.workers[self._named(context)]
        opening = drafter.read_draft_request(message, worker.description.vocab_size)
        if not isinstance(opening, OpenDraft):
            raise InvalidField("kind", "the first message of a session is open")
        if worker.description.sessions >= self._limits.sessions:
            raise Overloaded(f"all {self._limits.sessions} sessions are taken")
        trace, began = tracing.current(), time.perf_counter_ns()
        opened: asyncio.Future[DraftOpened] = asyncio.get_running_loop().create_future()
        session = worker.admit_session(partial(settle, opened))
        following = Following(worker, session, self._verifiers)

        def take(message: Any) -> None:
            arrived, step = time.perf_counter_ns(), drafter.read_draft_request(message, worker.description.vocab_size)
            if not isinstance(step, DraftStep):
                raise InvalidField("kind", "the session is open already")
            session.check_backlog()
            session.newest, requests.is_busy = step.fence.step, True
            following.ask(step, arrived)

        def answer(part: Answer) -> None:
            if isinstance(part, TreeDelta) and (delta := following.answer(part)) is not None:
                woken = time.perf_counter_ns()
                message = drafter.draft_response_to_wire(delta).SerializeToString()
                encoded = time.perf_counter_ns()
                context.send(message)
                if trace is not None and delta.last:
                    _add_draft(trace, delta, *session.drafting, woken, encoded)
                if delta.last and delta.fence.step == session.newest:
                    session.newest = None
                    requests.answered()
            elif isinstance(part, Exception):
                requests.end(part)

        try:
            worker.open(session, await following.open(opening, not opening.want_misses))
            yield drafter.draft_response_to_wire(await opened)
            if trace is not None:
                trace.add("open", began, time.perf_counter_ns())
            session.answer = answer
            await requests.listen(take)
        finally:
            following.close()
            worker.close(session)

    async def DescribeHead(
        self, request: drafter_pb2.DescribeHeadRequest, context: grpc.aio.ServicerContext
    ) -> drafter_pb2.DescribeHeadResponse:
        return drafter.head_to_wire(self.workers[self._named(context)].description)

    async def SyncWeights(
        self, requests: AsyncIterator[Any], context: grpc.aio.ServicerContext
    ) -> drafter_pb2.SyncWeightsResponse:
        """One push of weights, beside the drafts; what is in use is acknowledged: its answer may have been lost.

        Raises Overloaded beside another push, and what Staging raises.
        """
        worker = self.workers[self._named(context)]
        try:
            if worker.syncing.locked():
                raise Overloaded("another weight sync is running")
            async with worker.syncing:
                return drafter.synced_to_wire(await self._sync(worker, requests))
        except CoppiceError as error:
            log.warning("weights refused", reason=str(error))
            await self._drop(requests)
            raise

    async def _sync(self, worker: Worker, messages: AsyncIterator[Any]) -> drafter.WeightsSynced:
        """Read one push to its end and put it to use."""
        began = time.perf_counter()
        header = await self._next(messages)
        if not isinstance(header, drafter.WeightsHeader):
            raise InvalidField("kind", "the first message of a weight sync is header")
        from .staging import Staging  # with torch, which heads that count do without

        staging = Staging(header, worker.head)
        if staging.in_use:
            await self._drop(messages)
            return drafter.WeightsSynced(header.version, header.weights_hash)
        while (part := await self._next(messages)) is not None:
            if not isinstance(part, drafter.WeightsPart):
                raise InvalidField("kind", "every message but the first is part")
            await asyncio.to_thread(staging.add, part)  # the disk would hold up the deltas of every session
        prepared = await asyncio.to_thread(staging.prepare)  # beside the drafts
        swap_ns, old = await worker.run(partial(staging.swap, *prepared))  # between two of them
        await asyncio.to_thread(old.clear)  # freeing them takes a while
        took = round(time.perf_counter() - began, 3)
        log.info("weights in use", version=header.version, bytes=staging.size, took_s=took, swap_us=swap_ns // 1000)
        return drafter.WeightsSynced(header.version, header.weights_hash, swap_ns)

    async def _next(self, messages: AsyncIterator[Any]) -> drafter.WeightsHeader | drafter.WeightsPart | None:
        """The next message; None at the end. Raises Unavailable when none comes for a while."""
        async with within(PART_S, Unavailable(f"no part for {PART_S:g} s")):
            message = await anext(messages, None)
        return None if message is None else drafter.read_weights(message)

    async def _drop(self, messages: AsyncIterator[Any]) -> None:
        """Read what still comes. A sender whose write fails reports that, and not the status that we end with."""
        with contextlib.suppress(TimeoutError, CoppiceError):
            async with asyncio.timeout(DROP_S):
                async for _ in messages:
                    pass


def _add_draft(trace: tracing.Trace, delta: TreeDelta, arrived: int, began: int, woken: int, encoded: int) -> None:
    """Add the draft that a delta ends; the thread `began` on it, the event loop was woken at `woken` to encode it."""
    if not trace.samples(delta.fence.step):
        return
    ended = arrived + delta.total_ns
    parts = {"queue": began - arrived, "forward": delta.forward_ns, "tree": ended - began - delta.forward_ns}
    parts |= {"wake": woken - ended, "encode": encoded - woken}
    trace.add("draft", arrived, encoded, parts, step=delta.fence.step)


@contextlib.asynccontextmanager
async def drafting(
    each: Mapping[str, Settings],
    metrics: SessionMetrics,
    verifier: Any = None,
    host: BatchingThread | None = None,
) -> AsyncIterator[DrafterServicer]:
    """Load heads and serve them inside the block.

    each: the settings of every head, by its pool's name, which differ in section drafter alone. verifier and host:
    those of this process, which computes on the host's thread. Raises InvalidField, and what a head's builder raises.
    """
    settings = next(iter(each.values()))
    producer, sends = Producer(settings.adaptation.redis, metrics.registry, list(each)), bool(settings.adaptation.redis)
    workers = {
        name: Worker(partial(served_head, own.drafter), metrics, Samples(producer, name) if sends else None, host)
        for name, own in each.items()
    }
    allowed, redis = settings.drafter.verifiers, settings.directory.redis
    addresses = directory(allowed, "verifier", "", redis, "drafter.verifiers") if allowed else None
    verifiers = Verifiers(Dialer(settings.tls), addresses, verifier)
    for worker in workers.values():
        await worker.start()
    watching = asyncio.create_task(addresses.run(lambda changed: None)) if addresses else None
    if sends:
        producer.start()
    try:
        yield DrafterServicer(workers, settings.limits, verifiers)
    finally:
        if watching:
            watching.cancel()
        for worker in workers.values():
            await worker.stop()
        await producer.stop()
