"""Callers that say nothing, read nothing, leave in the middle or come in thousands."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc._cython import cygrpc
from grpc_health.v1 import health_pb2

from coppice.errors import CALL_ENDED, InvalidField, Unavailable, from_rpc_error
from coppice.limits import Limits
from coppice.rpc import server as server_module
from coppice.rpc.access import ACCESS
from coppice.rpc.channels import CHANNEL_OPTIONS, LINKED, Dialer
from coppice.rpc.server import HEALTH_SERVICE, MAX_DETAILS, Door, Health, add_service, server_options
from coppice.speculation.sampling import SamplingParams
from coppice.stack.process import Ready
from coppice.v1 import generation_pb2
from coppice.wire.common import Fence, committed_hash
from coppice.wire.drafter import Advance, DraftStep, OpenDraft, draft_request_to_wire
from tests.fake_service import SERVICES
from tests.faults.test_fuzz import State, lets_go
from tests.processes import StartService
from tests.recorder import server_of
from tests.tiny import make_target

SERVICE, GENERATION = "/coppice.v1.DrafterService", "/coppice.v1.GenerationService"
IDLE_S = 0.5
OPEN = draft_request_to_wire(OpenDraft("s", [1, 2, 3], SamplingParams())).SerializeToString()
STEP = draft_request_to_wire(DraftStep(Fence(1, 3, committed_hash([1, 2, 3])), 1, 4, Advance())).SerializeToString()
AT_LENGTH = bool(os.environ.get("COPPICE_PROOF"))
STREAMS = 2000 if AT_LENGTH else 200
READ_OR_LEAVE = Limits(idle_s=IDLE_S)
QUIET_S, FASTER = (300.0, 1) if AT_LENGTH else (3.0, 20)  # no client pings twice a second
PINGS_MS = 10_000  # as often as gRPC's other implementations let a client ping


@pytest.fixture(scope="module")
def lookup(start_service: StartService) -> Ready:
    flags = ["--drafter.kind", "lookup", "--limits.idle_s", str(IDLE_S), "--drafter.depth", "4"]
    service = start_service("services.drafter", *flags)
    return Ready("drafter", service.address, service.health, service.metrics, service.process.pid)


@asynccontextmanager
async def called(address: str, method: str, service: str = SERVICE, **more: Any) -> AsyncIterator[Any]:
    async with Dialer().open(address) as channel:
        call = channel.stream_stream(f"{service}/{method}")(timeout=20, **more)
        yield call
        call.cancel()


async def read_all(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


@pytest.mark.parametrize("method", ["Draft", "SyncWeights", "DescribeHead"])
async def test_a_call_that_is_never_written_to_ends(lookup: Ready, method: str) -> None:
    async with called(lookup.address, method) as call:
        assert await call.code() is grpc.StatusCode.UNAVAILABLE
        assert await call.details() == f"no message for {IDLE_S:g} s"


async def test_the_one_message_of_a_call_is_not_waited_for_as_long_as_a_session(lookup: Ready) -> None:
    async with (
        careless(Limits(idle_s=300), IDLE_S) as (_, address),
        called(address, "DescribeModel", GENERATION) as call,
    ):
        assert await call.code() is grpc.StatusCode.UNAVAILABLE
        assert await call.details() == f"no message for {IDLE_S:g} s"
    async with called(lookup.address, "DescribeHead") as call:
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert await call.details() == "request: the call ended without a message"


async def test_a_message_beyond_the_bound_is_refused_packed_or_not(lookup: Ready) -> None:
    """A gzip of zeros is a thousandth of what it becomes."""
    data = b"\x7a\x80\x80\x80\x24" + bytes(72 << 20)  # a field that the message does not have, 72 MiB long
    for compression in (grpc.Compression.NoCompression, grpc.Compression.Gzip):
        options = [("grpc.max_send_message_length", -1)]
        async with grpc.aio.insecure_channel(lookup.address, options=options) as channel:
            call = channel.unary_unary(f"{SERVICE}/DescribeHead")(data, timeout=20, compression=compression)
            assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_thousands_of_streams_that_are_cancelled_leave_nothing(lookup: Ready) -> None:
    async def come_and_go(channel: grpc.aio.Channel, count: int) -> None:
        for number in range(count):
            call = channel.stream_stream(f"{SERVICE}/Draft")()
            for message in (OPEN, STEP)[: number % 3]:
                await call.write(message)
            if number % 2:
                await call.read() if number % 3 else await asyncio.sleep(0)
            call.cancel()

    async def storm(count: int) -> None:
        async with Dialer().open(lookup.address) as channel, asyncio.TaskGroup() as group:
            for _ in range(20):
                group.create_task(come_and_go(channel, count // 20))
        await lets_go(lookup)

    await storm(STREAMS // 10)
    before = State.of(lookup)
    await storm(STREAMS)
    after = State.of(lookup)
    assert after.has_not_grown(before, 8 << 20), (before, after)


async def test_what_callers_say_beyond_the_answer_keeps_no_stream(start_service: StartService, tmp_path: Path) -> None:
    """gRPC keeps a stream that ended with messages unread, and a connection has only so many."""
    few = ("--limits.sessions", "1", "--limits.queued", "1", "--verifier.threads", "1")
    verifier = start_service("services.verifier", "--verifier.target", str(make_target(tmp_path / "target", 300)), *few)
    method = "/coppice.v1.VerifierService/DescribeTarget"
    async with Dialer().open(verifier.address) as channel:

        async def talk() -> None:
            for _ in range(STREAMS):
                call = channel.stream_stream(method)()  # a deadline would end it at the server, too
                with suppress(grpc.RpcError, asyncio.InvalidStateError):
                    async with asyncio.timeout(5):
                        for _ in range(3):
                            await call.write(b"x" * 16)
                call.cancel()

        async with asyncio.TaskGroup() as group:
            for _ in range(8):
                group.create_task(talk())

        async with asyncio.timeout(30):
            while True:  # those that were just cancelled may fill the connection for a moment
                with suppress(grpc.RpcError):
                    await channel.unary_unary(method)(b"", timeout=5)
                    break


class Careless:
    """Answers more than anyone reads, and refuses in the words of the caller."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            while True:
                yield generation_pb2.GenerateResponse(chunk=generation_pb2.Chunk(text="x" * 10_000))
        finally:
            self.ended.set()

    async def DescribeModel(self, request: Any, context: Any) -> Any:
        raise InvalidField("name", "\ud800" + 2000 * "é")


