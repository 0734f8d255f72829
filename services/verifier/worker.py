"""The thread that owns torch: it loads the target, packs whatever waits into forwards, and answers.

Load, warm-up and every forward run here; a second thread would bring a second OpenMP pool, and the two fight.
"""

from __future__ import annotations

import asyncio
import dataclasses
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import structlog
import torch
from torch import Tensor

from coppice.config.sections import VerifierSettings
from coppice.engine.batch import Piece, pack
from coppice.engine.batching import Returns
from coppice.engine.engine import EngineInfo, ForwardOutput
from coppice.engine.kv_cache import OutOfBlocks
from coppice.engine.loading import load_engine
from coppice.errors import CoppiceError, InvalidField, NotFound, Unavailable
from coppice.limits import TREE_ROOM
from coppice.messages.steps import FeatureRef, Features, OpenSession, SessionOpened, VerifyStep, VerifyTimings
from coppice.telemetry import SessionMetrics
from services.verifier.job import Job
from services.verifier.pruner import Pruner, measure
from services.verifier.session import Session

log = structlog.get_logger()

WARM_ROWS = 32  # of the forwards before the first one that counts: libraries prepare for every number of rows


def reserved_tokens(request: OpenSession, settings: VerifierSettings) -> int:
    """KV tokens a session is admitted with, whole blocks and at most all there are, so that nothing is ever evicted."""
    wanted = -(-(request.max_len + TREE_ROOM) // settings.block_size)
    return min(wanted, settings.kv_tokens // settings.block_size) * settings.block_size


class Worker(threading.Thread):
    """The verifier's engine room. Callers are coroutines of one event loop; everything else happens on this thread."""

    def __init__(self, settings: VerifierSettings, metrics: SessionMetrics) -> None:
        super().__init__(name="torch", daemon=True)
        self.settings, self.metrics = settings, metrics
        self.address = ""  # where FeatureRefs point to; known once the server listens
        self.loop = asyncio.get_running_loop()
        self.loaded: asyncio.Future[EngineInfo] = self.loop.create_future()
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._sessions: dict[int, Session] = {}
        self._by_name: dict[str, Session] = {}
        self._prefills: deque[Job] = deque()
        self._steps: dict[int, Job] = {}
        self._returns = Returns()
        self._answers: list[tuple[asyncio.Future[Any], Any]] = []
        self._forward_s = 0.0  # moving average
        self._pruner: Pruner | None = None
        self._open = True
        self.kv_tokens_used = 0
        self.failed = asyncio.Event()  # the thread ended by an error; the process is of no more use

    # --- called from the event loop ---

    async def open(self, key: int, request: OpenSession) -> SessionOpened:
        """Prefill a new session; `key` is the caller's and new. Raises InvalidField when its name is taken."""
        answer: asyncio.Future[SessionOpened] = self.loop.create_future()
        arrived = time.perf_counter_ns()
        self._inbox.put(lambda: self._take_open(key, request, answer, arrived))
        return await answer

    async def verify(self, key: int, step: VerifyStep) -> Any:
        """One tree of a session. Raises StaleFence, InvalidField."""
        answer: asyncio.Future[Any] = self.loop.create_future()
        arrived = time.perf_counter_ns()
        self._inbox.put(lambda: self._take_step(key, step, answer, arrived))
        return await answer

    def close(self, key: int) -> None:
        """Free a session; nothing happens when it never opened."""
        self._inbox.put(lambda: self._take_close(key))

    async def features(self, ref: FeatureRef) -> Tensor:
        """(n, F) feature rows of the last n positions of a window, on the CPU. Raises NotFound, InvalidField."""
        answer: asyncio.Future[Tensor] = self.loop.create_future()
        self._inbox.put(lambda: self._take_features(ref, answer))
        return await answer

    def stop(self) -> None:
        """End the thread after what it is doing."""
        self._inbox.put(None)

    # --- the thread ---

    def run(self) -> None:
        """Load, then alternate between collecting work and one packed forward until told to stop."""
        if not self._load():
            return
        try:
            while self._open:
                self._collect()
                if self._steps or self._prefills:
                    self._forward()
                self._deliver()
        except Exception:
            log.exception("the torch thread died")
            self.loop.call_soon_threadsafe(self.failed.set)

    def _load(self) -> bool:
        """Load and warm up the target; False when that failed, which `loaded` says."""
        try:
            if self.settings.threads:
                torch.set_num_threads(self.settings.threads)
            self.engine = load_engine(
                self.settings.target,
                device=self.settings.device,
                dtype=self.settings.dtype,
                kv_tokens=self.settings.kv_tokens,
                block_size=self.settings.block_size,
            )
            self.engine.timings(range(WARM_ROWS, 0, -1), context=WARM_ROWS, repeats=1)
            if self.settings.prune:
                self._pruner = Pruner(measure(self.engine, self.settings.kv_tokens))
            self._answer(self.loaded, self.engine.info)
        except Exception as error:
            self._answer(self.loaded, error)
            return False
        finally:
            self._deliver()
        return True

    def _collect(self) -> None:
        """Take what came in; wait for work, and for the sessions answered last that usually are back soon."""
        if not (self._steps or self._prefills):
            self._take(self._inbox.get())
        latest = time.perf_counter() + min(self.settings.batch_wait_ms / 1e3, self._forward_s)
        while self._open:
            try:
                self._take(self._inbox.get_nowait())
            except queue.Empty:
                left = latest - time.perf_counter()
                if left <= 0 or not self._steps or not self._returns.missing(self._steps, latest):
                    return
                with suppress(queue.Empty):
                    self._take(self._inbox.get(timeout=left))

    def _take(self, message: Callable[[], None] | None) -> None:
        if message is None:
            self._open = False
        else:
            message()

    def _take_open(self, key: int, request: OpenSession, answer: asyncio.Future[Any], arrived: int) -> None:
        if request.session in self._by_name:
            self._answer(answer, InvalidField("open.session", "is already open"))
            return
        for layer in request.feature_layers:
            if layer not in range(self.engine.info.layers):
                why = f"{layer} is not a layer of this target (0..{self.engine.info.layers - 1})"
                self._answer(answer, InvalidField("open.feature_layers", why))
                return
        try:
            table = self.engine.pool.allocate(request.session, reserved_tokens(request, self.settings))
        except OutOfBlocks as error:  # the blocks of a closing session are on their way back
            self._answer(answer, Unavailable(str(error)))
            return
        session = Session(key, request, table, self.settings.feature_window)
        self._sessions[key] = self._by_name[request.session] = session
        self.metrics.opened.inc()
        self._prefills.append(Job(session, None, answer, arrived))

    def _take_step(self, key: int, step: VerifyStep, answer: asyncio.Future[Any], arrived: int) -> None:
        try:
            self._steps[key] = self._step_job(key, step, answer, arrived)
        except Exception as error:
            self._answer(answer, error)

    def _step_job(self, key: int, step: VerifyStep, answer: asyncio.Future[Any], arrived: int) -> Job:
        """The step with as much of its tree as there is room for. Raises NotFound, StaleFence."""
        if key not in self._sessions:
            raise NotFound("the session is not open")
        session = self._sessions[key]
        session.check_fence(step.fence)
        self._returns.came(key, arrived / 1e9)
        job = Job(session, step, answer, arrived)
        room = session.table.capacity - session.committed_len - 1
        job.tree = step.tree
        job.cut(room)
        return job

    def _take_close(self, key: int) -> None:
        session = self._sessions.pop(key, None)
        if session is None:
            return
        del self._by_name[session.request.session]
        self._steps.pop(key, None)
        self._prefills = deque(job for job in self._prefills if job.session is not session)
        self._returns.closed(key)
        self.engine.pool.free(session.table)
        self.metrics.closed.inc()
        self._note_kv()

    def _take_features(self, ref: FeatureRef, answer: asyncio.Future[Any]) -> None:
        session = self._by_name.get(ref.session)
        try:
            if session is None:
                raise NotFound(f"no session {ref.session} here")
            self._answer(answer, session.features.read(ref.start, ref.count))
        except CoppiceError as error:
            self._answer(answer, error)

    def _forward(self) -> None:
        """One packed forward: every waiting step, then as much of the prefills as fits; then the answers."""
        jobs, pieces = self._pieces()
        layers = tuple(sorted({layer for job in jobs for layer in job.session.request.feature_layers}))
        started = time.perf_counter_ns()
        try:
            output = self.engine.forward(pack(pieces, layers))
        except Exception as error:
            log.exception("forward failed", sessions=len(jobs))
            for job in jobs:
                self._finish(job, error)
            self._forget_answered()
            return
        ended = time.perf_counter_ns()
        took = output.forward_ns / 1e9
        self._forward_s = 0.9 * (self._forward_s or took) + 0.1 * took
        rows = sum(len(piece.tokens) for piece in pieces)
        packed = self._packed(rows, jobs, started, ended, output.forward_ns)
        self.metrics.forwards.inc()
        self.metrics.rows.inc(rows)
        self.metrics.forward_seconds.observe(took)
        hint = self._pruner.hint(len(self._steps)) if self._pruner and self._steps else None
        answered: list[int] = []
        first_row = first_kept = 0
        for job, piece in zip(jobs, pieces, strict=True):
            part = _part(output, first_row, len(piece.tokens), first_kept, len(piece.keep))
            first_row, first_kept = first_row + len(piece.tokens), first_kept + len(piece.keep)
            job.started = job.started or started
            job.forward_ns += output.forward_ns
            try:
                self._settle(job, piece, part, layers, packed, hint)
            except Exception as error:
                self._finish(job, error)
            else:
                answered += [job.session.key] if job.step and not job.session.over else []
        self._returns.answered(answered, time.perf_counter())
        self._forget_answered()
        self._note_kv()

    def _note_kv(self) -> None:
        self.kv_tokens_used = self.engine.pool.used_tokens
        self.metrics.kv_tokens.set(self.kv_tokens_used)

    def _packed(self, rows: int, jobs: list[Job], started: int, ended: int, forward_ns: int) -> VerifyTimings:
        """What all sessions of a forward are told of it; the pruner learns from it."""
        plain_ns = 0
        if self._pruner is not None:
            decoded, awaited = len(jobs) == len(self._steps), not self._returns.expected.isdisjoint(self._steps)
            share = self._pruner.ran(rows, started / 1e9, ended / 1e9, decoded=decoded, awaited=awaited)
            plain_ns = int(share * forward_ns)
        return VerifyTimings(rows=rows, sessions=len(jobs), plain_ns=plain_ns)

    def _pieces(self) -> tuple[list[Job], list[Piece]]:
        """Every waiting step with the nodes that pay, and the prefills that fit."""
        prefills, chunks = self._prefill_pieces()
        steps = list(self._steps.values())
        if self._pruner is not None:
            self._pruner.cut(steps, sum(len(piece.tokens) for piece in chunks))
        return [*steps, *prefills], [*map(Job.piece, steps), *chunks]

    def _prefill_pieces(self) -> tuple[list[Job], list[Piece]]:
        jobs: list[Job] = []
        pieces: list[Piece] = []
        room = self.settings.prefill_rows
        for job in self._prefills:
            if room <= 0:
                break
            chunk = job.prefill_left[:room]
            room -= len(chunk)
            keep = [len(chunk) - 1] if len(chunk) == len(job.prefill_left) else []
            jobs.append(job)
            pieces.append(Piece.chain(job.session.table, job.session.committed_len, chunk, keep))
        return jobs, pieces

    def _settle(
        self,
        job: Job,
        piece: Piece,
        part: ForwardOutput,
        layers: tuple[int, ...],
        packed: VerifyTimings,
        hint: int | None,
    ) -> None:
        """Commit one session's part of a forward and answer it if it is complete."""
        session = job.session
        features = _columns(part.features, layers, session.request.feature_layers)
        began = time.perf_counter_ns()
        if job.step is None:
            session.commit(list(piece.tokens), None if features is None else features.cpu())
            if job.prefill_left:
                return
            root = session.first_root(part.logits[-1])
            answer: Any = SessionOpened(session.fence, root, self._prompt_features(session), packed)
        else:
            base = session.committed_len
            verdict, kept = session.judge(job.step, job.tree, job.verified, part.logits, features)
            self.engine.pool.compact(session.table, base, kept)
            answer = dataclasses.replace(verdict, budget_hint=hint)
        ended = time.perf_counter_ns()
        timings = dataclasses.replace(
            packed,
            queue_ns=job.started - job.arrived,
            forward_ns=job.forward_ns,
            accept_ns=ended - began,
            total_ns=ended - job.arrived,
        )
        self._finish(job, dataclasses.replace(answer, timings=timings))

    def _prompt_features(self, session: Session) -> Features | None:
        end = session.features.end
        count = min(end - session.features.start, self.settings.feature_window)  # it holds whole chunks, maybe more
        if not session.request.feature_layers or not count:
            return None
        start = end - count
        ref = FeatureRef(self.address, session.request.session, start, count)
        return Features(start, count, self.settings.dtype, None, ref)

    # --- answers ---

    def _finish(self, job: Job, value: Any) -> None:
        job.answered = True
        self._answer(job.answer, value)

    def _forget_answered(self) -> None:
        self._steps.clear()
        self._prefills = deque(job for job in self._prefills if not job.answered)

    def _answer(self, future: asyncio.Future[Any], value: Any) -> None:
        self._answers.append((future, value))

    def _deliver(self) -> None:
        """Hand all answers to the event loop in one wake-up."""
        if self._answers:
            answers, self._answers = self._answers, []
            self.loop.call_soon_threadsafe(_resolve, answers)


def _resolve(answers: list[tuple[asyncio.Future[Any], Any]]) -> None:
    for future, value in answers:
        if future.done():  # its caller was cancelled
            continue
        if isinstance(value, Exception):
            future.set_exception(value)
        else:
            future.set_result(value)


def _part(output: ForwardOutput, first_row: int, rows: int, first_kept: int, kept: int) -> ForwardOutput:
    features = None if output.features is None else output.features[first_row : first_row + rows]
    return ForwardOutput(output.logits[first_kept : first_kept + kept], features, output.forward_ns)


def _columns(features: Tensor | None, layers: tuple[int, ...], wanted: tuple[int, ...]) -> Tensor | None:
    """The columns of the layers one session wants, in its order, of features that hold every session's."""
    if features is None or not wanted:
        return None
    if wanted == layers:
        return features
    by_layer = features.chunk(len(layers), dim=-1)
    return torch.cat([by_layer[layers.index(layer)] for layer in wanted], dim=-1)
