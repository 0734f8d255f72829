"""Callers that say nothing, read nothing, leave in the middle, come in thousands, or obey all rules and still harm."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
import urllib.request
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coppice.client.client import AsyncClient
from coppice.errors import CALL_ENDED, InvalidField, Unavailable, from_rpc_error
from coppice.limits import Limits
from coppice.rpc import server as server_module
from coppice.rpc.access import ACCESS
from coppice.rpc.channels import CHANNEL_OPTIONS, LINKED, Dialer, Stub
from coppice.rpc.server import HEALTH_SERVICE, MAX_DETAILS, Door, Health, add_service, most_calls, server_options
from coppice.speculation.sampling import SamplingParams
from coppice.stack.launch import Stack
from coppice.stack.process import Ready
from coppice.stack.spec import COUNTED_HEADS
from coppice.telemetry import MOST_SCRAPES, metric
from coppice.v1 import generation_pb2
from coppice.wire.common import Fence, committed_hash
from coppice.wire.drafter import Advance, DraftStep, OpenDraft, draft_request_to_wire
from coppice.wire.generation import Chunk, Origin, Started
from orchestrator.service import GenerationServicer
from tests.fake_service import SERVICES
from tests.faults.test_fuzz import State, lets_go
from tests.processes import StartService
from tests.recorder import server_of
from tests.signals import eventually, holds
from tests.stacks import serving
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


async def read_to_end(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_a_call_without_a_message_ends_and_one_that_needs_but_one_sooner_than_a_session(lookup: Ready) -> None:
    async with careless(Limits(idle_s=300), IDLE_S) as (_, address):
        calls = [(lookup.address, method, SERVICE) for method in ("Draft", "SyncWeights", "DescribeHead")]
        for place in (*calls, (address, "DescribeModel", GENERATION)):
            async with called(*place) as call:
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
    assert await holds(lambda: State.of(lookup).has_not_grown(before, 8 << 20)), (before, State.of(lookup))


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


async def test_a_caller_that_does_not_read_or_a_little_now_and_then_is_left() -> None:
    async with careless() as (servicer, address), called(address, "Generate", GENERATION) as call:
        await call.write(b"")
        await asyncio.wait_for(servicer.ended.wait(), IDLE_S + 5)
        with pytest.raises(grpc.aio.AioRpcError, match=f"the answer was not read for {IDLE_S:g} s") as ended:
            await read_to_end(call)
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
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
    reading = [asyncio.create_task(read_to_end(call)) for call in calls]
    done, _ = await asyncio.wait(reading, timeout=QUIET_S, return_when=asyncio.FIRST_COMPLETED)
    assert not [task.exception() for task in done]
    assert not done
    for channel in channels:
        await channel.close()
    await asyncio.wait(reading)
    await server.stop(0)
    await watched.stop()


# What clients can do to an orchestrator and its sessions without breaking any rule of gRPC.

VOCAB, CONTEXT = 300, 16_384
SEATS = 4


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A verifier with KV for two long sessions and an orchestrator with a few seats."""
    folder = tmp_path_factory.mktemp("door")
    target = make_target(folder / "target", VOCAB, max_len=CONTEXT)
    seats = {"limits.sessions": SEATS, "limits.queued": 40, "limits.max_new_tokens": CONTEXT}
    extra = {
        "verifier": {"verifier.kv_tokens": 2 * CONTEXT + 512, "limits.queue_s": 1, "verifier.prune": False},
        "orchestrator": {**seats, "limits.queue_s": 120},  # beside other tests a seat takes a while
    }
    with serving(folder, target, *COUNTED_HEADS, draft_deadline_ms=0, extra=extra) as running:
        yield running


@contextlib.asynccontextmanager
async def connected(stack: Stack) -> AsyncIterator[Any]:
    narrow = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024))  # the window does not grow
    async with grpc.aio.insecure_channel(stack.address, options=narrow) as channel:
        yield Stub(channel, generation_pb2)


