"""The choices of an HTTP request, decoded side by side, and streamed as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping, Sequence
from typing import Any, TypeVar

import anyio
from anyio.streams.memory import MemoryObjectSendStream
from sse_starlette.sse import EventSourceResponse
from starlette.requests import Request
from starlette.responses import Response

from coppice.client.completion import StreamEvent
from coppice.errors import Cancelled, DeadlineExceeded, Unavailable
from coppice.rpc.access import Access
from coppice.rpc.server import within
from coppice.wire.generation import GenerationRequest, request_to_wire

from ..service import GenerationServicer
from . import errors

T = TypeVar("T")
Json = dict[str, Any]
SendStream = MemoryObjectSendStream[tuple[int, StreamEvent]]
Events = AsyncGenerator[tuple[int, StreamEvent], None]
"""of all choices of a request, each with its choice's index"""

_PING_S = 15  # between two signs of life in a stream


class Answering:
    """Has a service decode choices, and ends them when the server stops."""

    def __init__(self, service: GenerationServicer, access: Access) -> None:
        self._service, self._access = service, access
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
        running = asyncio.create_task(self._decode_all(requests, headers, send))
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        try:
            async for event in receive:
                yield event
            await asyncio.wait([running])
            if running.cancelled():
                raise Unavailable("the server is stopping")
            running.result()
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            receive.close()

    async def _decode_all(
        self, requests: Sequence[GenerationRequest], headers: Mapping[str, str], send: SendStream
    ) -> None:
        """Send the events of all requests."""
        call_s = self._service.settings.limits.call_s
        late = DeadlineExceeded(f"a call ends after {call_s:g} s")
        try:
            async with send, within(call_s, late), contextlib.AsyncExitStack() as places:
                for _ in requests[1:]:
                    await places.enter_async_context(self._access.client(headers.items(), counted=True))
                group = await places.enter_async_context(asyncio.TaskGroup())
                for index, request in enumerate(requests):
                    group.create_task(self._decode(index, request, send))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _decode(self, index: int, request: GenerationRequest, send: SendStream) -> None:
        answer = self._service.answer(request_to_wire(request))
        async with contextlib.aclosing(answer):
            async for event in answer:
                await send.send((index, event))


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of some work, which ends when the client leaves."""

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


async def streamed(request: Request, parts: AsyncGenerator[Json, None], idle_s: float) -> Response:
    """Stream parts, and [DONE] behind them. An error before the first part is raised, a later one is a part."""
    first = await unless_gone(request, anext(parts))
    return EventSourceResponse(_data(first, parts), sep="\n", ping=_PING_S, send_timeout=idle_s)


async def _data(first: Json, parts: AsyncGenerator[Json, None]) -> AsyncIterator[dict[str, str]]:
    async with contextlib.aclosing(parts):
        yield {"data": json.dumps(first)}
        try:
            async for part in parts:
                yield {"data": json.dumps(part)}
        except Exception as error:
            yield {"data": json.dumps(errors.describe(error)[1])}
    yield {"data": "[DONE]"}
