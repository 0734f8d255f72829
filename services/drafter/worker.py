"""The thread that owns the head: it applies what sessions send, in order, and drafts all that wait in one call."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import structlog

from coppice import failpoints
from coppice.adaptation.signals import Producer, Sample
from coppice.engine.batching import BatchingThread
from coppice.errors import Overloaded, StaleFence, Unavailable
from coppice.heads.base import DraftJob, Growth, Head
from coppice.limits import MAX_CONTEXT
from coppice.speculation.tree import DraftTree, extend
from coppice.telemetry import SessionMetrics
from coppice.wire.common import Features, Fence, committed_hash
from coppice.wire.drafter import Advance, DraftOpened, DraftStep, HeadDescription, OpenDraft, TreeDelta

log = structlog.get_logger()

HASH_CHUNK = 4096  # prompt ids hashed before other sessions get their turn
MAX_BACKLOG = 32  # steps not taken
WINDOW = 64  # positions of a sample
_LEAST_TEXT = 16  # committed positions of a text's end that are worth a sample

Answer = DraftOpened | TreeDelta | Exception


@dataclass(eq=False, slots=True)
class Session:
    """What lies above `taken` belongs to the event loop, the rest to the worker's thread."""

    key: int
    answer: Callable[[Answer], None]  # called on the event loop with what comes of its opening and its steps
    sent: int = 0  # steps handed to the worker
    newest: int | None = None  # number of the newest step while it is not answered
    taken: int = 0  # steps the worker took; the event loop reads it
    drafting: tuple[int, int] = 0, 0
    """when the step that is drafted for came, and when the thread began, of `perf_counter_ns`; the loop reads it"""
    opening: OpenDraft | None = None  # without ids and features
    length: int = 0
    hash: int = committed_hash(())
    too_long: bool = False  # longer than the head drafts for, so that the head does not hold it

    def check_backlog(self) -> None:
        """Raise Overloaded when the client sends steps faster than the head drafts."""
        if self.sent - self.taken > MAX_BACKLOG:
            raise Overloaded(f"more than {MAX_BACKLOG} steps are waiting")

    def append(self, ids: Sequence[int]) -> None:
        self.hash = committed_hash(ids, self.hash)
        self.length += len(ids)

    def advance(self, step: DraftStep) -> None:
        """Commit what a step says was committed. Raises StaleFence when the step is about another text."""
        fence = step.fence
        self.append(step.advance.ids)
        if (fence.committed_len, fence.committed_hash) != (self.length, self.hash):
            sent = f"{fence.committed_len} tokens with hash {fence.committed_hash:016x}"
            expected = f"{self.length} tokens with hash {self.hash:016x}"
            raise StaleFence(f"step {fence.step} is about {sent}; expected {expected}")


