"""The HTTP server beside the gRPC one: the same process, event loop, certificates and end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator

import structlog
import uvicorn

from coppice.config.settings import Settings
from coppice.errors import InvalidField
from coppice.rpc.access import Access
from coppice.rpc.certificates import Certificates

from .answering import Answering
from .app import make_app
from .door import Door
from .page import Look, add_page, is_served
from .served import Served

log = structlog.get_logger()

_LOOK_S = 5.0  # between two looks at the certificates
_IDLE_S = 75  # a connection without a request is closed
_LAST_WORDS_S = 2  # for what is cut to tell its client


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the process: they end gRPC and HTTP together."""
        yield


class HttpServer:
    """OpenAI's API on one port."""

    def __init__(self, settings: Settings, served: Served, access: Access, draining: asyncio.Event, look: Look) -> None:
        """look: what the page shows of the deployment. Raises InvalidField for bad certificates."""
        self._tls, self._grace_s, self._draining = settings.tls, settings.server.grace_s, draining
        self._certificates = Certificates.read(settings.tls) if settings.tls.on else None
        if self._certificates is not None and not self._certificates.cert:
            raise InvalidField("tls.cert", "is missing: a server shows a certificate")
        self._answering = Answering(served, access)
        app = make_app(served, self._answering)
        if is_served(settings):
            add_page(app, served, self._answering, look)
        self._config = uvicorn.Config(
            Door(app, served, access, draining),
            host=settings.server.host,
            port=settings.orchestrator.http_port,
            http="h11",  # which bounds the bytes of headers
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_IDLE_S,
            timeout_graceful_shutdown=int(self._grace_s) + _LAST_WORDS_S,
            ssl_certfile=settings.tls.cert or None,
            ssl_keyfile=settings.tls.key or None,
            ssl_ca_certs=settings.tls.ca or None,
            ssl_cert_reqs=ssl.CERT_REQUIRED if settings.tls.require else ssl.CERT_NONE,
        )
        self._server = _Server(self._config)
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
        self._tasks = [asyncio.create_task(self._server.serve([listening])), asyncio.create_task(self._end_on_drain())]
        if self._certificates is not None:
            self._tasks.append(asyncio.create_task(self._renew(self._certificates)))
        log.info("serving", role="http", address=address)
        return address

    async def stop(self) -> None:
        """Wait until the requests under way have ended, or were cut at the end of the grace."""
        await self._tasks[0]
        for task in self._tasks[1:]:
            task.cancel()

    async def _end_on_drain(self) -> None:
        """Take no more connections, and cut what still runs at the end of the grace."""
        await self._draining.wait()
        self._server.should_exit = True
        await asyncio.sleep(self._grace_s)
        self._answering.cut()

    async def _renew(self, used: Certificates) -> None:
        """Show new certificates to new connections."""
        while True:
            await asyncio.sleep(_LOOK_S)
            before, used = used, used.renewed(self._tls)
            if used is not before and self._config.ssl is not None:
                self._config.ssl.load_cert_chain(self._tls.cert, self._tls.key)
                self._config.ssl.load_verify_locations(self._tls.ca)
