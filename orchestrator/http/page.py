"""The page: its files, the stream of one answer's trace, and what it shows of the deployment."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from sse_starlette.sse import EventSourceResponse

from coppice.config.settings import Settings
from coppice.errors import InvalidField
from coppice.rpc.certificates import is_loopback
from coppice.rpc.channels import Dialer
from coppice.wire.generation import request_to_wire

from ..service import Event, GenerationServicer
from . import errors
from .app import PING_S, check_model, unless_gone
from .bodies import ChatBody, CompletionBody
from .deployment import Deployment

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


def add_page(app: FastAPI, servicer: GenerationServicer, dialer: Dialer) -> None:
    """Add the page's routes to the application over a servicer."""
    deployment = Deployment(servicer, dialer)
    for path, file in FILES.items():
        _add_file(app, path, file)

    @app.post("/trace/completions")
    async def trace_completion(body: CompletionBody, request: Request) -> Response:
        return await _trace(servicer, request, body)

    @app.post("/trace/chat/completions")
    async def trace_chat(body: ChatBody, request: Request) -> Response:
        return await _trace(servicer, request, body)

    @app.get("/deployment")
    async def look() -> Response:
        return Response(_json(await deployment.look()), media_type="application/json")


def _add_file(app: FastAPI, path: str, file: Path) -> None:
    content = file.read_bytes()

    @app.get(path, include_in_schema=False)
    async def _file() -> Response:
        return Response(content, media_type=_TYPES[file.suffix], headers=HEADERS)


async def _trace(servicer: GenerationServicer, request: Request, body: CompletionBody | ChatBody) -> Response:
    """Stream the events of one answer with the tree of each step, as gRPC's Generate does, each as a JSON value."""
    check_model(body.model, servicer.target.name)
    (_, asked), *others = body.requests(secrets.randbits(32))
    if others:
        raise InvalidField("n", "a trace is of one answer to one prompt")
    traced = replace(asked, want_trees=True, want_log_probs=True, top_log_probs=0, want_prompt_log_probs=False)
    events = servicer.answer(request_to_wire(traced), _event, len)
    first = await unless_gone(request, anext(events))
    return EventSourceResponse(
        _stream(first, events), sep="\n", ping=PING_S, send_timeout=servicer.settings.limits.idle_s
    )


async def _stream(first: str, events: AsyncGenerator[str, None]) -> AsyncIterator[dict[str, str]]:
    async with contextlib.aclosing(events):
        yield {"data": first}
        try:
            async for event in events:
                yield {"data": event}
        except Exception as error:
            yield {"data": json.dumps(errors.told(error)[1])}


def _event(event: Event) -> str:
    """An event under the name that it has in GenerateResponse."""
    return _json({type(event).__name__.lower(): event})


def _json(value: Any) -> str:
    return json.dumps(value, default=_plain)


def _plain(value: Any) -> Any:
    """A dataclass as its fields, bytes in hexadecimal."""
    if isinstance(value, bytes):
        return value.hex()
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
