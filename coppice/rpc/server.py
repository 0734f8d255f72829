"""One home for how a Coppice server accepts calls: guarded handlers, health, an orderly stop.

Health is told on a port and in threads of its own, so that a busy server still answers its probes, and on the service
port, from the event loop: load balancers and clients ask where they call.
"""

import asyncio
import contextlib
import os
import secrets
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio
import structlog
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor, ServiceDescriptor
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from coppice import failpoints
from coppice.config.sections import TlsSettings
from coppice.config.settings import Settings, load_settings
from coppice.errors import RETRY_HINT, CoppiceError, DeadlineExceeded, InvalidField, NotFound, Unavailable
from coppice.limits import MESSAGE_BYTES, REQUEST_BYTES, Limits
from coppice.rpc import tracing
from coppice.rpc.access import Access, Clients, Place, is_loopback, server_credentials
from coppice.rpc.admission import Admission
from coppice.rpc.directory import Registry
from coppice.rpc.link import LINK, LINKED, ServedLink
from coppice.stack.process import write_ready
from coppice.telemetry import configure_logging, serve_metrics

log = structlog.get_logger()

_SHORT_CALLS = 64
_FOLLOWERS = 4  # of a session, usually: a drafter for each head
_LAST_WORDS_S = 0.05  # for what a caller says beyond its answer
MAX_DETAILS = 600  # characters of a status' details: a header holds 8 KiB, a character takes up to 12 bytes of it
MAX_PARTS = 4096  # fields and elements of a message, those of its parts included; a packed list is one
SMALL_BYTES = 16 << 10  # a message up to this size is not worth counting
HEARTBEAT_S = 0.2  # between two signs of the event loop's life
NOT_READY_S = 2.0  # without a turn of the server's loop: calls wait for so long, so others should get them
NOT_ALIVE_S = 30.0  # it hangs
MOST_CALLS = 64  # at once of the health port, and of each method on the service port
MESSAGE_S = 5.0  # how long a service port waits for the message of a call that has one
PINGS = (("grpc.http2.min_ping_interval_without_data_ms", 5000), ("grpc.keepalive_permit_without_calls", 1))
"""channel arguments of every server: callers may ping a quiet connection this often"""
HEALTH_SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"]
_HEALTH_THREADS = 4
_VARINT, _FIXED_64, _BYTES, _FIXED_32 = 0, 1, 2, 5
_GROUPS = (3, 4)

T = TypeVar("T")
Handler = Callable[[Any, grpc.aio.ServicerContext], Any]


def parser(method: MethodDescriptor) -> Callable[[bytes], Any]:
    """A function that makes a method's request of bytes, or an InvalidField: grpc would send the parser's text.

    The parts of a large message are counted first: an empty one is two bytes on the wire and a hundred as an object.
    """
    described = method.input_type
    message = message_factory.GetMessageClass(described)

    def parse(data: bytes) -> Any:
        try:
            if len(data) > SMALL_BYTES and _count(data, 0, len(data), described, MAX_PARTS) > MAX_PARTS:
                return InvalidField("request", f"has more than {MAX_PARTS} parts")
            return message.FromString(data)
        except Exception:
            return InvalidField("request", "the bytes are not a message of this method")

    return parse


def _count(data: bytes, at: int, end: int, described: Descriptor | None, most: int) -> int:
    """Parts of the message in data[at:end], counted up to one more than `most`. Raises IndexError, ValueError."""
    fields = described.fields_by_number if described else {}
    parts = 0
    while at < end and parts <= most:
        tag, at = _varint(data, at)
        parts, kind = parts + 1, tag & 7
        if kind == _VARINT:
            _, at = _varint(data, at)
        elif kind == _BYTES:
            size, at = _varint(data, at)
            field = fields.get(tag >> 3)
            if field is not None and field.type == FieldDescriptor.TYPE_MESSAGE:
                parts += _count(data, at, min(end, at + size), field.message_type, most - parts)
            at += size
        elif kind not in _GROUPS:  # what is in a group follows its tag
            at += {_FIXED_64: 8, _FIXED_32: 4}[kind]
    return parts


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at data[at:], and where it ends."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise ValueError("a number of more than ten bytes")


@contextlib.asynccontextmanager
async def within(seconds: float | None, late: CoppiceError) -> AsyncIterator[None]:
    """Raise `late` when the block takes longer."""
    try:
        async with asyncio.timeout(seconds) as timeout:
            yield
    except TimeoutError:
        if not timeout.expired():
            raise
        raise late from None


