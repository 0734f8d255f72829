"""Health checks on a port and in threads of their own, so that a busy server still answers its probes."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

BEAT_S = 0.2
NOT_READY_S = 2.0  # without a turn of the server's loop: calls wait for so long, so others should get them
NOT_ALIVE_S = 30.0  # it hangs
_THREADS = 4
_CALLS = 64

_Status = health_pb2.HealthCheckResponse.ServingStatus


class _Servicer(health.HealthServicer):  # type: ignore[misc]  # grpc_health has no types
    """Answers what was set, and NOT_SERVING while the server's event loop does not turn."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        super().__init__(experimental_non_blocking=True, experimental_thread_pool=threads)
        self.beat = time.monotonic()

    def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        """The state of a service, or with no name that of the process."""
        if time.monotonic() - self.beat > (NOT_READY_S if request.service else NOT_ALIVE_S):
            return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.NOT_SERVING)
        return super().Check(request, context)


class Health:
    """grpc.health.v1 of a server. The name "" is alive from construction on; a service's name only while ready."""

    def __init__(self) -> None:
        threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="health")
        self.server = grpc.server(threads, maximum_concurrent_rpcs=_CALLS)
        self._servicer = _Servicer(threads)
        self._beating: asyncio.Task[None] | None = None
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, self.server)

    def start(self, service: str) -> None:
        """Answer, and say that a service is ready. Call it on the server's event loop, whose turns it watches."""
        self._servicer.set("", _Status.Value("SERVING"))
        self._servicer.set(service, _Status.Value("SERVING"))
        self._beating = asyncio.create_task(self._beat())
        self.server.start()

    def not_ready(self, service: str) -> None:
        """Say that a service takes no more calls."""
        self._servicer.set(service, _Status.Value("NOT_SERVING"))

    async def stop(self) -> None:
        """Answer no more."""
        if self._beating is not None:
            self._beating.cancel()
        await asyncio.to_thread(self.server.stop(0).wait)

    async def _beat(self) -> None:
        while True:
            self._servicer.beat = time.monotonic()
            await asyncio.sleep(BEAT_S)
