"""The HTTP server beside the gRPC one: the same process, event loop, certificates and end.

It serves OpenAI's API, and the page.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import re
import resource
import socket
import ssl
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import h11
import structlog
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

import coppice
from coppice.config.sections import TlsSettings
from coppice.config.settings import Settings
from coppice.errors import Cancelled, CoppiceError, DeadlineExceeded, InvalidField, NotFound, Overloaded, Unavailable
from coppice.limits import MAX_CONTEXT, NEW_TOKENS, REQUEST_BYTES, Limits, check_count, check_ids
from coppice.rpc import tracing
from coppice.rpc.access import Access, Certificates, is_loopback
from coppice.rpc.server import MAX_PARTS, most_calls, within
from coppice.wire.generation import Chunk, GenerationRequest, request_to_wire

from ..service import GenerationServicer
from .answers import Events, HttpAnswer, error_response, finite, streamed, unless_gone
from .bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, check_log_probs, naming_fields_of
from .responses import ResponsesAnswer, ResponsesBody
from .tools import ChatFormat, Json

log = structlog.get_logger()

_FOLDER = Path(__file__).parent / "page"
FILES = {"/" if file.name == "index.html" else f"/{file.name}": file for file in sorted(_FOLDER.iterdir())}
"""The files of the page by their paths: they hold nothing of a deployment."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_JSON, _EVENTS = "application/json", "text/event-stream"
MAX_TOKENS_HEADER = "x-coppice-max-tokens"
"""How many new tokens an answer may have that was asked for with a larger limit"""


def is_page_served(settings: Settings) -> bool:
    """Whether `orchestrator.page` asks for the page where this process listens."""
    where = settings.orchestrator.page
    return where == "always" or (where == "loopback" and is_loopback(settings.server.host))


def make_app(api: Api, page: bool = False) -> FastAPI:
    """The application of an API, with the page or without."""
    app = FastAPI(
        title="Coppice",
        version=coppice.__version__,
        redoc_url=None,
        responses={"4XX": {"description": "what is wrong, in OpenAI's body of an error"}},
    )

    @app.exception_handler(CoppiceError)
    @app.exception_handler(HTTPException)
    @app.exception_handler(RequestValidationError)
    @app.exception_handler(Exception)
    async def answer(request: Request, error: Exception) -> JSONResponse:
        if isinstance(error, RequestValidationError) and "json" not in request.headers.get("content-type", ""):
            error = HTTPException(415, "send Content-Type: application/json")
        return error_response(error)

    for method, path, endpoint, *kinds in api.routes(page):
        plain = JSONResponse if _JSON in kinds else Response
        content: Any = {200: {"content": {kind: {} for kind in kinds}}}
        app.add_api_route(path, endpoint, methods=[method], response_class=plain, responses=content)
    for path, file in FILES.items() if page else ():
        app.add_route(path, partial(_serve, file), include_in_schema=False)
    return app


async def _serve(file: Path, request: Request) -> Response:
    return FileResponse(file, headers=HEADERS)


