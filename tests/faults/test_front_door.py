"""What clients can do to an orchestrator and its sessions without breaking any rule of gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from threading import Thread
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coppice.client.client import AsyncClient
from coppice.rpc.channels import Dialer, Stub
from coppice.rpc.server import Health, most_calls
from coppice.stack.launch import Stack
from coppice.stack.spec import COUNTED_HEADS
from coppice.telemetry import MOST_SCRAPES, metric
from coppice.v1 import generation_pb2
from coppice.wire.generation import Chunk, Origin, Started
from orchestrator.service import GenerationServicer
from tests.signals import eventually
from tests.stacks import serving
from tests.tiny import make_target

VOCAB, CONTEXT = 300, 32_768
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


async def read(call: Any, kinds: list[str]) -> grpc.StatusCode:
    with contextlib.suppress(grpc.RpcError, asyncio.CancelledError):
        while (event := await call.read()) is not grpc.aio.EOF:
            kinds.append(event.WhichOneof("kind"))
    return await call.code()


async def test_an_answer_that_started_is_not_refused_for_want_of_kv(stack: Stack) -> None:
    """Two of the long ones fit at a time; the verifier's queue lets the others wait for one second."""
    async with connected(stack) as stub:
        calls = [stub.Generate(request(new=CONTEXT - 8)) for _ in range(3)]
        heard: list[list[str]] = [[] for _ in calls]
        reading = [asyncio.create_task(read(call, kinds)) for call, kinds in zip(calls, heard, strict=True)]
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
            assert await read(call, []) is grpc.StatusCode.OK


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
        assert await read(call, []) is grpc.StatusCode.UNAVAILABLE
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
            for _ in range(15):
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
