"""The routes of OpenAI's API, and those of the page."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

import coppice
from coppice.config.settings import Settings
from coppice.errors import InvalidField, NotFound, Unavailable
from coppice.limits import NEW_TOKENS, check_count, check_ids
from coppice.rpc.access import is_loopback
from coppice.wire.generation import Chunk

from ..service import GenerationServicer
from . import errors
from .answering import Answering, Events, Json, streamed, unless_gone
from .answers import HttpAnswer, finite
from .bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, check_log_probs, naming_fields_of

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


def is_page_served(settings: Settings) -> bool:
    """Whether `orchestrator.page` asks for the page where this process listens."""
    where = settings.orchestrator.page
    return where == "always" or (where == "loopback" and is_loopback(settings.server.host))


def make_app(service: GenerationServicer, answering: Answering, page: bool = False) -> FastAPI:
    """The application over a service, with the page or without."""
    app = FastAPI(
        title="Coppice",
        version=coppice.__version__,
        redoc_url=None,
        responses={"4XX": {"description": "what is wrong, in OpenAI's body of an error"}},
    )
    errors.handle(app)
    api = Api(service, answering)
    for method, path, endpoint in [*api.routes(), *(api.page_routes() if page else ())]:
        app.add_api_route(path, endpoint, methods=[method])
    for path, file in FILES.items() if page else ():
        app.get(path, include_in_schema=False)(_serving(file))
    return app


def _serving(file: Path) -> Callable[..., Any]:
    async def serve() -> Response:
        return FileResponse(file, headers=HEADERS)

    return serve


class Api:
    """What each path answers. The first line of a docstring is the path's description."""

    def __init__(self, service: GenerationServicer, answering: Answering) -> None:
        self._service, self._answering = service, answering
        target = service.target
        self._model = {"id": target.name, "object": "model", "created": int(time.time()), "owned_by": "coppice"}
        self._model["max_model_len"] = target.max_len

    def routes(self) -> Iterator[tuple[str, str, Callable[..., Any]]]:
        """Method, path and endpoint of OpenAI's API and of what probes and engines have beside it."""
        yield "GET", "/health", self.health
        yield "GET", "/ping", self.health
        yield "GET", "/ready", self.ready
        yield "GET", "/version", self.version
        if not self._service.settings.orchestrator.tokens:  # metrics name all clients
            yield "GET", "/metrics", self.metrics
        yield "GET", "/v1/models", self.models
        yield "GET", "/v1/models/{name:path}", self.model
        yield "POST", "/v1/completions", self.completions
        yield "POST", "/v1/chat/completions", self.chat_completions
        yield "POST", "/tokenize", self.tokenize
        yield "POST", "/detokenize", self.detokenize

    def page_routes(self) -> Iterator[tuple[str, str, Callable[..., Any]]]:
        """The same of what the page asks beside that."""
        yield "GET", "/model", self.described
        yield "POST", "/trace/completions", self.trace_completion
        yield "POST", "/trace/chat/completions", self.trace_chat

    async def health(self) -> Response:
        """Answer while the process lives."""
        return Response()

    async def ready(self) -> Response:
        """Answer while requests are taken and a verifier can be asked; otherwise the status is 503."""
        if not self._service.ready:
            raise Unavailable("no verifier is ready")
        return Response()

    async def version(self) -> Json:
        """Tell Coppice's version."""
        return {"version": coppice.__version__}

    async def metrics(self) -> Response:
        """Answer what the metrics port answers."""
        return PlainTextResponse(generate_latest(self._service.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def models(self) -> Json:
        """List the served model."""
        return {"object": "list", "data": [self._model]}

    async def model(self, name: str) -> Json:
        """Describe the served model; max_model_len is its context."""
        self._check_model(name)
        return self._model

    async def completions(self, body: CompletionBody, request: Request) -> Response:
        """Complete a prompt, whole or as server-sent events."""
        return await self._answer(body, request)

    async def chat_completions(self, body: ChatBody, request: Request) -> Response:
        """Answer a conversation, whole or as server-sent events."""
        return await self._answer(body, request)

    async def _answer(self, body: CompletionBody | ChatBody, request: Request) -> Response:
        """Answer all choices of a body. An error before the first part is a status."""
        self._check_model(body.model)
        with naming_fields_of(body):
            choices = body.requests()
            check_log_probs(choices, self._service.target.max_len, NEW_TOKENS)
            answer = HttpAnswer(self._service, body, choices)
            events = self._answering.events(choices, request.headers)
            if body.stream:
                return await streamed(request, answer.parts(events), self._service.settings.limits.idle_s)
            return JSONResponse(await unless_gone(request, answer.whole(events)))

    async def tokenize(self, body: TokenizeBody) -> Json:
        """Tell the tokens of a prompt or of messages, and their count."""
        self._check_model(body.model)
        prompt = [message.plain for message in body.messages] if body.messages else body.prompt or ""
        with naming_fields_of(body):
            ids = await self._service.encode(prompt)
        return {"tokens": ids, "count": len(ids), "max_model_len": self._service.target.max_len}

    async def detokenize(self, body: DetokenizeBody) -> Json:
        """Tell the prompt that tokens are."""
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
            choice, *others = body.requests()
            if others:
                raise InvalidField("n", "a trace is of one answer to one prompt")
            events = self._answering.events([dataclasses.replace(choice, **options)], request.headers)
            return await streamed(request, _events(events), self._service.settings.limits.idle_s)

    def _check_model(self, name: str) -> None:
        """Raise NotFound unless a body names the served model, or none."""
        served = self._service.target.name
        if name and name != served:
            raise NotFound(f"the model {name!r} does not exist here; {served!r} is served")


async def _events(events: Events) -> AsyncGenerator[Json, None]:
    """Each event under the name that it has in GenerateResponse."""
    async with contextlib.aclosing(events):
        async for _, event in events:
            if isinstance(event, Chunk):
                event = dataclasses.replace(event, log_probs=tuple(map(finite, event.log_probs)))
            yield {type(event).__name__.lower(): dataclasses.asdict(event)}
