"""What an HTTP request meets before and behind its answer: who may ask, bounds, unexpected errors, the end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from coppice.config.sections import TlsSettings
from coppice.config.settings import load_settings
from coppice.errors import NotFound, Overloaded
from coppice.messages.generation import Chunk, Finished, Origin, Started
from coppice.messages.steps import TargetDescription, TopLogProbs
from coppice.rpc.access import Access
from coppice.rpc.tokens import Tokens
from coppice.telemetry import OrchestratorMetrics
from orchestrator.http.answering import Answering
from orchestrator.http.app import make_app
from orchestrator.http.door import Door

TARGET = TargetDescription("target", 300, 512, 2, 8, (0,), "float32", 2**20, 0, 0, 0, 0, 1.0, bytes(32))
STARTED = Started(1, "plain", (), 0, 7)
HALF = Chunk("a", (65,), (Origin.ROOT,), ("a",))
WHOLE = (STARTED, HALF, Finished("length", 1, 1, [], [], []))


class Service:
    """A service whose answers are these events; an exception among them is raised, a number waited for."""

    tokenizer = None
    ready = True

    def __init__(self, *events: Any, **limits: Any) -> None:
        self.settings = load_settings([f for name, value in limits.items() for f in (f"--limits.{name}", str(value))])
        self.target, self.metrics = TARGET, OrchestratorMetrics()
        self.events, self.full, self.running = events, False, 0

    def check_seats(self) -> None:
        if self.full:
            raise Overloaded("full", 2.5)

    async def encode(self, prompt: Any) -> list[int]:
        return [1]

    async def answer(
        self, message: Any, pack: Callable[[Any], Any], size: Callable[[Any], int]
    ) -> AsyncGenerator[Any, None]:
        self.running += 1
        try:
            for event in self.events:
                if isinstance(event, Exception):
                    raise event
                if isinstance(event, float):
                    await asyncio.sleep(event)
                else:
                    yield pack(event)
        finally:
            self.running -= 1


class Front:
    """The front of a service, and a client of it."""

    def __init__(self, service: Service, tokens: Tokens | None = None) -> None:
        access = Access(TlsSettings(), tokens)
        self.draining, self.answering = asyncio.Event(), Answering(service, access)
        self.door = Door(make_app(service, self.answering), service, access, self.draining)
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(self.door), base_url="http://front")

    async def complete(self, token: str = "", **fields: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return await self.client.post("/v1/completions", json={"prompt": "a", **fields}, headers=headers)


def told(response: httpx.Response) -> tuple[int, str]:
    """Status and message of an error."""
    return response.status_code, response.json()["error"]["message"]


@pytest.mark.parametrize("events", [(RuntimeError("secret"),), (STARTED, HALF, RuntimeError("secret"))])
async def test_an_unexpected_error_is_opaque(events: tuple[Any, ...]) -> None:
    front = Front(Service(*events))
    status, message = told(await front.complete())
    assert status == 500
    assert message.startswith("internal error ")
    streamed = await front.complete(stream=True)
    assert "secret" not in message + streamed.text
    if len(events) > 1:
        *_, error, done = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line]
        assert json.loads(error)["error"]["type"] == "server_error"
        assert done == "[DONE]"
    else:
        assert streamed.status_code == 500


@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_before_the_first_event_is_a_status(stream: bool) -> None:
    assert told(await Front(Service(NotFound("gone"))).complete(stream=stream, n=2)) == (404, "gone")


async def test_an_answer_ends_at_the_longest_call() -> None:
    service = Service(STARTED, HALF, 30.0, call_s=0.1)
    front = Front(service)
    assert told(await front.complete()) == (408, "a call ends after 0.1 s")
    assert '"a call ends after 0.1 s"' in (await front.complete(stream=True)).text
    assert service.running == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_cut_is_told_so(stream: bool) -> None:
    service = Service(STARTED, HALF, 30.0)
    front = Front(service)
    waiting = asyncio.create_task(front.complete(stream=stream, n=2))
    await asyncio.sleep(0.3)
    assert service.running == 2
    front.answering.cut()
    response = await waiting
    assert "the server is stopping" in response.text
    assert response.status_code == (200 if stream else 503)
    assert service.running == 0


async def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    front, sent = Front(Service(*WHOLE, idle_s=0.1)), []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "http_version": "1.1"}
    headers = [(b"content-type", b"application/json"), (b"content-length", b"10")]
    await front.door({**scope, "headers": headers}, asyncio.Event().wait, send)
    assert sent[0]["status"] == 408
    assert json.loads(sent[1]["body"])["error"]["type"] == "timeout_error"


async def test_a_server_that_stops_takes_nothing_new() -> None:
    front = Front(Service(*WHOLE))
    assert (await front.client.get("/ready")).status_code == 200
    front.draining.set()
    assert told(await front.complete()) == (503, "the server is stopping")
    codes = [(await front.client.get(path)).status_code for path in ("/ready", "/health", "/v1/models")]
    assert codes == [503, 200, 503]


async def test_a_full_server_refuses_before_the_body_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(*WHOLE)
    front, service.full = Front(service), True
    response = await front.complete(nonsense=1)
    assert told(response) == (429, "full")
    assert response.headers["retry-after"] == "3"
    monkeypatch.setattr("orchestrator.http.door.most_calls", lambda limits: 0)
    assert told(await front.client.get("/v1/models")) == (429, "too many requests at once")


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    (tmp_path / "tokens").write_text(f"alice {sha256(b'right').hexdigest()} 2\n")
    return Tokens(str(tmp_path / "tokens"), OrchestratorMetrics().client_requests)


async def test_only_a_token_opens_and_each_choice_is_a_request_of_its_bearer(tokens: Tokens) -> None:
    front = Front(Service(*WHOLE), tokens)
    for wrong in ("", "wrong"):
        response = await front.complete(wrong, nonsense=1)
        assert told(response) == (401, "a valid bearer token is needed")
        assert response.headers["www-authenticate"] == "Bearer"
        assert (await front.client.get("/metrics")).status_code == 401
    assert (await front.client.get("/health")).status_code == 200
    assert (await front.complete("right", n=2)).status_code == 200
    for stream in (False, True):
        status, message = told(await front.complete("right", n=3, stream=stream))
        assert (status, "alice has 2 requests running" in message) == (429, True)
    assert (await front.complete("right", n=2)).status_code == 200  # all places are free again


async def test_json_has_no_infinity() -> None:
    row = TopLogProbs(np.array([65, 66]), np.array([-0.5, -np.inf], np.float32))
    chunk = Chunk("a", (65,), (Origin.ROOT,), ("a",), (-np.inf,), None, (row,))
    front = Front(Service(STARTED, chunk, WHOLE[-1]))
    log_probs = (await front.complete(logprobs=2)).json()["choices"][0]["logprobs"]
    assert log_probs["token_logprobs"] == [-9999.0]
