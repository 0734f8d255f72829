"""The page: its files, the stream of one answer's trace, and the model that it names."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse

from coppice.client.completion import StreamEvent
from coppice.config.settings import Settings
from coppice.errors import InvalidField
from coppice.rpc.access import is_loopback
from coppice.wire.generation import Chunk

from ..service import GenerationServicer
from .answering import Answering, Events, Json, streamed
from .answers import LEAST_LOG_PROB
from .app import check_model
from .bodies import ChatBody, CompletionBody, naming_fields_of

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


def is_served(settings: Settings) -> bool:
    """Whether `orchestrator.page` asks for the page where this process listens."""
    where = settings.orchestrator.page
    return where == "always" or (where == "loopback" and is_loopback(settings.server.host))


def add_page(app: FastAPI, service: GenerationServicer, answering: Answering) -> None:
    """Add the page's files, and what it asks of a service, to the application."""

    @app.post("/trace/completions")
    async def trace_completion(body: CompletionBody, request: Request) -> Response:
        """Stream the events of one completion with the tree of each step."""
        return await traced(body, request)

    @app.post("/trace/chat/completions")
    async def trace_chat(body: ChatBody, request: Request) -> Response:
        """Stream the events of one answer in a conversation with the tree of each step."""
        return await traced(body, request)

    async def traced(body: CompletionBody | ChatBody, request: Request) -> Response:
        """Stream the events of one answer and the tree of each step, as gRPC's Generate does, each as a JSON value."""
        check_model(service, body.model)
        with naming_fields_of(body):
            traced, *others = body.requests()
            if others:
                raise InvalidField("n", "a trace is of one answer to one prompt")
            traced = replace(traced, want_trees=True, want_log_probs=True, top_log_probs=0, want_prompt_log_probs=False)
            parts = _parts(answering.events([traced], request.headers))
            return await streamed(request, parts, service.settings.limits.idle_s)

    @app.get("/model")
    async def model() -> Json:
        """Describe the served model as gRPC's DescribeModel does, and its dtype."""
        return {"model": dataclasses.asdict(service.describe()), "dtype": service.target.dtype}

    for path, file in FILES.items():
        app.get(path, include_in_schema=False)(_serving(file))


def _serving(file: Path) -> Any:
    async def serve() -> Response:
        return FileResponse(file, headers=HEADERS)

    return serve


async def _parts(events: Events) -> AsyncGenerator[Json, None]:
    """Each event under the name that it has in GenerateResponse."""
    async with contextlib.aclosing(events):
        async for _, event in events:
            yield {type(event).__name__.lower(): _fields(event)}


def _fields(event: StreamEvent) -> Json:
    if isinstance(event, Chunk):
        event = replace(event, log_probs=tuple(max(LEAST_LOG_PROB, value) for value in event.log_probs))
    return dataclasses.asdict(event)
