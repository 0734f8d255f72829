"""The SDK when the only server that it knows is killed and comes back on its port."""

from __future__ import annotations

import asyncio
import os
import signal

from coppice.client.client import AsyncClient, Client
from coppice.stack.launch import Stack
from coppice.wire.generation import Chunk, Finished, Started

PROMPT = tuple(range(7, 40))
NEW = 200
TOLD = {"max_new_tokens": NEW, "ignore_eos": True, "temperature": 1.0}


class Heard:
    """An answer as it comes."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.seeds: list[int] = []
        self.resumed = 0

    def add(self, event: Started | Chunk | Finished) -> bool:
        """Take in an event; whether the 20th token came with it."""
        before = len(self.ids)
        if isinstance(event, Started):
            self.seeds.append(event.seed)
        elif isinstance(event, Chunk):
            self.ids += event.ids
        else:
            assert event.new_tokens == len(self.ids) == NEW
            self.resumed = event.resumed
        return before < 20 <= len(self.ids)


def kill(stack: Stack) -> None:
    os.kill(stack.services["orchestrator"].pid, signal.SIGKILL)


def test_an_answer_goes_on_when_its_only_server_was_killed_and_came_back(stack: Stack) -> None:
    heard = Heard()
    with Client(stack.address) as client:
        for event in client.stream(PROMPT, **TOLD):
            if heard.add(event):
                kill(stack)
                stack.restart("orchestrator")
        (seed,) = heard.seeds
        assert heard.resumed == 1
        assert tuple(heard.ids) == client.generate(PROMPT, seed=seed, policy="plain", **TOLD).ids


async def test_an_answer_waits_for_its_only_server_to_come_back(stack: Stack) -> None:
    """It is away for a while, during which the client asks in vain."""

    async def come_back() -> None:
        await asyncio.sleep(1.5)
        await asyncio.to_thread(stack.restart, "orchestrator")

    heard, coming = Heard(), None
    async with AsyncClient(stack.address) as client:
        async for event in client.stream(PROMPT, **TOLD):
            if heard.add(event):
                kill(stack)
                coming = asyncio.create_task(come_back())
        assert coming is not None
        await coming
        (seed,) = heard.seeds
        assert heard.resumed >= 1
        assert tuple(heard.ids) == (await client.generate(PROMPT, seed=seed, policy="plain", **TOLD)).ids