async def _checked(requests: AsyncIterator[Any], wait_s: float) -> AsyncIterator[Any]:
    """The requests of a call, each of which comes in time: gRPC's own wait has no bound."""
    while True:
        async with within(wait_s, Unavailable(f"no message for {wait_s:g} s")):
            request = await anext(requests, None)
        if request is None:
            return
        if isinstance(request, InvalidField):
            raise request
        yield request


@contextlib.asynccontextmanager
async def _read_out(requests: AsyncIterator[Any]) -> AsyncIterator[None]:
    """Read what the caller still says when the answer is known, and only then let the call end.

    gRPC keeps a stream that ended with messages unread, and a connection has only so many streams. The last read ends
    with the call: grpc.aio never frees what belongs to a read that is cancelled (grpc/grpc#43360).
    """

    async def drop() -> None:
        # A reader of the service may still wait there; a read that the call's end meets raises, too.
        with contextlib.suppress(RuntimeError, grpc.aio.BaseError):
            async for _ in requests:
                pass

    try:
        yield
    finally:
        await asyncio.wait([asyncio.create_task(drop())], timeout=_LAST_WORDS_S)


@contextlib.asynccontextmanager
async def _guard(context: grpc.aio.ServicerContext, method: str) -> AsyncIterator[None]:
    """Turn exceptions into statuses; details of unexpected ones stay in the log under an opaque id."""
    try:
        yield
    except CoppiceError as error:
        hint = ((RETRY_HINT, str(int(error.retry_after_s * 1e3))),) if error.retry_after_s else ()
        details = str(error)[:MAX_DETAILS].encode(errors="replace").decode()  # it may quote what the caller sent
        await context.abort(grpc.StatusCode[error.status], details, hint)
    except (asyncio.CancelledError, grpc.aio.AbortError):
        raise
    except Exception:
        opaque = secrets.token_hex(8)
        log.exception("unexpected error", method=method, error_id=opaque)
        await context.abort(grpc.StatusCode.INTERNAL, f"internal error {opaque}")


class _HealthServicer(health.HealthServicer):  # type: ignore[misc]  # grpc_health has no types
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
            return health_pb2.HealthCheckResponse(status="NOT_SERVING")
        return super().Check(request, context)


class Health:
    """grpc.health.v1 of a server, whose service port lets everybody in, so many at a time. The name "" is alive from
    construction on; a service's name only while ready.
    """

    def __init__(self, not_ready_s: float = NOT_READY_S) -> None:
        """`not_ready_s`: how long the loop may stand until the services are said to be not ready."""
        threads = ThreadPoolExecutor(_HEALTH_THREADS, thread_name_prefix="health")
        self.server = grpc.server(threads, options=PINGS, maximum_concurrent_rpcs=MOST_CALLS)
        self._servicer = _HealthServicer(threads, not_ready_s)
        self._beating: asyncio.Task[None] | None = None
        self._states: dict[str, str] = {}
        self._left = asyncio.Event()
        self._places = {name: Admission(f"calls of {name}", MOST_CALLS, 0, 0) for name in ("Check", "Watch")}
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

    def admit(self, method: MethodDescriptor, context: grpc.aio.ServicerContext) -> Place:
        """Hold one of the places that a method has on the service port inside the block. Raises Overloaded."""
        return self._places[method.name].admit()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        """The state of a service, or with no name that of the process. Raises NotFound."""
        if request.service not in self._states:
            raise NotFound("no such service")
        return health_pb2.HealthCheckResponse(status=self._states[request.service])

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """The state of a service now, and when the server begins to drain; then the call ends."""
        yield health_pb2.HealthCheckResponse(status=self._states.get(request.service, "SERVICE_UNKNOWN"))
        await self._left.wait()
        yield health_pb2.HealthCheckResponse(status=self._states.get(request.service, "SERVICE_UNKNOWN"))

    def _set(self, service: str, state: str) -> None:
        self._states[service] = state
        self._servicer.set(service, health_pb2.HealthCheckResponse.ServingStatus.Value(state))

    async def _beat(self) -> None:
        while True:
            self._servicer.beat = time.monotonic()
            await asyncio.sleep(HEARTBEAT_S)


@dataclass(frozen=True, slots=True)
class Door:
    """What holds for every call of a server."""

    access: Access | Health = field(default_factory=lambda: Access(TlsSettings()))
    """who may call"""
    limits: Limits = field(default_factory=Limits)
    full: Callable[[], object] | None = None
    """raises Overloaded while no streamed answer can begin; it is asked before the call's message is read"""
    message_s: float = MESSAGE_S
    """longest wait for the message of a call that has one"""
    draining: asyncio.Event = field(default_factory=asyncio.Event)
    """set when links end that carry no session"""
    links: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    """made for each link, and entered as long as it lasts"""


