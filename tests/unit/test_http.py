"""What an HTTP request meets before and behind its answer: who may ask, bounds, unexpected errors, the end."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import structlog

from coppice.client.request import build_request
from coppice.config.sections import TlsSettings
from coppice.config.settings import load_settings
from coppice.config.token_bytes import TokenBytes
from coppice.errors import InvalidField, NotFound, Overloaded
from coppice.rpc.access import Access
from coppice.wire.common import TopLogProbs
from coppice.wire.generation import Chunk, Finished, Origin, Started
from coppice.wire.verifier import TargetDescription
from orchestrator.http.bodies import check_log_probs
from orchestrator.http.server import Api, HttpDoor, HttpServer, check_parts, make_app
from orchestrator.metrics import OrchestratorMetrics
from orchestrator.service import GenerationServicer
from orchestrator.tokens import Tokens
from tests.processes import until

TARGET = TargetDescription("target", 300, 512, 2, 8, (0,), "float32", 2**20, 0, 0, 0, 0, 1.0, bytes(32))
STARTED = Started(1, "plain", (), 0, 7)
HALF = Chunk("a", (65,), (Origin.ROOT,), ("a",))
WHOLE = (STARTED, HALF, Finished("length", 1, 1, [], [], []))


class Service(GenerationServicer):
    """A service whose answers are these events; an exception among them is raised, a number waited for."""

    ready = True
    codec: Any = None

    def __init__(self, *events: Any, flags: Sequence[str] = (), **limits: Any) -> None:
        bounds = [f for name, value in limits.items() for f in (f"--limits.{name}", str(value))]
        self.settings = load_settings([*bounds, *flags])
        self.target, self.metrics, self.token_bytes = TARGET, OrchestratorMetrics(), TokenBytes(None)
        self.events, self.full, self.running = events, False, 0

    def check_seats(self) -> None:
        if self.full:
            raise Overloaded("full", 2.5)

    async def encode(self, prompt: Any, bare: bool = False, template_arguments: str = "") -> list[int]:
        return [1]

    async def _answer(self, message: Any, send: Callable[[Any], None]) -> None:
        self.running += 1
        try:
            for event in self.events:
                if isinstance(event, Exception):
                    raise event
                if isinstance(event, float):
                    await asyncio.sleep(event)
                else:
                    send(event)
                    await asyncio.sleep(0)
        finally:
            self.running -= 1


class Front(httpx.AsyncClient):
    """A client of a service's front."""

    def __init__(self, service: Service, tokens: Tokens | None = None) -> None:
        access = Access(TlsSettings(), tokens)
        self.draining, self.api = asyncio.Event(), Api(service, access)
        door = HttpDoor(make_app(self.api), service, access, self.draining)
        json_alone = {"Content-Type": "application/json"}
        super().__init__(transport=httpx.ASGITransport(door), base_url="http://127.0.0.1", headers=json_alone)

    async def complete(self, token: str = "", **fields: Any) -> httpx.Response:
        return await self.post("/v1/completions", json={"prompt": "a", **fields}, headers=bearer(token))


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"} if token else {}


def error(response: httpx.Response) -> tuple[int, str]:
    """Status and message."""
    return response.status_code, response.json()["error"]["message"]


async def unended(*parts: bytes, every_s: float = 0) -> AsyncIterator[bytes]:
    """A body in parts, one `every_s`; behind them nothing comes any more."""
    for part in parts:
        await asyncio.sleep(every_s)
        yield part
    await asyncio.Event().wait()


async def test_an_unexpected_error_is_opaque_and_in_the_log() -> None:
    for events in ((RuntimeError("secret"),), (STARTED, HALF, RuntimeError("secret"))):
        front = Front(Service(*events))
        with structlog.testing.capture_logs() as logged:
            status, message = error(await front.complete())
            streamed = await front.complete(stream=True)
        assert (status, message) == (500, f"internal error {logged[0]['error_id']}")
        assert "secret" in str(logged[0]["exc_info"])
        assert "secret" not in message + streamed.text
        assert streamed.status_code == (500 if len(events) == 1 else 200)
    *_, last, done = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line]
    assert (json.loads(last)["error"]["type"], done) == ("server_error", "[DONE]")


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_ends_with_an_error_at_once_at_the_longest_call_and_when_it_is_cut(stream: bool) -> None:
    assert error(await Front(Service(NotFound("gone"))).complete(stream=stream, n=2)) == (404, "gone")
    service = Service(STARTED, HALF, 30.0, call_s=0.1)
    assert "a call ends after 0.1 s" in (await Front(service).complete(stream=stream)).text
    service = Service(STARTED, HALF, 30.0)
    front = Front(service)
    waiting = asyncio.create_task(front.complete(stream=stream, n=2))
    await until(lambda: service.running == 2)
    await asyncio.sleep(0.05)  # the first part has been sent
    front.api.cut()
    response = await waiting
    assert "the server is stopping" in response.text
    assert response.status_code == (200 if stream else 503)
    assert service.running == 0


