"""Drafters that follow a session of a verifier: the features that they get, what is drafted before it is asked for, and
what a lie costs.

The drafter runs in this process, the verifier in its own, unless it lies.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest

from coppice.speculation.sampling import SamplingParams
from coppice.speculation.tree import DraftTree
from coppice.wire.common import Features, Fence, committed_hash
from coppice.wire.drafter import OpenDraft, TreeDelta, draft_request_to_wire
from coppice.wire.verifier import Commit
from services.drafter import service
from tests.processes import Service, until
from tests.recorder import (
    IDS,
    LAYERS,
    TINY_TARGET,
    Feeder,
    Recorder,
    drafter_of,
    feeding,
    fetched,
    start_verifier,
    truth,
    verifier,
)
from tests.sessions import DrafterClient, VerifierClient, drafter_idle, drafting, status_of, verifying

__all__ = ["TINY_TARGET", "start_verifier", "truth", "verifier"]  # fixtures, and the target's options
FOLLOWED = "followed"
ROW_BYTES = 4 * 64 * len(LAYERS)


class Talk:
    """A session of a verifier, one of a drafter that follows it, and what the drafter's head was asked."""

    def __init__(self, session: VerifierClient, client: DrafterClient, head: Recorder, address: str) -> None:
        self.session, self.client, self.head, self.address = session, client, head, address

    async def verify(self, tokens: list[int]) -> int:
        """Verify a chain; returns where the newly committed ids begin."""
        at = len(self.session.committed)
        await self.session.verify(DraftTree.chain(tokens, [-0.1] * len(tokens)))
        return at

    async def ask(self, at: int, root: int | None = None) -> TreeDelta:
        """Ask for a tree as an orchestrator does that knows the ids from `at` on."""
        await self.client.send(self.session.root if root is None else root, self.session.committed[at:])
        return await self.client.tree()

    def drafted(self) -> list[tuple[int, int]]:
        """Length of the text and root of each job of the head."""
        return [(job.committed_len, job.root) for job in self.head.jobs]

    def now(self) -> tuple[int, int]:
        """The length of the text, and the next root."""
        return len(self.session.committed), self.session.root


@asynccontextmanager
async def talking(verifier: Service, truth: list[int]) -> AsyncIterator[Talk]:
    """A drafter that was asked for a first tree already."""
    head = Recorder(truth=truth)
    async with drafter_of(head) as drafter, verifying(verifier) as there, drafting(drafter) as here:
        session = await VerifierClient(there, FOLLOWED, IDS, feature_layers=LAYERS).open()
        client = await DrafterClient(here, IDS, features=session.opened.features).open()
        talk = Talk(session, client, head, verifier.address)
        await talk.ask(len(IDS))
        yield talk
        session.call.cancel()


async def test_a_draft_begins_when_the_verifier_commits_unasked_and_no_other_until_it_is_asked_for(
    verifier: Service, model: Any, truth: list[int]
) -> None:
    async with talking(verifier, truth) as talk:
        for length in (3, 0, 2):
            before = len(talk.head.jobs)
            start = len(talk.session.committed)
            at = await talk.verify(truth[start + 1 : start + 1 + length])
            await until(lambda count=before: len(talk.head.jobs) > count)  # type: ignore[misc]
            assert talk.drafted()[-1] == talk.now()
            delta = await talk.ask(at)
            assert delta.nodes.tokens.tolist() == truth[talk.now()[0] + 1 :][:3]
            assert len(talk.head.jobs) == before + 1
        at = await talk.verify([])
        await until(lambda: talk.drafted()[-1] == talk.now())
        done = talk.drafted()
        for _ in range(3):
            await talk.verify([])
        await asyncio.sleep(0.2)
        assert talk.drafted() == done
        await talk.ask(at)
        assert talk.drafted()[-1] == talk.now()
        talk.head.seen[0].check(model, talk.head.seen[0].features[0].start)  # type: ignore[union-attr]


