"""The drafter as a process, and its worker with heads that misbehave on purpose."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from coppice.errors import Overloaded, StaleFence, Unavailable
from coppice.heads.base import DraftJob, Growth, Head
from coppice.heads.ngram import Lookup, grow
from coppice.speculation.sampling import SamplingParams
from coppice.speculation.tree import DraftTree, validate
from coppice.telemetry import SessionMetrics
from coppice.v1 import drafter_pb2
from coppice.wire.common import Fence, committed_hash
from coppice.wire.drafter import Advance, DraftStep, HeadDescription, OpenDraft, draft_request_to_wire
from services.drafter.worker import MAX_BACKLOG, Session, Worker
from tests.processes import Service, StartService
from tests.sessions import TEXT as IDS
from tests.sessions import DrafterClient, drafter_idle, drafting, status_of
from tests.tiny import make_target

VOCAB = 50


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a target of which only the vocabulary's width is known."""
    folder = tmp_path_factory.mktemp("target")
    (folder / "config.json").write_text(json.dumps({"vocab_size": VOCAB}))
    return str(folder)


@pytest.fixture(scope="module")
def lookup(start_service: StartService, target: str) -> Service:
    return start_service("services.drafter", "--drafter.kind", "lookup", "--drafter.target", target)


def own_tree(ids: list[int], root: int, budget: int, params: SamplingParams | None = None) -> DraftTree:
    """What the head drafts in this process."""
    model = Lookup()
    model.extend(ids)
    return grow(model, DraftJob(0, root, len(ids), budget, params or SamplingParams()), depth=6, width=8)[0]


async def test_a_session_drafts_what_the_head_drafts_and_echoes_its_fences(lookup: Service) -> None:
    params = SamplingParams(temperature=1.0, seed=11)
    async with drafting(lookup) as stub:
        session = await DrafterClient(stub, sampling=params).open()
        for root, commit in [(3, []), (9, [3]), (1, [9, 5]), (2, [1])]:
            delta = await session.draft(root, commit)
            assert delta.nodes == own_tree(session.committed, root, 16, params)
            ids = session.committed
            assert delta.fence == Fence(session.step_number, len(ids), committed_hash(ids), 0, 0)
            assert delta.total_ns > 0
            assert delta.forward_ns == 0
            validate(delta.nodes, VOCAB)
        assert len(delta.nodes)


async def test_a_stale_fence_is_refused(lookup: Service) -> None:
    async with drafting(lookup) as stub:
        for changes in ({"committed_len": 99}, {"committed_hash": 7}):
            session = await DrafterClient(stub).open()
            await session.send(3, [4], **changes)
            with pytest.raises(StaleFence, match="expected 13 tokens"):
                await session.tree()


def test_a_client_that_asks_faster_than_the_head_drafts_is_refused() -> None:
    session = Session(0, print, sent=MAX_BACKLOG)
    session.check_backlog()
    session.sent += 1
    with pytest.raises(Overloaded, match="waiting"):
        session.check_backlog()


async def test_bad_input_is_refused_by_field_and_other_sessions_go_on(lookup: Service) -> None:
    opening = draft_request_to_wire(OpenDraft("s", IDS, SamplingParams()))
    async with drafting(lookup) as stub:
        other = await DrafterClient(stub).open()
        for field, messages in {
            "kind: the first message": [draft_request_to_wire(DraftStep(Fence(1, 0, 0), 1, 1, Advance()))],
            "kind: neither open nor step": [drafter_pb2.DraftRequest()],
            "kind: the session is open already": [opening, opening],
            "open.ids": [drafter_pb2.DraftRequest(open=drafter_pb2.OpenDraft(session="s"))],
            "open.want_q_rows": [draft_request_to_wire(OpenDraft("s", IDS, SamplingParams(), want_q_rows=True))],
            "step.root": [opening, drafter_pb2.DraftRequest(step=drafter_pb2.DraftStep(root=VOCAB))],
        }.items():
            call = stub.Draft()
            for message in messages:
                await call.write(message)
            code, details = await status_of(call)
            assert (code, details[: len(field)]) == (grpc.StatusCode.INVALID_ARGUMENT, field)
        assert (await other.draft(3)).nodes == own_tree(IDS, 3, 16)


