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
from coppice.rpc.channels import Dialer

from ..service import GenerationServicer
from .app import make_app
from .door import Door
from .page import add_page, is_served

log = structlog.get_logger()

_LOOK_S = 5.0  # between two looks at the certificates
_IDLE_S = 75  # a connection without a request is closed


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the process: they end gRPC and HTTP together."""
        yield


class HttpServer:
    """OpenAI's API on one port."""

    def __init__(
        self, settings: Settings, servicer: GenerationServicer, access: Access, draining: asyncio.Event
    ) -> None:
        """Raises InvalidField for bad certificates."""
        self._tls, self._draining = settings.tls, draining
        self._certificates = Certificates.read(settings.tls) if settings.tls.on else None
        if self._certificates is not None and not self._certificates.cert:
            raise InvalidField("tls.cert", "is missing: a server shows a certificate")
        routes = make_app(servicer)
        if is_served(settings):
            add_page(routes, servicer, Dialer(settings.limits, settings.tls))
        app = Door(routes, servicer, access, draining)
        self._config = uvicorn.Config(
            app,
            host=settings.server.host,
            port=settings.orchestrator.http_port,
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_IDLE_S,
            timeout_graceful_shutdown=max(1, int(settings.server.grace_s)),
            ssl_certfile=settings.tls.cert or None,
            ssl_keyfile=settings.tls.key or None,
            ssl_ca_certs=settings.tls.ca or None,
            ssl_cert_reqs=ssl.CERT_REQUIRED if settings.tls.require else ssl.CERT_NONE,
        )
        self._server = _Server(self._config)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> str:
        """Listen; returns the address. Raises OSError when the port is taken."""
        host = self._config.host
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host.strip("[]"), self._config.port), family=family)
        address = f"{host}:{listening.getsockname()[1]}"
        self._tasks = [asyncio.create_task(self._server.serve([listening])), asyncio.create_task(self._end_on_drain())]
        if self._certificates is not None:
            self._tasks.append(asyncio.create_task(self._renew(self._certificates)))
        log.info("serving", role="http", address=address)
        return address

    async def stop(self) -> None:
        """Wait until the requests under way have ended, or were cut at the end of the grace."""
        self._server.should_exit = True
        await self._tasks[0]
        for task in self._tasks[1:]:
            task.cancel()

    async def _end_on_drain(self) -> None:
        await self._draining.wait()
        self._server.should_exit = True

    async def _renew(self, used: Certificates) -> None:
        """Show new certificates to new connections."""
        while True:
            await asyncio.sleep(_LOOK_S)
            before, used = used, used.renewed(self._tls)
            if used is not before and self._config.ssl is not None:
                self._config.ssl.load_cert_chain(self._tls.cert, self._tls.key)
                self._config.ssl.load_verify_locations(self._tls.ca)
