"""Heads behind an orchestrator: they get features, move, are left alone when late, and are told what they miss.

Drafters run in this process, verifiers and orchestrators in their own.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any

import pytest
from redis import Redis

from coppice.adaptation.signals import redis_key
from coppice.client.client import AsyncClient
from coppice.errors import CoppiceError, InvalidField, Overloaded
from coppice.heads.base import DraftJob, Growth
from coppice.rpc.channels import Dialer
from coppice.speculation.tree import DraftTree
from coppice.stack.process import LocalRedis
from coppice.telemetry import metric
from coppice.wire.drafter import OpenDraft
from coppice.wire.generation import Chunk
from orchestrator.heads import HeadPool, feature_layers
from orchestrator.metrics import OrchestratorMetrics
from tests.processes import Service, StartService, free_port, until
from tests.recorder import IDS, LAYERS, TINY_TARGET, Recorder, drafter_of, truth
from tests.reference import make_tree
from tests.signals import counts, holds, queries

__all__ = ["TINY_TARGET", "truth"]  # fixtures, and the target's options
MANY = tuple(range(20, 36))


@dataclass
class Pipeline:
    """A client of an orchestrator, and the page of its metrics."""

    client: AsyncClient
    service: Service

    async def ids(self, prompt: Sequence[int], policy: str, count: int) -> list[int]:
        """The first ids of an answer."""
        return list((await self.client.generate(prompt, policy=policy, max_new_tokens=count, ignore_eos=True)).ids)

    async def metric(self, name: str) -> float:
        """A counter or gauge by its name."""
        return await asyncio.to_thread(metric, self.service.metrics, name)


@dataclass
class Orchestrators:
    """Starts orchestrator processes in front of a verifier."""

    start: StartService
    verifier: Service

    @asynccontextmanager
    async def over(self, deadline_ms: int = 2000, *flags: str, **heads: Any) -> AsyncIterator[Pipeline]:
        """One over drafters by the names of their pools; the test's loop runs while it starts."""
        flags = ("--orchestrator.verifiers", self.verifier.address, *flags)
        flags = ("--orchestrator.draft_deadline_ms", f"{deadline_ms}", *flags)
        for name, drafters in heads.items():
            for drafter in drafters if isinstance(drafters, tuple) else (drafters,):
                flags = (*flags, "--orchestrator.heads", f"{name}={drafter.address}")
        service = await asyncio.to_thread(self.start, "orchestrator", *flags)
        async with AsyncClient(service.address) as client:
            yield Pipeline(client, service)
        await asyncio.to_thread(service.stop)


@pytest.fixture(scope="module")
def orchestrators(start_service: StartService, verifier: Service) -> Orchestrators:
    return Orchestrators(start_service, verifier)


@asynccontextmanager
async def drafters_of(*heads: Recorder, ports: Sequence[int] = ()) -> AsyncIterator[list[Any]]:
    """A drafter for each of the heads."""
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(drafter_of(head, port=port))
            for head, port in zip_longest(heads, ports, fillvalue=0)
        ]


async def test_heads_of_other_layers_get_their_own(orchestrators: Orchestrators, model: Any, truth: list[int]) -> None:
    heads = [Recorder(layers=layers, truth=truth) for layers in ((4,), (5, 0, 3, 1, 2), LAYERS, ())]
    async with drafters_of(*heads) as (one, five, three, none):
        named = {"one": one, "five": five, "three": three, "none": none}
        async with orchestrators.over(**named) as running:
            options = {"max_new_tokens": 40, "ignore_eos": True}
            for policy in ("merge", "route", "route:five/one", "auto", "single:five", "single:none", "plain"):
                answer = await running.client.generate(IDS, policy=policy, **options)
                assert list(answer.ids) == truth[len(IDS) :][:40]
                assert policy == "auto" or (answer.tau > 2.5) == (policy != "plain"), policy
            sampled = {"temperature": 1.0, "seed": 5, **options}
            plain = await running.client.generate(IDS, policy="plain", **sampled)
            assert (await running.client.generate(IDS, policy="merge", **sampled)).ids == plain.ids
    for head, least in zip(heads, (3, 4, 2), strict=False):
        assert len(head.seen) >= least
        for seen in head.seen:
            assert seen.features[0] is not None
            seen.check(model, 0)
    assert {features for seen in heads[-1].seen for features in seen.features} == {None}


async def text_of(client: AsyncClient, gate: threading.Event, policy: str = "single:reader") -> list[int]:
    """440 ids of a text drafted by `reader`; the gate opens when the text has gone on without it for a while."""
    ids: list[int] = []
    async for event in client.stream(IDS, policy=policy, max_new_tokens=440, ignore_eos=True):
        if isinstance(event, Chunk):
            ids += event.ids
        if len(ids) >= 30:
            gate.set()
    return ids


