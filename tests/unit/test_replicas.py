"""What an orchestrator makes of a replica's trouble."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from coppice.errors import DeadlineExceeded, Unavailable
from coppice.rpc import link
from coppice.rpc.channels import Dialer
from coppice.speculation.sampling import SamplingParams
from coppice.speculation.tree import DraftTree
from coppice.v1 import verifier_pb2
from coppice.wire.common import Fence
from coppice.wire.drafter import OpenDraft
from coppice.wire.verifier import OpenSession, TargetDescription, VerifyStep, target_to_wire
from orchestrator import targets
from orchestrator.heads import HeadPool, HeadSession
from orchestrator.http.answers import error_response
from orchestrator.metrics import OrchestratorMetrics
from orchestrator.targets import TargetPool, TargetSession
from tests.recorder import server_of


async def test_a_draft_that_is_given_up_before_it_was_sent_leaves_no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "SILENT_S", 0.5)
    before, opening = asyncio.all_tasks(), OpenDraft("s", [1], SamplingParams())
    with socket.create_server(("127.0.0.1", 0)) as mute:  # connects, and says nothing
        pool = HeadPool("head", [f"127.0.0.1:{mute.getsockname()[1]}"], Dialer(), OrchestratorMetrics(), 6)
        pool.feature_layers = ()
        for _ in range(5):
            session = HeadSession(pool, opening, 96, learns=False)
            assert session.ask(Fence(1, 2, 0), 3, [1, 2], 4) is not None
            await asyncio.sleep(0)
            session.close()
        _, pending = await asyncio.wait(asyncio.all_tasks() - before, timeout=20)  # the link gives it up
        assert not pending
        assert [replica.sessions for replica in pool.replicas] == [0]


TARGET = TargetDescription("t", 100, 512, 6, 32, (0,), "float32", 4096, weights_hash=bytes(32))


async def test_a_verifier_that_loaded_something_else_serves_nobody() -> None:
    other: list[dict[str, Any]] = [{"weights_hash": b"\1" * 32}, {"weights_hash": b""}, {"dtype": "bfloat16"}]
    for change in ({"sessions": 3, "max_len": 256}, *other):
        pool = TargetPool(["127.0.0.1:1", "127.0.0.1:2"], Dialer())
        for replica, target in zip(pool.replicas, (TARGET, replace(TARGET, **change)), strict=True):
            replica.stub = SimpleNamespace(DescribeTarget=AsyncMock(return_value=target_to_wire(target)))
            await pool.look(replica)
        assert [replica.fit for replica in pool.replicas] == [True, "sessions" in change]
        for replica in pool.replicas:
            await replica.channel.close()


class Slow:
    """A verifier with many prompts before the one that is asked for."""

    async def Verify(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async for _ in requests:
            await asyncio.sleep(0.5)
            yield verifier_pb2.VerifyResponse(opened={"next": {"drawn_id": 5}, "fence": {"committed_len": 1}})

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


async def test_the_only_verifier_is_not_given_up_while_it_prefills(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "_PREFILL_S", 0.1)
    opening = OpenSession("s", [1], SamplingParams(), frozenset(), 8)
    async with server_of(verifier_pb2.DESCRIPTOR.services_by_name["VerifierService"], Slow()) as server:
        pool = TargetPool([server.address], Dialer(), failover_s=0.2)
        session = TargetSession(pool, opening)
        opened = await session.open([1])
        assert opened.next.drawn_id == 5
        pool.update([server.address, "127.0.0.1:1"])  # there may be a quicker one
        monkeypatch.setattr(targets, "_LEAST_DEADLINE_S", 0.1)
        with pytest.raises(DeadlineExceeded):  # long before the prefill's would be over
            await session.verify(VerifyStep(Fence(1, 1, 0), 5, DraftTree.empty()))
        session.close()
        with pytest.raises((DeadlineExceeded, Unavailable)) as lost:
            await TargetSession(pool, opening).open([1])
        status, headers = error_response(lost.value).status_code, error_response(lost.value).headers
        assert (status in (503, 504), headers["retry-after"]) == (True, "1")
        for replica in pool.replicas:
            await replica.channel.close()


async def test_texts_that_begin_alike_go_to_one_verifier_unless_it_has_too_many_sessions() -> None:
    addresses = [f"127.0.0.1:{port}" for port in range(1, 5)]
    pool, other = TargetPool(addresses, Dialer()), TargetPool(addresses[::-1], Dialer())
    for replica in (*pool.replicas, *other.replicas):
        replica.target = replace(TARGET, prefix_cache_tokens=1000)
    prefixes = [bytes([number]) for number in range(40)]

    def chosen(of: TargetPool, prefix: bytes) -> tuple[Any, bool]:
        replica, preferred = of.pick_for(prefix)
        assert replica
        return replica.address, preferred

    first = {prefix: chosen(pool, prefix) for prefix in prefixes}
    assert first == {prefix: chosen(other, prefix) for prefix in prefixes}
    assert set(first.values()) == {(address, True) for address in addresses}
    replica: Any = pool.pick_for(prefixes[0])[0]
    for sessions in range(1, 4):
        replica.sessions += 1
        assert chosen(pool, prefixes[0])[1] == (sessions <= 2)
    second: Any = pool.pick_for(prefixes[0])[0]
    assert pool.pick_for(prefixes[0], {second})[0] not in (replica, second)
    replica.cool_down()
    assert chosen(pool, prefixes[0]) == (second.address, True)
    for each in pool.replicas:  # without caches the least busy one is chosen
        each.target, each.sessions = TARGET, 2
    least = next(each for each in pool.replicas if each.fit)
    least.sessions = 1
    assert {chosen(pool, prefix) for prefix in prefixes} == {(least.address, False)}
    for each in (*pool.replicas, *other.replicas):
        await each.channel.close()
