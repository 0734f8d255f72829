"""Answers as server-sent events."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

from sse_starlette.sse import EventSourceResponse
from starlette.requests import Request
from starlette.responses import Response

from coppice.client.completion import StreamEvent

from . import errors
from .answering import Events, unless_gone

_PING_S = 15  # between two signs of life in a stream

Parts = Callable[[int, StreamEvent], Iterable[str]]
"""The data of what a choice's event is told as"""


async def streamed(
    request: Request, events: Events, idle_s: float, parts: Parts, last: Callable[[], Iterable[str]], end: Iterable[str]
) -> Response:
    """Stream events as `parts` tells them. An error before the first event is raised, a later one is told.

    last: the data behind all events, if there was no error. end: the data behind that, in any case.
    """
    first = await unless_gone(request, anext(events))
    return EventSourceResponse(_data(first, events, parts, last, end), sep="\n", ping=_PING_S, send_timeout=idle_s)


async def _data(
    first: tuple[int, StreamEvent], events: Events, parts: Parts, last: Callable[[], Iterable[str]], end: Iterable[str]
) -> AsyncIterator[dict[str, Any]]:
    async with contextlib.aclosing(events):
        try:
            one: tuple[int, StreamEvent] | None = first
            while one is not None:
                for part in parts(*one):
                    yield {"data": part}
                one = await anext(events, None)
            for part in last():
                yield {"data": part}
        except Exception as error:
            yield {"data": json.dumps(errors.told(error)[1])}
    for part in end:
        yield {"data": part}
