"""What an HTTP request meets before and behind its answer: who may ask, bounds, unexpected errors, the end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog

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
from orchestrator.text import TokenBytes

TARGET = TargetDescription("target", 300, 512, 2, 8, (0,), "float32", 2**20, 0, 0, 0, 0, 1.0, bytes(32))
STARTED = Started(1, "plain", (), 0, 7)
HALF = Chunk("a", (65,), (Origin.ROOT,), ("a",))
WHOLE = (STARTED, HALF, Finished("length", 1, 1, [], [], []))


class Service:
    """A service whose answers are these events; an exception among them is raised, a number waited for."""

    token_bytes = TokenBytes(None)
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


@dataclass
class Response:
    """What was answered."""

    status: int
    headers: dict[str, str]
    text: str

    @property
    def error(self) -> tuple[int, str]:
        """Status and message."""
        return self.status, json.loads(self.text)["error"]["message"]


class Front:
    """The front of a service, and its clients."""

    def __init__(self, service: Service, tokens: Tokens | None = None) -> None:
        access = Access(TlsSettings(), tokens)
        self.draining, self.answering = asyncio.Event(), Answering(service, access)
        self.door = Door(make_app(service, self.answering), service, access, self.draining)

    async def ask(self, method: str, path: str, *parts: dict[str, Any], token: str = "") -> Response:
        """One call, whose body comes in parts; behind them nothing comes any more."""
        waiting, sent = iter(parts), []

        async def receive() -> Any:
            part = next(waiting, None)
            return part if part is not None else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"content-type", b"application/json")]
        headers += [(b"authorization", f"Bearer {token}".encode())] if token else []
        scope = {"type": "http", "http_version": "1.1", "method": method, "path": path, "query_string": b""}
        await self.door({**scope, "headers": headers}, receive, send)
        told = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        return Response(sent[0]["status"], told, b"".join(part.get("body", b"") for part in sent).decode())

    async def get(self, path: str) -> Response:
        return await self.ask("GET", path, {"type": "http.request"})

    async def complete(self, token: str = "", **fields: Any) -> Response:
        body = json.dumps({"prompt": "a", **fields}).encode()
        return await self.ask("POST", "/v1/completions", {"type": "http.request", "body": body}, token=token)


@pytest.mark.parametrize("events", [(RuntimeError("secret"),), (STARTED, HALF, RuntimeError("secret"))])
async def test_an_unexpected_error_is_opaque_and_in_the_log(events: tuple[Any, ...]) -> None:
    front = Front(Service(*events))
    with structlog.testing.capture_logs() as logged:
        status, message = (await front.complete()).error
        streamed = await front.complete(stream=True)
    assert status == 500
    assert message == f"internal error {logged[0]['error_id']}"
    assert "secret" in str(logged[0]["exc_info"])
    assert len(logged) == 2
    assert "secret" not in message + streamed.text
    if len(events) > 1:
        *_, error, done = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line]
        assert json.loads(error)["error"]["type"] == "server_error"
        assert done == "[DONE]"
    else:
        assert streamed.status == 500


@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_before_the_first_event_is_a_status(stream: bool) -> None:
    assert (await Front(Service(NotFound("gone"))).complete(stream=stream, n=2)).error == (404, "gone")


async def test_an_answer_ends_at_the_longest_call() -> None:
    service = Service(STARTED, HALF, 30.0, call_s=0.1)
    front = Front(service)
    assert (await front.complete()).error == (408, "a call ends after 0.1 s")
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
    assert response.status == (200 if stream else 503)
    assert service.running == 0


async def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    begun = {"type": "http.request", "body": b"{", "more_body": True}
    response = await Front(Service(*WHOLE, idle_s=0.1)).ask("POST", "/v1/completions", begun)
    assert response.error == (408, "no byte of the body for 0.1 s")


async def test_a_server_that_stops_takes_nothing_new() -> None:
    front = Front(Service(*WHOLE))
    assert (await front.get("/ready")).status == 200
    front.draining.set()
    assert (await front.complete()).error == (503, "the server is stopping")
    codes = [(await front.get(path)).status for path in ("/ready", "/health", "/v1/models")]
    assert codes == [503, 200, 503]


async def test_a_full_server_refuses_before_the_body_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(*WHOLE)
    front, service.full = Front(service), True
    response = await front.complete(nonsense=1)
    assert response.error == (429, "full")
    assert response.headers["retry-after"] == "3"
    monkeypatch.setattr("orchestrator.http.door.most_calls", lambda limits: 0)
    assert (await front.get("/v1/models")).error == (429, "too many requests at once")


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    (tmp_path / "tokens").write_text(f"alice {sha256(b'right').hexdigest()} 2\n")
    return Tokens(str(tmp_path / "tokens"), OrchestratorMetrics().client_requests)


async def test_only_a_token_opens_and_each_choice_is_a_request_of_its_bearer(tokens: Tokens) -> None:
    front = Front(Service(*WHOLE), tokens)
    for wrong in ("", "wrong"):
        response = await front.complete(wrong, nonsense=1)
        assert response.error == (401, "a valid bearer token is needed")
        assert response.headers["www-authenticate"] == "Bearer"
        assert (await front.get("/metrics")).status == 401
    assert (await front.get("/health")).status == 200
    assert (await front.complete("right", n=2)).status == 200
    for stream in (False, True):
        status, message = (await front.complete("right", n=3, stream=stream)).error
        assert (status, "alice has 2 requests running" in message) == (429, True)
    assert (await front.complete("right", n=2)).status == 200  # all places are free again


async def test_json_has_no_infinity() -> None:
    row = TopLogProbs(np.array([65, 66]), np.array([-0.5, -np.inf], np.float32))
    chunk = Chunk("a", (65,), (Origin.ROOT,), ("a",), (-np.inf,), None, (row,))
    front = Front(Service(STARTED, chunk, WHOLE[-1]))
    log_probs = json.loads((await front.complete(logprobs=2)).text)["choices"][0]["logprobs"]
    assert log_probs["token_logprobs"] == [-9999.0]


async def test_a_requests_metrics_count_the_drafts_in_its_text() -> None:
    """The last step of a text that ends amid a block has no root."""
    root, draft = Origin.ROOT, Origin.DRAFT
    steps = [(root,), (draft, draft, root), (draft, draft)]
    chunks = [Chunk("a" * len(step), (65,) * len(step), step, ("a",) * len(step)) for step in steps]
    front = Front(Service(STARTED, *chunks, Finished("stop", 1, 6, [3, 2], [0, 0], [4, 9])))
    figures = json.loads((await front.complete(include_metrics=True)).text)["metrics"]["speculative_decoding"]
    assert (figures["num_accepted_draft_tokens"], figures["num_draft_tokens"]) == (4, 13)
    assert (figures["acceptance_histogram"], figures["mean_acceptance_length"]) == ([0, 0, 2], 3.0)