async def test_q_rows_travel_with_a_chain_and_limits_hold(start_service: StartService, tmp_path: Path) -> None:
    folder = str(make_target(tmp_path, VOCAB, tokenizer=False))
    flags = ["--drafter.kind", "lm", "--drafter.path", folder, "--drafter.target", folder]
    bounds = ["--limits.sessions", "2", "--limits.idle_s", "0.3"]
    with start_service("services.drafter", *flags, *bounds) as service:
        async with drafting(service) as stub:
            sampling = SamplingParams(temperature=1.0, seed=2)
            session = await DrafterClient(stub, sampling=sampling, want_q_rows=True).open()
            delta = await session.draft(3, budget=4)
            assert delta.q_rows is not None
            assert delta.q_rows.shape == (4, VOCAB)
            np.testing.assert_allclose(delta.q_rows.sum(1), 1, rtol=1e-5)
            assert delta.nodes.parents.tolist() == [0, 1, 2, 3]

            other = await DrafterClient(stub).open()
            with pytest.raises(Overloaded, match="all 2 sessions"):
                await DrafterClient(stub).open()
            assert len((await other.draft(1, [1] * 4)).nodes)

            with pytest.raises(Unavailable, match=r"0\.3 s"):  # the idle one ends by itself
                await session.read()
            assert (await drafter_idle(stub)).sessions == 0
            await DrafterClient(stub).open()
        assert service.stop() == 0
        assert "Traceback" not in service.log


class ScriptedHead(Head):
    """Drafts node by node, and goes wrong where a root says so."""

    BAD_BATCH, BAD_LATE, BAD_END = 100, 101, 102

    def __init__(self) -> None:
        self.description = HeadDescription("scripted", "scripted", 0, weights_version=4)
        self.texts: dict[int, list[int]] = {}
        self.batches: list[int] = []
        self.entered, self.proceed = threading.Semaphore(0), threading.Event()
        self.proceed.set()

    def open(self, key: int, opening: OpenDraft) -> Iterator[None]:
        self.texts[key] = list(opening.ids)
        yield

    def close(self, key: int) -> None:
        self.texts.pop(key, None)

    def advance(self, key: int, advance: Advance) -> None:
        if 13 in advance.ids:
            raise RuntimeError("cannot advance")
        self.texts[key] += advance.ids

    def draft(self, jobs: Sequence[DraftJob]) -> Iterator[list[Growth]]:
        self.batches.append(len(jobs))
        self.entered.release()
        assert self.proceed.wait(10)
        roots = [job.root for job in jobs]
        if self.BAD_BATCH in roots:
            raise RuntimeError("a job is bad")
        self.forward_ns += 5
        yield [Growth(at, DraftTree.chain([len(self.texts[job.key])], [-1.0]), False) for at, job in enumerate(jobs)]
        if self.BAD_LATE in roots:
            raise RuntimeError("half way")
        self.forward_ns += 5
        second = DraftTree(np.array([1]), np.array([1]), np.array([-2.0], np.float32))
        yield [Growth(at, second, True) for at, root in enumerate(roots) if root != self.BAD_END]


def answers(session: Session) -> asyncio.Queue[Any]:
    return session.answer.__self__  # type: ignore[attr-defined]


@asynccontextmanager
async def working(count: int, **facts: Any) -> AsyncIterator[tuple[ScriptedHead, Worker, list[Session]]]:
    """A scripted head of which these facts hold, its worker, and so many open sessions."""
    head = ScriptedHead()
    vars(head).update(facts)
    worker = Worker(lambda: head, SessionMetrics("drafter"))
    await worker.start()
    sessions = [worker.admit_session(asyncio.Queue().put_nowait) for _ in range(count)]
    for session in sessions:
        worker.open(session, OpenDraft("s", [1, 2], SamplingParams()))
        await asyncio.wait_for(answers(session).get(), 5)
    yield head, worker, sessions
    await worker.stop()
    assert not worker.failed.is_set()


def step_of(number: int, root: int, commit: Sequence[int] = (), before: Sequence[int] = (1, 2)) -> DraftStep:
    text = [*before, *commit]
    return DraftStep(Fence(number, len(text), committed_hash(text)), root, 8, Advance(list(commit)))


async def keep_busy(worker: Worker, head: ScriptedHead, session: Session) -> None:
    """Have the head draft for a session, which it goes on with when it may `proceed`."""
    head.proceed.clear()
    worker.step(session, step_of(1, 7), time.perf_counter_ns())
    await asyncio.to_thread(head.entered.acquire)


