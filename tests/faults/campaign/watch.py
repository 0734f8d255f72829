"""How fast processes answer for their health, and how fast one that is full refuses, seen from a process of its own.

`python -m tests.faults.campaign.watch FULL HEALTH_ADDRESS...`, where FULL is an orchestrator's address or empty, asks
until its input ends, then prints a `Watched` as JSON. A process of its own, because in the one that makes the load an
answer waits for a hundred clients' turns too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import asdict, dataclass, field

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coppice.client.request import build_request
from coppice.errors import CoppiceError, Overloaded
from coppice.stack.process import Ready
from coppice.wire.generation import request_to_wire
from tests.faults.campaign.calls import CALL_S, Direct

PERIOD_S = 0.1


@dataclass(slots=True)
class Watched:
    """What was seen."""

    took: list[float] = field(default_factory=list)
    """seconds that each answer about health took"""
    missed: int = 0
    """such questions without an answer"""
    refused: list[float] = field(default_factory=list)
    """seconds that each RESOURCE_EXHAUSTED took"""


@contextlib.asynccontextmanager
async def watching(services: Iterable[Ready], full: str = "") -> AsyncIterator[Watched]:
    """Ask these for their health inside the block, and the orchestrator at `full`, if any, for answers.

    What was seen is there behind the block.
    """
    seen = Watched()
    command = [sys.executable, "-m", "tests.faults.campaign.watch", full, *(ready.health for ready in services)]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=1 << 24)
    try:
        assert process.stdout
        await process.stdout.readline()  # it has begun
        yield seen
    finally:
        answer, _ = await process.communicate(b"")  # ends its input
    seen.took, seen.missed, seen.refused = json.loads(answer).values()


async def _health(address: str, seen: Watched, ended: asyncio.Event) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub, request = health_pb2_grpc.HealthStub(channel), health_pb2.HealthCheckRequest(service="")
        await stub.Check(request, timeout=CALL_S, wait_for_ready=True)
        while not ended.is_set():
            await asyncio.sleep(PERIOD_S)
            began = time.monotonic()
            try:
                await stub.Check(request, timeout=CALL_S)
                seen.took.append(time.monotonic() - began)
            except grpc.RpcError:
                seen.missed += 1


async def _refusals(address: str, seen: Watched, ended: asyncio.Event) -> None:
    request, direct = request_to_wire(build_request([1], max_new_tokens=1)), Direct(address)
    while not ended.is_set():
        await asyncio.sleep(PERIOD_S)
        began = time.monotonic()
        try:
            await direct.ask(request, CALL_S)
        except Overloaded:
            seen.refused.append(time.monotonic() - began)
        except CoppiceError:
            continue  # the load counts what fails
    await direct.close()


async def _watch(full: str, addresses: Sequence[str]) -> Watched:
    seen, ended = Watched(), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for address in addresses:
            group.create_task(_health(address, seen, ended))
        if full:
            group.create_task(_refusals(full, seen, ended))
        print(flush=True)
        await asyncio.to_thread(sys.stdin.read)
        ended.set()
    return seen


if __name__ == "__main__":
    print(json.dumps(asdict(asyncio.run(_watch(sys.argv[1], sys.argv[2:])))))
