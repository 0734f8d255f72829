"""OpenAI's answers: errors, and those made of the events of a request's choices, whole or streamed."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import itertools
import json
import math
import secrets
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Collection, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import structlog
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from sse_starlette.sse import EventSourceResponse
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from coppice.client.completion import Accumulator, Completion, StreamEvent
from coppice.errors import Cancelled, CoppiceError, InvalidField
from coppice.rpc.server import MAX_DETAILS
from coppice.wire.common import TopLogProbs
from coppice.wire.generation import Chunk, Finished, FinishReason, GenerationRequest, Origin, Started

from ..service import GenerationServicer
from ..text import TokenBytes
from .bodies import ChatBody, CompletionBody

log = structlog.get_logger()

T = TypeVar("T")
Json = dict[str, Any]
Events = AsyncGenerator[tuple[int, StreamEvent], None]  # of all choices of a request, each with its choice's index

_PING_S = 15  # between two signs of life in a stream


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of some work, which ends when the client leaves."""

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


async def streamed(request: Request, parts: AsyncGenerator[Json, None], idle_s: float) -> Response:
    """Stream parts, and [DONE] behind them. An error before the first part is raised, a later one is a part."""
    first = await unless_gone(request, anext(parts))
    return EventSourceResponse(_data(first, parts), sep="\n", ping=_PING_S, send_timeout=idle_s)


async def _data(first: Json, parts: AsyncGenerator[Json, None]) -> AsyncIterator[dict[str, str]]:
    async with contextlib.aclosing(parts):
        yield {"data": json.dumps(first)}
        try:
            async for part in parts:
                yield {"data": json.dumps(part)}
        except Exception as error:
            yield {"data": json.dumps(describe_error(error)[1])}
    yield {"data": "[DONE]"}


CODES = {
    "INVALID_ARGUMENT": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "DEADLINE_EXCEEDED": 408,
    "CANCELLED": 499,
    "RESOURCE_EXHAUSTED": 429,
    "UNAVAILABLE": 503,
    "FAILED_PRECONDITION": 503,
    "INTERNAL": 500,
}
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
}
"""by HTTP status; of all others the class counts"""


def envelope(code: int, message: str, field: str | None = None) -> Json:
    """OpenAI's body of an error. The message may quote what the caller made up."""
    kind = TYPES.get(code, "invalid_request_error" if code < 500 else "server_error")
    texts = {"message": message, "param": field}
    plain = {name: text and text[:MAX_DETAILS].encode(errors="replace").decode() for name, text in texts.items()}
    return {"error": {**plain, "type": kind, "code": code}}


def describe_error(error: Exception) -> tuple[int, Json]:
    """The HTTP status of an error and its body. Details of an unexpected one stay in the log under an opaque id."""
    if isinstance(error, CoppiceError):
        code = CODES[error.status]
        return code, envelope(code, str(error), error.field if isinstance(error, InvalidField) else None)
    if isinstance(error, HTTPException):
        message = "it is not served here; /docs lists what is" if error.status_code == 404 else str(error.detail)
        return error.status_code, envelope(error.status_code, message)
    if isinstance(error, RequestValidationError):
        deepest = max(error.errors(), key=lambda each: len(each["loc"]))
        parts = list(map(str, deepest["loc"][1:]))  # with the names of the types that pydantic tried
        field = ".".join(part for at, part in enumerate(parts) if not (at and (part == "str" or "[" in part)))
        reason = "is not served (docs/http.md#fields)" if deepest["type"] == "extra_forbidden" else deepest["msg"]
        return 400, envelope(400, f"{field or 'body'}: {reason}", field or None)
    opaque = secrets.token_hex(8)
    log.error("unexpected error", method="HTTP", error_id=opaque, exc_info=error)
    return 500, envelope(500, f"internal error {opaque}")


def error_response(error: Exception) -> JSONResponse:
    """The answer that an error is."""
    code, body = describe_error(error)
    headers = dict(getattr(error, "headers", None) or {})
    if isinstance(error, CoppiceError) and error.retry_after_s:
        headers["Retry-After"] = str(math.ceil(error.retry_after_s))
    if code == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(body, code, headers)


REASONS: dict[FinishReason, str] = {"eos": "stop", "stop": "stop", "length": "length", "cancelled": "stop"}
LEAST_LOG_PROB = -9999.0  # as OpenAI has it: JSON has no infinity
_BROKEN = "\ufffd"  # stands for bytes that are no character


def finite(log_prob: float) -> float:
    """A log-probability that JSON can hold."""
    return max(LEAST_LOG_PROB, log_prob)


class Scored(NamedTuple):
    """A token with its log-probability, None at the prompt's beginning, and the best ones in its place."""

    spelled: bytes  # what it adds to the text; b"" when it is left out
    offset: int  # in the text, characters
    log_prob: float | None
    top: list[tuple[bytes, float]]