async def answer_of(session: Session) -> Any:
    answer = await asyncio.wait_for(answers(session).get(), 5)
    if isinstance(answer, Exception):
        raise answer
    return answer


async def test_waiting_sessions_are_drafted_together_and_parts_that_are_in_time_are_one_delta() -> None:
    async with working(6) as (head, worker, sessions):
        await keep_busy(worker, head, sessions[0])
        for session in sessions[1:]:
            step = step_of(1, 7)
            if session is sessions[-1]:
                step = replace(step, fence=replace(step.fence, deadline_ns=10**12))
            worker.step(session, step, time.perf_counter_ns())
        head.proceed.set()
        for session in sessions[:-1]:
            first, last = await answer_of(session), await answer_of(session)
            assert (first.last, last.last) == (False, True)
            assert (first.forward_ns, last.forward_ns) == (5, 10)
            assert 0 < first.total_ns <= last.total_ns
            assert last.fence.weights_version == 4
        delta = await answer_of(sessions[-1])
        assert (delta.last, delta.made, delta.forward_ns) == (True, (1, 1), 10)
        assert delta.nodes == DraftTree(np.array([2, 1]), np.array([0, 1]), np.array([-1.0, -2.0], np.float32))
        assert head.batches == [1, 5]


async def test_a_superseded_step_is_not_drafted_and_its_advance_still_counts() -> None:
    async with working(2) as (head, worker, (busy, session)):
        await keep_busy(worker, head, busy)
        worker.step(session, step_of(1, 7), time.perf_counter_ns())
        worker.step(session, step_of(2, 8, [7]), time.perf_counter_ns())
        worker.step(session, step_of(3, 9, [8, 8], before=[1, 2, 7]), time.perf_counter_ns())
        head.proceed.set()
        first, last = await answer_of(session), await answer_of(session)
        assert (first.fence.step, last.fence.step, last.last) == (3, 3, True)
        assert first.nodes.tokens.tolist() == [5]  # the head's text has five ids
        assert head.texts[session.key] == [1, 2, 7, 8, 8]
        assert answers(session).empty()
        assert head.batches == [1, 1]


@pytest.mark.parametrize(
    ("bad_root", "commit"),
    [(ScriptedHead.BAD_BATCH, []), (ScriptedHead.BAD_LATE, []), (ScriptedHead.BAD_END, []), (7, [13])],
    ids=["batch", "late", "end", "advance"],
)
async def test_a_step_that_fails_ends_its_own_session_only(bad_root: int, commit: list[int]) -> None:
    async with working(3) as (head, worker, (busy, bad, good)):
        await keep_busy(worker, head, busy)
        late = bad_root in (ScriptedHead.BAD_LATE, ScriptedHead.BAD_END)
        worker.step(bad, step_of(1, bad_root, commit), time.perf_counter_ns())
        if not late:
            worker.step(good, step_of(1, 7), time.perf_counter_ns())
        head.proceed.set()
        if late:
            assert not (await answer_of(bad)).last
            worker.step(good, step_of(1, 7), time.perf_counter_ns())
        with pytest.raises(RuntimeError):
            await answer_of(bad)
        assert [(await answer_of(good)).last for _ in range(2)] == [False, True]
        worker.step(bad, step_of(2, 7), time.perf_counter_ns())  # on its way when the session failed
        worker.step(good, step_of(2, 7), time.perf_counter_ns())
        assert [(await answer_of(good)).last for _ in range(2)] == [False, True]
        assert answers(bad).empty()


async def test_a_text_longer_than_the_head_drafts_for_goes_on_without_drafts() -> None:
    async with working(1, max_context=4) as (head, worker, (session,)):
        worker.step(session, step_of(1, 7, [3, 4, 5]), time.perf_counter_ns())
        delta = await answer_of(session)
        assert (len(delta.nodes), delta.last, head.texts) == (0, True, {})


async def test_closing_drops_what_waits_and_leaves_nothing_in_the_head() -> None:
    async with working(2) as (head, worker, (busy, session)):
        await keep_busy(worker, head, busy)
        unborn = worker.admit_session(asyncio.Queue().put_nowait)
        worker.open(unborn, OpenDraft("s", [1], SamplingParams()))
        worker.step(session, step_of(1, 7), time.perf_counter_ns())
        for closing in (session, busy, unborn):
            worker.close(closing)
        assert worker.description.sessions == 3
        head.proceed.set()
    assert (worker.description.sessions, head.texts, head.batches) == (0, {}, [1])
