"""What holds for every HTTP request before it reaches a route: who asks, whether there is room, how much is read."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Mapping, Sequence

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coppice.errors import Cancelled, DeadlineExceeded, InvalidField, Overloaded, PermissionDenied, Unavailable
from coppice.limits import MAX_CONTEXT, Limits
from coppice.rpc import tracing
from coppice.rpc.access import Access
from coppice.rpc.certificates import is_loopback
from coppice.rpc.server import most_calls
from coppice.rpc.unpacking import MAX_PARTS

from . import errors
from .docs import PATHS
from .page import FILES
from .served import Served

LIVES = frozenset({"/health", "/ping", "/version"})
"""Paths that need no token and are answered while the server is full or stops: probes ask them."""
OPEN = LIVES | {"/ready", *PATHS, *FILES}
"""Paths that need no token"""
_LOCAL = re.compile(r"(localhost|[0-9.]+|\[[0-9a-f:.]+\])(:[0-9]+)?", re.IGNORECASE)  # hosts that no name points to
_BODY_S, _BODY_BYTES_S = 10, 64 << 10  # for a whole body, and one second more for each so many bytes of it
_MOST_STRINGS = 4 * MAX_PARTS  # names of fields among them
GENERATES = frozenset({f"{path}{kind}" for path in ("/v1", "/trace") for kind in ("/completions", "/chat/completions")})


class Door:
    """An ASGI application around another one: the same bounds and tokens as of gRPC."""

    def __init__(self, app: ASGIApp, served: Served, access: Access, draining: asyncio.Event) -> None:
        """draining: nothing new begins."""
        self._app, self._served, self._access, self._draining = app, served, access, draining
        self._limits = served.settings.limits
        # Pages of other sites can reach this machine through a visitor's browser. They know no token.
        self._guarded = is_loopback(served.settings.server.host) and not served.settings.orchestrator.tokens
        self._calls = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return
        begun = False
        headers = [(key.decode("latin-1"), value.decode("latin-1")) for key, value in scope["headers"]]

        async def sent(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            if self._guarded:
                check_origin(dict(headers), self._served.settings.orchestrator.hosts)
            async with self._admitted(scope, headers):
                waiting = [await _read(receive, self._limits)] if scope["method"] == "POST" else []

                async def received() -> Message:
                    return waiting.pop() if waiting else await receive()

                await self._app(scope, received, sent)
        except Exception as error:  # those that were answered too: Starlette raises them again
            if not begun:
                await errors.response(error)(scope, receive, send)

    @contextlib.asynccontextmanager
    async def _admitted(self, scope: Scope, headers: list[tuple[str, str]]) -> AsyncIterator[None]:
        """Hold a request's place inside the block. Raises CoppiceError."""
        path, posts = scope["path"], scope["method"] == "POST"
        if self._draining.is_set() and path not in LIVES:
            raise Unavailable("the server is stopping")
        if path in OPEN and not posts:
            yield
            return
        if self._calls >= most_calls(self._limits):
            raise Overloaded("too many requests at once")
        self._calls += 1
        # An answer has call_s, and its reader then has idle_s to read it.
        longest_s = self._limits.call_s + self._limits.idle_s
        generates = path in GENERATES
        try:
            async with asyncio.timeout(longest_s) as ended, self._access.client(headers, counted=posts):
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


def check_origin(headers: Mapping[str, str], hosts: Sequence[str]) -> None:
    """Raise PermissionDenied for what a page of another site asks, also one that had its name point to this machine.

    hosts: names by which this server is asked, besides addresses and localhost.
    """
    host, origin = headers.get("host", "localhost"), headers.get("origin")
    if not _LOCAL.fullmatch(host) and host.partition(":")[0] not in hosts:
        raise PermissionDenied(f"the host {host!r} is not served here; orchestrator.hosts names what is")
    if origin is not None and (site := origin.partition("//")[2]) != host and site.partition(":")[0] not in hosts:
        raise PermissionDenied(f"pages of {origin!r} are not served here; orchestrator.hosts names what is")


async def _read(receive: Receive, limits: Limits) -> Message:
    """A request's whole body in one message: not more bytes, parts and seconds than allowed."""
    body, more, end = bytearray(), True, asyncio.get_running_loop().time() + min(_BODY_S, limits.idle_s)
    while more:
        try:
            async with asyncio.timeout_at(end + len(body) / _BODY_BYTES_S):
                message = await receive()
        except TimeoutError:
            raise DeadlineExceeded(f"the body comes too slowly: {len(body)} bytes until now") from None
        if message["type"] == "http.disconnect":
            raise Cancelled("the client left")
        body += message.get("body", b"")
        if len(body) > limits.request_bytes:
            raise HTTPException(413, f"a body has {limits.request_bytes} bytes at most")
        more = message.get("more_body", False)
    check_parts(body)
    return {"type": "http.request", "body": bytes(body)}


def check_parts(body: bytes | bytearray) -> None:
    """Raise InvalidField when a JSON text has more parts than any request, before one of them becomes an object.

    What is counted stands outside of strings, whose quotation marks are counted first. What a parser would read
    otherwise than UTF-8 holds zero bytes, which no JSON in UTF-8 does.
    """
    if b"\0" in body:
        raise InvalidField("body", "is not JSON in UTF-8")
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if plain.count(b'"') <= 2 * _MOST_STRINGS:
        plain = b"".join(plain.split(b'"')[::2])
        lists, entries = plain.count(b"[") + plain.count(b"{"), plain.count(b",")
        if lists <= MAX_PARTS and entries <= MAX_CONTEXT + MAX_PARTS:
            return
    raise InvalidField("body", "has more lists, objects, strings or entries than any request")