def commit_of(ids: list[int], root: int, start: int = len(IDS), **changes: Any) -> Commit:
    """A commit of some ids behind the prompt."""
    end = start + len(ids)
    fence = replace(Fence(1, end, committed_hash([*IDS, *ids])), **changes)
    return Commit(fence, tuple(ids), root, rows_of(end - len(ids), len(ids)))


def rows_of(start: int, count: int) -> Features:
    return Features(start, count, "float32", bytes(ROW_BYTES * count))


class Holder(Feeder):
    """A verifier that has the prompt's rows and what was committed by now, and feeds `commits` when it is told to."""

    def rows(self, request: Any) -> list[Features | Commit]:
        return [rows_of(request.ref.start, request.ref.count)]


@asynccontextmanager
async def asked_once(feeder: Feeder, head: Recorder) -> AsyncIterator[DrafterClient]:
    """A drafter that follows what a test feeds and was asked for a first tree."""
    async with feeding(feeder) as ref, drafter_of(head) as drafter, drafting(drafter) as here:
        client = await DrafterClient(here, IDS, features=fetched(ref.verifier, "s")).open()
        await client.send(5, [])
        await client.tree()
        yield client


LIES = (
    (commit_of([9], 8), True),  # other ids than were committed
    (commit_of([5], 8), False),  # another root
    (commit_of([5], 6, committed_hash=7), True),
    (commit_of([5], 6, start=3), False),
)


async def test_a_lie_of_the_verifier_costs_a_draft_or_the_stream_and_no_text() -> None:
    for lie, ends in LIES:
        feeder, head = Holder(), Recorder(truth=list(range(100)))
        feeder.commits = [lie]
        async with asked_once(feeder, head) as client:
            feeder.go.set()
            await asyncio.sleep(0.2)
            with suppress(asyncio.InvalidStateError):  # it may have ended already
                await client.send(6, [5])
            if ends:
                assert (await status_of(client.call))[0] is grpc.StatusCode.FAILED_PRECONDITION
            else:
                await client.tree()
                assert (head.jobs[-1].committed_len, head.jobs[-1].root) == (len(IDS) + 1, 6)


@pytest.mark.parametrize(("hangs", "ids", "followed"), [(True, [5], 1), (False, [5, 6], 2)])
async def test_a_step_waits_for_rows_of_this_stream_or_where_it_ends_of_another(
    hangs: bool, ids: list[int], followed: int
) -> None:
    feeder, head = Holder(hangs=hangs), Recorder(truth=list(range(100)))
    feeder.commits = [commit_of([5], 6)]
    async with asked_once(feeder, head) as client:
        await client.send(8, ids)
        await asyncio.sleep(0.2)
        assert len(head.jobs) == 1
        feeder.go.set()
        await client.tree()
        assert feeder.followed == followed
        client.call.cancel()
        await until(lambda: feeder.dropped == followed)


async def test_a_stream_that_broke_or_left_a_gap_is_followed_again_and_dropped_by_the_verifier() -> None:
    feeder, head = Holder(), Recorder(truth=list(range(100)))
    feeder.commits = [commit_of([7], 8, start=len(IDS) + 3)]
    async with asked_once(feeder, head) as client:
        feeder.go.set()
        await until(lambda: feeder.dropped == 1)
        await client.send(6, [5])  # the second stream brings the row of this position at once, and then the gap
        await client.tree()
        assert feeder.followed == 2
        await until(lambda: feeder.dropped == 2)


async def test_another_session_that_a_step_names_is_followed_from_there_on() -> None:
    first, second, head = Holder(), Holder(), Recorder(truth=list(range(100)))
    async with asked_once(first, head) as client, feeding(second) as ref:
        await client.send(6, [5], features=fetched(ref.verifier, "s", 0, len(IDS) + 1))
        await client.tree()
        await until(lambda: first.dropped == 1)
        assert (second.followed, second.dropped) == (1, 0)


