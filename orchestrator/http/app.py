"""The routes of OpenAI's API."""

from __future__ import annotations

import contextlib
import json
import time

from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

import coppice
from coppice.errors import InvalidField, NotFound, Unavailable
from coppice.limits import check_count, check_ids

from . import errors
from .answering import Answering, Events, unless_gone
from .answers import Answer, Json
from .bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, check_log_probs, naming_fields_of
from .served import Served
from .sse import streamed


def make_app(served: Served, answering: Answering) -> FastAPI:
    """The application over a service."""
    app = FastAPI(
        title="Coppice",
        version=coppice.__version__,
        docs_url=None,  # FastAPI's own loads scripts from elsewhere; docs.py has ours
        redoc_url=None,
        responses={"4XX": {"description": "what is wrong, in OpenAI's body of an error"}},
    )
    errors.handle(app)
    _add_state(app, served)
    _add_models(app, served)
    _add_answers(app, served, answering)
    _add_tokens(app, served)
    return app


def _add_state(app: FastAPI, served: Served) -> None:
    @app.get("/health")
    @app.get("/ping", include_in_schema=False)
    async def health() -> Response:
        """Answer while the process lives."""
        return Response()

    @app.get("/ready")
    async def ready() -> Response:
        """Answer while requests are taken and a verifier can be asked; otherwise the status is 503."""
        if not served.ready:
            raise Unavailable("no verifier is ready")
        return Response()

    @app.get("/version")
    async def version() -> Json:
        """Tell Coppice's version."""
        return {"version": coppice.__version__}

    if not served.settings.orchestrator.tokens:  # it names all clients

        @app.get("/metrics")
        async def metrics() -> Response:
            """Answer what the metrics port answers."""
            return PlainTextResponse(generate_latest(served.metrics.registry), media_type=CONTENT_TYPE_LATEST)


def _add_models(app: FastAPI, served: Served) -> None:
    target = served.target
    model = {"id": target.name, "object": "model", "created": int(time.time()), "owned_by": "coppice"}
    model["max_model_len"] = target.max_len

    @app.get("/v1/models")
    async def models() -> Json:
        """List the served model."""
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{name:path}")
    async def named(name: str) -> Json:
        """Describe the served model; max_model_len is its context."""
        check_model(served, name)
        return model


def _add_answers(app: FastAPI, served: Served, answering: Answering) -> None:
    @app.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Complete a prompt, whole or as server-sent events."""
        return await answered(body, request)

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        """Answer a conversation, whole or as server-sent events."""
        return await answered(body, request)

    async def answered(body: CompletionBody | ChatBody, request: Request) -> Response:
        """Answer all choices of a body, whole or as a stream. An error before the first event is a status."""
        check_model(served, body.model)
        with naming_fields_of(body):
            asked = body.requests()
            check_log_probs(asked, served.target.max_len, served.settings.orchestrator.max_new_tokens)
            answer = Answer(served, body, asked)
            events = answering.events(asked, request.headers)
            if not body.stream:
                return await unless_gone(request, _whole(answer, events))
            idle_s = served.settings.limits.idle_s
            return await streamed(
                request,
                events,
                idle_s,
                lambda index, event: map(json.dumps, answer.parts(index, event)),
                lambda: map(json.dumps, answer.last_parts()),
                ("[DONE]",),
            )


def _add_tokens(app: FastAPI, served: Served) -> None:
    @app.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> Json:
        """Tell the tokens of a prompt or of messages, and their count."""
        check_model(served, body.model)
        prompt = [message.plain for message in body.messages] if body.messages else body.prompt or ""
        with naming_fields_of(body):
            ids = await served.encode(prompt)
        return {"tokens": ids, "count": len(ids), "max_model_len": served.target.max_len}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> Json:
        """Tell the prompt that tokens are."""
        check_model(served, body.model)
        if served.token_bytes.tokenizer is None:
            raise InvalidField("tokens", "this target has no tokenizer.json")
        check_count("tokens", len(body.tokens), 0, served.target.max_len)
        check_ids("tokens", body.tokens, served.target.vocab_size)
        return {"prompt": served.token_bytes.decode(body.tokens)}


def check_model(served: Served, name: str) -> None:
    """Raise NotFound unless a body names the served model, or none."""
    if name and name != served.target.name:
        raise NotFound(f"the model {name!r} does not exist here; {served.target.name!r} is served")


async def _whole(answer: Answer, events: Events) -> Response:
    async with contextlib.aclosing(events):
        async for index, event in events:
            answer.add(index, event)
    return Response(json.dumps(answer.whole()), media_type="application/json")
