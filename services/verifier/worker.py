"""The thread that owns the target: it packs whatever waits into forwards, and answers."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Hashable, Sequence
from dataclasses import replace
from typing import Any

import structlog
import torch
from torch import Tensor

from coppice.config.sections import VerifierSettings
from coppice.engine.batching import BatchingThread, settle
from coppice.engine.engine import Engine, ForwardOutput
from coppice.engine.rows import Piece, pack
from coppice.telemetry import WARMING_UP, SessionMetrics
from coppice.wire.common import FeatureRef, Features
from coppice.wire.verifier import OpenSession, SessionOpened, Verdict, VerifyStep, VerifyTimings

from .acceptance import Reading
from .devices import check_devices
from .features import Committed, Feed, Window, columns
from .generation_config import repetition_penalty
from .pruner import Job, Pruner, measure
from .ranks import Ranks, load
from .readout import instruct, prepare, read_out
from .session import Session
from .sessions import Sessions

log = structlog.get_logger()

PREFILL_ROWS = 512
"""prompt rows added to one forward at most"""
BATCH_WAIT_S = 0.05
"""longest wait for sessions to join a forward"""
WARM_ROWS = 32  # of the forwards before the first one that counts: libraries prepare for every number of rows


class Worker(BatchingThread):
    """The verifier's engine room. Callers are coroutines of one event loop; everything else happens on the thread."""

    engine: Engine

    def __init__(self, settings: VerifierSettings, metrics: SessionMetrics) -> None:
        super().__init__("torch", BATCH_WAIT_S)
        self.settings, self.metrics = settings, metrics
        self.address = ""  # where FeatureRefs point to; known once the server listens
        self.kv_tokens_used = 0
        self.repetition_penalty = 1.0  # of sessions that set none; known once the target is loaded
        self._prefills: deque[Job] = deque()
        self._steps: dict[int, Job] = {}
        self._answers: list[tuple[asyncio.Future[Any], Any]] = []
        self._fed: list[tuple[Feed, Committed | None]] = []
        self._pruner: Pruner | None = None
        self._ranks: Ranks | None = None  # the others, where the target has several

    # --- called from the event loop ---

    async def stop(self) -> None:
        """End the thread after what it is doing, and the target's other ranks."""
        await super().stop()
        if self._ranks:
            self._ranks.stop()

    async def open(self, key: int, request: OpenSession, arrived: int) -> SessionOpened:
        """Prefill a new session; `key` is the caller's and new. Raises InvalidField when its name is taken."""
        answer: SessionOpened = await self._ask(lambda job: self._take_open(key, request, job), arrived)
        return answer

    async def verify(self, key: int, step: VerifyStep, arrived: int) -> Verdict:
        """One tree of a session, which came at `arrived` of `perf_counter_ns`. Raises StaleFence, InvalidField."""
        verdict: Verdict = await self._ask(lambda job: self._take_step(key, step, job), arrived)
        return verdict

    def follow(self, ref: FeatureRef) -> Feed:
        """Feature rows of a session from a position on, then what each step commits, until `cancel`."""

        def begin(feed: Feed) -> Awaitable[Window]:
            return self._ask(lambda job: self._take_follow(feed, job), time.perf_counter_ns())

        def end(feed: Feed) -> None:
            self.post(lambda: self._sessions.unfollow(feed))

        return Feed(ref, self.engine.info.dtype, begin, end)

    def close(self, key: int) -> None:
        """Free a session; nothing happens when it never opened."""
        self.post(lambda: self._take_close(key))

    async def _ask(self, take: Callable[[Job], None], arrived: int) -> Any:
        """Post a job; whatever `take` raises is its answer."""
        job = Job(self.loop.create_future(), arrived)

        def work() -> None:
            try:
                take(job)
            except Exception as error:
                self._answer(job, error)

        self.post(work)
        return await job.answer

    # --- the thread ---

    def load(self) -> None:
        """Load and warm up the target."""
        self.repetition_penalty = repetition_penalty(self.settings.target, self.settings.generation_config)
        self.settings = check_devices(self.settings)
        if self.settings.ranks > 1:
            self._ranks = Ranks(self.settings)
            self.engine = self._ranks.load()
        else:
            if self.settings.threads:
                torch.set_num_threads(self.settings.threads)
            self.engine = load(self.settings)
        if cut_by := self.engine.info.context.cut_by:
            log.warning("the context is shorter than the model's", tokens=self.engine.info.max_context, why=cut_by)
        log.info("memory", takes=self.engine.memory)
        log.info(WARMING_UP)
        self.engine.timings(range(WARM_ROWS, 0, -1), context=WARM_ROWS, repeats=1)
        prepare(self.engine)
        if self.settings.prune:
            self._pruner = Pruner(measure(self.engine, self.settings.kv_tokens))
        self._sessions = Sessions(self.engine, self.settings, self.metrics, self.repetition_penalty)

    def idle(self) -> bool:
        """Whether neither a step nor a prompt waits."""
        return not (self._steps or self._prefills)

    def waiting(self) -> Collection[Hashable]:
        """Sessions with a step, also beside prompts."""
        return self._steps

    def serve(self) -> None:
        """Run one packed forward over every waiting step and as much of the prompts as fits; send the answers."""
        if self._steps or self._prefills:
            self._forward()
        self._deliver()

    def _take_open(self, key: int, request: OpenSession, job: Job) -> None:
        job.session = self._sessions.open(key, request)
        self._prefills.append(job)

    def _take_step(self, key: int, step: VerifyStep, job: Job) -> None:
        """Take a step with as much of its tree as there is room for."""
        session = self._sessions.get(key)
        session.check_fence(step.fence)
        self._rejoin.came(key, job.arrived / 1e9)
        job.session, job.step, job.tree = session, step, step.tree
        job.cut(session.table.capacity - session.committed_len - 1)
        self._steps[key] = job

    def _take_close(self, key: int) -> None:
        session = self._sessions.close(key)
        if session is None:
            return
        self._steps.pop(key, None)
        self._prefills = deque(job for job in self._prefills if job.session is not session)
        self._rejoin.closed(key)
        self._fed += ((feed, None) for feed in session.feeds)
        self._note_kv()

    def _take_follow(self, feed: Feed, job: Job) -> None:
        self._answer(job, self._sessions.named(feed.ref.session).follow(feed))

    # --- a forward ---

    def _forward(self) -> None:
        """One packed forward, and what each session makes of its part."""
        taken = time.perf_counter_ns()
        jobs, pieces = self._pack()
        for job in jobs:
            job.started = job.started or taken
        layers = tuple(sorted({layer for job in jobs for layer in job.opened.request.feature_layers}))
        started = time.perf_counter_ns()
        try:
            on_device = self.engine.on_device and self._ranks is None  # whose KV moves with this one's
            told = instruct(jobs, pieces, self.engine.info.vocab_size) if on_device else None
            output = self.engine.forward(pack(pieces, layers), told and told.numbers)
            readings = read_out(jobs, pieces, told, output, self.engine.pool) if told else [(None, None)] * len(jobs)
        except Exception as error:
            log.exception("forward failed", sessions=len(jobs))
            if self._ranks:
                self._ranks.fail("rank 0 did not do a forward that the others did")
            for job in jobs:
                self._answer(job, error)
        else:
            shared = self._account(jobs, pieces, output, started, time.perf_counter_ns())
            hint = self._pruner.hint(len(self._steps)) if self._pruner and self._steps else None
            judged = self._settle_all(jobs, pieces, output, readings, layers, shared, hint)
            self.served(output.forward_ns / 1e9, judged, time.perf_counter())
        self._steps.clear()
        if self._prefills:
            self._prefills = deque(job for job in self._prefills if not job.answered)
        self._note_kv()

    def _pack(self) -> tuple[list[Job], list[Piece]]:
        """Every waiting step with the nodes that pay, and the prompts' next chunks that fit."""
        prefills, chunks = self._prompt_chunks()
        steps = list(self._steps.values())
        if self._pruner is not None:
            self._pruner.cut(steps, sum([len(piece.tokens) for piece in chunks]))
        return [*steps, *prefills], [*[job.piece() for job in steps], *chunks]

    def _prompt_chunks(self) -> tuple[list[Job], list[Piece]]:
        jobs: list[Job] = []
        pieces: list[Piece] = []
        room = PREFILL_ROWS
        for job in self._prefills:
            if room <= 0:
                break
            left, session = job.prefill_left, job.opened
            chunk = left[:room]
            room -= len(chunk)
            last = [len(chunk) - 1] if len(chunk) == len(left) else []
            keep = range(len(chunk)) if session.request.want_prompt_log_probs else last
            jobs.append(job)
            pieces.append(Piece.chain(session.table, session.committed_len, chunk, keep))
        return jobs, pieces

    def _account(
        self, jobs: list[Job], pieces: list[Piece], output: ForwardOutput, started: int, ended: int
    ) -> VerifyTimings:
        """What all sessions of a forward are told of it; metrics and the pruner learn from it."""
        rows, plain_ns = sum([len(piece.tokens) for piece in pieces]), 0
        self.metrics.forwards.inc()
        self.metrics.rows.inc(rows)
        self.metrics.forward_seconds.observe(output.forward_ns / 1e9)
        for job in jobs:
            job.forward_ns += output.forward_ns
        if self._pruner is not None:
            decoded, awaited = len(jobs) == len(self._steps), not self._rejoin.expected.isdisjoint(self._steps)
            share = self._pruner.ran(rows, started / 1e9, ended / 1e9, decoded=decoded, awaited=awaited)
            plain_ns = int(share * output.forward_ns)
        return VerifyTimings(rows=rows, sessions=len(jobs), plain_ns=plain_ns)

    def _settle_all(
        self,
        jobs: list[Job],
        pieces: list[Piece],
        output: ForwardOutput,
        readings: Sequence[tuple[Reading | None, Tensor | None]],
        layers: tuple[int, ...],
        shared: VerifyTimings,
        hint: int | None,
    ) -> list[int]:
        """Commit every session's part; returns the keys of those that will send another step."""
        judged: list[int] = []
        first_row = first_kept = 0
        for job, piece, (reading, read) in zip(jobs, pieces, readings, strict=True):
            end_row, end_kept = first_row + len(piece.tokens), first_kept + len(piece.keep)
            logits = output.logits[first_kept:end_kept]
            features = None if output.features is None else output.features[first_row:end_row]
            features = read if reading else features
            first_row, first_kept = end_row, end_kept
            session = job.opened
            try:
                wanted = session.request.feature_layers
                own = columns(features, layers, wanted) if features is not None and wanted else None
                self._settle(job, piece, logits, own, reading, shared, hint)
            except Exception as error:
                self._answer(job, error)
            else:
                judged += [session.key] if job.step and not session.over else []
        return judged

    def _settle(
        self,
        job: Job,
        piece: Piece,
        logits: Tensor,
        features: Tensor | None,
        reading: Reading | None,
        shared: VerifyTimings,
        hint: int | None,
    ) -> None:
        """Commit one session's part of a forward and answer it if it is complete."""
        session = job.opened
        began = time.perf_counter_ns()
        answer: SessionOpened | Verdict
        if job.step is None:
            if session.request.want_prompt_log_probs:
                session.score_prompt(logits)
            session.commit(list(piece.tokens), features)
            self._sessions.cache.fill(session.prefix)
            if job.prefill_left:
                return
            answer = session.opened(logits[-1], self._prompt_features(session), shared, reading)
        else:
            base = session.committed_len
            verdict, kept = session.judge(job.step, job.tree, job.verified, logits, features, reading)
            if reading:
                self.engine.pool.extend(session.table, session.committed_len)
            else:
                self.engine.pool.compact(session.table, base, kept)
            self._sessions.cache.fill(session.prefix)
            answer = replace(verdict, budget_hint=hint)
            for feed in session.feeds:
                self._fed.append((feed, session.last))
        ended = time.perf_counter_ns()
        timings = replace(
            shared,
            queue_ns=job.started - job.arrived,
            forward_ns=job.forward_ns,
            accept_ns=ended - began,
            total_ns=ended - job.arrived,
        )
        self._answer(job, replace(answer, timings=timings))

    def _prompt_features(self, session: Session) -> Features | None:
        end = session.features.end
        count = min(end - session.features.start, self.settings.feature_window)  # it holds whole chunks, maybe more
        layers = session.request.feature_layers
        if not layers:
            start, count = session.committed_len, 0
        elif not count:
            return None
        else:
            start = end - count
        ref = FeatureRef(self.address, session.request.session, start, count, layers)
        return Features(start, count, self.settings.dtype, None, ref)

    def _note_kv(self) -> None:
        self.kv_tokens_used = self.engine.pool.used_tokens
        self.metrics.kv_tokens.set(self.kv_tokens_used)

    # --- answers ---

    def _answer(self, job: Job, value: Any) -> None:
        job.answered = True
        self._answers.append((job.answer, value))

    def _deliver(self) -> None:
        """Hand all answers to the event loop in one wake-up, behind the commits: drafting goes on first."""
        if self._answers or self._fed:
            answers, fed = self._answers, self._fed
            self._answers, self._fed = [], []
            self.loop.call_soon_threadsafe(_hand_over, answers, fed)


def _hand_over(answers: list[tuple[asyncio.Future[Any], Any]], fed: list[tuple[Feed, Committed | None]]) -> None:
    for feed, committed in fed:
        feed.put(committed)
    for future, value in answers:
        settle(future, value)
