"""DrafterService on the wire: one session is one stream."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc.aio
import structlog

from coppice.errors import CoppiceError, InvalidField, Overloaded, Unavailable
from coppice.limits import Limits
from coppice.rpc import tracing
from coppice.rpc.sessions import StreamWaits
from coppice.v1 import drafter_pb2
from coppice.wire.drafter import (
    DraftOpened,
    DraftStep,
    OpenDraft,
    TreeDelta,
    WeightsHeader,
    WeightsPart,
    WeightsSynced,
    draft_response_to_wire,
    head_to_wire,
    read_draft_request,
    read_weights,
    synced_to_wire,
)

from .features import FeatureSource
from .following import Following
from .session import Session
from .worker import Worker

log = structlog.get_logger()

PART_S = 30.0  # longest wait for a part of it: others wait for its end
DROP_S = 5.0  # longest wait for the end of a push that is refused or needless


class WeightSync:
    """Takes pushes for a worker's head."""

    def __init__(self, worker: Worker, limits: Limits, waits: StreamWaits) -> None:
        self._worker, self._limits, self._waits = worker, limits, waits
        self._turn = asyncio.Lock()

    async def take(self, messages: AsyncIterator[Any]) -> WeightsSynced:
        """Read one push to its end and put it to use; a push of what is in use is acknowledged unchecked.

        The answer may be lost when the weights are in use already, so a sender asks again with the same push. Raises
        Overloaded beside another push, and what Staging raises.
        """
        try:
            if self._turn.locked():
                raise Overloaded("another weight sync is running")
            async with self._turn:
                return await self._take(messages)
        except CoppiceError as error:
            log.warning("weights refused", why=str(error))
            await self._drop(messages)
            raise

    async def _take(self, messages: AsyncIterator[Any]) -> WeightsSynced:
        began = time.perf_counter()
        header = await self._next(messages)
        if not isinstance(header, WeightsHeader):
            raise InvalidField("kind", "the first message of a weight sync is header")
        staging = self._worker.staging(header)
        if staging.in_use:
            await self._drop(messages)
            return WeightsSynced(header.version, header.weights_hash)
        while (part := await self._next(messages)) is not None:
            if not isinstance(part, WeightsPart):
                raise InvalidField("kind", "every message but the first is part")
            await asyncio.to_thread(staging.add, part)  # hashing it would hold up the deltas of every session
        swap_ns = await self._worker.replace_weights(staging)
        took = round(time.perf_counter() - began, 3)
        log.info("weights in use", version=header.version, bytes=header.size, took_s=took, swap_us=swap_ns // 1000)
        return WeightsSynced(header.version, header.weights_hash, swap_ns)

    async def _drop(self, messages: AsyncIterator[Any]) -> None:
        """Read what still comes. A sender whose write fails reports that, and not the status that we end with."""
        with contextlib.suppress(TimeoutError, CoppiceError):
            async with asyncio.timeout(DROP_S):
                while await self._waits.next(messages) is not None:
                    pass

    async def _next(self, messages: AsyncIterator[Any]) -> WeightsHeader | WeightsPart | None:
        """The next message; None at the end. Raises Unavailable when none comes for a while."""
        try:
            async with asyncio.timeout(PART_S):
                message = await self._waits.next(messages)
        except TimeoutError:
            raise Unavailable(f"no part for {PART_S:g} s") from None
        return None if message is None else read_weights(message, self._limits.weights_bytes)


class DrafterServicer:
    """Checks what comes in, hands it to the worker, sends what comes back."""

    def __init__(
        self, worker: Worker, limits: Limits, waits: StreamWaits, source: FeatureSource, ahead: bool = True
    ) -> None:
        """ahead: whether drafts are begun before they are asked for."""
        self._worker, self._limits, self._waits, self._source, self._ahead = worker, limits, waits, source, ahead
        self._vocab_size = worker.description.vocab_size
        self._sync = WeightSync(worker, limits, waits)
        self._keys = itertools.count()
        self._fetching = 0
        self._readers: set[asyncio.Task[None]] = set()

    async def Draft(self, requests: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        """One session: `open`, then steps. A newer step supersedes an older one that is not drafted yet."""
        message = await self._waits.next(requests)
        if message is None:
            return
        opening = read_draft_request(message, self._vocab_size)
        if not isinstance(opening, OpenDraft):
            raise InvalidField("kind", "the first message of a session is open")
        if self._worker.sessions + self._fetching >= self._limits.sessions:
            raise Overloaded(f"all {self._limits.sessions} sessions are taken")
        trace, began = tracing.current(), time.perf_counter_ns()
        session = Session(next(self._keys))
        following = Following(self._worker, session, self._source)
        opening = await self._opened(following, opening)
        self._worker.open(session, opening)
        try:
            while not session.finished:
                answer = await session.answers.get()
                if isinstance(answer, Exception):
                    raise answer
                if isinstance(answer, TreeDelta):
                    answer = following.answer(answer)
                woken = time.perf_counter_ns()
                if isinstance(answer, DraftOpened):
                    # Steps are read only now: until then they wait in the transport, which bounds them.
                    # The reader is not cancelled: its last read ends with the call, as the server's own does.
                    reader = asyncio.create_task(self._read_steps(requests, session, following))
                    self._readers.add(reader)
                    reader.add_done_callback(self._readers.discard)
                elif answer is not None and answer.last and answer.fence.step == session.newest:
                    session.newest = None
                if answer is None:
                    continue
                message = draft_response_to_wire(answer)
                encoded = time.perf_counter_ns()
                yield message
                if trace is not None and isinstance(answer, DraftOpened):
                    trace.add("open", began, woken)
                elif trace is not None and isinstance(answer, TreeDelta) and answer.last:
                    _add_draft(trace, answer, *session.drafting, woken, encoded)
            if session.end is not None:
                raise session.end
        finally:
            following.close()
            self._worker.close(session)

    async def _opened(self, following: Following, opening: OpenDraft) -> OpenDraft:
        """The opening with the features inline, if the head reads any. Raises InvalidField, Unavailable."""
        self._fetching += 1
        try:
            leads = self._ahead and not opening.want_misses  # which are about a draft that was asked for
            return replace(opening, features=await following.open(opening.ids, opening.features, leads))
        finally:
            self._fetching -= 1

    async def _read_steps(self, requests: AsyncIterator[Any], session: Session, following: Following) -> None:
        """Hand steps to the worker until none comes any more; errors travel to the sender as answers."""
        try:
            while (message := await self._waits.next(requests)) is not None:
                arrived = time.perf_counter_ns()
                step = read_draft_request(message, self._vocab_size)
                if not isinstance(step, DraftStep):
                    raise InvalidField("kind", "the session is open already")
                session.check_backlog()
                session.newest = step.fence.step
                await following.ask(step, arrived)
        except Unavailable as end:
            session.finish(end)
        except Exception as error:
            session.answers.put_nowait(error)
        else:
            session.finish(None)

    async def DescribeHead(
        self, request: drafter_pb2.DescribeHeadRequest, context: grpc.aio.ServicerContext
    ) -> drafter_pb2.DescribeHeadResponse:
        """What is served, and how many sessions."""
        return head_to_wire(self._worker.description)

    async def SyncWeights(
        self, requests: AsyncIterator[Any], context: grpc.aio.ServicerContext
    ) -> drafter_pb2.SyncWeightsResponse:
        """One push of weights; drafting goes on beside it."""
        return synced_to_wire(await self._sync.take(requests))


def _add_draft(trace: tracing.Trace, delta: TreeDelta, arrived: int, began: int, woken: int, encoded: int) -> None:
    """Add the draft that a delta ends: in the queue until the thread `began`, in the head's forwards, in the tree that
    is made of them; then the event loop was woken, at `woken`, to encode it.
    """
    if not trace.samples(delta.fence.step):
        return
    made = arrived + delta.total_ns
    parts = {"queue": began - arrived, "forward": delta.forward_ns, "tree": made - began - delta.forward_ns}
    parts |= {"wake": woken - made, "encode": encoded - woken}
    trace.add("draft", arrived, encoded, parts, step=delta.fence.step)
