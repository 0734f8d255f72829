"""Health checks on a port and in threads of their own, so that a busy server still answers its probes, and on the
service port, from the event loop: load balancers and clients ask where they call.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import grpc.aio
from google.protobuf.descriptor import MethodDescriptor
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from coppice.errors import NotFound, Overloaded

BEAT_S = 0.2
NOT_READY_S = 2.0  # without a turn of the server's loop: calls wait for so long, so others should get them
NOT_ALIVE_S = 30.0  # it hangs
MOST_CALLS = 64  # at once of the health port, and of each method on the service port
MESSAGE_S = 5.0  # how long a service port waits for the message of a call that has one
PINGS = (("grpc.http2.min_ping_interval_without_data_ms", 5000), ("grpc.keepalive_permit_without_calls", 1))
"""channel arguments of every server: callers may ping a quiet connection this often"""
SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"]
_THREADS = 4

_Status = health_pb2.HealthCheckResponse.ServingStatus


class _Servicer(health.HealthServicer):  # type: ignore[misc]  # grpc_health has no types
    """Answers what was set, and NOT_SERVING while the server's event loop does not turn."""

    def __init__(self, threads: ThreadPoolExecutor, not_ready_s: float) -> None:
        super().__init__(experimental_non_blocking=True, experimental_thread_pool=threads)
        self._not_ready_s = not_ready_s
        self.beat = time.monotonic()

    def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        """The state of a service, or with no name that of the process."""
        if time.monotonic() - self.beat > (self._not_ready_s if request.service else NOT_ALIVE_S):
            return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.NOT_SERVING)
        return super().Check(request, context)


class Health:
    """grpc.health.v1 of a server, whose service port lets everybody in, so many at a time. The name "" is alive from
    construction on; a service's name only while ready.
    """

    def __init__(self, not_ready_s: float = NOT_READY_S) -> None:
        """`not_ready_s`: how long the loop may stand until the services are said to be not ready."""
        threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="health")
        self.server = grpc.server(threads, options=PINGS, maximum_concurrent_rpcs=MOST_CALLS)
        self._servicer = _Servicer(threads, not_ready_s)
        self._beating: asyncio.Task[None] | None = None
        self._states: dict[str, health_pb2.HealthCheckResponse] = {}
        self._left = asyncio.Event()
        self._under_way = Counter[str]()
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, self.server)

    def start(self, *services: str) -> None:
        """Answer, and say that these services are ready. Call it on the server's event loop, whose turns it watches."""
        for name in ("", *services):
            self._set(name, "SERVING")
        self._beating = asyncio.create_task(self._beat())
        self.server.start()

    def not_ready(self, *services: str) -> None:
        """Say that these services take no more calls, and let those end who watch on the service port."""
        for name in services:
            self._set(name, "NOT_SERVING")
        self._left.set()

    async def stop(self) -> None:
        """Answer no more."""
        if self._beating is not None:
            self._beating.cancel()
        await asyncio.to_thread(self.server.stop(0).wait)

    @contextlib.asynccontextmanager
    async def admit(self, method: MethodDescriptor, context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
        """Hold one of the places that a method has on the service port inside the block. Raises Overloaded."""
        if self._under_way[method.name] >= MOST_CALLS:
            raise Overloaded(f"{MOST_CALLS} calls of {method.name} are under way")
        self._under_way[method.name] += 1
        try:
            yield
        finally:
            self._under_way[method.name] -= 1

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        """The state of a service, or with no name that of the process. Raises NotFound."""
        if request.service not in self._states:
            raise NotFound("no such service")
        return self._states[request.service]

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """The state of a service now, and when the server begins to drain; then the call ends."""
        unknown = health_pb2.HealthCheckResponse(status=_Status.Value("SERVICE_UNKNOWN"))
        yield self._states.get(request.service, unknown)
        await self._left.wait()
        yield self._states.get(request.service, unknown)

    def _set(self, service: str, state: str) -> None:
        self._states[service] = health_pb2.HealthCheckResponse(status=_Status.Value(state))
        self._servicer.set(service, _Status.Value(state))

    async def _beat(self) -> None:
        while True:
            self._servicer.beat = time.monotonic()
            await asyncio.sleep(BEAT_S)
