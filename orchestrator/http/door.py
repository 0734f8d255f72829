"""What holds for every HTTP request before it reaches a route: who asks, whether there is room, how much is read."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import structlog
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coppice.errors import CoppiceError, DeadlineExceeded, Overloaded, Unavailable
from coppice.rpc import tracing
from coppice.rpc.access import Access
from coppice.rpc.server import most_calls
from coppice.v1 import generation_pb2

from ..service import GenerationServicer
from . import errors, page

log = structlog.get_logger()

OPEN = frozenset({"/health", "/ping", "/ready", "/version", *page.FILES})
"""Paths that need no token and are answered while the server is full or stops: probes and browsers ask them."""
GENERATES = frozenset({f"{path}{kind}" for path in ("/v1", "/trace") for kind in ("/completions", "/chat/completions")})
_MOST_PARTS = 4096  # objects and lists of a body: a small one may unpack to many times its size
_GENERATE = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].methods_by_name["Generate"]


class Door:
    """An ASGI application around another one: the same bounds and tokens as of gRPC."""

    def __init__(self, app: ASGIApp, servicer: GenerationServicer, access: Access, draining: asyncio.Event) -> None:
        """draining: nothing new begins."""
        self._app, self._servicer, self._access, self._draining = app, servicer, access, draining
        self._limits = servicer.settings.limits
        self._calls = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return
        begun = False

        async def sent(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            async with self._admitted(scope):
                await self._app(scope, _Bounded(receive, self._limits.request_bytes, self._limits.idle_s), sent)
        except CoppiceError as error:
            if not begun:
                await errors.response(error)(scope, receive, send)

    @contextlib.asynccontextmanager
    async def _admitted(self, scope: Scope) -> AsyncIterator[None]:
        """Hold a request's place inside the block. Raises CoppiceError."""
        path, headers = (
            scope["path"],
            [(key.decode("latin-1"), value.decode("latin-1")) for key, value in scope["headers"]],
        )
        if path in OPEN:
            if path == "/ready" and self._draining.is_set():
                raise Unavailable("the server is stopping")
            yield
            return
        if self._draining.is_set():
            raise Unavailable("the server is stopping")
        if self._calls >= most_calls(self._limits):
            raise Overloaded("too many requests at once")
        self._calls += 1
        try:
            async with (
                self._access.client(headers, counted=path in GENERATES),
                asyncio.timeout(self._limits.call_s) as ended,
            ):
                if path in GENERATES:
                    self._servicer.check_seats()
                    with tracing.serving(_GENERATE, headers):
                        yield
                else:
                    yield
        except TimeoutError:
            if not ended.expired():
                raise
            raise DeadlineExceeded(f"a call ends after {self._limits.call_s:g} s") from None
        finally:
            self._calls -= 1


class _Bounded:
    """A request's body as it comes in: not more bytes, not more parts and not more slowly than allowed."""

    def __init__(self, receive: Receive, most_bytes: int, within_s: float) -> None:
        self._receive, self._most, self._within_s = receive, most_bytes, within_s
        self._bytes = self._parts = 0
        self._complete = False

    async def __call__(self) -> Any:
        """The next message. Raises HTTPException."""
        if self._complete:
            return await self._receive()  # tells when the client leaves
        try:
            async with asyncio.timeout(self._within_s):
                message = await self._receive()
        except TimeoutError:
            raise HTTPException(408, f"no byte of the body for {self._within_s:g} s") from None
        body: bytes = message.get("body", b"")
        self._bytes += len(body)
        self._parts += body.count(b"{") + body.count(b"[")
        self._complete = not message.get("more_body", False)
        if self._bytes > self._most:
            raise HTTPException(413, f"a body has {self._most} bytes at most")
        if self._parts > _MOST_PARTS:
            raise HTTPException(400, f"a body has {_MOST_PARTS} lists and objects at most")
        return message