@dataclass(slots=True)
class Waiting:
    """A step that is not drafted yet, and the parts of its tree that were not sent yet."""

    session: Session
    fence: Fence
    arrived_ns: int
    job: DraftJob
    miss: float | None  # 1 - r of the draft before it
    parts: list[Growth] = field(default_factory=list)
    is_sent: bool = False  # in part
    is_done: bool = False

    def delta(self, weights_version: int, forward_ns: int) -> TreeDelta:
        """The parts as one message; they are kept no longer."""
        parts, fence = self.parts, self.fence
        nodes, last = extend(*[part.nodes for part in parts]), parts[-1].last
        step = fence.step - failpoints.hit("drafter.stale")
        if failpoints.hit("drafter.garbage"):
            nodes = replace(nodes, parents=nodes.parents + len(nodes))  # behind their children
        q_rows = [part.q_rows for part in parts if part.q_rows is not None]
        delta = TreeDelta(
            fence=Fence(step, fence.committed_len, fence.committed_hash, weights_version, fence.deadline_ns),
            nodes=nodes,
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


class _Window:
    """A session's latest committed positions: at most WINDOW ids and feature rows."""

    def __init__(self, opening: OpenDraft, features: Features) -> None:
        self.session, self.ids, self.rows = opening.session, list[int](), b""
        self.append(opening.ids, features)
        self.sampled = self.end  # the end of the last sample, before the first one the prompt's end

    def append(self, ids: list[int], features: Features) -> None:
        """Take the features of positions up to a new end, `ids` those of its last positions."""
        rows, count = features.inline or b"", min(features.count, len(ids), WINDOW)
        width = len(rows) // max(1, features.count)
        self.ids = [*self.ids, *ids[len(ids) - count :]][-WINDOW:]
        self.rows = (self.rows + rows[len(rows) - count * width :])[-len(self.ids) * width :]
        self.dtype, self.end, self.width = features.dtype or "float32", features.start + features.count, width


class Samples:
    """Cuts samples of sessions by their key, and queues them while an adapter learns from texts."""

    def __init__(self, producer: Producer, head: str) -> None:
        self._producer, self.head = producer, head
        self._windows: dict[int, _Window] = {}

    def open(self, key: int, opening: OpenDraft) -> None:
        """Take a session's prompt, if samples are wanted now and it comes with features."""
        if opening.features is not None and self._producer.demand_for(self.head):
            self._windows[key] = _Window(opening, opening.features)

    def advance(self, key: int, advance: Advance) -> None:
        """Take what a session committed. A window that is full of what was not sampled yet is a sample."""
        window = self._windows.get(key)
        if window is not None and advance.ids and advance.features is not None:
            window.append(advance.ids, advance.features)
            self._offer(window, WINDOW)

    def close(self, key: int) -> None:
        if window := self._windows.pop(key, None):
            self._offer(window, _LEAST_TEXT)

    def _offer(self, window: _Window, least: int) -> None:
        if window.end - window.sampled >= least and self._producer.demand_for(self.head):
            window.sampled = window.end
            sample = Sample(window.session, np.array(window.ids, np.int64), window.rows[: -window.width], window.dtype)
            self._producer.sample(self.head, sample)


class Worker(BatchingThread):
    """One head on one thread. What is public before `load` is for the event loop; the rest is the thread's."""

    def __init__(
        self,
        build: Callable[[], Head],
        metrics: SessionMetrics,
        samples: Samples | None = None,
        host: BatchingThread | None = None,
    ) -> None:
        """`build` runs on the thread. host: whose thread it is, see BatchingThread."""
        super().__init__("head", host=host)
        self._build, self._metrics, self._samples = build, metrics, samples
        self.syncing = asyncio.Lock()  # while a push of weights comes
        # Each has one writer, the loop and the thread; a session counts as closed when the head has let go of it.
        self._opened = self._closed = self._remembered = 0
        self._sessions: set[Session] = set()
        self._openings: deque[tuple[Session, Iterator[None]]] = deque()
        self._waiting: dict[Session, Waiting] = {}

    @property
    def description(self) -> HeadDescription:
        """What the head is and how many sessions it has or is about to."""
        opened, closed = self._opened, self._closed
        return replace(self.head.description, sessions=opened - closed, sessions_opened=opened, sessions_closed=closed)

    def admit_session(self, answer: Callable[[Answer], None]) -> Session:
        """A new session, which counts from now on; `close` must follow."""
        self._opened += 1
        self._metrics.opened.inc()
        return Session(self._opened, answer)

    def open(self, session: Session, opening: OpenDraft) -> None:
        """Have the head take a session's prompt; DraftOpened or an error is posted to it."""
        self.post(partial(self._take_open, session, opening))

    def step(self, session: Session, step: DraftStep, arrived_ns: int) -> None:
        """Advance an opened session and draft; deltas or an error are posted to it."""
        self.post(partial(self._take_step, session, step, arrived_ns))

    def close(self, session: Session) -> None:
        """Free a session, whether it was opened or not."""
        self.post(partial(self._take_close, session))

    def load(self) -> None:
        self.head = self._build()
        self._max_context = self.head.max_context or MAX_CONTEXT

    def idle(self) -> bool:
        """Whether neither a step nor an opening waits."""
        return not (self._waiting or self._openings)

    def waiting(self) -> Collection[Hashable]:
        """Sessions with a step, unless an opening waits, too."""
        return () if self._openings else self._waiting

    def serve(self) -> None:
        """Draft for all sessions that wait, then take one chunk of one opening, the openings in turn."""
        if self._waiting:
            waiting, self._waiting = list(self._waiting.values()), {}
            self._draft(waiting)
        if not self._openings:
            return
        session, opening = self._openings.popleft()
        try:
            next(opening)
        except StopIteration:
            opened = DraftOpened(self._version) if session.too_long else self.head.opened(session.key)
            self._post([(session, opened)])
        except Exception as error:
            self._fail(session, error)
        else:
            self._openings.append((session, opening))

    def _take_open(self, session: Session, opening: OpenDraft) -> None:
        session.opening = replace(opening, ids=[], features=None)
        self._sessions.add(session)
        self._openings.append((session, self._opening(session, opening)))

    def _opening(self, session: Session, opening: OpenDraft) -> Iterator[None]:
        """Hash the prompt and let the head take it, a chunk at a time."""
        for start in range(0, len(opening.ids), HASH_CHUNK):
            session.append(opening.ids[start : start + HASH_CHUNK])
            yield
        if not self._is_too_long(session):
            yield from self.head.open(session.key, opening)
        if self._samples:
            self._samples.open(session.key, opening)

    def _take_step(self, session: Session, step: DraftStep, arrived_ns: int) -> None:
        """Apply the step's advance; the step then waits, in place of an older one of its session."""
        session.taken += 1
        if session not in self._sessions or session.opening is None:  # the session failed meanwhile
            return
        try:
            session.advance(step)
            miss = None if self._is_too_long(session) else self.head.advance(session.key, step.advance)
            if self._samples:
                self._samples.advance(session.key, step.advance)
        except Exception as error:
            self._fail(session, error)
            return
        if session.too_long:
            self._post([(session, TreeDelta(step.fence, DraftTree.empty(), last=True))])
            return
        self._rejoin.came(session, arrived_ns / 1e9)
        of = session.opening
        job = DraftJob(session.key, step.root, session.length, step.budget, of.sampling, of.coupled, of.want_q_rows)
        self._waiting[session] = Waiting(session, step.fence, arrived_ns, job, miss)

    def _is_too_long(self, session: Session) -> bool:
        """Whether nothing is drafted for a text any more; the head then holds nothing of it."""
        if not session.too_long and session.length > self._max_context:
            session.too_long = True
            self.head.close(session.key)
            self._metrics.too_long.inc()
        return session.too_long

    def _take_close(self, session: Session) -> None:
        self._forget(session)
        if self._samples:
            self._samples.close(session.key)
        try:
            self.head.close(session.key)
        except Exception:
            log.exception("closing failed", session=session.key)
        self._closed += 1
        self._metrics.closed.inc()
        remembered = self.head.remembered
        self._metrics.remembered.inc(remembered - self._remembered)  # other heads of the process count there, too
        self._remembered = remembered

    def die(self) -> None:
        """End every session by an error, too: the process may go on."""
        super().die()
        self._post([(session, Unavailable("the head has failed")) for session in self._sessions])

    def _fail(self, session: Session, error: Exception) -> None:
        self._forget(session)
        self._post([(session, error)])

    def _forget(self, session: Session) -> None:
        self._sessions.discard(session)
        self._waiting.pop(session, None)
        self._rejoin.closed(session)
        self._openings = deque(opening for opening in self._openings if opening[0] is not session)

    def _draft(self, waiting: list[Waiting]) -> None:
        """One call of the head. When it fails, the sessions that have nothing yet are drafted one by one."""
        began = time.perf_counter_ns()
        for step in waiting:
            step.session.drafting = step.arrived_ns, began
        failpoints.hit("drafter.slow")
        self._metrics.forwards.inc()
        self._metrics.rows.inc(len(waiting))
        try:
            self._send_as_it_grows(waiting)
        except Exception as error:
            unfinished = [step for step in waiting if not step.is_done]
            log.warning("drafting failed", sessions=len(waiting), unfinished=len(unfinished), error=repr(error))
            for step in unfinished:
                step.parts.clear()
                if step.is_sent or len(waiting) == 1:
                    self._fail(step.session, error)
                else:
                    self._draft([step])
        ended = time.perf_counter_ns()
        took = (ended - began) / 1e9
        self.served(took, [step.session for step in waiting if step.is_done], ended / 1e9)
        self._metrics.forward_seconds.observe(took)

    def _send_as_it_grows(self, waiting: list[Waiting]) -> None:
        """Draft, and post the trees' parts. Each wakes two processes: while there is time it waits for the next one."""
        forward_before = self.head.forward_ns
        for parts in self.head.draft([step.job for step in waiting]):
            forward_ns = self.head.forward_ns - forward_before
            answers: list[tuple[Session, Answer]] = []
            for part in parts:
                step = waiting[part.job]
                step.parts.append(part)
                waited_ns = time.perf_counter_ns() - step.arrived_ns
                if part.last or waited_ns >= step.fence.deadline_ns / 4:  # else the rest will be in time, too
                    answers.append((step.session, step.delta(self._version, forward_ns)))
            if answers:
                self._post(answers)
        if not all(step.is_done for step in waiting):
            raise RuntimeError("the head left a draft without an end")

    @property
    def _version(self) -> int:
        return self.head.description.weights_version  # of those in use

    def _post(self, answers: list[tuple[Session, Answer]]) -> None:
        """Hand answers to the event loop in one wake-up."""
        self.loop.call_soon_threadsafe(_deliver, answers)


def _deliver(answers: list[tuple[Session, Answer]]) -> None:
    for session, answer in answers:
        session.answer(answer)