async def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    front = Front(Service(*WHOLE, idle_s=0.1))
    assert error(await front.post("/v1/completions", content=unended(b"{")))[0] == 408
    status, message = error(await front.post("/tokenize", content=unended(*[b"{"] * 99, every_s=0.04)))
    assert status == 408
    assert int(message.split()[5]) < 9  # bytes: the whole body has that time, not each part of it


BIG = (1 << 17) + (1 << 12)
FIT = [[5] * (1 << 17), [[]] * 4095, [""] * (1 << 14), ["[{," * BIG], ['\\"[,"\\' * BIG]]
TOO_MANY = [[5] * (BIG + 2), [[]] * 4096, [{}] * 4096, [""] * (1 << 14 | 1)]
TOO_MANY += [['\\"', [5] * (BIG + 2), "\\"], ["\\", [5] * (BIG + 2), '\\\\"']]


def test_the_parts_of_a_body_are_counted_outside_of_its_strings() -> None:
    for text in ("", *map(json.dumps, FIT)):
        check_parts(text.encode())
    utf16 = json.dumps({"a": 1}, indent=1).encode("utf-16").decode("latin-1")
    for text in ("[" * 5000, utf16, *map(json.dumps, TOO_MANY)):
        with pytest.raises(InvalidField, match="body: "):
            check_parts(text.encode("latin-1"))


def test_log_probabilities_of_all_choices_fit_one_body() -> None:
    request = replace(
        build_request([1] * 4000, log_probs=True, max_new_tokens=16), want_prompt_log_probs=True, top_log_probs=20
    )
    for each, choices in (
        (request, 3),
        (replace(request, top_log_probs=0), 16),
        (replace(request, want_prompt_log_probs=False), 16),
        (build_request("x" * 9000), 16),
    ):
        check_log_probs([each] * choices, 4096, 256)
    for each in (request, replace(request, ids=None, text="é" * 2000)):
        with pytest.raises(InvalidField, match="logprobs: "):
            check_log_probs([each] * 4, 1 << 17, 256)


@pytest.mark.parametrize(
    ("host", "origin", "flags", "status"),
    [
        ("127.0.0.1:8000", None, (), 200),
        ("LocalHost:8000", "http://LocalHost:8000", (), 200),
        ("evil.example:8000", None, (), 403),
        ("127.0.0.1.evil.example", None, (), 403),
        ("127.0.0.1:8000", "http://evil.example", (), 403),
        ("127.0.0.1:8000", "http://127.0.0.1:3000", (), 403),
        ("mine.example:8000", None, ("--orchestrator.hosts", '["mine.example"]'), 200),
        ("127.0.0.1:8000", "https://mine.example", ("--orchestrator.hosts", '["mine.example"]'), 200),
        ("evil.example", "http://evil.example", ("--server.host", "0.0.0.0"), 200),
        ("evil.example", None, ("--orchestrator.tokens", "tokens"), 200),
    ],
)
async def test_on_loopback_pages_of_other_sites_are_refused(
    host: str, origin: str | None, flags: tuple[str, ...], status: int
) -> None:
    front = Front(Service(*WHOLE, flags=flags))
    headers = {"host": host, **({"origin": origin} if origin is not None else {})}
    assert (await front.get("/v1/models", headers=headers)).status_code == status
    page = await front.get("/", headers=headers)  # as everything else
    assert page.status_code == (404 if status == 200 else status)


async def test_a_server_that_stops_or_is_full_refuses_before_the_body_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    front = Front(Service(*WHOLE))
    assert (await front.get("/ready")).status_code == 200
    front.draining.set()
    assert error(await front.complete(nonsense=1)) == (503, "the server is stopping")
    codes = [(await front.get(path)).status_code for path in ("/ready", "/health", "/v1/models")]
    assert codes == [503, 200, 503]
    service = Service(*WHOLE)
    front, service.full = Front(service), True
    response = await front.complete(nonsense=1)
    assert (error(response), response.headers["retry-after"]) == ((429, "full"), "3")
    monkeypatch.setattr("orchestrator.http.server.most_calls", lambda limits: 0)
    assert error(await front.get("/v1/models")) == (429, "too many requests at once")


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    (tmp_path / "tokens").write_text(f"alice {sha256(b'right').hexdigest()} 2\n")
    return Tokens(str(tmp_path / "tokens"), OrchestratorMetrics().client_requests)


