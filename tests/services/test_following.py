"""Drafters that follow a session of a verifier: what is drafted before it is asked for, and what a lie costs.

The drafter runs in this process, the verifier in its own, unless it lies.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import grpc
import pytest

from coppice.speculation.tree import DraftTree
from coppice.v1 import verifier_pb2
from coppice.wire.common import Features, Fence, committed_hash
from coppice.wire.drafter import TreeDelta
from coppice.wire.verifier import Commit, commit_to_wire, feature_part_to_wire
from tests.processes import Service
from tests.recorder import LAYERS, Recorder, drafter_of, server_of
from tests.services import test_drafter, test_verifier
from tests.services.test_drafter import status_of
from tests.services.test_features import IDS, fetched, model, start_verifier, target, truth, verifier

__all__ = ["model", "start_verifier", "target", "truth", "verifier"]
FOLLOWED = "followed"
ROW_BYTES = 4 * 64 * len(LAYERS)


async def until(condition: Callable[[], bool]) -> None:
    """Wait until something is so."""
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise TimeoutError


class Talk:
    """A session of a verifier, one of a drafter that follows it, and what the drafter's head was asked."""

    def __init__(
        self, session: test_verifier.Client, client: test_drafter.Client, head: Recorder, address: str
    ) -> None:
        self.session, self.client, self.head, self.address = session, client, head, address

    async def verify(self, tokens: list[int]) -> int:
        """Verify a chain; returns where the newly committed ids begin."""
        at = len(self.session.committed)
        await self.session.verify(DraftTree.chain(tokens, [-0.1] * len(tokens)))
        return at

    async def ask(self, at: int, root: int | None = None) -> TreeDelta:
        """Ask for a tree as an orchestrator does that knows the ids from `at` on."""
        ids = self.session.committed[at:]
        features = fetched(self.address, FOLLOWED, at, at + len(ids)) if ids else None
        await self.client.send(self.session.root if root is None else root, ids, features=features)
        return await self.client.tree()

    def drafted(self) -> list[tuple[int, int]]:
        """Length of the text and root of each job of the head."""
        return [(job.committed_len, job.root) for job in self.head.jobs]

    def now(self) -> tuple[int, int]:
        """The length of the text, and the next root."""
        return len(self.session.committed), self.session.root


@asynccontextmanager
async def talking(verifier: Service, truth: list[int], ahead: bool = True) -> AsyncIterator[Talk]:
    """A drafter that was asked for a first tree already."""
    head = Recorder(truth=truth)
    async with (
        drafter_of(head, ahead=ahead) as drafter,
        test_verifier.connected(verifier) as there,
        test_drafter.connected(drafter) as here,
    ):
        session = test_verifier.Client(there, FOLLOWED, IDS, feature_layers=LAYERS)
        opened = await session.open()
        client = await test_drafter.Client(here, IDS, features=opened.features).open()
        talk = Talk(session, client, head, verifier.address)
        await talk.ask(len(IDS))
        yield talk
        session.call.cancel()


async def test_a_draft_is_begun_when_the_verifier_commits_and_the_question_only_confirms_it(
    verifier: Service, truth: list[int]
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


async def test_another_root_is_drafted_for_anew(verifier: Service, truth: list[int]) -> None:
    async with talking(verifier, truth) as talk:
        at = await talk.verify([])
        await until(lambda: talk.drafted()[-1] == talk.now())
        await talk.ask(at, root=7)
        assert talk.drafted()[-1] == (talk.now()[0], 7)


async def test_a_head_that_is_not_asked_drafts_no_further_and_has_the_features_when_it_is(
    verifier: Service, model: Any, truth: list[int]
) -> None:
    async with talking(verifier, truth) as talk:
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


async def test_without_the_setting_nothing_is_drafted_unasked(verifier: Service, truth: list[int]) -> None:
    async with talking(verifier, truth, ahead=False) as talk:
        at = await talk.verify([])
        await asyncio.sleep(0.2)
        assert len(talk.head.jobs) == 1
        await talk.ask(at)
        assert talk.drafted()[-1] == talk.now()


class Liar:
    """A verifier that commits what a test says, when it says so."""

    def __init__(self, commits: list[Commit]) -> None:
        self.commits, self.go, self.followed = commits, asyncio.Event(), 0

    async def FetchFeatures(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.followed += 1
        ref = request.ref
        yield feature_part_to_wire(Features(ref.start, ref.count, "float32", bytes(ROW_BYTES * ref.count)))
        await self.go.wait()
        for commit in self.commits:
            yield commit_to_wire(commit)

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def commit_of(ids: list[int], root: int, start: int = len(IDS), **changes: Any) -> Commit:
    """A commit of some ids behind the prompt."""
    end = start + len(ids)
    fence = replace(Fence(1, end, committed_hash([*IDS, *ids])), **changes)
    return Commit(
        fence, tuple(ids), root, Features(end - len(ids), len(ids), "float32", bytes(4 * len(LAYERS) * 64 * len(ids)))
    )


@pytest.mark.parametrize(
    ("lie", "ends"),
    [
        (commit_of([9], 8), True),  # other ids than were committed
        (commit_of([5], 8), False),  # another root
        (commit_of([5], 6, committed_hash=7), True),
        (commit_of([5], 6, start=3), False),
    ],
    ids=["ids", "root", "hash", "position"],
)
async def test_a_lie_of_the_verifier_costs_a_draft_or_the_stream_and_no_wrong_tree_is_sent(
    lie: Commit, ends: bool
) -> None:
    service, liar = verifier_pb2.DESCRIPTOR.services_by_name["VerifierService"], Liar([lie])
    head = Recorder(truth=list(range(100)))
    async with (
        server_of(service, liar) as there,
        drafter_of(head) as drafter,
        test_drafter.connected(drafter) as here,
    ):
        client = await test_drafter.Client(here, IDS, features=fetched(there.address, "s")).open()
        await client.send(5, [])
        await client.tree()
        liar.go.set()
        await asyncio.sleep(0.2)
        with suppress(asyncio.InvalidStateError):  # it may have ended already
            await client.send(6, [5], features=fetched(there.address, "s", len(IDS), len(IDS) + 1))
        if ends:
            assert (await status_of(client.call))[0] is grpc.StatusCode.FAILED_PRECONDITION
        else:
            await client.tree()
            assert (head.jobs[-1].committed_len, head.jobs[-1].root) == (len(IDS) + 1, 6)