@pytest.mark.parametrize(("policy", "breaks_at"), [("single:reader", 9), ("merge", 0)], ids=["drafting", "opening"])
async def test_a_stream_opened_again_in_mid_text_goes_on_with_the_features_there_are(
    orchestrators: Orchestrators, model: Any, truth: list[int], breaks_at: int, policy: str
) -> None:
    breaking, whole = Recorder(truth=truth, breaks_at=breaks_at), Recorder(truth=truth)
    other = Recorder(layers=(5, 3), truth=truth)
    if breaks_at == 0:
        breaking.gate.clear()
    ports = sorted((free_port(), free_port()), key=str)  # the first session goes to the first address
    async with (
        drafters_of(breaking, whole, other, ports=ports) as (first, second, third),
        orchestrators.over(200, reader=(first, second), other=third) as running,
    ):
        assert await text_of(running.client, breaking.gate, policy) == truth[len(IDS) :][:440]
    seen = whole.seen[0]
    opened = seen.features[0]
    assert opened is not None
    assert len(IDS) < opened.count < len(seen.ids)
    for broken in breaking.seen[:1]:
        broken.check(model, 0)
    seen.check(model, 0)
    assert bool(other.seen) == (policy == "merge")  # once more where it was late
    for beside in other.seen:
        beside.check(model, 0)


async def test_a_plan_asks_for_the_layers_of_all_its_heads_and_too_many_are_refused() -> None:
    heads = [Recorder(layers=layers) for layers in ((1, 2, 5), (3, 2, 1), (), MANY)]
    async with drafters_of(*heads) as drafters:
        metrics, gone = OrchestratorMetrics(), SimpleNamespace(address="127.0.0.1:1")
        named = dict(zip(("one", "two", "none", "many", "gone"), (*drafters, gone), strict=True))
        pools = {name: HeadPool(name, [at.address], Dialer(), metrics, 40) for name, at in named.items()}
        await asyncio.gather(*(pool.look_at_all() for pool in pools.values()))
        for heads, layers in {
            (): (),
            ("none", "gone"): (),
            ("none", "two", "gone"): (3, 2, 1),
            ("one", "none", "two"): (1, 2, 5, 3),
            ("many",): MANY,
        }.items():
            assert feature_layers([pools[name] for name in heads], "policy") == layers
        assert (pools["gone"].feature_layers, pools["gone"].pick()) == (None, None)
        with pytest.raises(InvalidField, match=r"policy: .* more than 16 layers: one \(1, 2, 5\), many \(20, 21, "):
            feature_layers([pools["one"], pools["none"], pools["many"]], "policy")


async def test_a_head_of_another_vocabulary_is_left_alone_and_counted_once() -> None:
    head = Recorder()
    head.description = replace(head.description, vocab_size=96, tokenizer_hash=b"a" * 32)
    async with drafter_of(head) as one:
        metrics = OrchestratorMetrics()
        fits = HeadPool("fits", [one.address], Dialer(), metrics, 6, 96, b"a" * 32)
        other = HeadPool("other", [one.address], Dialer(), metrics, 6, 300)
        strange = HeadPool("strange", [one.address], Dialer(), metrics, 6, 96, b"b" * 32)
        for _ in range(3):
            for pool in (fits, other, strange):
                for replica in pool.replicas:
                    await pool.look(replica)
        assert fits.pick() is not None
        assert other.pick() is None
        assert [replica.unfit for replica in other.replicas] == ["it has a vocabulary of 96 ids, the target one of 300"]
        assert [replica.unfit for replica in strange.replicas] == ["its tokenizer is not the target's"]
        assert metrics.registry.get_sample_value("coppice_heads_unfit_total", {"head": "other"}) == 1
        assert not metrics.registry.get_sample_value("coppice_heads_unfit_total", {"head": "fits"})


# Moves.

SESSIONS = 7
LONG = 300


class Slow(Recorder):
    """Takes its time over every draft until told to `hurry`."""

    hurry = threading.Event()

    def draft(self, jobs: Sequence[DraftJob]) -> Iterator[list[Growth]]:
        if not self.hurry.is_set():
            time.sleep(0.15)
        yield from super().draft(jobs)


