"""The page: its files, the stream of one answer's trace, and the model that it names."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response

from coppice.client.completion import StreamEvent
from coppice.config.settings import Settings
from coppice.errors import InvalidField
from coppice.rpc.certificates import is_loopback
from coppice.wire.generation import Chunk

from .answering import Answering
from .answers import LEAST_LOG_PROB
from .app import check_model
from .bodies import ChatBody, CompletionBody, naming_fields_of
from .served import Served
from .sse import streamed

_FOLDER = Path(__file__).parent / "page"
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
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
    wanted = settings.orchestrator.page
    return wanted == "always" or (wanted == "loopback" and is_loopback(settings.server.host))


def add_page(app: FastAPI, served: Served, answering: Answering) -> None:
    """Add what the page asks of a service to the application."""

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
        check_model(served, body.model)
        with naming_fields_of(body):
            asked, *others = body.requests()
            if others:
                raise InvalidField("n", "a trace is of one answer to one prompt")
            asked = replace(asked, want_trees=True, want_log_probs=True, top_log_probs=0, want_prompt_log_probs=False)
            events = answering.events([asked], request.headers)
            idle_s = served.settings.limits.idle_s
            return await streamed(request, events, idle_s, lambda _, event: (_event(event),), tuple, ())

    @app.get("/model")
    async def model() -> Response:
        """Describe the served model as gRPC's DescribeModel does, and its dtype."""
        described = {"model": served.describe(), "dtype": served.target.dtype}
        return Response(_json(described), media_type="application/json")


def add_files(app: FastAPI, paths: Iterable[str]) -> None:
    """Add those of the page's FILES at these paths to the application."""
    for path in paths:
        _add_file(app, path, FILES[path])


def _add_file(app: FastAPI, path: str, file: Path) -> None:
    content = file.read_bytes()

    @app.get(path, include_in_schema=False)
    async def _file() -> Response:
        return Response(content, media_type=_TYPES[file.suffix], headers=HEADERS)


def _event(event: StreamEvent) -> str:
    """An event under the name that it has in GenerateResponse."""
    if isinstance(event, Chunk):
        event = replace(event, log_probs=tuple(max(LEAST_LOG_PROB, value) for value in event.log_probs))
    return _json({type(event).__name__.lower(): event})


def _json(value: Any) -> str:
    return json.dumps(value, default=_plain)


def _plain(value: Any) -> Any:
    """A dataclass as its fields, bytes in hexadecimal."""
    if isinstance(value, bytes):
        return value.hex()
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
