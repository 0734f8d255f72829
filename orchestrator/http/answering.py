"""The choices of an HTTP request, decoded side by side."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from typing import TypeVar

import anyio
from starlette.requests import Request

from coppice.client.completion import StreamEvent
from coppice.errors import Cancelled, DeadlineExceeded, Unavailable
from coppice.rpc.access import Access
from coppice.wire.generation import GenerationRequest, request_to_wire

from .served import Served

T = TypeVar("T")
Events = AsyncGenerator[tuple[int, StreamEvent], None]
"""of all choices of a request, each with its choice's index"""

_EVENT_BYTES, _TOKEN_BYTES, _NODE_BYTES = 256, 32, 128  # of an event that waits to be read, about


class Answering:
    """Has a service decode choices, and ends them when the server stops."""

    def __init__(self, served: Served, access: Access) -> None:
        self._served, self._access = served, access
        self._running: set[asyncio.Task[None]] = set()

    def cut(self) -> None:
        """End everything that runs: its clients are told that the server stops."""
        for task in self._running:
            task.cancel()

    async def events(self, requests: Sequence[GenerationRequest], headers: Mapping[str, str]) -> Events:
        """The events of several requests as they come; when one fails, all end. Raises CoppiceError.

        headers: the HTTP request's, whose client has one place since the door and takes one more for each other choice.
        """
        send, receive = anyio.create_memory_object_stream[tuple[int, StreamEvent]]()
        call_s = self._served.settings.limits.call_s

        async def one(index: int, request: GenerationRequest) -> None:
            answer = self._served.answer(request_to_wire(request), lambda event: event, _size)
            async with contextlib.aclosing(answer) as events:
                async for event in events:
                    await send.send((index, event))

        async def every() -> None:
            try:
                async with send, asyncio.timeout(call_s), contextlib.AsyncExitStack() as places:
                    for _ in requests[1:]:
                        await places.enter_async_context(self._access.client(headers.items(), counted=True))
                    group = await places.enter_async_context(asyncio.TaskGroup())
                    for index, request in enumerate(requests):
                        group.create_task(one(index, request))
            except TimeoutError:
                raise DeadlineExceeded(f"a call ends after {call_s:g} s") from None
            except ExceptionGroup as several:
                raise several.exceptions[0] from None

        running = asyncio.create_task(every())
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        running.add_done_callback(lambda done: done.cancelled() or done.exception())  # read, whoever left
        try:
            async for event in receive:
                yield event
            await asyncio.wait([running])
            if running.cancelled():
                raise Unavailable("the server is stopping")
            running.result()
        finally:
            running.cancel()
            running.add_done_callback(lambda _: receive.close())  # not before: choices that still send would fail


def _size(event: StreamEvent) -> int:
    """About as many bytes as an event's part of the answer has."""
    tree = getattr(event, "tree", None)
    nodes = len(tree.tokens) if tree else 0
    return _EVENT_BYTES + _TOKEN_BYTES * len(getattr(event, "ids", ())) + _NODE_BYTES * nodes


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """What comes of some work. It ends when the client leaves."""

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.create_task(left())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Cancelled("the client left")
        return await working
    finally:
        leaving.cancel()
        working.cancel()
        await asyncio.wait((working, leaving))
