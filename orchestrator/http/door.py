"""What holds for every HTTP request before it reaches a route: who asks, whether there is room, how much is read."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coppice.errors import DeadlineExceeded, Overloaded, Unavailable
from coppice.rpc import tracing
from coppice.rpc.access import Access
from coppice.rpc.server import most_calls

from . import errors
from .docs import PATHS
from .page import FILES
from .served import Served

LIVES = frozenset({"/health", "/ping", "/version"})
"""Paths that need no token and are answered while the server is full or stops: probes ask them."""
OPEN = LIVES | {"/ready", *PATHS, *FILES}
"""Paths that need no token"""
GENERATES = frozenset({f"{path}{kind}" for path in ("/v1", "/trace") for kind in ("/completions", "/chat/completions")})


class Door:
    """An ASGI application around another one: the same bounds and tokens as of gRPC."""

    def __init__(self, app: ASGIApp, served: Served, access: Access, draining: asyncio.Event) -> None:
        """draining: nothing new begins."""
        self._app, self._served, self._access, self._draining = app, served, access, draining
        self._limits = served.settings.limits
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
        except Exception as error:  # those that were answered too: Starlette raises them again
            if not begun:
                await errors.response(error)(scope, receive, send)

    @contextlib.asynccontextmanager
    async def _admitted(self, scope: Scope) -> AsyncIterator[None]:
        """Hold a request's place inside the block. Raises CoppiceError."""
        path: str = scope["path"]
        if self._draining.is_set() and path not in LIVES:
            raise Unavailable("the server is stopping")
        if path in OPEN:
            yield
            return
        if self._calls >= most_calls(self._limits):
            raise Overloaded("too many requests at once")
        self._calls += 1
        # An answer has call_s, and its reader then has idle_s to read it.
        longest_s = self._limits.call_s + self._limits.idle_s
        headers = [(key.decode("latin-1"), value.decode("latin-1")) for key, value in scope["headers"]]
        generates = path in GENERATES
        try:
            async with asyncio.timeout(longest_s) as ended, self._access.client(headers, counted=generates):
                if generates:
                    self._served.check_seats()
                with tracing.serving(tracing.GENERATE, headers) if generates else contextlib.nullcontext():
                    yield
        except TimeoutError:
            if not ended.expired():
                raise
            raise DeadlineExceeded(f"a call ends after {longest_s:g} s") from None
        finally:
            self._calls -= 1


class _Bounded:
    """A request's body as it comes in: not more bytes and not more slowly than allowed."""

    def __init__(self, receive: Receive, most_bytes: int, within_s: float) -> None:
        self._receive, self._most, self._within_s = receive, most_bytes, within_s
        self._bytes, self._complete = 0, False

    async def __call__(self) -> Any:
        """The next message. Raises HTTPException."""
        if self._complete:
            return await self._receive()  # tells when the client leaves
        try:
            async with asyncio.timeout(self._within_s):
                message = await self._receive()
        except TimeoutError:
            raise HTTPException(408, f"no byte of the body for {self._within_s:g} s") from None
        self._bytes += len(message.get("body", b""))
        self._complete = not message.get("more_body", False)
        if self._bytes > self._most:
            raise HTTPException(413, f"a body has {self._most} bytes at most")
        return message
