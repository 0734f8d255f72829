"""DrafterService on the wire: sessions live on links. And `drafting`, which serves the heads of a process."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import Any

import grpc.aio
import structlog

from coppice.adaptation.signals import Producer
from coppice.config.settings import Settings
from coppice.engine.batching import BatchingThread, settle
from coppice.errors import CoppiceError, InvalidField, Overloaded, Unavailable
from coppice.heads.base import served_head
from coppice.limits import Limits
from coppice.rpc import tracing
from coppice.rpc.channels import HEAD, Dialer
from coppice.rpc.directory import directory
from coppice.rpc.link import Context, Inbox
from coppice.rpc.server import Serving, StreamWaits, within
from coppice.telemetry import SessionMetrics
from coppice.v1 import drafter_pb2
from coppice.wire import drafter
from coppice.wire.drafter import DraftOpened, DraftStep, OpenDraft, TreeDelta, WeightsHeader, WeightsPart, WeightsSynced

from .following import Following, LocalVerifier, Verifiers
from .worker import Answer, Samples, Worker

log = structlog.get_logger()

PART_S = 30.0  # longest wait for a part of it: others wait for its end
DROP_S = 5.0  # longest wait for the end of a push that is refused or needless


class DrafterServicer:
    """Checks what comes in, hands it to a head's worker, sends what comes back."""

    def __init__(self, workers: Mapping[str, Worker], limits: Limits, waits: StreamWaits, verifiers: Verifiers) -> None:
        """workers: of the heads, by their pools' names."""
        self.workers, self._limits, self._waits, self._verifiers = workers, limits, waits, verifiers

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
        message = await self._waits.next(requests)
        if message is None:
            return
        worker = self.workers[self._named(context)]
        opening = drafter.read_draft_request(message, worker.description.vocab_size)
        if not isinstance(opening, OpenDraft):
            raise InvalidField("kind", "the first message of a session is open")
        if worker.sessions >= self._limits.sessions:
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
                    self._waits.answered(requests)
            elif isinstance(part, Exception):
                requests.end(part)

        try:
            worker.open(session, await following.open(opening, not opening.want_misses))
            yield drafter.draft_response_to_wire(await opened)
            if trace is not None:
                trace.add("open", began, time.perf_counter_ns())
            session.answer = answer
            await self._waits.listen(requests, take)
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

    async def _sync(self, worker: Worker, messages: AsyncIterator[Any]) -> WeightsSynced:
        """Read one push to its end and put it to use."""
        began = time.perf_counter()
        header = await self._next(messages)
        if not isinstance(header, WeightsHeader):
            raise InvalidField("kind", "the first message of a weight sync is header")
        from .staging import Staging  # with torch, which heads that count do without

        staging = Staging(header, worker.head)
        if staging.in_use:
            await self._drop(messages)
            return WeightsSynced(header.version, header.weights_hash)
        while (part := await self._next(messages)) is not None:
            if not isinstance(part, WeightsPart):
                raise InvalidField("kind", "every message but the first is part")
            await asyncio.to_thread(staging.add, part)  # the disk would hold up the deltas of every session
        prepared = await asyncio.to_thread(staging.prepare)  # beside the drafts
        swap_ns, old = await worker.run(partial(staging.swap, *prepared))  # between two of them
        await asyncio.to_thread(old.clear)  # freeing them takes a while
        took = round(time.perf_counter() - began, 3)
        log.info("weights in use", version=header.version, bytes=staging.size, took_s=took, swap_us=swap_ns // 1000)
        return WeightsSynced(header.version, header.weights_hash, swap_ns)

    async def _next(self, messages: AsyncIterator[Any]) -> WeightsHeader | WeightsPart | None:
        """The next message; None at the end. Raises Unavailable when none comes for a while."""
        async with within(PART_S, Unavailable(f"no part for {PART_S:g} s")):
            message = await self._waits.next(messages)
        return None if message is None else drafter.read_weights(message)

    async def _drop(self, messages: AsyncIterator[Any]) -> None:
        """Read what still comes. A sender whose write fails reports that, and not the status that we end with."""
        with contextlib.suppress(TimeoutError, CoppiceError):
            async with asyncio.timeout(DROP_S):
                while await self._waits.next(messages) is not None:
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
    serving: Serving,
    metrics: SessionMetrics,
    verifier: LocalVerifier | None = None,
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
    watching = asyncio.create_task(verifiers.run())
    if sends:
        producer.start()
    try:
        yield DrafterServicer(workers, settings.limits, serving.waits, verifiers)
    finally:
        watching.cancel()
        for worker in workers.values():
            await worker.stop()
        await producer.stop()
