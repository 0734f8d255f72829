"""Links: many sessions over one stream, each with its own end; a link that ends, or falls silent, ends them all."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from coppice.errors import InvalidField, Overloaded, from_rpc_error
from coppice.limits import CHUNK_BYTES
from coppice.rpc import link
from coppice.rpc.channels import CHANNEL_OPTIONS, Dialer, Stub
from coppice.rpc.server import Door, add_service
from coppice.v1 import drafter_pb2
from coppice.v1.drafter_pb2 import DraftRequest, DraftResponse
from coppice.wire.common import control_item, message_item
from tests.processes import until

SERVICE = drafter_pb2.DESCRIPTOR.services_by_name["DrafterService"]


def saying(number: int) -> DraftRequest:
    return DraftRequest(step={"root": number})


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides look at their link more often."""
    monkeypatch.setattr(link, "BEAT_S", 0.1)


class Echo:
    """Answers every root by its number, and some of them in another way."""

    def __init__(self) -> None:
        self.open = 0

    async def Draft(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        self.open += 1
        try:
            async for request in requests:
                match request.step.root:
                    case 404:
                        raise InvalidField("root", "is not here")
                    case 408:
                        await asyncio.sleep(1)
                    case 429:
                        raise Overloaded("come back", 7)
                    case 500:
                        for _ in range(8):
                            yield DraftResponse(delta={"q_rows": bytes(CHUNK_BYTES - 64)})
                yield DraftResponse(delta={"miss": request.step.root})
        finally:
            self.open -= 1


@contextlib.asynccontextmanager
async def serving(port: int = 0, servicer: Any = None) -> AsyncIterator[tuple[Any, Door, grpc.aio.Server, str]]:
    server, echo, door = grpc.aio.server(options=CHANNEL_OPTIONS), servicer or Echo(), Door()
    add_service(server, SERVICE, echo, door)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    yield echo, door, server, f"127.0.0.1:{port}"
    await server.stop(0)


@contextlib.asynccontextmanager
async def linked() -> AsyncIterator[tuple[Any, Door, Any, Stub]]:
    async with serving() as (echo, door, server, address), Dialer().open(address) as channel:
        yield echo, door, server, Stub(channel, drafter_pb2)


async def asked(call: Any, number: int) -> float:
    await call.write(saying(number))
    return (await call.read()).delta.miss


async def test_what_is_ready_at_one_time_is_one_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    write, written = link.Outbox.write, 0

    async def counted(outbox: link.Outbox, write_frame: Any) -> None:
        async def counting(frame: bytes) -> None:
            nonlocal written
            written += bool(frame)
            await write_frame(frame)

        await write(outbox, counting)

    monkeypatch.setattr(link.Outbox, "write", counted)
    async with linked() as (echo, _, _, stub):
        calls = [stub.Draft() for _ in range(50)]
        for step in range(10):
            assert await asyncio.gather(*map(asked, calls, range(step, step + 50))) == list(range(step, step + 50))
        assert 20 <= written <= 40  # of 500 questions and as many answers
        for call in calls[1:]:
            call.cancel()
        await until(lambda: echo.open == 1)
        assert await asked(calls[0], 7) == 7


async def test_an_end_is_of_one_session() -> None:
    async with linked() as (echo, _, _, stub):
        one, other, broken = stub.Draft(), stub.Draft(), stub.Draft()
        assert await asked(one, 1) == 1
        for number, message in ((404, "root: is not here"), (429, "come back")):
            call = stub.Draft()
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await asked(call, number)
            error = from_rpc_error(ended.value)
            assert str(error) == message
            assert not isinstance(error, Overloaded) or error.retry_after_s == 7
            with pytest.raises(asyncio.InvalidStateError):
                await call.write(saying(1))
        broken._serialize = lambda _: b"\x07"  # type: ignore[attr-defined]
        with pytest.raises(grpc.aio.AioRpcError, match="are not a message of this method"):
            await asked(broken, 1)
        await other.done_writing()
        assert await other.read() is grpc.aio.EOF
        assert await asked(one, 2) == 2
        assert echo.open == 1


async def test_a_long_answer_holds_up_no_other() -> None:
    async with linked() as (_, _, _, stub):
        long, short = stub.Draft(), stub.Draft()
        await long.write(saying(500))
        assert [await asked(short, number) for number in range(20)] == list(range(20))
        parts = [await long.read() for _ in range(9)]
        assert [len(part.delta.q_rows) for part in parts[:8]] == [CHUNK_BYTES - 64] * 8


async def test_sessions_end_with_their_link_and_the_next_one_begins_another() -> None:
    async with serving() as (echo, _, server, address), Dialer().open(address) as channel:
        stub = Stub(channel, drafter_pb2)
        calls = [stub.Draft() for _ in range(3)]
        await asyncio.gather(*map(asked, calls, range(3)))
        await server.stop(0)
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await call.read()
            assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        await until(lambda: echo.open == 0)
        async with serving(int(address.rpartition(":")[2])):
            await asyncio.sleep(1)  # gRPC connects again at most half a second later
            assert await asked(stub.Draft(), 5) == 5


class Broken:
    """Takes a link, says nothing or that it is there, and reads nothing."""

    def __init__(self, says: bytes | None) -> None:
        self._says = says

    async def Link(self, requests: AsyncIterator[Any], context: Any) -> None:
        while True:
            if self._says is not None:
                await context.write(self._says)
            await asyncio.sleep(0.1)


@pytest.mark.parametrize(
    ("says", "reason"),
    [(None, "stopped answering: nothing for 0.5 s"), (b"", "stopped reading: nothing for 0.3 s"), (b"\7", "no frame")],
)
async def test_a_broken_server_is_lost(monkeypatch: pytest.MonkeyPatch, says: bytes | None, reason: str) -> None:
    monkeypatch.setattr(link, "SILENT_S", 0.5)
    if says is not None:
        monkeypatch.setattr(link, "STUCK_S", 0.3)
    async with serving(servicer=Broken(says)) as (_, _, _, address), Dialer().open(address) as channel:
        call = Stub(channel, drafter_pb2).Draft()
        for _ in range(32):  # more than a connection takes unread
            call.send(DraftRequest(step={"advance": {"features": {"inline": bytes(CHUNK_BYTES)}}}))
        with pytest.raises(grpc.aio.AioRpcError, match=reason):
            await call.read()


async def test_an_idle_server_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "SILENT_S", 0.5)
    async with linked() as (_, _, _, stub):
        call = stub.Draft()
        await asked(call, 1)
        await asyncio.sleep(1)
        assert await asked(call, 2) == 2