@asynccontextmanager
async def careless(limits: Limits = READ_OR_LEAVE, message_s: float = 5.0) -> AsyncIterator[tuple[Careless, str]]:
    servicer, door = Careless(), Door(limits=limits, message_s=message_s)
    async with server_of(SERVICES["orchestrator"], servicer, door=door) as server:
        yield servicer, server.address


async def test_a_caller_that_does_not_read_is_left() -> None:
    async with careless() as (servicer, address), called(address, "Generate", GENERATION) as call:
        await call.write(b"")
        await asyncio.wait_for(servicer.ended.wait(), IDLE_S + 5)
        with pytest.raises(grpc.aio.AioRpcError, match=f"the answer was not read for {IDLE_S:g} s") as ended:
            await read_all(call)
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_caller_that_reads_a_little_now_and_then_is_left_too() -> None:
    limits = Limits(idle_s=60, call_s=2 * IDLE_S)
    async with careless(limits) as (servicer, address), called(address, "Generate", GENERATION) as call:
        await call.write(b"")
        while not servicer.ended.is_set():
            await call.read()
            await asyncio.sleep(IDLE_S / 5)


async def test_details_fit_into_a_header_whatever_they_quote() -> None:
    async with careless() as (_, address), called(address, "DescribeModel", GENERATION) as call:
        await call.write(b"")
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert await call.details() == ("name: ?" + 2000 * "é")[:MAX_DETAILS]


def test_a_write_that_finds_the_call_ended_is_a_lost_server() -> None:
    nothing = grpc.aio.Metadata()
    error = grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, nothing, nothing, CALL_ENDED)
    assert type(from_rpc_error(error)) is Unavailable


class Quiet:
    """Answers nothing, whatever it is asked."""

    def __getattr__(self, name: str) -> Any:
        async def wait(_: Any, context: Any) -> None:
            await asyncio.Event().wait()

        async def stream(_: Any, context: Any) -> AsyncIterator[Any]:
            await asyncio.Event().wait()
            yield

        return stream if name in ("Generate", *(path.rpartition("/")[2] for path in LINKED)) else wait


def faster(options: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    return [(name, value // FASTER if name.endswith("_ms") else value) for name, value in options]


async def test_a_quiet_call_outlives_the_pings_of_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every method, and a Watch on both ports, each on a connection of its own. All times are scaled alike."""
    monkeypatch.setattr(server_module, "PINGS", faster(server_module.PINGS))
    server, watched = grpc.aio.server(options=server_options(Limits(), "orchestrator")), Health()
    for service in SERVICES.values():
        add_service(server, service, Quiet())
    add_service(server, HEALTH_SERVICE, watched, Door(watched))
    port, health_port = (each.add_insecure_port("127.0.0.1:0") for each in (server, watched.server))
    await server.start()
    watched.start()
    paths = {f"/{service}/{method}" for service, callers in ACCESS.items() for method in callers} - LINKED
    methods = [(path, port) for path in paths if not path.endswith("/Link")]  # which is not quiet
    watch, pings = "/grpc.health.v1.Health/Watch", [("grpc.keepalive_time_ms", PINGS_MS)]
    options = faster([*(option for option in CHANNEL_OPTIONS if option[0] != pings[0][0]), *pings])
    channels, calls = [], []
    for method, at in [*methods, (watch, port), (watch, health_port)]:
        channels.append(grpc.aio.insecure_channel(f"127.0.0.1:{at}", options=options))
        calls.append(channels[-1].unary_stream(method)(health_pb2.HealthCheckRequest().SerializeToString()))
    reading = [asyncio.create_task(read_all(call)) for call in calls]
    done, _ = await asyncio.wait(reading, timeout=QUIET_S, return_when=asyncio.FIRST_COMPLETED)
    assert not [task.exception() for task in done]
    assert not done
    for channel in channels:
        await channel.close()
    await asyncio.wait(reading)
    await server.stop(0)
    await watched.stop()


def test_gRPC_knows_every_channel_argument_that_is_set() -> None:
    """It ignores others without a word."""
    root, known = Path(__file__).resolve().parents[2], Path(cygrpc.__file__).read_bytes()
    sources = [
        file.read_text() for part in ("coppice", "orchestrator", "services") for file in root.glob(f"{part}/**/*.py")
    ]
    names = {name for source in sources for name in re.findall(r'\("(grpc\.[a-z0-9_.]+)", ', source)}
    assert len(names) > 10
    assert not [name for name in names if name.encode() not in known]