async def test_only_a_token_opens_and_each_choice_is_a_request_of_its_bearer(tokens: Tokens) -> None:
    front = Front(Service(*WHOLE), tokens)
    refusals = [front.complete("", nonsense=1), front.complete("wrong", nonsense=1), front.get("/v1/models")]
    for response in await asyncio.gather(*refusals):
        assert error(response) == (401, "a valid bearer token is needed")
        assert response.headers["www-authenticate"] == "Bearer"
    assert (await front.get("/health")).status_code == 200
    assert (await front.complete("right", n=2)).status_code == 200
    for stream in (False, True):
        status, message = error(await front.complete("right", n=3, stream=stream))
        assert (status, "alice has 2 requests running" in message) == (429, True)
    assert (await front.complete("right", n=2)).status_code == 200  # all places are free again
    told, paths = bearer("right"), ("/tokenize", "/detokenize")
    slow = [asyncio.create_task(front.post(path, content=unended(b"{"), headers=told)) for path in paths]
    await asyncio.sleep(0.05)
    for path in (*paths, "/v1/completions", "/health"):
        status, message = error(await front.post(path, content=unended(b"{"), headers=told))
        assert (status, "alice has 2 requests running" in message) == (429, True)
    for task in slow:
        task.cancel()


async def test_no_client_reads_the_names_of_others(tokens: Tokens) -> None:
    front = Front(Service(*WHOLE, flags=("--orchestrator.tokens", "tokens")), tokens)
    assert error(await front.get("/metrics", headers=bearer("right")))[0] == 404
    assert "vllm:spec_decode" in (await Front(Service(*WHOLE)).get("/metrics")).text


@contextlib.asynccontextmanager
async def listening(service: Service) -> AsyncIterator[tuple[str, int]]:
    """The address of a real server."""
    draining = asyncio.Event()
    server = HttpServer(service.settings, service, Access(TlsSettings()), draining)
    host, _, port = (await server.start()).rpartition(":")
    try:
        yield host, int(port)
    finally:
        draining.set()
        await server.stop()


FLAGS = ("--orchestrator.http_port", "0", "--server.grace_s", "0")


async def ended(reader: asyncio.StreamReader) -> bool:
    """Whether a connection was closed without a word."""
    try:
        return await reader.read(1) == b""
    except ConnectionResetError:
        return True


async def test_idle_connections_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (64, 64))
    begun = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{"
    async with listening(Service(*WHOLE, flags=(*FLAGS, "--orchestrator.hosts", '["a"]'))) as address:
        busy, busy_writer = await asyncio.open_connection(*address)
        busy_writer.write(begun)
        idle = [await asyncio.open_connection(*address) for _ in range(60)]
        idle[0][1].write(b"GET /health HTT")
        assert all(await asyncio.gather(*[ended(reader) for reader, _ in idle[:29]]))
        for reader, writer in (idle[-1], idle[-31]):
            writer.write(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        busy_writer.write(b"        ")
        assert (await busy.readline()).startswith(b"HTTP/1.1 415")


async def test_a_head_that_does_not_come_is_not_waited_for() -> None:
    async with listening(Service(*WHOLE, idle_s=1, flags=(*FLAGS, "--orchestrator.hosts", '["a"]'))) as address:
        reader, writer = await asyncio.open_connection(*address)
        for _ in range(2):  # behind an answer as at first
            writer.write(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
        for part in b"GET /he":
            writer.write(bytes([part]))
        fresh, _ = await asyncio.open_connection(*address)
        rest, rest_writer = await asyncio.open_connection(*address)
        rest_writer.write(b"GET /health HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\n\r\n")
        await rest.readuntil(b"\r\n\r\n")
        rest_writer.write(b" ")
        async with asyncio.timeout(20):
            assert all(await asyncio.gather(ended(reader), ended(fresh), ended(rest)))


async def test_log_probabilities_are_finite_and_need_no_alternatives() -> None:
    row = TopLogProbs(np.array([65, 66]), np.array([-0.5, -np.inf], np.float32))
    for value, top, asked, expected in ((-np.inf, (row,), 2, -9999.0), (-0.5, (), 0, -0.5)):
        chunk = Chunk("a", (65,), (Origin.ROOT,), ("a",), (value,), None, top)
        answer = json.loads((await Front(Service(STARTED, chunk, WHOLE[-1])).complete(logprobs=asked)).text)
        told = answer["choices"][0]["logprobs"]
        assert (told["token_logprobs"], told["top_logprobs"] == [None]) == ([expected], asked == 0)


async def test_a_requests_metrics_count_the_drafts_in_its_text() -> None:
    """The last step of a text that ends amid a block has no root."""
    root, draft = Origin.ROOT, Origin.DRAFT
    steps = [(root,), (draft, draft, root), (draft, draft)]
    chunks = [Chunk("a" * len(step), (65,) * len(step), step, ("a",) * len(step)) for step in steps]
    front = Front(Service(STARTED, *chunks, Finished("stop", 1, 6, [3, 2], [0, 0], [4, 9])))
    figures = json.loads((await front.complete(include_metrics=True)).text)["metrics"]["speculative_decoding"]
    assert (figures["num_accepted_draft_tokens"], figures["num_draft_tokens"]) == (4, 13)
    assert (figures["acceptance_histogram"], figures["mean_acceptance_length"]) == ([0, 0, 2], 3.0)
