"""The thread that owns the target and its sessions: it packs whatever waits into forwards, and answers."""

import asyncio
import json
import time
from collections.abc import Callable, Collection, Hashable, Sequence
from concurrent.futures import wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import structlog
import torch
from torch import Tensor

from coppice.config.sections import VerifierSettings
from coppice.engine.batching import BatchingThread, settle
from coppice.engine.engine import Engine, ForwardOutput
from coppice.engine.kv_cache import OutOfBlocks
from coppice.engine.rows import PackedBatch, pack
from coppice.errors import InvalidField, NotFound, Unavailable
from coppice.limits import BLOCK_SIZE, LEAST_REPETITION_PENALTY, MAX_REPETITION_PENALTY, TREE_ROOM
from coppice.speculation.grammar import Guide
from coppice.telemetry import SessionMetrics
from coppice.wire.common import FeatureRef
from coppice.wire.verifier import OpenSession, SessionOpened, Verdict, VerifyStep, VerifyTimings

from .budget import Pruner, measure
from .device import draw_jobs, warm_up
from .features import Feed, Window
from .grammars import Grammars
from .prefix import PrefixCache
from .ranks import Ranks, check_devices, load
from .session import Job, Session, take_features

log = structlog.get_logger()

PREFILL_ROWS = 512  # prompt rows added to one forward at most
BATCH_WAIT_S = 0.05  # longest wait for sessions to join a forward
WARM_ROWS = 32  # of the forwards before the first one that counts: libraries prepare for every number of rows

NEUTRAL: dict[str, Any] = {
    **dict.fromkeys(("min_length", "min_new_tokens", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), 0),
    **dict.fromkeys(("num_beams", "num_beam_groups", "encoder_repetition_penalty", "guidance_scale"), 1),
    "token_healing": False,
    **dict.fromkeys(("stop_strings", "max_time", "bad_words_ids", "force_words_ids", "constraints"), None),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "sequence_bias", "penalty_alpha"), None),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"), None),
    **dict.fromkeys(("watermarking_config", "dola_layers"), None),
}
"""Fields that change the text of `generate(do_sample=False)` and are not served, and values that change nothing."""

Answer = Callable[[Any], None]  # called on the event loop with what came of a question, an exception too


