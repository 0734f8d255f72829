"""The thread that owns the head: it applies what sessions send, in order, and drafts all that wait in one call."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import structlog

from coppice import failpoints, limits
from coppice.engine.batching import Returns
from coppice.errors import InvalidField, StaleFence
from coppice.heads.base import DraftJob, Growth, Head, Miss, Spare
from coppice.messages.steps import (
    Advance,
    DraftStep,
    Fence,
    HeadDescription,
    OpenDraft,
    Rejection,
    TreeDelta,
    WeightsHeader,
    committed_hash,
)
from coppice.speculation.sampling import SamplingParams
from coppice.telemetry import SessionMetrics
from services.drafter.garbage import garbage
from services.drafter.samples import Samples, Window
from services.drafter.session import Answer, Opened, Session

if TYPE_CHECKING:
    from coppice.weights.staging import Staging

log = structlog.get_logger()

HASH_CHUNK = 4096  # prompt ids hashed before other sessions get their turn


@dataclass(slots=True)
class _Live:
    """What a session drafts with, and the ids it has committed."""

    sampling: SamplingParams
    coupled: bool
    want_q_rows: bool
    name: str
    window: Window | None  # what samples are cut from, when any may be wanted
    length: int = 0
    hash: int = committed_hash(())

    def append(self, ids: Sequence[int]) -> None:
        self.hash = committed_hash(ids, self.hash)
        self.length += len(ids)


@dataclass(frozen=True, slots=True)
class _Missed:
    """What the draft before a step missed by, and what a sample of it needs."""

    miss: Miss
    rejection: Rejection
    version: int


@dataclass(slots=True)
class _Waiting:
    """A step that is not drafted yet."""

    session: Session
    fence: Fence
    arrived_ns: int
    job: DraftJob
    missed: _Missed | None
    held: list[TreeDelta] = field(default_factory=list)  # deltas that go out with the next one
    sent: bool = False  # some of its deltas are out
    done: bool = False

    @property
    def early(self) -> bool:
        """Whether the rest of the tree will be in time too: less than a quarter of the time there is has passed."""
        return time.perf_counter_ns() - self.arrived_ns < self.fence.deadline_ns / 4


class Worker:
    """One head on one thread. `start` and the verbs below it are for the event loop; the rest is the thread's."""

    def __init__(
        self,
        build: Callable[[], Head],
        metrics: SessionMetrics,
        max_context: int = 0,
        samples: Samples | None = None,
    ) -> None:
        """`build` runs on the thread; `max_context` 0 leaves the bound on a session's length to limits and head."""
        self._build, self._metrics, self._samples = build, metrics, samples
        self._max_context = max_context or limits.MAX_CONTEXT
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="head", daemon=True)
        self._running = True
        self.failed = asyncio.Event()
        """the thread ended by an error; the process is of no more use"""
        # Each has one writer, the loop and the thread; a session counts as closed when the head has let go of it.
        self._opened = self._closed = 0
        self._live: dict[Session, _Live] = {}
        self._openings: deque[tuple[Session, Iterator[None]]] = deque()
        self._waiting: dict[Session, _Waiting] = {}
        self._returns = Returns()
        self._draft_s = 0.0  # moving average of a batch

    async def start(self) -> None:
        """Start the thread and wait for the head. Raises what `build` raises."""
        self._loop = asyncio.get_running_loop()
        self._built: asyncio.Future[None] = self._loop.create_future()
        self._thread.start()
        await self._built

    @property
    def description(self) -> HeadDescription:
        """What the head is and how many sessions it has."""
        opened, closed = self._opened, self._closed
        return replace(self._head.description, sessions=opened - closed, sessions_opened=opened, sessions_closed=closed)

    @property
    def sessions(self) -> int:
        """Sessions that the head holds or is about to."""
        return self._opened - self._closed

    def open(self, session: Session, opening: OpenDraft) -> None:
        """Open a session; Opened or an error is posted to it. `close` must follow."""
        self._opened += 1
        self._metrics.opened.inc()
        self._inbox.put(lambda: self._take_open(session, opening))

    def step(self, session: Session, step: DraftStep) -> None:
        """Advance an opened session and draft; deltas or an error are posted to it."""
        arrived_ns = time.perf_counter_ns()
        self._inbox.put(lambda: self._take_step(session, step, arrived_ns))

    def close(self, session: Session) -> None:
        """Free a session that was given to `open`."""
        self._inbox.put(lambda: self._take_close(session))

    def staging(self, header: WeightsHeader) -> Staging:
        """Where the parts of a push of weights go. Raises what the head's own `staging` raises."""
        return self._head.staging(header)

    async def replace_weights(self, staging: Staging) -> int:
        """Check what was staged, make it ready beside the drafts and put it to use between two of them.

        Returns for how long nothing was drafted, nanoseconds. Raises what the head's `spare` and `swap` raise.
        """
        spare = await asyncio.to_thread(self._head.spare, staging)
        swapped: asyncio.Future[int] = self._loop.create_future()
        self._inbox.put(lambda: self._take_swap(spare, swapped))
        swap_ns = await swapped
        await asyncio.to_thread(spare.release)
        return swap_ns

    async def stop(self) -> None:
        """End the thread after what it is doing."""
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join, 10)

    def _run(self) -> None:
        try:
            self._head = self._build()
        except BaseException as error:
            self._loop.call_soon_threadsafe(self._built.set_exception, error)
            return
        self._loop.call_soon_threadsafe(self._built.set_result, None)
        try:
            while self._running:
                self._collect()
                if self._waiting:
                    waiting, self._waiting = list(self._waiting.values()), {}
                    self._draft(waiting)
                if self._openings:
                    self._open_some()
        except BaseException:
            log.exception("the head's thread died")
            self._loop.call_soon_threadsafe(self.failed.set)

    def _collect(self) -> None:
        """Take what came in; wait for work, and for the sessions drafted for last that usually are back soon."""
        if not (self._waiting or self._openings):
            self._take(self._inbox.get())
        latest = time.perf_counter() + self._draft_s
        while self._running:
            try:
                self._take(self._inbox.get_nowait())
            except queue.Empty:
                left = latest - time.perf_counter()
                if left <= 0 or not self._waiting or self._openings or not self._returns.missing(self._waiting, latest):
                    return
                with suppress(queue.Empty):
                    self._take(self._inbox.get(timeout=left))

    def _take(self, message: Callable[[], None] | None) -> None:
        if message is None:
            self._running = False
        else:
            message()

    def _take_open(self, session: Session, opening: OpenDraft) -> None:
        learns = self._samples is not None and opening.want_misses and opening.features is not None
        window = self._samples.window() if self._samples and learns else None
        self._live[session] = _Live(opening.sampling, opening.coupled, opening.want_q_rows, opening.session, window)
        self._openings.append((session, self._opening(session, opening)))

    def _opening(self, session: Session, opening: OpenDraft) -> Iterator[None]:
        """Hash the prompt and let the head take it, a chunk at a time."""
        self._check_length("open.ids", len(opening.ids))
        live = self._live[session]
        for start in range(0, len(opening.ids), HASH_CHUNK):
            live.append(opening.ids[start : start + HASH_CHUNK])
            yield
        yield from self._head.open(session.key, opening)
        if live.window is not None and opening.features is not None:
            live.window.append(opening.ids, opening.features)

    def _open_some(self) -> None:
        """One chunk of one opening, the openings in turn."""
        session, opening = self._openings.popleft()
        try:
            next(opening)
        except StopIteration:
            self._post([(session, Opened(self._head.description.weights_version))])
        except Exception as error:
            self._fail(session, error)
        else:
            self._openings.append((session, opening))

    def _take_step(self, session: Session, step: DraftStep, arrived_ns: int) -> None:
        """Apply the step's advance; the step then waits, in place of an older one of its session."""
        session.taken += 1
        live = self._live.get(session)
        if live is None:  # the session failed meanwhile
            return
        try:
            missed = self._advance(session, live, step)
        except Exception as error:
            self._fail(session, error)
            return
        self._returns.came(session, arrived_ns / 1e9)
        job = DraftJob(session.key, step.root, live.length, step.budget, live.sampling, live.coupled, live.want_q_rows)
        self._waiting[session] = _Waiting(session, step.fence, arrived_ns, job, missed)

    def _advance(self, session: Session, live: _Live, step: DraftStep) -> _Missed | None:
        fence, ids, before = step.fence, step.advance.ids, live.length
        self._check_length("step.advance.ids", before + len(ids))
        live.append(ids)
        if (fence.committed_len, fence.committed_hash) != (live.length, live.hash):
            raise StaleFence(
                f"step {fence.step} is about {fence.committed_len} tokens with hash {fence.committed_hash:016x}; "
                f"expected {live.length} tokens with hash {live.hash:016x}"
            )
        if ids and self._head.description.feature_layers:
            _check_covered(before, step.advance)
        miss = self._head.advance(session.key, step.advance)
        if ids and live.window is not None and step.advance.features is not None:
            live.window.append(ids, step.advance.features)
        if miss is None or step.advance.rejection is None:
            return None
        return _Missed(miss, step.advance.rejection, self._head.description.weights_version)

    def _check_length(self, field: str, length: int) -> None:
        if length > self._max_context:
            raise InvalidField(field, f"make {length} positions, this drafter holds {self._max_context}")

    def _take_close(self, session: Session) -> None:
        self._forget(session)
        try:
            self._head.close(session.key)
        except Exception:
            log.exception("closing failed", session=session.key)
        self._closed += 1
        self._metrics.closed.inc()

    def _take_swap(self, spare: Spare, swapped: asyncio.Future[int]) -> None:
        began = time.perf_counter_ns()
        try:
            spare.swap()
        except Exception as error:
            self._loop.call_soon_threadsafe(_settle, swapped, error)
        else:
            self._loop.call_soon_threadsafe(_settle, swapped, time.perf_counter_ns() - began)

    def _fail(self, session: Session, error: Exception) -> None:
        """End one session by an error; its stream's end closes it."""
        self._forget(session)
        self._post([(session, error)])

    def _forget(self, session: Session) -> None:
        self._live.pop(session, None)
        self._waiting.pop(session, None)
        self._returns.closed(session)
        self._openings = deque(opening for opening in self._openings if opening[0] is not session)

    def _draft(self, waiting: list[_Waiting]) -> None:
        """One call of the head. When it fails, the sessions that have nothing yet are drafted one by one."""
        began, forward_before = time.perf_counter_ns(), self._head.forward_ns
        failpoints.hit("drafter.slow")
        self._metrics.forwards.inc()
        self._metrics.rows.inc(len(waiting))
        try:
            for grown in self._head.draft([one.job for one in waiting]):
                self._send(waiting, grown, self._head.forward_ns - forward_before)
            if not all(one.done for one in waiting):
                raise RuntimeError("the head left a draft without an end")
        except Exception as error:
            unfinished = [one for one in waiting if not one.done]
            log.warning("drafting failed", sessions=len(waiting), unfinished=len(unfinished), error=repr(error))
            for one in unfinished:
                one.held.clear()
                if one.sent or len(waiting) == 1:
                    self._fail(one.session, error)
                else:
                    self._draft([one])
        ended = time.perf_counter_ns()
        took = (ended - began) / 1e9
        self._draft_s = 0.9 * (self._draft_s or took) + 0.1 * took
        self._returns.answered([one.session for one in waiting if one.done], ended / 1e9)
        self._metrics.forward_seconds.observe(took)
        for one in waiting:
            self._offer(one)

    def _send(self, waiting: list[_Waiting], grown: list[Growth], forward_ns: int) -> None:
        """Post what grew; a part whose tree is not complete goes with the next one while there is time.

        Each wakes this process's event loop, which takes the interpreter from the thread, and the orchestrator.
        """
        answers: list[tuple[Session, Answer]] = []
        for part in grown:
            one = waiting[part.job]
            one.held.append(self._delta(one, part, forward_ns))
            if part.last or not one.early:
                answers += ((one.session, delta) for delta in one.held)
                one.held.clear()
                one.sent, one.done = True, part.last
        if answers:
            self._post(answers)

    def _offer(self, one: _Waiting) -> None:
        """Make a sample of what was missed, now that the draft is out."""
        missed, one.missed = one.missed, None
        live = self._live.get(one.session)
        if missed and self._samples and live and live.window:
            self._samples.offer(live.name, live.window, missed.version, missed.rejection, missed.miss)

    def _delta(self, one: _Waiting, part: Growth, forward_ns: int) -> TreeDelta:
        miss = one.missed.miss.value if one.missed and not one.sent and not one.held else None
        asked = one.fence
        version = self._head.description.weights_version
        step = asked.step - failpoints.hit("drafter.stale")
        fence = Fence(step, asked.committed_len, asked.committed_hash, version, asked.deadline_ns)
        nodes = garbage(part.nodes) if failpoints.hit("drafter.garbage") else part.nodes
        total_ns = time.perf_counter_ns() - one.arrived_ns
        return TreeDelta(fence, nodes, part.last, forward_ns, total_ns, part.q_rows, miss)

    def _post(self, answers: list[tuple[Session, Answer]]) -> None:
        """Hand answers to the event loop in one wake-up."""
        self._loop.call_soon_threadsafe(_deliver, answers)


def _check_covered(start: int, advance: Advance) -> None:
    """Raise InvalidField unless the advance holds features of exactly its ids, the first at position `start`."""
    features, wanted = advance.features, (start, len(advance.ids))
    if features is None or features.inline is None or (features.start, features.count) != wanted:
        raise InvalidField("step.advance.features", f"this head reads those of {wanted[1]} positions from {start}")


def _settle(future: asyncio.Future[int], outcome: int | Exception) -> None:
    """Answer a caller, unless it has left."""
    if future.done():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


def _deliver(answers: list[tuple[Session, Answer]]) -> None:
    for session, answer in answers:
        session.answers.put_nowait(answer)