class AnswerChoice:
    """One answer as its events come in."""

    def __init__(self, prompt: str | Sequence[int], tokens: TokenBytes, ends: Collection[int]) -> None:
        """prompt: what the answer begins with, "" for nothing. ends: ids that end a text and are no part of it."""
        self.folded = Accumulator()
        self.echo = prompt if isinstance(prompt, str) else tokens.decode(prompt)
        self.prompt: list[Scored] = []
        self.tokens: list[Scored] = []
        self._prompt, self._bytes, self._ends = prompt, tokens, ends
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def add(self, event: StreamEvent) -> list[Scored]:
        """Take in an event; returns its tokens with their log-probabilities, when these were asked for."""
        self.folded.add(event)
        if isinstance(event, Started) and event.prompt_ids:
            text = self._prompt if isinstance(self._prompt, str) else None
            spelled = self._bytes.of_prompt(event.prompt_ids, text)
            self.echo = b"".join(spelled).decode(errors="replace")
            self.prompt = self._scored(spelled, (None, *event.prompt_log_probs), (None, *event.prompt_top))
            self._utf8.reset()
            self._offset = len(self.echo)
            return self.prompt
        if isinstance(event, Chunk) and event.log_probs:
            spelled = [b"" if token in self._ends else self._bytes.of(token) for token in event.ids]
            scored = self._scored(spelled, event.log_probs, event.top)
            self.tokens += scored
            return scored
        return []

    def _scored(
        self, spelled: Sequence[bytes], log_probs: Sequence[float | None], top: Sequence[TopLogProbs | None]
    ) -> list[Scored]:
        rows = itertools.chain(top, itertools.repeat(None))
        return [
            Scored(added, self._place(added), None if value is None else finite(value), self._best(row))
            for added, value, row in zip(spelled, log_probs, rows, strict=False)
        ]

    def _place(self, spelled: bytes) -> int:
        """Where in the text the bytes behind those before stand; half a character stands where the whole one will."""
        begun, text = bool(self._utf8.getstate()[0]), self._utf8.decode(spelled)
        self._offset += len(text)
        return self._offset - len(text) + (begun and text.startswith(_BROKEN))

    def _best(self, row: TopLogProbs | None) -> list[tuple[bytes, float]]:
        if row is None:
            return []
        spelled = [self._bytes.of(token, True) for token in row.ids.tolist()]
        return list(zip(spelled, map(finite, row.log_probs.tolist()), strict=True))