async def test_a_stream_whose_commits_do_not_come_ends_the_session() -> None:
    async with asked_once(Holder(), Recorder()) as client:
        await client.send(6, [5])
        code, details = await status_of(client.call)
        assert (code, "not in 1 s" in details) == (grpc.StatusCode.UNAVAILABLE, True)


async def test_a_head_that_is_opened_and_never_asked_keeps_a_bounded_number_of_rows() -> None:
    feeder, count = Holder(), service._MOST_UNASKED + 2
    feeder.commits = [commit_of([5], 6, start=len(IDS) + number) for number in range(count)]
    async with feeding(feeder) as ref, drafter_of(Recorder(truth=[5] * 400)) as drafter, drafting(drafter) as here:
        client = await DrafterClient(here, IDS, features=fetched(ref.verifier, "s")).open()
        feeder.go.set()
        await until(lambda: feeder.dropped == 1)
        await client.send(6, [5] * count)
        await client.tree()
        assert feeder.followed == 2


# The features of an opening.


async def ending(stub: Any, features: Features | None) -> tuple[grpc.StatusCode, str]:
    """How a session ends that cannot be opened with these features."""
    call = stub.Draft()
    await call.write(draft_request_to_wire(OpenDraft("s", IDS, SamplingParams(), features=features)))
    return await status_of(call)


async def test_features_that_cannot_be_fetched_are_unavailable_and_the_head_hears_of_nothing(verifier: Service) -> None:
    head = Recorder()
    async with drafter_of(head) as drafter, drafting(drafter) as stub:
        async with verifying(verifier) as there:
            await VerifierClient(there, "bare", IDS).open()
            for lost, why in [
                (fetched(verifier.address, "nobody"), "no session nobody"),
                (fetched(verifier.address, "bare"), "is not one of the session's layers ()"),
                (fetched("127.0.0.1:1", "s"), "no features from the verifier at 127.0.0.1:1"),
            ]:
                code, details = await ending(stub, lost)
                assert code is grpc.StatusCode.UNAVAILABLE
                assert why in details
        assert (head.seen, (await drafter_idle(stub)).sessions) == ([], 0)


async def test_rows_of_other_positions_than_asked_for_are_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    async with drafter_of(Recorder()) as drafter, drafting(drafter) as stub:
        for parts, hangs in (([], False), ([(0, 10)], False), ([(0, 10), (12, 28)], False), ([(0, 10)], True)):
            monkeypatch.setattr(service, "OPEN_S", 0.3 if hangs else 20.0)
            feeder = Feeder([Features(start, count, "float32", b"\0" * 4 * count) for start, count in parts], hangs)
            feeder.go.set()
            async with feeding(feeder) as ref:
                assert (await ending(stub, fetched(ref.verifier, "s")))[0] is grpc.StatusCode.UNAVAILABLE


async def test_missing_or_other_positions_features_are_refused_by_field() -> None:
    rows, ref = Features(0, len(IDS), "float32", b"\0" * 4 * len(IDS)), fetched("127.0.0.1:1", "s")
    assert ref.ref is not None
    openings = [
        (None, "open.features: a recorder head reads"),
        (rows, "open.features: holds rows; name the session"),
        (replace(rows, inline=None), "open.features: a recorder head reads"),
        (fetched("127.0.0.1:1", "s", 40, 41), "open.features: begin at position 40 of 40"),
        (ref, "open.features.ref.verifier: is not one"),
        (
            replace(ref, ref=replace(ref.ref, layers=(2, 1))),
            "open.features.ref.layers: are (2, 1), this head reads those of (2, 3, 1)",
        ),
    ]
    async with drafter_of(Recorder(), allowed=["elsewhere:1"]) as drafter, drafting(drafter) as stub:
        for features, why in openings:
            code, details = await ending(stub, features)
            assert (code, details[: len(why)]) == (grpc.StatusCode.INVALID_ARGUMENT, why)
