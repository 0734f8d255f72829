"""The routes of OpenAI's API."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

import coppice
from coppice.errors import InvalidField, NotFound, Unavailable
from coppice.limits import NEW_TOKENS, check_count, check_ids

from ..service import GenerationServicer
from . import errors
from .answering import Answering, Events, Json, streamed, unless_gone
from .answers import HttpAnswer
from .bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, check_log_probs, naming_fields_of


def make_app(service: GenerationServicer, answering: Answering) -> FastAPI:
    """The application over a service."""
    app = FastAPI(
        title="Coppice",
        version=coppice.__version__,
        redoc_url=None,
        responses={"4XX": {"description": "what is wrong, in OpenAI's body of an error"}},
    )
    errors.handle(app)
    _add_state(app, service)
    _add_answers(app, service, answering)
    _add_tokens(app, service)
    return app


def _add_state(app: FastAPI, service: GenerationServicer) -> None:
    target = service.target
    model = {"id": target.name, "object": "model", "created": int(time.time()), "owned_by": "coppice"}
    model["max_model_len"] = target.max_len

    @app.get("/health")
    @app.get("/ping", include_in_schema=False)
    async def health() -> Response:
        """Answer while the process lives."""
        return Response()

    @app.get("/ready")
    async def ready() -> Response:
        """Answer while requests are taken and a verifier can be asked; otherwise the status is 503."""
        if not service.ready:
            raise Unavailable("no verifier is ready")
        return Response()

    @app.get("/version")
    async def version() -> Json:
        """Tell Coppice's version."""
        return {"version": coppice.__version__}

    if not service.settings.orchestrator.tokens:  # it names all clients

        @app.get("/metrics")
        async def metrics() -> Response:
            """Answer what the metrics port answers."""
            return PlainTextResponse(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/models")
    async def models() -> Json:
        """List the served model."""
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{name:path}")
    async def named(name: str) -> Json:
        """Describe the served model; max_model_len is its context."""
        check_model(service, name)
        return model


def _add_answers(app: FastAPI, service: GenerationServicer, answering: Answering) -> None:
    @app.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Complete a prompt, whole or as server-sent events."""
        return await answered(body, request)

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        """Answer a conversation, whole or as server-sent events."""
        return await answered(body, request)

    async def answered(body: CompletionBody | ChatBody, request: Request) -> Response:
        """Answer all choices of a body, whole or as a stream. An error before the first part is a status."""
        check_model(service, body.model)
        with naming_fields_of(body):
            choices = body.requests()
            check_log_probs(choices, service.target.max_len, NEW_TOKENS)
            answer = HttpAnswer(service, body, choices)
            events = answering.events(choices, request.headers)
            if body.stream:
                return await streamed(request, _parts(answer, events), service.settings.limits.idle_s)
            return await unless_gone(request, _whole(answer, events))


async def _parts(answer: HttpAnswer, events: Events) -> AsyncGenerator[Json, None]:
    async with contextlib.aclosing(events):
        async for index, event in events:
            for part in answer.parts(index, event):
                yield part
    for part in answer.last_parts():
        yield part


async def _whole(answer: HttpAnswer, events: Events) -> Response:
    async with contextlib.aclosing(events):
        async for index, event in events:
            answer.add(index, event)
    return JSONResponse(answer.whole())


def _add_tokens(app: FastAPI, service: GenerationServicer) -> None:
    @app.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> Json:
        """Tell the tokens of a prompt or of messages, and their count."""
        check_model(service, body.model)
        prompt = [message.plain for message in body.messages] if body.messages else body.prompt or ""
        with naming_fields_of(body):
            ids = await service.encode(prompt)
        return {"tokens": ids, "count": len(ids), "max_model_len": service.target.max_len}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> Json:
        """Tell the prompt that tokens are."""
        check_model(service, body.model)
        if service.token_bytes.tokenizer is None:
            raise InvalidField("tokens", "this target has no tokenizer.json")
        check_count("tokens", len(body.tokens), 0, service.target.max_len)
        check_ids("tokens", body.tokens, service.target.vocab_size)
        return {"prompt": service.token_bytes.decode(body.tokens)}


def check_model(service: GenerationServicer, name: str) -> None:
    """Raise NotFound unless a body names the served model, or none."""
    if name and name != service.target.name:
        raise NotFound(f"the model {name!r} does not exist here; {service.target.name!r} is served")
