"""The SDK when the only server that it knows is killed and comes back on its port."""

from __future__ import annotations

import asyncio
import os
import signal

from coppice.client.client import AsyncClient
from coppice.stack.launch import Stack
from coppice.wire.generation import Chunk, Finished, Started

PROMPT = tuple(range(7, 40))
NEW = 200
TOLD = {"max_new_tokens": NEW, "ignore_eos": True, "temperature": 1.0}


async def test_an_answer_waits_for_its_only_server_to_come_back(stack: Stack) -> None:
    """It is away for a while, during which the client asks in vain."""

    async def come_back() -> None:
        await asyncio.sleep(1.5)
        await asyncio.to_thread(stack.restart, "orchestrator")

    ids, seeds, coming, end = list[int](), list[int](), None, None
    async with AsyncClient(stack.address) as client:
        async for event in client.stream(PROMPT, **TOLD):
            if isinstance(event, Started):
                seeds.append(event.seed)
            elif isinstance(event, Chunk):
                ids += event.ids
                if coming is None and len(ids) >= 20:
                    os.kill(stack.services["orchestrator"].pid, signal.SIGKILL)
                    coming = asyncio.create_task(come_back())
            else:
                end = event
        assert coming is not None
        await coming
        (seed,) = seeds
        plain = await client.generate(PROMPT, seed=seed, policy="plain", **TOLD)
    assert isinstance(end, Finished)
    assert end.new_tokens == len(ids) == NEW
    assert end.resumed >= 1
    assert tuple(ids) == plain.ids
