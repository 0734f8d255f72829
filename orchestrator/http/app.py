"""The routes of OpenAI's API."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from sse_starlette.sse import EventSourceResponse

import coppice
from coppice.errors import Cancelled, InvalidField, NotFound, Unavailable
from coppice.messages.generation import GenerationRequest
from coppice.wire.generation import request_to_wire

from ..service import Event, GenerationServicer
from ..tokenizer import TextCodec
from . import errors
from .answers import Answer
from .bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

T = TypeVar("T")
Events = AsyncGenerator[tuple[int, Event], None]
"""of all choices of a request, each with its choice's index"""

_SEED_BITS = 32
PING_S = 15
"""between two signs of life in a stream"""
_EVENT_BYTES, _TOKEN_BYTES = 256, 32  # of an event that waits to be read, about


def make_app(servicer: GenerationServicer) -> FastAPI:
    """The application over a servicer."""
    app = FastAPI(title="Coppice", version=coppice.__version__, redoc_url=None)
    errors.handle(app)
    target, began = servicer.target, int(time.time())
    served = {"id": target.name, "object": "model", "created": began, "owned_by": "coppice"}
    served["max_model_len"] = target.max_len

    @app.get("/health")
    @app.get("/ping", include_in_schema=False)
    async def health() -> Response:
        return Response()

    @app.get("/ready")
    async def ready() -> Response:
        if not any(replica.fit for replica in servicer.verifiers.replicas):
            raise Unavailable("no verifier is ready")
        return Response()

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": coppice.__version__}

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(generate_latest(servicer.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [served]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        check_model(name, target.name)
        return served

    @app.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        return await _answer(servicer, request, body)

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        return await _answer(servicer, request, body)

    @app.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        check_model(body.model, target.name)
        if servicer.encoder is None:
            raise InvalidField("prompt", "this target has no tokenizer.json")
        prompt = [message.plain for message in body.messages] if body.messages else body.prompt
        ids = await servicer.encoder.encode(prompt)
        return {"tokens": ids, "count": len(ids), "max_model_len": target.max_len}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> dict[str, str]:
        check_model(body.model, target.name)
        if servicer.codec is None:
            raise InvalidField("tokens", "this target has no tokenizer.json")
        if body.tokens and max(body.tokens) >= target.vocab_size:
            raise InvalidField("tokens", f"{max(body.tokens)} is not below {target.vocab_size}")
        return {"prompt": servicer.codec.tokenizer.decode(body.tokens, skip_special_tokens=False)}

    return app


def check_model(wanted: str, served: str) -> None:
    """Raise NotFound unless a body names the served model, or none."""
    if wanted and wanted != served:
        raise NotFound(f"the model {wanted!r} does not exist here; {served!r} is served")


async def _answer(servicer: GenerationServicer, request: Request, body: CompletionBody | ChatBody) -> Response:
    """Answer all choices of a body, whole or as a stream. An error before the first event is a status."""
    check_model(body.model, servicer.target.name)
    asked = body.requests(secrets.randbits(_SEED_BITS))
    answer = Answer(servicer.target.name, body, [seed for seed, _ in asked], partial(_text_of, servicer.codec))
    events = _events(servicer, [one for _, one in asked])
    if not body.stream:
        return await unless_gone(request, _whole(answer, events))
    first = await unless_gone(request, anext(events))
    parts = _stream(answer, first, events)
    return EventSourceResponse(parts, sep="\n", ping=PING_S, send_timeout=servicer.settings.limits.idle_s)


async def _whole(answer: Answer, events: Events) -> Response:
    async with contextlib.aclosing(events):
        async for index, event in events:
            answer.add(index, event)
    return Response(json.dumps(answer.whole()), media_type="application/json")


async def _stream(answer: Answer, first: tuple[int, Event], events: Events) -> AsyncIterator[dict[str, str]]:
    """The parts of a stream, as data of server-sent events. An error is the last part but `[DONE]`."""
    async with contextlib.aclosing(events):
        try:
            one: tuple[int, Event] | None = first
            while one is not None:
                for part in answer.parts(*one):
                    yield {"data": json.dumps(part)}
                one = await anext(events, None)
            for part in answer.last_parts():
                yield {"data": json.dumps(part)}
        except Exception as error:
            yield {"data": json.dumps(errors.told(error)[1])}
    yield {"data": "[DONE]"}


def _text_of(codec: TextCodec | None, token: int) -> str:
    return codec.tokenizer.decode([token], skip_special_tokens=False) if codec else str(token)


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What comes of some work. It ends when the client leaves."""

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.create_task(left())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Cancelled("the client left")
        return await working
    finally:
        leaving.cancel()
        working.cancel()
        await asyncio.wait((working, leaving))


async def _events(servicer: GenerationServicer, requests: Sequence[GenerationRequest]) -> Events:
    """The events of several requests as they come; when one fails, all end. Raises CoppiceError."""
    queue: asyncio.Queue[tuple[int, Event] | None] = asyncio.Queue(maxsize=1)

    async def one(index: int, request: GenerationRequest) -> None:
        answers = servicer.answer(request_to_wire(request), lambda event: event, _size)
        async with contextlib.aclosing(answers):
            async for event in answers:
                await queue.put((index, event))

    async def every() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for index, request in enumerate(requests):
                    group.create_task(one(index, request))
        finally:
            await queue.put(None)

    running = asyncio.create_task(every())
    try:
        while (event := await queue.get()) is not None:
            yield event
        await running
    except ExceptionGroup as several:
        raise several.exceptions[0] from None
    finally:
        running.cancel()


def _size(event: Event) -> int:
    """About as many bytes as an event's part of the answer has."""
    return _EVENT_BYTES + _TOKEN_BYTES * len(getattr(event, "ids", ()))