class HttpAnswer:
    """An HTTP request's answer: its choices in one body, or as parts of a stream."""

    def __init__(
        self, service: GenerationServicer, body: CompletionBody | ChatBody, requests: Sequence[GenerationRequest]
    ) -> None:
        """requests: the body's, one a choice."""
        self._body, self._is_chat = body, isinstance(body, ChatBody)
        self._only_prompt = body.echoes and body.max_tokens == 0
        ends = () if body.ignore_eos else service.target.eos_ids
        prompts = [(request.ids or request.text or "") if body.echoes else "" for request in requests]
        self._choices = [AnswerChoice(prompt, service.token_bytes, ends) for prompt in prompts]
        number = ("chatcmpl-" if self._is_chat else "cmpl-") + uuid.uuid4().hex
        self._head: Json = {"id": number, "created": int(time.time()), "model": service.target.names[0]}

    async def whole(self, events: Events) -> Json:
        """The body of a request that is not streamed."""
        async with contextlib.aclosing(events):
            async for index, event in events:
                self._choices[index].add(event)
        answers, choices = self._completions(), []
        for index, (choice, answer) in enumerate(zip(self._choices, answers, strict=True)):
            text, tokens, reason = answer.text, choice.tokens, REASONS[answer.finish_reason]
            if self._only_prompt:
                text, tokens, reason = "", [], "length"
            text, log_probs = choice.echo + text, self._log_probs([*choice.prompt, *tokens])
            content = {"message": {"role": "assistant", "content": text}} if self._is_chat else {"text": text}
            choices.append({"index": index, **content, "logprobs": log_probs, "finish_reason": reason})
        kind = "chat.completion" if self._is_chat else "text_completion"
        usage, ours = self._usage(answers), self._coppice(answers)
        return {"object": kind, **self._head, "choices": choices, "usage": usage, **ours}

    async def parts(self, events: Events) -> AsyncGenerator[Json, None]:
        """The parts of a stream; usage, if it is asked for, is in one with no choice behind all others."""
        options = self._body.stream_options
        prompt, new = [0] * len(self._choices), [0] * len(self._choices)
        async with contextlib.aclosing(events):
            async for index, event in events:
                prompt[index] = getattr(event, "prompt_tokens", prompt[index])
                new[index] += len(event.ids) if isinstance(event, Chunk) and not self._only_prompt else 0
                usage = _count(prompt[index], new[index]) if options.continuous_usage_stats else None
                for part in self._parts_of(index, event):
                    yield part | ({"usage": usage} if options.include_usage else {})
        if options.include_usage:
            yield {**self._part(), "usage": self._usage(self._completions())}

    def _parts_of(self, index: int, event: StreamEvent) -> Iterator[Json]:
        """The parts that an event of a choice is."""
        choice = self._choices[index]
        scored = choice.add(event)
        if isinstance(event, Started) and self._is_chat:
            yield self._part(index, {"role": "assistant", "content": ""})
        elif isinstance(event, Finished):
            reason = "length" if self._only_prompt else REASONS[event.finish_reason]
            ours = self._coppice([choice.folded.completion()])
            yield self._part(index, {} if self._is_chat else "", finish_reason=reason) | ours
        elif isinstance(event, Started) or not self._only_prompt:
            text = choice.echo if isinstance(event, Started) else event.text
            if text or scored:
                yield self._part(index, {"content": text} if self._is_chat else text, logprobs=self._log_probs(scored))

    def _part(self, index: int | None = None, content: Json | str = "", **fields: Json | str | None) -> Json:
        """A part of a stream, of one choice or of none; of completions the content is text."""
        kind, name = ("chat.completion.chunk", "delta") if self._is_chat else ("text_completion", "text")
        choice: Json = {"index": index, name: content, "logprobs": None, "finish_reason": None, **fields}
        return {"object": kind, **self._head, "choices": [] if index is None else [choice]}

    def _completions(self) -> list[Completion]:
        return [choice.folded.completion() for choice in self._choices]

    def _log_probs(self, tokens: Sequence[Scored]) -> Json | None:
        """The log-probabilities of tokens, when they were asked for."""
        if not self._body.scored:
            return None
        if self._is_chat:
            content = [
                _entry(token.spelled, token.log_prob) | {"top_logprobs": [_entry(*best) for best in token.top]}
                for token in tokens
            ]
            return {"content": content, "refusal": None}
        tops = [{_printed(best): value for best, value in reversed(token.top)} for token in tokens]
        return {
            "tokens": [_printed(token.spelled) for token in tokens],
            "token_logprobs": [token.log_prob for token in tokens],
            "top_logprobs": [top or None for top in tops],
            "text_offset": [token.offset for token in tokens],
        }

    def _usage(self, answers: Sequence[Completion]) -> Json:
        """OpenAI's count of tokens, in which a prompt counts once for all of its choices."""
        prompts = answers[:: self._body.n]
        prompt = sum(answer.prompt_tokens for answer in prompts)
        new = 0 if self._only_prompt else sum(answer.new_tokens for answer in answers)
        return {
            **_count(prompt, new),
            "prompt_tokens_details": {"cached_tokens": sum(answer.cached_tokens for answer in prompts)},
            "completion_tokens_details": {
                "accepted_prediction_tokens": sum(answer.accepted_prediction_tokens for answer in answers),
                "rejected_prediction_tokens": sum(answer.rejected_prediction_tokens for answer in answers),
            },
        }

    def _coppice(self, answers: Sequence[Completion]) -> Json:
        """Coppice's own fields about the steps; of several choices a list."""
        names = ("tau", "policy", "heads", "accept_lengths", "seed")
        figures = [{name: getattr(answer, name) for name in names} for answer in answers]
        ours: Json = {"coppice": figures[0] if len(figures) == 1 else figures}
        if self._body.include_metrics:
            ours["metrics"] = {"speculative_decoding": speculative_decoding(answers)}
        return ours


def _count(prompt: int, new: int) -> Json:
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def _entry(spelled: bytes, log_prob: float | None) -> Json:
    return {"token": _printed(spelled), "logprob": log_prob, "bytes": list(spelled)}


def _printed(spelled: bytes) -> str:
    """A token as text. One that is no whole characters is spelled out, and so differs from others."""
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def speculative_decoding(answers: Sequence[Completion]) -> Json:
    """vLLM's metrics of a request: steps that verified drafts, and how many drafts they accepted."""
    steps = []
    for answer in answers:
        origins = iter(answer.origins[1:])
        for length, nodes in zip(answer.accept_lengths, answer.verified_nodes, strict=True):
            accepted_drafts = list(itertools.islice(origins, length)).count(Origin.DRAFT)
            steps += [(accepted_drafts, nodes)] if nodes else []
    accepted, drafted = sum(length for length, _ in steps), sum(nodes for _, nodes in steps)
    counts = Counter(length for length, _ in steps)
    return {
        "mean_acceptance_length": 1 + accepted / len(steps) if steps else 1.0,
        "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
        "acceptance_histogram": [counts[length] for length in range(max(counts, default=-1) + 1)],
        "num_spec_steps": len(steps),
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
    }
