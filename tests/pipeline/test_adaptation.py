"""A whole stack with an adapter: whatever happens to the weights, to Redis and to the adapter, the text is plain's."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from coppice.adaptation.weights import ROUTES, Route, Routes, Weights, pack_update, variant_name
from coppice.client.adapter import AdapterClient
from coppice.client.client import Client
from coppice.heads.checkpoints import load_head, public_weights
from coppice.limits import SKETCH
from coppice.rpc.channels import Dialer
from coppice.speculation.sampling import SamplingParams
from coppice.stack.launch import Stack
from coppice.stack.process import ProcessFailed
from coppice.stack.spec import HeadSpec
from coppice.v1 import adapter_pb2 as pb
from services.adapter.loop import DrafterLink
from tests.faults.campaign.scenarios import QUICK
from tests.pipeline.test_feature_heads import KINDS, POLICIES, PROMPTS, heads, target
from tests.pushes import altered
from tests.signals import eventually
from tests.stacks import serving

__all__ = ["heads", "target"]  # fixtures

SAMPLINGS = (SamplingParams(), SamplingParams(temperature=0.7, seed=3))
PLAIN = {"policy": "plain", "max_new_tokens": 24, "ignore_eos": True}
PUSHES = 5000 if os.environ.get("COPPICE_PROOF") else 24
Texts = dict[tuple[tuple[int, ...], SamplingParams], tuple[int, ...]]  # the ids of answers, by prompt and sampling


@pytest.fixture(scope="module")
def stack(target: Path, heads: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("adapter")
    both = (HeadSpec(name, kind, heads[name]) for name, kind in KINDS.items())
    options = {"adapt": True, "http_port": 0, "extra": {"adapter": {**QUICK, "adapter.folder": folder}}}
    with serving(tmp_path_factory.mktemp("logs"), target, *both, draft_deadline_ms=20_000, **options) as running:
        yield running


@pytest.fixture(scope="module")
def plain(stack: Stack) -> Texts:
    with Client(stack.address) as client:
        return {
            (prompt, sampling): client.generate(prompt, sampling=sampling, **PLAIN).ids  # type: ignore[arg-type]
            for prompt, sampling in itertools.product(PROMPTS[:2], SAMPLINGS)
        }


def answers_are_plains(client: Client, plain: Texts, policy: str) -> None:
    for (prompt, sampling), ids in plain.items():
        answer = client.generate(prompt, sampling=sampling, **PLAIN | {"policy": policy})  # type: ignore[arg-type]
        assert answer.ids == ids


def status(stack: Stack) -> list[pb.HeadStatus]:
    with AdapterClient(stack.services["adapter"].address) as adapter:
        return adapter.status(history=100)


def all_current(stack: Stack) -> bool:
    return all(replica.current for head in status(stack) for replica in head.replicas)


def test_texts_are_plains_while_both_heads_are_adapted(stack: Stack, plain: Texts) -> None:
    with Client(stack.address) as client:
        until = time.monotonic() + 300  # a full machine trains slowly
        for number, policy in enumerate(itertools.cycle(POLICIES), 1):
            answers_are_plains(client, plain, policy)
            if number >= len(POLICIES) and all(head.events for head in status(stack)):
                break
            assert time.monotonic() < until, status(stack)
    assert {head.head for head in status(stack)} == set(KINDS)
    assert eventually(lambda: all_current(stack), 120)


def test_texts_are_plains_beside_pushes(stack: Stack, plain: Texts, target: Path, heads: dict[str, Path]) -> None:
    """Some are of random weights, or a variant that drafts for half of the texts. The adapter, which would put its
    own back, is held still.
    """
    loaded = load_head("specblock", heads["block"], target)
    first = Weights.of(public_weights(loaded.model, loaded.config))
    routes = {ROUTES: Routes([Route((0.0,) * SKETCH, 2.0, 1, 0.5)]).tensor()}

    async def push() -> None:
        async with DrafterLink(stack.services["drafter-block"].address, Dialer()) as replica:
            version = (await replica.describe()).weights_version
            for number in range(PUSHES):
                names = None if number % 10 == 0 else ["lm_head.weight"]
                new = altered(first, number, names, version + number + 1)
                if number % 3 == 0:
                    variant = {variant_name(1, name): new.tensors[name] for name in new.differing(first)}
                    new = first.changed(variant | routes, new.version)
                await replica.push(*pack_update("block", first, new))
        pushed.set()

    adapter, pushed = stack.services["adapter"].pid, threading.Event()
    os.kill(adapter, signal.SIGSTOP)
    try:
        pushing = threading.Thread(target=lambda: asyncio.run(push()))
        pushing.start()
        with Client(stack.address) as client:
            for policy in itertools.cycle(("single:block", "merge")):
                answers_are_plains(client, plain, policy)
                if not pushing.is_alive():
                    break
        assert pushed.is_set()
    finally:
        os.kill(adapter, signal.SIGCONT)
    assert eventually(lambda: all_current(stack), 120)  # the adapter's own weights again


def test_texts_are_plains_without_redis_and_without_the_adapter(stack: Stack, plain: Texts) -> None:
    """The last test of this stack: both are killed."""
    plain = {at: ids for at, ids in plain.items() if at[0] == PROMPTS[1]}
    with Client(stack.address) as client:
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
