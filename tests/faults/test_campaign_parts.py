"""The fault campaign's own parts: what it counts as wrong, how it cuts connections, and when it refuses a result."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coppice.errors import InvalidField, Overloaded
from coppice.speculation.sampling import SamplingParams
from coppice.stack.spec import HeadSpec, StackSpec
from coppice.wire.generation import GenerationRequest, request_to_wire
from lab.report import Check, Report
from tests.fake_service import echo_server
from tests.faults.__main__ import app
from tests.faults.campaign.calls import Direct
from tests.faults.campaign.load import Load, Question, Stream
from tests.faults.campaign.proxy import Proxies
from tests.faults.campaign.report import FaultRow, add_faults
from tests.faults.campaign.run import choose, every

ROOT = Path(__file__).parents[2]


def stream(ids: list[int], *, ended: float | None = 2.0, failure: str = "", left: bool = False) -> Stream:
    return Stream((1, 2, 3), 0.0, ids, ended=ended, failure=failure, left=left)


@pytest.mark.parametrize(
    ("one", "wrong"),
    [
        (stream([1, 2, 3]), 0),
        (stream([1, 9, 3]), 1),
        (stream([1, 2]), 1),  # complete, and a token short
        (stream([1, 2, 3, 3]), 1),
        (stream([2, 3]), 3),  # one was lost, so none is where it belongs
        (stream([1, 2], failure="UNAVAILABLE: gone"), 0),
        (stream([1, 7], failure="UNAVAILABLE: gone"), 1),
        (stream([1], left=True), 0),
        (stream([1, 2], ended=None), 0),
    ],
)
def test_every_token_that_is_not_plains_is_wrong(one: Stream, wrong: int) -> None:
    assert one.wrong == wrong


def row(**changes: object) -> FaultRow:
    made = FaultRow("verifier-kill", 3, 48, tokens=2000, recoveries=[0.1, 0.4])
    for name, value in changes.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("changes", "failed"),
    [
        ({}, None),
        ({"failed": 1}, "failed requests"),
        ({"wrong": 1}, "wrong tokens"),
        ({"leaks": ["verifier holds a session"]}, "left behind"),
        ({"recoveries": [0.1, 5.2]}, "recovery p99, s"),
        ({"weak": ["3 of 16 sessions were being answered"]}, "repetitions that prove nothing"),
        ({"checks": [Check("throughput", 0.5, "0.9", False)]}, "throughput"),
    ],
)
def test_a_row_fails_by_each_of_its_promises(changes: dict[str, object], failed: str | None, tmp_path: Path) -> None:
    made = row(**changes)
    assert [check.name.rpartition(": ")[2] for check in made.to_checks() if not check.ok] == (
        [failed] if failed else []
    )
    report = Report("faults", "float32", 1)
    add_faults(report, [made])
    report.write(tmp_path / "faults.json")
    told = json.loads((tmp_path / "faults.json").read_text())
    assert told["ok"] == (failed is None)
    assert told["rows"][0]["fault"] == "verifier-kill"
    assert told["rows"][0]["recovery_p99_s"] == made.p99
    if "weak" in changes:
        assert any(check.note.startswith("weak: 3 of 16") for check in report.checks)


@pytest.fixture
def echo() -> Iterator[str]:
    """Sends back what it gets, to anybody."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    taken, _ = server.accept()
                except OSError:
                    return
                threading.Thread(target=_echo, args=(taken,), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)


def _echo(taken: socket.socket) -> None:
    with taken:
        while data := taken.recv(4096):
            taken.sendall(data)


def _connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=5)


def _said_back(connection: socket.socket) -> bytes:
    connection.sendall(b"hello")
    return connection.recv(16)


def _ended(connection: socket.socket) -> bool:
    try:
        return not connection.recv(1)
    except ConnectionResetError:
        return True


def test_a_proxy_cuts_heals_and_slows(echo: str) -> None:
    with Proxies() as proxies:
        address = proxies("one", echo)
        assert proxies("one", echo) == address
        with _connect(address) as connection:
            assert _said_back(connection) == b"hello"
            proxies.cut("one")
            assert _ended(connection)
        with pytest.raises(ConnectionRefusedError):
            _connect(address)
        proxies.heal("one")
        with _connect(address) as connection:
            proxies.slow("one", 0.1)
            began = time.monotonic()
            assert _said_back(connection) == b"hello"
            assert time.monotonic() - began >= 0.2  # there and back
            proxies.heal("one")
            began = time.monotonic()
            assert _said_back(connection) == b"hello"
            assert time.monotonic() - began < 0.1


async def test_a_load_ends_its_requests_and_compares_them() -> None:
    answers = {Question("one", SamplingParams()): tuple(b"one"), Question("two", SamplingParams()): tuple(b"TWO")}
    with echo_server() as (address, _):
        async with Load(address, answers, sessions=3) as load:
            while len(load.streams) < 12:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert not load.running
        made = FaultRow("none")
        made.count(load.streams)
    assert (made.failed, made.requests) == (0, len(load.streams))
    assert made.wrong == 3 * sum(one.expected == tuple(b"TWO") for one in load.streams) > 0


async def test_a_direct_request_is_refused_once() -> None:
    with echo_server() as (address, server):
        direct = Direct(address)
        assert await direct.ask(request_to_wire(GenerationRequest(text="yes")), 5) == list(b"yes")
        with pytest.raises(Overloaded):
            await direct.ask(request_to_wire(GenerationRequest(text="busy")), 5)
        await direct.close()
    assert server.calls == 2


def test_scenarios_are_chosen_by_name_and_group(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    counting = StackSpec(target=tmp_path)
    learning = StackSpec(target=tmp_path, heads=(HeadSpec("block", "specblock", tmp_path),))
    chosen, left_out = choose([], counting)
    assert {one.group for one in left_out} == {"adapter", "redis", "weights"}
    assert [*chosen, *left_out] == every()
    assert choose([], learning) == (every(), [])
    names = [one.name for one in choose(["verifier-kill,redis"], learning)[0]]
    assert names == ["verifier-kill", "redis-stop", "redis-cut", "redis-flush", "redis-slow"]
    with pytest.raises(InvalidField, match="kinds: 'verifier-melt' is none of"):
        choose(["verifier-melt"], counting)
    with pytest.raises(InvalidField, match="kinds: redis-stop needs a head"):
        choose(["redis"], counting)


def test_the_command_lists_what_there_is() -> None:
    listed = CliRunner().invoke(app, ["--list"])
    pages = listed.output, (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    assert all(scenario.name in page for page in pages for scenario in every())