def reserved_tokens(request: OpenSession, settings: VerifierSettings) -> int:
    """KV tokens a session is admitted with, whole blocks and at most all there are, so that no session loses any."""
    blocks = -(-(request.max_len + TREE_ROOM) // BLOCK_SIZE)
    return min(blocks, settings.kv_tokens // BLOCK_SIZE) * BLOCK_SIZE


def repetition_penalty(folder: str | Path, mode: str) -> float:
    """The repetition penalty that a folder's generation_config.json sets, 1 under the mode "ignore".

    Raises InvalidField under any other mode when the file sets what changes greedy decoding and is not served.
    """
    if mode == "ignore":
        return 1.0
    files = [Path(folder) / name for name in ("generation_config.json", "config.json")]  # older folders have one file
    config: dict[str, Any] = json.loads(next(filter(Path.is_file, files)).read_text(encoding="utf-8"))
    if unserved := [name for name in NEUTRAL if config.get(name) not in (None, [], {}, NEUTRAL[name])]:
        reason = f"the target's generation_config.json sets {', '.join(unserved)}, which is not served"
        raise InvalidField("verifier.generation_config", f"{reason}; 'ignore' ignores it")
    own, least, most = config.get("repetition_penalty"), LEAST_REPETITION_PENALTY, MAX_REPETITION_PENALTY
    penalty = 1.0 if own is None else float(own)
    if not least <= penalty <= most:
        reason = f"the target's repetition_penalty {penalty} is not in {least}..{most}"
        raise InvalidField("verifier.generation_config", reason)
    return penalty


class Worker(BatchingThread):
    """The verifier's engine room. Callers are coroutines of one event loop; everything else happens on the thread."""

    engine: Engine

    def __init__(self, settings: VerifierSettings, metrics: SessionMetrics, sessions: int = 0) -> None:
        """sessions: that may be open at once, for whose states room is left."""
        super().__init__("torch", BATCH_WAIT_S)
        self.settings, self.metrics, self._most_sessions = settings, metrics, sessions
        self.address = ""  # where FeatureRefs point to; known once the server listens
        self.kv_tokens_used = 0
        self.repetition_penalty = 1.0  # of sessions that set none; known once the target is loaded
        self._sessions: dict[int, Session] = {}  # by key
        self._by_name: dict[str, Session] = {}
        self._jobs: dict[int, Job] = {}  # of sessions that are opened or have a step, by key, in the order they came
        self._calls: list[tuple[Callable[[Any], None], Any]] = []  # for the event loop, behind the next batch
        self._pruner: Pruner | None = None
        self._ranks: Ranks | None = None  # tensor-parallel ranks 1 to n - 1; None on one device

    # --- called from the event loop ---

    async def stop(self) -> None:
        """End the thread after what it is doing, and the target's other ranks."""
        await super().stop()
        if self._ranks:
            self._ranks.stop()

    async def open(self, key: int, request: OpenSession, arrived: int) -> SessionOpened:
        """Prefill a new session; `key` is the caller's and new. Raises InvalidField for its name or its grammar."""
        answer = request.ids[request.prompt_tokens or len(request.ids) :]
        guide = await self._grammars.start(request.grammar, answer) if request.grammar else None
        opened: asyncio.Future[SessionOpened] = self.loop.create_future()
        self._ask(partial(self._take_open, key, request, arrived, guide), partial(settle, opened))
        return await opened

    def verify(self, key: int, step: VerifyStep, arrived: int, answer: Answer) -> None:
        """Verify one tree of a session, which came at `arrived` of `perf_counter_ns`.

        It is answered with a Verdict, StaleFence or InvalidField.
        """
        self._ask(partial(self._take_step, key, step, arrived), answer)

    def follow(self, ref: FeatureRef) -> Feed:
        """Feature rows of a session from a position on, then what each step commits, until `cancel`."""
        begin, end = self._take_follow, self._take_unfollow
        dtype = self.engine.info.dtype
        return Feed(ref, dtype, lambda feed: self.run(partial(begin, feed)), lambda feed: self.post(partial(end, feed)))

    def close(self, key: int) -> None:
        """Free a session; nothing happens when it never opened."""
        self.post(partial(self._take_close, key))

    def _ask(self, take: Callable[[Answer], None], answer: Answer) -> None:
        """Have `take` done on the thread; whatever it raises is the answer."""

        def work() -> None:
            try:
                take(answer)
            except Exception as error:
                self._calls.append((answer, error))

        self.post(work)

    # --- the thread ---

    def load(self) -> None:
        self.repetition_penalty = repetition_penalty(self.settings.target, self.settings.generation_config)
        self.settings = check_devices(self.settings, sessions=self._most_sessions)
        if self.settings.ranks > 1:
            self._ranks = Ranks(self.settings)
            self.engine = self._ranks.engine
        else:
            if self.settings.threads:
                torch.set_num_threads(self.settings.threads)
            self.engine = load(self.settings)
        if cut_by := self.engine.info.context.cut_by:
            log.warning("the context is shorter than the model's", tokens=self.engine.info.context.tokens, why=cut_by)
        self._grammars = Grammars(self.settings.target, self.engine.info)
        log.info("warming up")
        for rows in range(WARM_ROWS, 0, -1):
            self.engine.timing(rows, context=WARM_ROWS, repeats=1)
        warm_up(self.engine)
        if speed := self.engine.speed():
            self.engine.memory += f"; {speed}"
        log.info("memory", takes=self.engine.memory)
        if self.settings.prune:
            self._pruner = Pruner(measure(self.engine, self.settings.kv_tokens))
        if self.engine.states is not None:
            log.info("no prefix cache: the target keeps states of texts, and cached blocks have none")
            self.settings = self.settings.model_copy(update={"prefix_cache": 0.0})
        self._cache = PrefixCache(self.engine.pool, self.settings.prefix_cache_tokens, self.metrics.registry)
        wait([self._grammars.vocabulary])

    def idle(self) -> bool:
        """Whether neither a step nor a prompt waits."""
        return not self._jobs

    def waiting(self) -> Collection[Hashable]:
        """Sessions with a step, also beside prompts."""
        return [key for key, job in self._jobs.items() if job.step]

    def serve(self) -> None:
        """Run one packed forward over every waiting step and as much of the prompts as fits; send the answers."""
        if not self.idle():
            self._forward()
        if self._calls:
            calls, self._calls = self._calls, []
            self.loop.call_soon_threadsafe(_call_all, calls)

    def _take_open(self, key: int, request: OpenSession, arrived: int, guide: Guide | None, answer: Answer) -> None:
        """Admit a session and give it its KV. Raises InvalidField, and Unavailable while the pool has no room: the
        blocks of a closing session are on their way back.
        """
        if request.session in self._by_name:
            raise InvalidField("open.session", "is already open")
        layers = self.engine.info.layers
        for layer in request.feature_layers:
            if layer not in range(layers + 2):  # behind them what the final norm reads, and what it gives
                raise InvalidField("open.feature_layers", f"{layer} is not a layer of this target (0..{layers + 1})")
        try:
            prefix = self._cache.open(request, reserved_tokens(request, self.settings))
        except OutOfBlocks as error:
            raise Unavailable(str(error)) from None
        request = replace(request, sampling=request.sampling.with_defaults(self.repetition_penalty))
        session = Session(key, request, prefix, self.engine.info.vocab_size, guide)
        self._sessions[key] = self._by_name[request.session] = session
        self.metrics.opened.inc()
        self._jobs[key] = Job(session, answer, arrived)

    def _take_step(self, key: int, step: VerifyStep, arrived: int, answer: Answer) -> None:
        if key not in self._sessions:
            raise NotFound("the session is not open")
        session = self._sessions[key]
        session.check_fence(step.fence)
        job = Job(session, answer, arrived, step, step.tree)
        job.cut_forbidden()
        self._rejoin.came(key, arrived / 1e9)
        self._jobs[key] = job

    def _take_close(self, key: int) -> None:
        session = self._sessions.pop(key, None)
        if session is None:
            return
        del self._by_name[session.request.session]
        self._cache.close(session.prefix)
        self.metrics.closed.inc()
        self._jobs.pop(key, None)
        self._rejoin.closed(key)
        self._calls += ((feed.put, None) for feed in session.feeds)
        self._note_kv()

    def _take_follow(self, feed: Feed) -> Window:
        if session := self._by_name.get(feed.ref.session):
            return session.follow(feed)
        raise NotFound(f"no session {feed.ref.session} here")

    def _take_unfollow(self, feed: Feed) -> None:
        session = self._by_name.get(feed.ref.session)
        if session is not None and feed in session.feeds:
            session.feeds.remove(feed)

    # --- a forward ---

    def _forward(self) -> None:
        """One packed forward, and what each session makes of its part."""
        taken = time.perf_counter_ns()
        jobs = self._schedule()
        for job in jobs:
            job.started = job.started or taken
        layers = tuple(sorted({layer for job in jobs for layer in job.session.request.feature_layers}))
        started = time.perf_counter_ns()
        try:
            batch = pack([job.piece for job in jobs], layers)
            guided = [job for job in jobs if job.step and job.session.guide] if not self.engine.on_device else ()
            output = self._forward_guided(batch, guided) if guided else self.engine.forward(batch)
            drawn = draw_jobs(jobs, output.logits) if self.engine.on_device else ()
        except Exception as error:
            log.exception("forward failed", sessions=len(jobs))
            if self._ranks:
                self._ranks.fail("rank 0 did not do a forward that the others did")
            for job in jobs:
                self._end(job, error)
        else:
            steps = [job.session.key for job in jobs if job.step]
            shared = self._account(jobs, steps, output, started)
            jobs = self._read(jobs, output.logits, drawn)
            walked = [job for job in jobs if job.step]
            self.engine.pool.compact([(job.session.table, job.session.committed_len, job.text) for job in walked])
            take_features(jobs, output.features, layers)
            self._commit(jobs, shared, self._pruner.hint(len(steps)) if self._pruner and steps else None)
            going_on = [job.session.key for job in walked if not job.session.over]
            self.served(output.forward_ns / 1e9, going_on, time.perf_counter())
        self._note_kv()

    def _schedule(self) -> list[Job]:
        """Lay the rows of every waiting step with the nodes that pay, and of the prompts' next chunks that fit."""
        chunks: list[Job] = []
        steps: list[Job] = []
        room = PREFILL_ROWS
        for job in self._jobs.values():
            if job.step:
                job.cut(job.session.table.capacity - job.session.committed_len - 1)
                steps.append(job)
            elif room > 0:
                job.lay(room)
                room -= len(job.piece.tokens)
                chunks.append(job)
        if self._pruner is not None:
            self._pruner.cut(steps, PREFILL_ROWS - room)
        for job in steps:
            job.lay(room)
        return [*steps, *chunks]

    def _forward_guided(self, batch: PackedBatch, jobs: Sequence[Job]) -> ForwardOutput:
        """A forward on the CPU, while another thread prepares what grammars leave of the rows of some jobs."""
        is_over = Event()

        def look_ahead() -> None:
            for job in jobs:
                if job.step and job.session.guide and not is_over.is_set():
                    job.session.guide.look_ahead([job.step.root], job.tree, is_over.is_set)

        looking = self._grammars.masking.submit(look_ahead)
        try:
            return self.engine.forward(batch)
        finally:
            is_over.set()
            looking.result()

    def _account(self, jobs: list[Job], steps: list[int], output: ForwardOutput, started: int) -> VerifyTimings:
        """What all sessions of a forward are told of it; metrics and the pruner learn from it. steps: of which keys."""
        rows, plain_ns, ended = sum([len(job.piece.tokens) for job in jobs]), 0, time.perf_counter_ns()
        forward_ns = output.forward_ns
        self.metrics.forwards.inc()
        self.metrics.rows.inc(rows)
        self.metrics.forward_seconds.observe(forward_ns / 1e9)
        for job in jobs:
            job.forward_ns += forward_ns
        if self._pruner is not None:
            decoded, awaited = len(jobs) == len(steps), not self._rejoin.expected.isdisjoint(steps)
            share = self._pruner.ran(rows, started / 1e9, ended / 1e9, decoded=decoded, awaited=awaited)
            plain_ns = int(share * forward_ns)
        return VerifyTimings(rows=rows, sessions=len(jobs), plain_ns=plain_ns)

    def _read(self, jobs: list[Job], logits: Tensor, drawn: Sequence[int]) -> list[Job]:
        """Give each job its part of a forward, and walk the trees. A job whose part fails is answered, and left out.

        logits: (R, V) of all jobs. drawn: (R,) ids that a device drew, if one did.
        """
        readable: list[Job] = []
        first = start = 0
        for job in jobs:
            end = start + len(job.piece.keep)
            try:
                job.read(first, logits[start:end], drawn[start:end])
                readable.append(job)
            except Exception as error:
                self._end(job, error)
            first, start = first + len(job.piece.tokens), end
        return readable

    def _commit(self, jobs: list[Job], shared: VerifyTimings, hint: int | None) -> None:
        """Commit every job's part, and answer those that are complete, behind all commits: drafting goes on first."""
        began, answers = time.perf_counter_ns(), []
        for job in jobs:
            session = job.session
            answer: SessionOpened | Verdict | None
            try:
                if job.step:
                    answer, committed = job.judge(job.step, hint)
                    self._calls += [(feed.put, committed) for feed in session.feeds]
                else:
                    answer = job.prefilled(self.address, self.settings.dtype)
                self._cache.fill(session.prefix)
            except Exception as error:
                self._end(job, error)
                continue
            if answer is None:
                continue
            ended, queue_ns = time.perf_counter_ns(), job.started - job.arrived
            own = {"accept_ns": ended - began, "total_ns": ended - job.arrived, "forward_ns": job.forward_ns}
            answers.append((job, replace(answer, timings=replace(shared, queue_ns=queue_ns, **own))))
        for job, whole in answers:
            self._end(job, whole)

    def _note_kv(self) -> None:
        self.kv_tokens_used = self.engine.pool.used_tokens
        self.metrics.kv_tokens.set(self.kv_tokens_used)

    def _end(self, job: Job, value: SessionOpened | Verdict | Exception) -> None:
        if guide := job.session.guide:
            self.metrics.grammar_seconds.observe(guide.spent_ns / 1e9)
            guide.spent_ns = 0
        del self._jobs[job.session.key]
        self._calls.append((job.answer, value))


def _call_all(calls: list[tuple[Callable[[Any], None], Any]]) -> None:
    """Hand everything that waited to the event loop, in one wake-up."""
    for call, value in calls:
        call(value)
