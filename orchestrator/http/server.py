"""The HTTP server beside the gRPC one: the same process, event loop, certificates and end."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import resource
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import h11
import structlog
import uvicorn
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from coppice.config.sections import TlsSettings
from coppice.config.settings import Settings
from coppice.errors import Cancelled, DeadlineExceeded, InvalidField, Overloaded, PermissionDenied, Unavailable
from coppice.limits import MAX_CONTEXT, REQUEST_BYTES, Limits
from coppice.rpc import tracing
from coppice.rpc.access import Access, Certificates, is_loopback
from coppice.rpc.server import MAX_PARTS, most_calls, within

from ..service import GenerationServicer
from . import errors
from .answering import Answering
from .app import FILES, is_page_served, make_app

log = structlog.get_logger()

LIVES = frozenset({"/health", "/ping", "/version"})
"""Paths that need no token and are answered while the server is full or stops: probes ask them."""
OPEN = LIVES | {"/ready", "/docs", "/openapi.json", *FILES}
"""Paths that need no token"""
_LOCAL = re.compile(r"(localhost|[0-9.]+|\[[0-9a-f:.]+\])(:[0-9]+)?", re.IGNORECASE)  # hosts that no name points to
_BODY_S, _BODY_BYTES_S = 10, 64 << 10  # for a whole body, and one second more for each so many bytes of it
_MOST_STRINGS = 4 * MAX_PARTS  # names of fields among them
GENERATES = frozenset({f"{path}{kind}" for path in ("/v1", "/trace") for kind in ("/completions", "/chat/completions")})


class HttpDoor:
    """An ASGI application around another one: the same bounds and tokens as of gRPC."""

    def __init__(self, app: ASGIApp, service: GenerationServicer, access: Access, draining: asyncio.Event) -> None:
        """draining: nothing new begins."""
        self._app, self._service, self._access, self._draining = app, service, access, draining
        self._limits = service.settings.limits
        # Pages of other sites can reach this machine through a visitor's browser. They know no token.
        self._guarded = is_loopback(service.settings.server.host) and not service.settings.orchestrator.tokens
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
                check_origin(dict(headers), self._service.settings.orchestrator.hosts)
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
        generates, late = path in GENERATES, DeadlineExceeded(f"a call ends after {longest_s:g} s")
        try:
            async with within(longest_s, late), self._access.client(headers, counted=posts):
                if generates:
                    self._service.check_seats()
                with tracing.serving(tracing.GENERATE, headers) if generates else contextlib.nullcontext():
                    yield
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
        if len(body) > REQUEST_BYTES:
            raise HTTPException(413, f"a body has {REQUEST_BYTES} bytes at most")
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


_IDLE_S = 75  # a connection on which no whole head of a request comes is closed
_FILES_A_CALL = 8  # descriptors of the process for each call that is taken at once; connections have half of them
_BACKLOG = 2048  # connections that wait to be accepted
_LAST_WORDS_S = 2  # for what is cut to tell its client


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the process: they end gRPC and HTTP together."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Let many connections wait, but asyncio accept one at a time: it logs each failure of `backlog` in a row."""
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(_BACKLOG)


class _Connection(H11Protocol):
    """A connection that waits so long for the whole head of a request, and the longest when there are too many."""

    most: ClassVar[int]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a request; the connection that waits longest makes room for one too many."""
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.transport.abort)
        if len(self.connections) > self.most:
            waiting: list[Any] = [each for each in self.connections if getattr(each, "timeout_keep_alive_task", None)]
            min(waiting, key=lambda each: each.timeout_keep_alive_task.when()).transport.abort()

    def _unset_keepalive_if_required(self) -> None:
        if self.conn.our_state not in (h11.IDLE, h11.DONE):  # part of a head, or what is left of a body, is no request
            super()._unset_keepalive_if_required()


class HttpServer:
    """OpenAI's API on one port."""

    def __init__(
        self, settings: Settings, service: GenerationServicer, access: Access, draining: asyncio.Event
    ) -> None:
        """Raises InvalidField for bad certificates."""
        self._grace_s, self._draining = settings.server.grace_s, draining
        self._answering = Answering(service, access)
        app = make_app(service, self._answering, is_page_served(settings))
        self._config = uvicorn.Config(
            HttpDoor(app, service, access, draining),
            host=settings.server.host,
            port=settings.orchestrator.http_port,
            http=_Connection,  # h11 bounds the bytes of headers
            backlog=1,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=math.ceil(min(_IDLE_S, settings.limits.idle_s)),
            timeout_graceful_shutdown=int(self._grace_s) + _LAST_WORDS_S,
        )
        self._config.load()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        files = min(_FILES_A_CALL * most_calls(settings.limits), hard if hard > 0 else sys.maxsize)
        if 0 < soft < files:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
        _Connection.most = files // 2
        self._config.ssl = _following(settings.tls) if settings.tls.on else None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> str:
        """Listen; returns the address. Raises InvalidField when the port is taken."""
        host, port = self._config.host, self._config.port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listening = socket.create_server((host.strip("[]"), port), family=family)
        except OSError as error:
            raise InvalidField("orchestrator.http_port", f"cannot listen on {host}:{port}") from error
        address = f"{host}:{listening.getsockname()[1]}"
        server = _Server(self._config)
        self._tasks = [asyncio.create_task(work) for work in (server.serve([listening]), self._end_on_drain(server))]
        log.info("serving", role="http", address=address)
        return address

    async def stop(self) -> None:
        """Wait until the requests under way have ended, or were cut at the end of the grace."""
        serving, ending = self._tasks
        await serving
        ending.cancel()

    async def _end_on_drain(self, server: uvicorn.Server) -> None:
        """Take no more connections, and cut what still runs at the end of the grace."""
        await self._draining.wait()
        server.should_exit = True
        await asyncio.sleep(self._grace_s)
        self._answering.cut()


def _following(tls: TlsSettings) -> ssl.SSLContext:
    """What a port is opened with: every new connection gets the certificates that the files hold by then.

    Raises InvalidField naming the setting whose file is missing or unusable.
    """
    used = Certificates.of_server(tls)
    current = first = _context(tls)

    def follow(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        nonlocal used, current
        now = used.renewed(tls)
        if now is not used:
            current, used = _context(tls), now
        connection.context = current

    first.sni_callback = follow
    return first


def _context(tls: TlsSettings) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=tls.ca)
    context.load_cert_chain(tls.cert, tls.key)
    context.verify_mode = ssl.CERT_REQUIRED if tls.require else ssl.CERT_NONE
    return context
