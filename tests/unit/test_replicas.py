"""What an orchestrator makes of a replica's trouble."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from coppice.messages.steps import TargetDescription
from coppice.rpc.channels import Dialer
from coppice.v1 import verifier_pb2
from coppice.wire.verifier import target_to_wire
from orchestrator import replicas
from orchestrator.replicas import Replica
from orchestrator.verifiers import TargetPool, VerifierReplica


async def test_trouble_that_comes_back_is_left_alone_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(replicas.time, "monotonic", lambda: now)
    replica = Replica("127.0.0.1:1", Dialer())
    pauses = []
    for well_s in (0.0, 0.1, 0.1, 9.0, 11.0):
        now = max(now, replica.cooling_until) + well_s
        assert replica.fit
        assert replica.cool_down()
        assert not replica.cool_down()
        pauses.append(replica.cooling_until - now)
    assert pauses == pytest.approx([0.5, 1.0, 2.0, 4.0, 0.5])
    await replica.channel.close()


async def test_a_verifier_may_be_lost_in_the_very_turn_in_which_a_wait_for_it_ends() -> None:
    replica, late = VerifierReplica("127.0.0.1:1", Dialer()), asyncio.Event()

    async def wait(seconds: float) -> None:
        async with asyncio.timeout(seconds) as timeout:
            replica.waiting.add(timeout)
            try:
                await late.wait()
            finally:
                replica.waiting.discard(timeout)

    waits = [asyncio.create_task(wait(seconds)) for seconds in (0.0, 60.0)]
    for _ in range(2):  # the waits begin; the first one's time is over
        await asyncio.sleep(0)
    assert sorted(timeout.expired() for timeout in replica.waiting) == [False, True]
    replica.lose()
    ended = await asyncio.gather(*waits, return_exceptions=True)
    assert [type(error) for error in ended] == [TimeoutError] * 2
    await replica.channel.close()


class Verifiers:
    """What verifiers at two addresses say that they serve."""

    def __init__(self, *told: TargetDescription) -> None:
        self.told = {f"127.0.0.1:{port}": one for port, one in enumerate(told, 1)}

    async def answer(self, replica: VerifierReplica) -> verifier_pb2.DescribeTargetResponse:
        """The answer of the one at a replica's address."""
        return target_to_wire(self.told[replica.address])


@pytest.mark.parametrize(
    ("change", "fit"),
    [
        ({"sessions": 3, "max_len": 256}, True),
        ({"weights_hash": b"\1" * 32}, False),
        ({"weights_hash": b""}, False),
        ({"dtype": "bfloat16"}, False),
    ],
)
async def test_a_verifier_that_loaded_something_else_serves_nobody(change: dict[str, Any], fit: bool) -> None:
    first = TargetDescription("t", 100, 512, 6, 32, (0,), "float32", 4096, weights_hash=bytes(32))
    verifiers = Verifiers(first, replace(first, **change))
    pool = TargetPool(list(verifiers.told), Dialer())
    for replica in pool.replicas:
        replica.stub = SimpleNamespace(DescribeTarget=lambda *_, replica=replica, **__: verifiers.answer(replica))
        await pool.describe(replica)
    assert [not replica.unfit for replica in pool.replicas] == [True, fit]
    for replica in pool.replicas:
        await replica.channel.close()