def _guarded(method: MethodDescriptor, behaviour: Handler, door: Door, linked: bool = False) -> Handler:
    """Serve a call, or a session of a link, behind the door. All requests are read as streams, which are bounded."""
    idle_s, is_link = door.limits.idle_s, method.name == LINK
    call_s, late = None if is_link else door.limits.call_s, f"a call ends after {door.limits.call_s:g} s"
    wait_s = idle_s if method.client_streaming else min(idle_s, door.message_s)

    async def serve(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> Any:
        async with contextlib.AsyncExitStack() as inside:
            await inside.enter_async_context(_guard(context, method.full_name))
            if not linked:
                await inside.enter_async_context(_read_out(requests))
            await inside.enter_async_context(door.access.admit(method, context))
            if door.full is not None and method.server_streaming:
                door.full()
            inside.enter_context(tracing.serving(method.full_name, context.invocation_metadata()))
            await inside.enter_async_context(within(call_s, DeadlineExceeded(late)))
            is_bounded = is_link or (linked and method.client_streaming)
            request: Any = requests if is_bounded else _checked(requests, wait_s)
            if not method.client_streaming and (request := await anext(request, None)) is None:
                raise InvalidField("request", "the call ended without a message")
            if is_link or not method.server_streaming:
                return await behaviour(request, context)
            responses = await inside.enter_async_context(contextlib.aclosing(behaviour(request, context)))
            async for response in responses:
                async with within(None if linked else idle_s, Unavailable(f"the answer was not read for {idle_s:g} s")):
                    await context.write(_serialize(response) if linked else response)

    return serve


def _link(linked: Mapping[MethodDescriptor, Handler], door: Door) -> Handler:
    """The method Link of a service, which carries the sessions of these methods."""
    sessions = {method.name: _guarded(method, behaviour, door, linked=True) for method, behaviour in linked.items()}
    parsers = {method.name: parser(method) for method in linked}

    async def serve(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> None:
        with door.links():
            link = ServedLink(sessions, parsers, most_calls(door.limits), door.limits.idle_s)
            await link.serve(requests, context, door.draining)

    return serve


def _serialize(response: Any) -> bytes:
    """The bytes of an answer, or what holds them already."""
    return response if isinstance(response, bytes) else response.SerializeToString()


def add_service(
    server: grpc.aio.Server, service: ServiceDescriptor, servicer: object, door: Door | None = None
) -> None:
    """Register `servicer`, whose methods are named as in the proto, behind the guard and `door` (None: open to all).

    Unary answers are awaitables, streamed ones async generators of messages or of their bytes; they raise CoppiceError
    to refuse. A method that it lacks is UNIMPLEMENTED, and so is one that a link carries.
    """
    door = door or Door()
    served = {method: getattr(servicer, method.name) for method in service.methods if hasattr(servicer, method.name)}
    sessions = [method for method in served if f"/{service.full_name}/{method.name}" in LINKED]
    if linked := {method: served.pop(method) for method in sessions}:
        served[service.methods_by_name[LINK]] = _link(linked, door)
    handlers = {}
    for method, behaviour in served.items():
        answer = "stream" if method.server_streaming else "unary"
        make = getattr(grpc, f"stream_{answer}_rpc_method_handler")
        handlers[method.name] = make(
            _guarded(method, behaviour, door),
            request_deserializer=parser(method),
            response_serializer=bytes if method.name == LINK else _serialize,
        )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))


