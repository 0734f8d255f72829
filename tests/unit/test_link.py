"""Links: many sessions over one stream, each with its own end, and one that falls silent ends them all; admission."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coppice.errors import InvalidField, Overloaded, from_rpc_error
from coppice.limits import CHUNK_BYTES
from coppice.rpc import link
from coppice.rpc.admission import Admission
from coppice.rpc.channels import CHANNEL_OPTIONS, Dialer, Stub
from coppice.rpc.server import Door, add_service
from coppice.v1 import drafter_pb2
from coppice.v1.drafter_pb2 import DraftRequest, DraftResponse
from coppice.wire.common import control_item, message_item
from tests.processes import until, without_waiting

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
async def linked() -> AsyncIterator[tuple[Any, Stub]]:
    async with serving() as (echo, _, _, address), Dialer().open(address) as channel:
        yield echo, Stub(channel, drafter_pb2)


async def asked(call: Any, number: int) -> float:
    await call.write(saying(number))
    return (await call.read()).delta.miss


async def test_an_end_and_a_long_answer_are_of_one_session_and_an_idle_link_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link, "SILENT_S", 0.5)
    async with linked() as (echo, stub):
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
        long = stub.Draft()
        await long.write(saying(500))
        assert [await asked(one, number) for number in range(20)] == list(range(20))
        assert [len((await long.read()).delta.q_rows) for _ in range(8)] == [CHUNK_BYTES - 64] * 8
        long.cancel()
        await asyncio.sleep(1)
        assert await asked(one, 2) == 2
        assert echo.open == 1


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


async def test_a_client_that_reads_nothing_loses_its_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "STUCK_S", 0.3)
    async with serving() as (echo, _, _, address), grpc.aio.insecure_channel(address) as channel:
        assert await Stub(channel, drafter_pb2).Draft().code() is grpc.StatusCode.UNIMPLEMENTED  # without a link
        call = channel.stream_stream(f"/{SERVICE.full_name}/Link")()
        await call.write(b"".join(control_item(session=1, method="Draft")))
        for _ in range(8):
            await call.write(b"".join(message_item(1, saying(500).SerializeToString())))
        await until(lambda: echo.open == 1)
        await until(lambda: echo.open == 0)
        call.cancel()


async def test_what_is_not_read_ends_its_session_alone() -> None:
    async with linked() as (echo, stub):
        greedy, deaf, good = stub.Draft(), stub.Draft(), stub.Draft()
        for number in (408, *[1] * 600):
            deaf.send(saying(number))
        for _ in range(4):  # 32 MiB of answers
            greedy.send(saying(500))
        assert await deaf.details() == "too many messages of the session are unread"
        assert await greedy.code() is grpc.StatusCode.INTERNAL
        assert await asked(good, 1) == 1
        await until(lambda: echo.open == 1)


async def test_a_link_without_sessions_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "UNUSED_S", 0.5)
    before = asyncio.all_tasks()
    async with serving() as (_, door, server, address), Dialer().open(address) as channel:
        stub = Stub(channel, drafter_pb2)
        call = stub.Draft()
        assert await asked(call, 1) == 1
        call.cancel()
        await until(lambda: not any("Link._run" in str(task) for task in asyncio.all_tasks() - before))
        again = stub.Draft()
        assert await asked(again, 2) == 2
        door.draining.set()
        again.cancel()
        await server.stop(10)


# --- admission: seats are handed on in order, and none is lost or given twice, whoever gives up at whatever moment ---


CAPACITY = 3
ACTS = st.one_of(
    st.tuples(st.just("come"), st.integers(1, CAPACITY)),
    st.tuples(st.just("cancel"), st.integers(0, 20)),
    st.tuples(st.just("leave"), st.integers(0, 20)),
    st.tuples(st.just("turn"), st.integers(1, 3)),
    st.tuples(st.just("sleep"), st.just(0)),
)


class Caller:
    """One who wants some units, holds them until told to leave, and may be cancelled at any moment."""

    def __init__(self, admission: Admission, units: int) -> None:
        self.units, self.holds, self.left = units, False, asyncio.Event()
        self.task = asyncio.create_task(self._run(admission))

    async def _run(self, admission: Admission) -> None:
        with contextlib.suppress(Overloaded):
            async with admission.admit(self.units):
                self.holds = True
                try:
                    await self.left.wait()
                finally:
                    self.holds = False


async def _play(acts: list[tuple[str, int]]) -> None:
    admission = Admission("seats", CAPACITY, queued=6, wait_s=0.001)
    callers: list[Caller] = []
    for act, number in acts:
        if act == "come":
            callers.append(Caller(admission, number))
        elif act == "turn":
            for _ in range(number):
                await asyncio.sleep(0)
        elif act == "sleep":
            await asyncio.sleep(0.001)
        elif callers and act == "cancel":
            callers[number % len(callers)].task.cancel()
        elif callers:
            callers[number % len(callers)].left.set()
        assert admission.used <= CAPACITY
        assert sum(caller.units for caller in callers if caller.holds) <= admission.used
    for caller in callers:
        caller.left.set()
    for outcome in await asyncio.gather(*(caller.task for caller in callers), return_exceptions=True):
        assert outcome is None or isinstance(outcome, asyncio.CancelledError)
    assert admission.used == 0
    async with admission.admit(CAPACITY):
        assert admission.used == CAPACITY


@given(st.lists(ACTS, max_size=40))
@settings(max_examples=200, deadline=None)
def test_no_interleaving_loses_a_seat_or_ends_in_another_error(acts: list[tuple[str, int]]) -> None:
    without_waiting(_play)(acts)


@without_waiting
async def test_those_who_wait_are_served_in_order() -> None:
    admission = Admission("seats", 2, queued=8, wait_s=5)
    held = [Caller(admission, 1), Caller(admission, 1)]
    await asyncio.sleep(0)
    large, small = Caller(admission, 2), Caller(admission, 1)
    held[0].left.set()
    await asyncio.sleep(0.01)
    assert [large.holds, small.holds] == [False, False]  # the small one does not overtake
    held[1].left.set()
    await asyncio.sleep(0.01)
    assert [large.holds, small.holds] == [True, False]
    large.left.set()
    await asyncio.sleep(0.01)
    assert small.holds
    small.left.set()
    await asyncio.gather(*(caller.task for caller in (*held, large, small)))


@without_waiting
async def test_those_who_are_refused_come_back_as_fast_as_places_become_free() -> None:
    """However many they are: what they are told is spread over time, a few of them for each place."""
    held_s, capacity = 0.2, 4
    admission = Admission("seats", capacity, queued=0, wait_s=1)
    async with admission.admit():
        await asyncio.sleep(held_s)
    callers, hints = [Caller(admission, 1) for _ in range(capacity)], list[float]()
    await asyncio.sleep(0)
    for _ in range(440):
        with pytest.raises(Overloaded) as refused:
            admission.check()
        hints.append(refused.value.retry_after_s)
    assert hints[39] - hints[0] == pytest.approx(39 * held_s / capacity / 2, rel=0.2)
    assert max(hints) <= 0.1 + 8 * 1.5 * held_s  # nobody needs to wait for more than a few turns
    for caller in callers:
        caller.left.set()
    await asyncio.gather(*(caller.task for caller in callers))
