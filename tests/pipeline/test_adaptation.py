"""A whole stack with an adapter: whatever happens to the weights, to Redis and to the adapter, the text is plain's."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from coppice.client.adapter import AdapterClient
from coppice.client.client import AsyncClient, Client
from coppice.heads.checkpoints import load_head, public_weights
from coppice.limits import SKETCH
from coppice.rpc.channels import Dialer
from coppice.speculation.sampling import SamplingParams
from coppice.stack.launch import Stack
from coppice.stack.process import ProcessFailed
from coppice.stack.spec import HeadSpec, StackSpec
from coppice.weights.variants import ROUTES, Route, Routes, variant_name
from coppice.weights.versions import Weights, pack_update
from coppice.wire.adapter import HeadStatus
from services.adapter.push import DrafterLink
from tests.faults.campaign.adaptation import QUICK
from tests.pipeline.test_feature_heads import KINDS, PROMPTS, heads, target
from tests.pushes import altered
from tests.signals import eventually

__all__ = ["heads", "target"]  # fixtures

NEW = 24
SAMPLINGS = (SamplingParams(), SamplingParams(temperature=0.7, seed=3), SamplingParams(temperature=1.0, seed=4))
POLICIES = ("single:block", "single:eagle", "route", "merge")
PUSHES = 5000 if os.environ.get("COPPICE_PROOF") else 200


@pytest.fixture(scope="module")
def stack(target: Path, heads: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    deadline = {"orchestrator.draft_deadline_ms": 20_000}
    folder = tmp_path_factory.mktemp("adapter")
    spec = StackSpec(
        target=target,
        heads=tuple(HeadSpec(name, kind, heads[name]) for name, kind in KINDS.items()),
        dtype="float32",
        verifier_threads=1,
        drafter_threads=1,
        adapt=True,
        http_port=0,
        extra={
            "adapter": {**QUICK, "adapter.folder": folder},
            "orchestrator": deadline,
        },
    )
    with Stack(spec, log_dir=tmp_path_factory.mktemp("logs")) as running:
        yield running


@pytest.fixture(scope="module")
def plain(stack: Stack) -> dict[tuple[int, int], tuple[int, ...]]:
    """What plain decoding answers, by prompt and way of drawing."""
    with Client(stack.address) as client:
        return {
            (prompt, drawn): client.generate(
                PROMPTS[prompt], policy="plain", sampling=sampling, max_new_tokens=NEW, ignore_eos=True
            ).ids
            for prompt, (drawn, sampling) in itertools.product(range(len(PROMPTS)), enumerate(SAMPLINGS))
        }


def answers_are_plains(client: Client, plain: dict[tuple[int, int], tuple[int, ...]], policy: str) -> None:
    for (prompt, drawn), wanted in plain.items():
        sampling = SAMPLINGS[drawn]
        answer = client.generate(PROMPTS[prompt], policy=policy, sampling=sampling, max_new_tokens=NEW, ignore_eos=True)
        assert answer.ids == wanted


def status(stack: Stack) -> dict[str, HeadStatus]:
    with AdapterClient(stack.services["adapter"].address) as adapter:
        return {one.head: one for one in adapter.status(history=100)}


def test_texts_are_plains_while_both_heads_are_adapted(
    stack: Stack, plain: dict[tuple[int, int], tuple[int, ...]]
) -> None:
    with Client(stack.address) as client:
        until = time.monotonic() + 180  # a full machine trains slowly
        for number, policy in enumerate(itertools.cycle(POLICIES), 1):
            answers_are_plains(client, plain, policy)
            told = status(stack)
            if number >= len(POLICIES) and all(one.events >= 3 for one in told.values()):
                break
            assert time.monotonic() < until, told
    assert set(told) == set(KINDS)
    for one in told.values():
        assert one.queries == len(one.history) or one.queries > 100
        assert {change.what for change in one.changes} <= {"full", "revert"}
    heads = lambda: status(stack).values()  # noqa: E731
    assert eventually(lambda: all(replica.current for head in heads() for replica in head.replicas))


def test_texts_are_plains_beside_pushes(
    stack: Stack, plain: dict[tuple[int, int], tuple[int, ...]], target: Path, heads: dict[str, Path]
) -> None:
    """Some are of random weights, or a variant that drafts for half of the texts. The adapter, which would put its
    own back, is held still.
    """
    loaded = load_head("specblock", heads["block"], target)
    first = Weights.of(public_weights(loaded.model, loaded.config))
    address = stack.services["drafter-block"].address
    adapter = stack.services["adapter"].pid
    os.kill(adapter, signal.SIGSTOP)
    everything = Route((0.0,) * SKETCH, 2.0, 1, 0.5)
    pushed = generated = 0
    ended = asyncio.Event()

    async def pushing() -> None:
        nonlocal pushed
        async with DrafterLink(address, Dialer()) as replica:
            version = (await replica.describe()).weights_version
            for number in itertools.count():
                if number >= PUSHES and generated > 2:
                    break
                names = None if number % 10 == 0 else ["lm_head.weight"]
                new = altered(first, number, names, version + number + 1)
                if number % 3 == 0:
                    variant = {variant_name(1, name): new.tensors[name] for name in new.differing(first)}
                    new = first.changed(variant | {ROUTES: Routes([everything]).tensor()}, new.version)
                await replica.push(*pack_update("block", first, new))
                pushed += 1
        ended.set()

    async def generating(client: AsyncClient, policy: str) -> None:
        nonlocal generated
        for (prompt, drawn), wanted in itertools.cycle(plain.items()):
            answer = await client.generate(
                PROMPTS[prompt], policy=policy, sampling=SAMPLINGS[drawn], max_new_tokens=NEW, ignore_eos=True
            )
            assert answer.ids == wanted
            generated += 1
            if ended.is_set():
                return

    async def both() -> None:
        async with AsyncClient(stack.address) as client:
            await asyncio.gather(pushing(), *(generating(client, policy) for policy in ("single:block", "merge")))

    try:
        asyncio.run(both())
    finally:
        os.kill(adapter, signal.SIGCONT)
    assert (pushed >= PUSHES, generated > 2) == (True, True)
    until = time.monotonic() + 30
    while not all(one.current for one in status(stack)["block"].replicas):  # the adapter's own weights again
        assert time.monotonic() < until
        time.sleep(0.2)


def test_texts_are_plains_without_redis_and_without_the_adapter(
    stack: Stack, plain: dict[tuple[int, int], tuple[int, ...]]
) -> None:
    """The last test of this stack: both are killed."""
    plain = dict(list(plain.items())[: len(SAMPLINGS)])  # each way of drawing once
    with Client(stack.address) as client:
        answers_are_plains(client, plain, "merge")
        assert stack.redis
        assert stack.redis.pid
        for pid in (stack.redis.pid, stack.services["adapter"].pid):
            os.kill(pid, signal.SIGSTOP)
            answers_are_plains(client, plain, "merge")
            os.kill(pid, signal.SIGCONT)
            answers_are_plains(client, plain, "single:block")
            os.kill(pid, signal.SIGKILL)
            answers_are_plains(client, plain, "merge")
            stack.check()  # neither is missed
    assert eventually(lambda: stack.processes["adapter"].exit_code is not None)
    with pytest.raises(ProcessFailed):
        stack.processes["adapter"].check()