class Api:
    """What each path answers. The first line of a docstring is the path's description."""

    def __init__(self, service: GenerationServicer, access: Access) -> None:
        self._service, self._access = service, access
        self._chat = ChatFormat.of(service.codec.chat_template if service.codec else "", service.token_bytes)
        target = service.target
        about = {"object": "model", "created": int(time.time()), "owned_by": "coppice"}
        self._models = {name: {"id": name, **about, "max_model_len": target.max_len} for name in target.names}
        self._running = set[asyncio.Timeout]()
        self._is_cut = False

    def cut(self) -> None:
        """End every answer under way: its client is told that the server stops."""
        self._is_cut = True
        for call in self._running:
            if not call.expired():
                call.reschedule(0)

    def routes(self, page: bool) -> Iterator[tuple[str, str, Callable[..., Any], *tuple[str, ...]]]:
        """Method, path, endpoint and media types of OpenAI's API, of what stands beside it, and of the page's."""
        yield "GET", "/health", self.health
        yield "GET", "/ping", self.health
        yield "GET", "/ready", self.ready
        yield "GET", "/version", self.version, _JSON
        if not self._service.settings.orchestrator.tokens:  # metrics name all clients
            yield "GET", "/metrics", self.metrics, "text/plain"
        yield "GET", "/v1/models", self.models, _JSON
        yield "GET", "/v1/models/{name:path}", self.model, _JSON
        yield "POST", "/v1/completions", self.completions, _JSON, _EVENTS
        yield "POST", "/v1/chat/completions", self.chat_completions, _JSON, _EVENTS
        yield "POST", "/v1/responses", self.responses, _JSON, _EVENTS
        yield "POST", "/tokenize", self.tokenize, _JSON
        yield "POST", "/detokenize", self.detokenize, _JSON
        if page:
            yield "GET", "/model", self.described, _JSON
            yield "POST", "/trace/completions", self.trace_completion, _EVENTS
            yield "POST", "/trace/chat/completions", self.trace_chat, _EVENTS

    async def health(self) -> Response:
        """Answer while the process lives."""
        return Response()

    async def ready(self) -> Response:
        """Answer while requests are taken and a verifier can be asked; otherwise the status is 503."""
        if not self._service.ready:
            raise Unavailable("no verifier is ready")
        return Response()

    async def version(self) -> Json:
        """Return Coppice's version."""
        return {"version": coppice.__version__}

    async def metrics(self) -> Response:
        """Return the same as the metrics port."""
        return PlainTextResponse(generate_latest(self._service.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def models(self) -> Json:
        """List the served model, under each of its names."""
        return {"object": "list", "data": list(self._models.values())}

    async def model(self, name: str) -> Json:
        """Describe the served model; max_model_len is its context."""
        self._check_model(name)
        return self._models[name or next(iter(self._models))]

    async def completions(self, body: CompletionBody, request: Request) -> Response:
        """Complete a prompt, whole or as server-sent events."""
        return await self._answer(body, request)

    async def chat_completions(self, body: ChatBody, request: Request) -> Response:
        """Answer a conversation, whole or as server-sent events."""
        return await self._answer(body, request)

    async def responses(self, body: ResponsesBody, request: Request) -> Response:
        """Answer a conversation of items, whole or as server-sent events."""
        return await self._answer(body, request)

    async def _answer(self, body: CompletionBody | ChatBody | ResponsesBody, request: Request) -> Response:
        """Answer all choices of a body. An error before the first part is a status."""
        self._check_model(body.model)
        limits = self._service.settings.limits
        with naming_fields_of(body):
            asked = body.chat if isinstance(body, ResponsesBody) else body
            choices = asked.requests(limits.max_new_tokens, self._chat)
            check_log_probs(choices, self._service.target.max_len, NEW_TOKENS)
            answer: HttpAnswer | ResponsesAnswer
            answer = of_chat = HttpAnswer(self._service, asked, choices, self._chat)
            if isinstance(body, ResponsesBody):
                answer = ResponsesAnswer(self._service, body, of_chat.choices[0])
            headers = {MAX_TOKENS_HEADER: str(limits.max_new_tokens)} if asked.limit > limits.max_new_tokens else {}
            events = self._events(choices, request)
            if body.stream:
                return await streamed(request, answer.parts(events), limits.idle_s, headers)
            return JSONResponse(await unless_gone(request, answer.whole(events)), headers=headers)

    def _events(self, requests: Sequence[GenerationRequest], request: Request) -> Events:
        """The events of a request's choices as they come; when one fails, all end. Raises CoppiceError."""
        return self._service.answers(list(map(request_to_wire, requests)), self._place(len(requests) - 1, request))

    @contextlib.asynccontextmanager
    async def _place(self, others: int, request: Request) -> AsyncIterator[None]:
        """Hold a place for each other choice; the first has the door's. Raises CoppiceError, also when it is cut."""
        call_s = self._service.settings.limits.call_s
        try:
            async with asyncio.timeout(call_s) as call, contextlib.AsyncExitStack() as places:
                places.callback(self._running.discard, call)
                self._running.add(call)
                for _ in range(others):
                    await places.enter_async_context(self._access.client(request.headers.items(), counted=True))
                yield
        except TimeoutError:
            if not call.expired():
                raise
            late = DeadlineExceeded(f"a call ends after {call_s:g} s")
            raise (Unavailable("the server is stopping") if self._is_cut else late) from None

    async def tokenize(self, body: TokenizeBody) -> Json:
        """Return the tokens of a prompt or of messages, and their count."""
        self._check_model(body.model)
        with naming_fields_of(body):
            prompt = [message.plain for message in body.messages] if body.messages else body.prompt or ""
            ids = await self._service.encode(prompt, template_arguments=body.template_arguments)
        return {"tokens": ids, "count": len(ids), "max_model_len": self._service.target.max_len}

    async def detokenize(self, body: DetokenizeBody) -> Json:
        """Return the prompt that tokens are."""
        self._check_model(body.model)
        target, token_bytes = self._service.target, self._service.token_bytes
        if token_bytes.tokenizer is None:
            raise InvalidField("tokens", "this target has no tokenizer.json")
        check_count("tokens", len(body.tokens), 0, target.max_len)
        check_ids("tokens", body.tokens, target.vocab_size)
        return {"prompt": token_bytes.decode(body.tokens)}

    async def described(self) -> Json:
        """Describe the served model as gRPC's DescribeModel does, and its dtype."""
        return {"model": dataclasses.asdict(self._service.describe()), "dtype": self._service.target.dtype}

    async def trace_completion(self, body: CompletionBody, request: Request) -> Response:
        """Stream the events of one completion with the tree of each step."""
        return await self._trace(body, request)

    async def trace_chat(self, body: ChatBody, request: Request) -> Response:
        """Stream the events of one answer in a conversation with the tree of each step."""
        return await self._trace(body, request)

    async def _trace(self, body: CompletionBody | ChatBody, request: Request) -> Response:
        """Stream the events of one answer and the tree of each step, as gRPC's Generate does, each as a JSON value."""
        self._check_model(body.model)
        options: Any = {"want_trees": True, "want_log_probs": True, "top_log_probs": 0, "want_prompt_log_probs": False}
        with naming_fields_of(body):
            choice, *others = body.requests(self._service.settings.limits.max_new_tokens, self._chat)
            if others:
                raise InvalidField("n", "a trace is of one answer to one prompt")
            parts = _traced(self._events([dataclasses.replace(choice, **options)], request))
            return await streamed(request, parts, self._service.settings.limits.idle_s)

    def _check_model(self, name: str) -> None:
        """Raise NotFound unless a body names the served model, or none."""
        if name and name not in self._models:
            raise NotFound(f"the model {name!r} does not exist here; {', '.join(map(repr, self._models))} is served")


async def _traced(events: Events) -> AsyncGenerator[Json, None]:
    """Each event under the name that it has in GenerateResponse."""
    async with contextlib.aclosing(events):
        async for _, event in events:
            if isinstance(event, Chunk):
                event = dataclasses.replace(event, log_probs=tuple(map(finite, event.log_probs)))
            yield {type(event).__name__.lower(): dataclasses.asdict(event)}


PROBES = frozenset({"/health", "/ping", "/version"})
"""Paths that need no token and are answered while the server is full or stops: probes ask them."""
OPEN = PROBES | {"/ready", "/docs", "/openapi.json", *FILES}  # Paths that need no token
_LOCAL = re.compile(r"(localhost|[0-9.]+|\[[0-9a-f:.]+\])(:[0-9]+)?", re.IGNORECASE)  # hosts that no name points to
_BODY_S, _BODY_BYTES_S = 10, 64 << 10  # for a whole body, and one second more for each so many bytes of it
_MOST_STRINGS = 4 * MAX_PARTS  # names of fields among them
_GENERATES = ("/completions", "/responses")  # how the paths end that are answered with new tokens


class HttpDoor:
    """An ASGI application around another one: the same bounds and tokens as of gRPC."""

    def __init__(self, app: ASGIApp, service: GenerationServicer, access: Access, draining: asyncio.Event) -> None:
        """draining: nothing new begins."""
        self._app, self._service, self._access, self._draining = app, service, access, draining
        self._limits = service.settings.limits
        # Pages of other sites can reach this machine through a visitor's browser. They know no token.
        self._guarded = is_loopback(service.settings.server.host) and not service.settings.orchestrator.tokens
        self._calls = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False
        headers = [(key.decode("latin-1"), value.decode("latin-1")) for key, value in scope["headers"]]

        async def sent(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            if self._guarded:
                check_origin(dict(headers), self._service.settings.orchestrator.hosts)
            async with self._admitted(scope, headers):
                waiting = [await _read(receive, self._limits)] if scope["method"] == "POST" else []

                async def received() -> Message:
                    return waiting.pop() if waiting else await receive()

                await self._app(scope, received, sent)
        except Exception as error:  # those that were answered too: Starlette raises them again
            if not begun:
                await error_response(error)(scope, receive, send)

    @contextlib.asynccontextmanager
    async def _admitted(self, scope: Scope, headers: list[tuple[str, str]]) -> AsyncIterator[None]:
        """Hold a request's place inside the block. Raises CoppiceError."""
        path, posts = scope["path"], scope["method"] == "POST"
        if self._draining.is_set() and path not in PROBES:
            raise Unavailable("the server is stopping")
        if path in OPEN and not posts:
            yield
            return
        if self._calls >= most_calls(self._limits):
            raise Overloaded("too many requests at once")
        self._calls += 1
        # An answer has call_s, and its reader then has idle_s to read it.
        longest_s = self._limits.call_s + self._limits.idle_s
        generates, late = path.endswith(_GENERATES), DeadlineExceeded(f"a call ends after {longest_s:g} s")
        try:
            async with within(longest_s, late), self._access.client(headers, counted=posts):
                if generates:
                    self._service.check_seats()
                with tracing.serving(tracing.GENERATE, headers) if generates else contextlib.nullcontext():
                    yield
        finally:
            self._calls -= 1


def check_origin(headers: Mapping[str, str], hosts: Sequence[str]) -> None:
    """Raise HTTPException for what a page of another site asks, also one that had its name point to this machine.

    hosts: names by which this server is asked, besides addresses and localhost.
    """
    host, origin = headers.get("host", "localhost"), headers.get("origin")
    if not _LOCAL.fullmatch(host) and host.partition(":")[0] not in hosts:
        raise HTTPException(403, f"the host {host!r} is not served here; orchestrator.hosts names what is")
    if origin is not None and (site := origin.partition("//")[2]) != host and site.partition(":")[0] not in hosts:
        raise HTTPException(403, f"pages of {origin!r} are not served here; orchestrator.hosts names what is")


async def _read(receive: Receive, limits: Limits) -> Message:
    """A request's whole body in one message: not more bytes, parts and seconds than allowed."""
    body, more, end = bytearray(), True, asyncio.get_running_loop().time() + min(_BODY_S, limits.idle_s)
    while more:
        try:
            async with asyncio.timeout_at(end + len(body) / _BODY_BYTES_S):
                message = await receive()
        except TimeoutError:
            raise DeadlineExceeded(f"the body comes too slowly: {len(body)} bytes until now") from None
        if message["type"] == "http.disconnect":
            raise Cancelled("the client left")
        body += message.get("body", b"")
        if len(body) > REQUEST_BYTES:
            raise HTTPException(413, f"a body has {REQUEST_BYTES} bytes at most")
        more = message.get("more_body", False)
    check_parts(body)
    return {"type": "http.request", "body": bytes(body)}


def check_parts(body: bytes | bytearray) -> None:
    """Raise InvalidField when a JSON text has more parts than any request, before one of them becomes an object.

    What is counted stands outside of strings, whose quotation marks are counted first. What a parser would read
    otherwise than UTF-8 holds zero bytes, which no JSON in UTF-8 does.
    """
    if b"\0" in body:
        raise InvalidField("body", "is not JSON in UTF-8")
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if plain.count(b'"') <= 2 * _MOST_STRINGS:
        plain = b"".join(plain.split(b'"')[::2])
        lists, entries = plain.count(b"[") + plain.count(b"{"), plain.count(b",")
        if lists <= MAX_PARTS and entries <= MAX_CONTEXT + MAX_PARTS:
            return
    raise InvalidField("body", "has more lists, objects, strings or entries than any request")


_IDLE_S = 75  # a connection on which no whole head of a request comes is closed
_FILES_A_CALL = 8  # descriptors of the process for each call that is taken at once; connections have half of them
_BACKLOG = 2048  # connections that wait to be accepted
_CUT_S = 2  # for answers that are cut to send an error


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the process: they end gRPC and HTTP together."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Let many connections wait, but asyncio accept one at a time: it logs each failure of `backlog` in a row."""
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(_BACKLOG)


class _Connection(H11Protocol):
    """A connection that waits so long for the whole head of a request, and the longest when there are too many."""

    most: ClassVar[int]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a request; the connection that waits longest makes room for one too many."""
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.transport.abort)
        if len(self.connections) > self.most:
            waiting: list[Any] = [each for each in self.connections if getattr(each, "timeout_keep_alive_task", None)]
            min(waiting, key=lambda each: each.timeout_keep_alive_task.when()).transport.abort()

    def _unset_keepalive_if_required(self) -> None:
        if self.conn.our_state not in (h11.IDLE, h11.DONE):  # part of a head, or what is left of a body, is no request
            super()._unset_keepalive_if_required()


class HttpServer:
    """OpenAI's API on one port."""

    def __init__(
        self, settings: Settings, service: GenerationServicer, access: Access, draining: asyncio.Event
    ) -> None:
        """Raises InvalidField for bad certificates."""
        self._grace_s, self._draining = settings.server.grace_s, draining
        self._api = Api(service, access)
        app = make_app(self._api, is_page_served(settings))
        self._config = uvicorn.Config(
            HttpDoor(app, service, access, draining),
            host=settings.server.host,
            port=settings.orchestrator.http_port,
            http=_Connection,  # h11 bounds the bytes of headers
            backlog=1,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=math.ceil(min(_IDLE_S, settings.limits.idle_s)),
            timeout_graceful_shutdown=int(self._grace_s) + _CUT_S,
        )
        self._config.load()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        files = min(_FILES_A_CALL * most_calls(settings.limits), hard if hard > 0 else sys.maxsize)
        if 0 < soft < files:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
        _Connection.most = files // 2
        self._config.ssl = _following(settings.tls) if settings.tls.on else None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> str:
        """Listen; returns the address. Raises InvalidField when the port is taken."""
        host, port = self._config.host, self._config.port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listening = socket.create_server((host.strip("[]"), port), family=family)
        except OSError as error:
            raise InvalidField("orchestrator.http_port", f"cannot listen on {host}:{port}") from error
        address = f"{host}:{listening.getsockname()[1]}"
        server = _Server(self._config)
        self._tasks = [asyncio.create_task(work) for work in (server.serve([listening]), self._end_on_drain(server))]
        log.info("serving", role="http", address=address)
        return address

    async def stop(self) -> None:
        """Wait until the requests under way have ended, or were cut at the end of the grace."""
        serving, ending = self._tasks
        await serving
        ending.cancel()

    async def _end_on_drain(self, server: uvicorn.Server) -> None:
        """Take no more connections, and cut what still runs at the end of the grace."""
        await self._draining.wait()
        server.should_exit = True
        await asyncio.sleep(self._grace_s)
        self._api.cut()


def _following(tls: TlsSettings) -> ssl.SSLContext:
    """What a port is opened with: every new connection gets the certificates that the files hold by then.

    Raises InvalidField naming the setting whose file is missing or unusable.
    """
    used, current = Certificates.of_server(tls), _context(tls)
    first = current

    def follow(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        nonlocal used, current
        if (now := used.renewed(tls)) is not used:
            used, current = now, _context(tls)
        connection.context = current

    first.sni_callback = follow
    return first


def _context(tls: TlsSettings) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=tls.ca)
    context.load_cert_chain(tls.cert, tls.key)
    context.verify_mode = ssl.CERT_REQUIRED if tls.require else ssl.CERT_NONE
    return context
