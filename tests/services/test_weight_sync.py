"""Pushes of weights into drafter processes that draft meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from coppice.errors import InvalidField, Overloaded
from coppice.rpc.channels import Dialer, Stub
from coppice.v1 import drafter_pb2
from coppice.wire.drafter import weights_to_wire
from services.adapter.loop import DrafterLink
from tests.processes import Service, StartService
from tests.pushes import Case, Push, altered, matrix_of
from tests.recorder import fed
from tests.sessions import DrafterClient, drafter_idle, drafting
from tests.unit.test_feature_heads import Text, build, save_random

KIND = "specblock"
METHOD = "/coppice.v1.DrafterService/SyncWeights"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(tmp_path_factory.mktemp(KIND), KIND)


@pytest.fixture(scope="module")
def drafter(source: Path, start_service: StartService, target: Path) -> Service:
    flags = ["--drafter.kind", KIND, "--drafter.path", str(source), "--drafter.target", str(target)]
    flags += ["--drafter.threads", "1", "--drafter.top_k", "8", "--drafter.depth", "6"]
    return start_service("services.drafter", *flags)


@pytest.fixture(scope="module")
def case(source: Path, target: Path) -> Case:
    """The drafter at version 2."""
    first = build(KIND, source, target)[0].weights
    assert first is not None
    return Case(KIND, first, altered(first, 1, version=2))


@contextlib.asynccontextmanager
async def at_version_2(drafter: Service, case: Case) -> AsyncIterator[DrafterLink]:
    async with DrafterLink(drafter.address, Dialer()) as replica:
        push = Push.of(case.head, case.first, case.live)
        synced = await replica.push(push.header, push.parts)
        assert (synced.version, synced.weights_hash) == (2, case.live.hash)
        yield replica


async def state(replica: DrafterLink) -> tuple[int, bytes]:
    head = await replica.describe()
    return head.weights_version, head.weights_hash


async def test_other_bytes_and_messages_out_of_order_are_refused(drafter: Service, case: Case) -> None:
    good = case.good
    header, part = weights_to_wire(good.header), weights_to_wire(good.parts[0])
    streams = [
        ([], "kind: the first message of a weight sync is header"),
        ([part.SerializeToString()], "kind: the first message of a weight sync is header"),
        ([header.SerializeToString()] * 2, "kind: every message but the first is part"),
        ([b"\xff\xff"], "request: the bytes are not a message"),
        ([header.SerializeToString(), b"\xff\xff"], "request: the bytes are not a message"),
        ([b""], "kind: neither header nor part is set"),
    ]
    async with at_version_2(drafter, case) as replica, Dialer().open(drafter.address) as channel:
        for messages, why in streams:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.stream_unary(METHOD)(iter(messages), timeout=10)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert (caught.value.details() or "").startswith(why)
        assert await state(replica) == (2, case.live.hash)


async def test_there_is_one_push_at_a_time_and_one_that_is_left_changes_nothing(drafter: Service, case: Case) -> None:
    good = case.good
    async with at_version_2(drafter, case) as replica, drafting(drafter) as stub:
        call = stub.SyncWeights()
        await call.write(weights_to_wire(good.header))
        await call.write(weights_to_wire(good.parts[0]))
        await asyncio.sleep(0.2)
        with pytest.raises(Overloaded, match="another weight sync is running"):
            await replica.push(good.header, good.parts)
        call.cancel()
        await asyncio.sleep(0.2)
        assert await state(replica) == (2, case.live.hash)
        call = stub.SyncWeights(timeout=0.3)
        await call.write(weights_to_wire(good.header))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await asyncio.sleep(0.2)
        with pytest.raises(InvalidField, match="file: is no safetensors file"):
            await replica.push(good.header, good.parts[:-1])
        assert await state(replica) == (2, case.live.hash)


async def test_many_pushes_while_sessions_draft_lose_no_step(drafter: Service, case: Case) -> None:
    pushes, sessions, first = 30, 4, case.first
    seen: list[int] = []
    ended = asyncio.Event()

    async def drafting(stub: Any, seed: int) -> None:
        text, newest = Text.random(3000, seed), 0
        async with fed(text.inline(0, 3000)) as features:
            client = await DrafterClient(stub, text.ids[:12], features=features).open()
            while not ended.is_set() and len(client.committed) < 2990:
                at, end = len(client.committed), len(client.committed) + 1 + seed % 3
                delta = await asyncio.wait_for(client.draft(text.ids[end], text.ids[at:end], 40), 20)
                assert delta.last
                assert len(delta.nodes) > 0
                assert np.isfinite(delta.nodes.log_probs).all()
                assert delta.fence.weights_version >= newest  # never an older one again
                seen.append(newest := delta.fence.weights_version)
            assert ended.is_set()
            client.call.cancel()

    async def pushing() -> None:
        live = case.live
        async with at_version_2(drafter, case) as replica:
            for number in range(pushes):
                names = None if number % 3 == 0 else [matrix_of(first)]
                new = altered(live, number, names) if number % 4 else altered(first, number, names, live.version + 1)
                push = Push.of(KIND, live if number % 2 else first, new)
                synced = await replica.push(push.header, push.parts)
                assert (synced.version, synced.weights_hash) == (new.version, new.hash)
                live = new
            assert await state(replica) == (2 + pushes, live.hash)
        ended.set()

    async with Dialer().open(drafter.address) as channel:
        stub = Stub(channel, drafter_pb2)
        await asyncio.gather(*(drafting(stub, seed) for seed in range(sessions)), pushing())
        idle = await drafter_idle(stub)
    assert (idle.sessions, idle.sessions_opened, idle.sessions_closed) == (0, sessions, sessions)
    assert len(set(seen)) > 1