def request(prompt: int = 8, new: int = 16, **more: Any) -> generation_pb2.GenerateRequest:
    ids = generation_pb2.TokenIds(ids=[1 + n % 200 for n in range(prompt)])
    return generation_pb2.GenerateRequest(ids=ids, max_new_tokens=new, ignore_eos=True, **more)


async def read_kinds(call: Any, kinds: list[str]) -> grpc.StatusCode:
    with contextlib.suppress(grpc.RpcError, asyncio.CancelledError):
        while (event := await call.read()) is not grpc.aio.EOF:
            kinds.append(event.WhichOneof("kind"))
    return await call.code()


async def test_an_answer_that_started_is_not_refused_for_want_of_kv(stack: Stack) -> None:
    """Two of the long ones fit at a time; the verifier's queue lets the others wait for one second."""
    async with connected(stack) as stub:
        calls = [stub.Generate(request(new=CONTEXT - 8)) for _ in range(3)]
        heard: list[list[str]] = [[] for _ in calls]
        reading = [asyncio.create_task(read_kinds(call, kinds)) for call, kinds in zip(calls, heard, strict=True)]
        await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
        for call in calls:
            call.cancel()
        codes = await asyncio.gather(*reading)
    refused = [kinds for code, kinds in zip(codes, heard, strict=True) if code is grpc.StatusCode.RESOURCE_EXHAUSTED]
    assert refused == [[]]
    assert all(kinds[0] == "started" for kinds in heard if kinds)


async def test_an_answer_that_is_not_read_holds_no_seat(stack: Stack) -> None:
    async with connected(stack) as stub:
        unread = [stub.Generate(request(new=400, want_log_probs=True, top_log_probs=20)) for _ in range(SEATS)]
        for call in unread:
            assert (await call.read()).WhichOneof("kind") == "started"
        async with AsyncClient(stack.address) as other:
            await other.generate([1, 2, 3], max_new_tokens=4)
        assert not any(call.done() for call in unread)
        for call in unread:
            assert await read_kinds(call, []) is grpc.StatusCode.OK


async def test_an_answer_that_is_left_unread_holds_a_bounded_number_of_bytes(stack: Stack) -> None:
    """The trees of the steps are many times as large as the text. What the client has read by then is right."""
    async with connected(stack) as stub:
        call = stub.Generate(request(new=3000, want_trees=True, policy="merge", budget=256))
        assert (await call.read()).WhichOneof("kind") == "started"
        process = psutil.Process(stack.orchestrator.pid)
        before = process.memory_info().rss
        while metric(stack.orchestrator.metrics, "vllm:num_requests_running"):
            time.sleep(0.2)  # noqa: ASYNC251  # nobody reads meanwhile
        assert process.memory_info().rss - before < 32 << 20
        assert await read_kinds(call, []) is grpc.StatusCode.UNAVAILABLE
        assert "wait to be read" in await call.details()


async def test_a_part_that_is_larger_than_what_may_wait_does_not_end_its_answer() -> None:
    """As the log-probabilities of a long prompt are: what is being sent does not wait."""

    class Scoring(GenerationServicer):
        def __init__(self) -> None:
            pass

        async def _answer(self, message: Any, send: Any) -> None:
            for event in events:
                send(event)
                await asyncio.sleep(0)

    token = Chunk("a", (7,), (Origin.ROOT,), ("a",))
    events: list[Any] = [Started(1 << 16, "plain", (), 0, prompt_ids=(7,) * (1 << 16)), token, token]
    parts: list[Any] = []
    async for _, part in Scoring().answers([generation_pb2.GenerateRequest()], contextlib.nullcontext()):
        parts.append(part)
        for _ in range(4):
            await asyncio.sleep(0)
    assert parts == [events[0], Chunk("aa", (7, 7), (Origin.ROOT,) * 2, ("a", "a"))]  # chunks that wait become one


