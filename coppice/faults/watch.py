"""How fast processes answer for their health, and how fast one that is full refuses, seen from a process of its own.

`python -m coppice.faults.watch HEALTH_ADDRESS...` asks until its input ends, then prints a `Watched` as JSON. A process
of its own, because in the one that makes the load an answer waits for a hundred clients' turns too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coppice.client import build_request
from coppice.process import Ready
from coppice.v1.generation_pb2_grpc import GenerationServiceStub
from coppice.wire.generation import request_to_wire

PERIOD_S = 0.1
CALL_S = 5.0


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
async def watching(services: Sequence[Ready], full: str = "") -> AsyncIterator[Watched]:
    """Ask these for their health inside the block, and the orchestrator at `full`, if any, for answers.

    What was seen is there behind the block.
    """
    seen = Watched()
    command = [sys.executable, "-m", "coppice.faults.watch", full, *(ready.health for ready in services)]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=1 << 24)
    try:
        assert process.stdout
        await process.stdout.readline()  # it has begun
        yield seen
    finally:
        told, _ = await process.communicate(b"")  # ends its input
    seen.took, seen.missed, seen.refused = json.loads(told).values()


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
    """A request that is admitted all the same is left at its first event."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub, request = GenerationServiceStub(channel), request_to_wire(build_request([1], max_new_tokens=1))
        while not ended.is_set():
            await asyncio.sleep(PERIOD_S)
            began, call = time.monotonic(), stub.Generate(request, timeout=CALL_S)
            try:
                await call.read()
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                    seen.refused.append(time.monotonic() - began)
            finally:
                call.cancel()


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