async def test_a_client_that_reads_nothing_loses_its_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "STUCK_S", 0.3)
    async with serving() as (echo, _, _, address), grpc.aio.insecure_channel(address) as channel:
        call = channel.stream_stream(f"/{SERVICE.full_name}/Link")()
        await call.write(b"".join(control_item(session=1, method="Draft")))
        for _ in range(8):
            await call.write(b"".join(message_item(1, saying(500).SerializeToString())))
        await until(lambda: echo.open == 1)
        await until(lambda: echo.open == 0)
        call.cancel()


async def test_what_is_not_read_ends_its_session_alone() -> None:
    async with linked() as (echo, _, _, stub):
        greedy, deaf, good = stub.Draft(), stub.Draft(), stub.Draft()
        for number in (408, *[1] * 600):
            deaf.send(saying(number))
        for _ in range(4):  # 32 MiB of answers
            greedy.send(saying(500))
        assert await deaf.details() == "too many messages of the session are unread"
        assert await greedy.code() is grpc.StatusCode.INTERNAL
        assert await asked(good, 1) == 1
        await until(lambda: echo.open == 1)


async def test_a_session_may_be_closed_before_it_begins() -> None:
    async with linked() as (echo, _, _, stub):
        for _ in range(20):
            closed = stub.Draft(saying(1))
            closed.cancel()
            with pytest.raises(asyncio.CancelledError):
                await closed.read()
        assert await asked(stub.Draft(), 1) == 1
        await until(lambda: echo.open == 1)


async def test_a_session_without_a_link_is_refused() -> None:
    async with serving() as (_, _, _, address), grpc.aio.insecure_channel(address) as channel:
        assert await Stub(channel, drafter_pb2).Draft().code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_link_without_sessions_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "UNUSED_S", 0.5)
    before = asyncio.all_tasks()
    async with linked() as (_, door, server, stub):
        call = stub.Draft()
        assert await asked(call, 1) == 1
        call.cancel()
        await until(lambda: not any("Link._run" in str(task) for task in asyncio.all_tasks() - before))
        again = stub.Draft()
        assert await asked(again, 2) == 2
        door.draining.set()
        again.cancel()
        await server.stop(10)


async def test_what_fails_behind_the_last_message_ends_its_session() -> None:
    inbox = link.Inbox()
    listening = asyncio.create_task(inbox.listen(lambda _: setattr(inbox, "is_busy", True)))
    await asyncio.sleep(0)
    inbox.put(b"a step")
    inbox.end()  # the client writes no more, and waits for the answer
    inbox.end(InvalidField("step", "is stale"))
    with pytest.raises(InvalidField, match="is stale"):
        await asyncio.wait_for(listening, 5)