async def test_sessions_move_to_a_drafter_that_comes(orchestrators: Orchestrators, truth: list[int]) -> None:
    port, old, new = free_port(), Slow(truth=truth), Slow(truth=truth)
    coming = SimpleNamespace(address=f"127.0.0.1:{port}")
    async with drafter_of(old) as drafter, orchestrators.over(slow=(drafter, coming)) as running:
        answers = [asyncio.create_task(running.ids(IDS, "single:slow", LONG)) for _ in range(SESSIONS)]
        await until(lambda: len(old.open_sessions) == SESSIONS)
        async with drafter_of(new, port=port):
            await until(lambda: {len(old.open_sessions), len(new.open_sessions)} == {3, 4})
            Slow.hurry.set()
            assert await asyncio.gather(*answers) == [truth[len(IDS) :][:LONG]] * SESSIONS
        assert await running.metric("coppice_heads_benched_total") <= 1


# Heads that are late, or refuse a text.

NEW = 40


class Picky(Recorder):
    """Has no room for long texts."""

    def __init__(self, refusal: CoppiceError, truth: list[int]) -> None:
        super().__init__(layers=(), truth=truth)
        self.refusal, self.refused = refusal, 0

    def open(self, key: int, opening: OpenDraft) -> Iterator[None]:
        if len(opening.ids) > len(IDS):
            self.refused += 1
            raise self.refusal
        yield from super().open(key, opening)


@pytest.mark.parametrize("refusal", [InvalidField("open.ids", "are too many"), Overloaded("no room for the text")])
async def test_a_text_that_a_drafter_refuses_costs_no_other_text_its_drafts(
    orchestrators: Orchestrators, truth: list[int], refusal: CoppiceError
) -> None:
    head, long = Picky(refusal, truth), truth[: len(IDS) + 20]
    async with drafter_of(head) as drafter, orchestrators.over(picky=drafter) as running:

        async def tau(prompt: list[int]) -> float:
            told = {"policy": "single:picky", "max_new_tokens": NEW, "ignore_eos": True}
            answer = await running.client.generate(prompt, **told)
            assert list(answer.ids) == truth[len(prompt) :][:NEW]
            return answer.tau

        alone = await tau(IDS)
        assert alone > 2
        for _ in range(3):
            assert await tau(long) == 1
            assert await tau(IDS) == alone
        assert head.refused >= 3
        assert await running.metric("coppice_heads_benched_total") == 0


# What a head is told of its misses.

SOME = 30


class Wrong(Recorder):
    """Drafts one right token and behind it two wrong ones."""

    def draft(self, jobs: Sequence[DraftJob]) -> Iterator[list[Growth]]:
        yield [Growth(at, self._tree(job), True) for at, job in enumerate(jobs)]

    def _tree(self, job: DraftJob) -> DraftTree:
        if not job.budget or job.committed_len + 3 > len(self.truth):
            return DraftTree.empty()
        right, second = self.truth[job.committed_len + 1 : job.committed_len + 3]
        return make_tree([(right, 0, -0.1), ((second + 1) % 96, 1, -0.2), ((second + 2) % 96, 1, -0.3)])


async def test_each_rejection_is_told_once_with_adaptation_on(orchestrators: Orchestrators, truth: list[int]) -> None:
    head, blind = Wrong(truth=truth), Wrong(layers=(), truth=truth)
    text = truth[len(IDS) :][:SOME]
    with LocalRedis() as redis:
        client = Redis.from_url(redis.url)
        async with drafters_of(head, blind) as (first, second):
            named = {"reader": first, "other": second}
            async with orchestrators.over(**named) as off:
                assert await off.ids(IDS, "single:reader", SOME) == text
                assert (head.seen[0].wants_misses, head.seen[0].rejections) == (False, [])
                assert counts(off.service.metrics).produced == 0
            for name in named:
                client.set(redis_key(name, "demand"), "misses")
            async with orchestrators.over(2000, "--adaptation.redis", redis.url, **named) as on:
                await asyncio.sleep(0.5)  # it has heard what is wanted
                assert await on.ids(IDS, "single:reader", SOME) == text
                assert await holds(lambda: len(queries(client, "reader")) == 1)
                (record,) = queries(client, "reader")
                assert (record.s, record.new_tokens) == (0.0, SOME)  # this head knows no misses
                assert await on.ids(IDS, "single:other", SOME) == text
    seen = head.seen[1]
    assert seen.wants_misses
    # A step commits the root and one accepted token: a rejection at every second position, told with the next step.
    wanted = list(range(len(IDS) + 2, len(IDS) + SOME - 1, 2))
    assert [one.position for one in seen.rejections] == wanted
    assert all((each.parent, each.target_id) == (1, truth[each.position]) for each in seen.rejections)
    assert [(one.wants_misses, one.rejections) for one in blind.seen] == [(False, [])]