async def test_millions_of_empty_parts_are_refused_before_they_are_unpacked(stack: Stack) -> None:
    process = psutil.Process(stack.orchestrator.pid)
    before = process.memory_info().rss
    chat, stops, unknown = b"\x1a\xc0\x84\x3d" + b"\x0a\x00" * 500_000, b"\x3a\x00", b"\xfa\x3f\x00"
    async with Dialer().open(stack.address) as channel:
        generate = channel.unary_stream("/coppice.v1.GenerationService/Generate")
        for parts in (chat, stops * 500_000, unknown * 500_000):
            for call in [generate(parts) for _ in range(8)]:
                assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert await call.details() == "request: has more than 4096 parts"
    assert process.memory_info().rss - before < 48 << 20


async def test_long_texts_leave_running_sessions_alone(stack: Stack) -> None:
    """A prompt that the context cannot hold, however it is split, is refused at once; others are encoded aside."""
    async with connected(stack) as stub, AsyncClient(stack.address) as other:
        hopeless = stub.Generate(generation_pb2.GenerateRequest(text="x" * (9 * CONTEXT)))
        assert await hopeless.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "characters are more than" in await hopeless.details()
        long = [stub.Generate(generation_pb2.GenerateRequest(text="xyz " * (CONTEXT // 2))) for _ in range(SEATS - 1)]
        meanwhile = 0
        async for _ in other.stream([1, 2, 3], max_new_tokens=200, ignore_eos=True):
            meanwhile += not all(call.done() for call in long)
        for call in long:
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert await call.details() == f"prompt: {2 * CONTEXT} tokens leave no room in a context of {CONTEXT}"
    assert meanwhile > 2


async def test_silent_calls_fill_no_server(stack: Stack) -> None:
    """Those of one connection take half of its places, so that others still have theirs."""
    address, most = stack.services["verifier"].address, most_calls(stack.settings.limits)
    method = "/coppice.v1.VerifierService/Link"
    async with Dialer().open(address) as channel, Dialer().open(address) as second, Dialer().open(address) as another:
        silent = [channel.stream_stream(method)() for _ in range(most + 40)]
        await asyncio.sleep(0.5)
        async with AsyncClient(stack.address) as other:
            await other.generate([1, 2, 3], max_new_tokens=1)
        silent += [second.stream_stream(method)() for _ in range(most + 40)]
        for _ in range(20):
            late = another.stream_stream(method)(timeout=1)
            if await late.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                break
        assert await late.details() == "Concurrent RPC limit exceeded!"
        for call in silent:
            call.cancel()
    async with AsyncClient(stack.address) as other:
        await other.generate([1, 2, 3], max_new_tokens=1)


def test_idle_connections_do_not_keep_metrics_from_being_read(stack: Stack) -> None:
    address = stack.orchestrator.metrics
    host, _, port = address.rpartition(":")

    def is_read() -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as page:
            return b"coppice_requests" in page.read()
        return False

    before = psutil.Process(stack.orchestrator.pid).num_threads()
    idle = [socket.create_connection((host, int(port))) for _ in range(40)]
    time.sleep(0.5)
    assert psutil.Process(stack.orchestrator.pid).num_threads() <= before + MOST_SCRAPES
    assert eventually(is_read, 30)
    for connection in idle:
        connection.close()
    assert stack.log_dir
    assert "Traceback" not in (stack.log_dir / "orchestrator.log").read_text()


async def test_health_is_answered_while_the_loop_stands_and_says_that_it_does() -> None:
    health = Health(not_ready_s=0.5)
    port = health.server.add_insecure_port("127.0.0.1:0")
    health.start("a.Service")
    statuses: list[int] = []

    def ask() -> None:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            for _ in range(12):
                request = health_pb2.HealthCheckRequest(service="a.Service")
                statuses.append(health_pb2_grpc.HealthStub(channel).Check(request, timeout=5).status)
                time.sleep(0.1)

    asking = Thread(target=ask)
    asking.start()
    await asyncio.sleep(0.3)
    time.sleep(1)  # noqa: ASYNC251  # as a bug would
    await asyncio.to_thread(asking.join)
    await health.stop()
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    assert {*statuses} == {serving, not_serving}
    assert statuses[0] == serving