def server_options(limits: Limits, role: str) -> list[tuple[str, int]]:
    """Channel arguments of a server. Clients may send less than services do: messages unpack to far more."""
    return [
        ("grpc.max_receive_message_length", REQUEST_BYTES if role == "orchestrator" else MESSAGE_BYTES),
        ("grpc.max_send_message_length", MESSAGE_BYTES),
        ("grpc.max_concurrent_streams", most_calls(limits) // 2),  # of a connection: none fills the server
        ("grpc.max_metadata_size", 16 << 10),
        ("grpc.absolute_max_metadata_size", 16 << 10),  # between the two gRPC would refuse at random
        ("grpc.so_reuseport", 0),
        *PINGS,
    ]


def most_calls(limits: Limits) -> int:
    """Calls that a server takes at once, silent ones included: those admitted, those queued, and as many short ones;
    those of a session's followers; beside them those of health, which take no place from others.
    """
    lasting = (2 + _FOLLOWERS) * limits.sessions + 2 * limits.queued
    return lasting + _SHORT_CALLS + 2 * MOST_CALLS


class Serving:
    """A running server: its addresses, its health, and its end."""

    def __init__(
        self, settings: Settings, role: str, clients: Clients | None = None, registries: Sequence[Registry] = ()
    ) -> None:
        """`clients` None: they need no token. `registries`: where it is to be found. Raises InvalidField."""
        self.settings, self.limits, self.role, self._tls = settings.server, settings.limits, role, settings.tls
        self._registries = registries
        self._registered: list[asyncio.Task[None]] = []
        host, limits = self.settings.host, self.limits
        if clients and not (self._tls.on or self._tls.tokens_in_clear or is_loopback(host)):
            raise InvalidField("tls.tokens_in_clear", f"clients would send tokens to {host} without TLS")
        self.access = Access(self._tls, clients)
        self.server = grpc.aio.server(options=server_options(limits, role), maximum_concurrent_rpcs=most_calls(limits))
        self.draining = asyncio.Event()
        self.leaving = asyncio.Event()  # set to end it, as SIGTERM does
        self.links: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
        """counts links, as a Door's"""
        self.address = ""
        self.others: dict[str, str] = {}  # what else the ready file says, by name
        self.health = Health()
        self._services: list[str] = []

    async def start(
        self,
        servicers: Mapping[ServiceDescriptor, object],
        metrics: CollectorRegistry | None = None,
        full: Callable[[], object] | None = None,
    ) -> None:
        """Bind, register, report ready; SIGTERM and SIGINT end it in order. full: a Door's. Raises InvalidField."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self.leaving.set)
        door = Door(self.access, self.limits, full, draining=self.draining, links=self.links)
        for service, servicer in servicers.items():
            add_service(self.server, service, servicer, door)
        add_service(self.server, HEALTH_SERVICE, self.health, Door(self.health, self.limits))
        self._services = [service.full_name for service in servicers]
        host = self.settings.host
        metrics_port = serve_metrics(metrics, host, self.settings.metrics_port) if metrics else 0
        credentials = server_credentials(self._tls, self._services[0]) if self._tls.on else None
        port = _bind(self.server, host, self.settings.port, credentials)
        self.address = f"{self.settings.advertise or host}:{port}"
        health_port = _bind(self.health.server, host, self.settings.health_port)
        await self.server.start()
        self.health.start(*self._services)
        for registry in self._registries:
            self._registered.append(asyncio.create_task(registry.keep(self.address, self.leaving)))
        if self.settings.ready_file:
            places = {"address": self.address, "health": f"{host}:{health_port}"}
            places["metrics"] = f"{host}:{metrics_port}" if metrics_port else ""
            ready = {"role": self.role, "pid": os.getpid(), **places, **self.others}
            write_ready(Path(self.settings.ready_file), ready)
        log.info("serving", role=self.role, address=self.address, health=f"{host}:{health_port}")

    async def until_stopped(self, failed: asyncio.Event | None = None) -> int:
        """Serve until SIGTERM, SIGINT or `failed`, then let sessions end and stop; returns the process's exit code."""
        failed = failed or asyncio.Event()
        ends = [asyncio.create_task(event.wait()) for event in (self.leaving, failed)]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        self.leaving.set()
        await asyncio.gather(*self._registered, return_exceptions=True)
        self.draining.set()
        self.health.not_ready(*self._services)
        await self.server.stop(self.settings.grace_s)
        await self.health.stop()
        for task in ends:
            task.cancel()
        log.info("stopped", role=self.role)
        return 1 if failed.is_set() else 0


def run_service(
    serve: Callable[[Settings], Coroutine[Any, Any, int]], load: Callable[[], Settings] = load_settings
) -> int:
    """A service process's main; its exit code: serve's, 2 for unusable settings or models, 3 for a missing service."""
    try:
        settings = load()
        configure_logging(settings.server.log_json)
        failpoints.enable(settings.server.failpoints)
        code = asyncio.run(serve(settings))
        tracing.stop()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it has been obeyed; taking down libraries lasts a while
        return code
    except CoppiceError as error:
        print(error, file=sys.stderr)
        return 2 if error.status == "INVALID_ARGUMENT" else 3


def _bind(
    server: grpc.aio.Server | grpc.Server, host: str, port: int, credentials: grpc.ServerCredentials | None = None
) -> int:
    address = f"{host}:{port}"
    try:
        return int(server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address))
    except RuntimeError as error:
        raise InvalidField("server", f"cannot listen on {address}") from error
