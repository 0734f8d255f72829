"""The HTTP server beside the gRPC one: the same process, event loop, certificates and end."""

from __future__ import annotations

import asyncio
import contextlib
import math
import resource
import socket
import ssl
import sys
from collections.abc import Iterator
from typing import Any, ClassVar

import h11
import structlog
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from coppice.config.sections import TlsSettings
from coppice.config.settings import Settings
from coppice.errors import InvalidField
from coppice.rpc.access import Access
from coppice.rpc.certificates import Certificates
from coppice.rpc.server import most_calls

from .answering import Answering
from .app import make_app
from .docs import LOADED, add_docs
from .door import Door
from .page import FILES, add_files, add_page, is_served
from .served import Served

log = structlog.get_logger()

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
            waiting: list[Any] = [one for one in self.connections if getattr(one, "timeout_keep_alive_task", None)]
            min(waiting, key=lambda one: one.timeout_keep_alive_task.when()).transport.abort()

    def _unset_keepalive_if_required(self) -> None:
        if self.conn.our_state not in (h11.IDLE, h11.DONE):  # part of a head, or what is left of a body, is no request
            super()._unset_keepalive_if_required()


class HttpServer:
    """OpenAI's API on one port."""

    def __init__(self, settings: Settings, served: Served, access: Access, draining: asyncio.Event) -> None:
        """Raises InvalidField for bad certificates."""
        self._grace_s, self._draining = settings.server.grace_s, draining
        self._answering = Answering(served, access)
        app = make_app(served, self._answering)
        add_docs(app)
        add_files(app, FILES if is_served(settings) else LOADED)
        if is_served(settings):
            add_page(app, served, self._answering)
        self._config = uvicorn.Config(
            Door(app, served, access, draining),
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
    used = Certificates.read(tls)
    if not used.cert:
        raise InvalidField("tls.cert", "is missing: a server shows a certificate")
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
