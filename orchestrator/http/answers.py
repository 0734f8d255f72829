"""OpenAI's answers: errors, and those made of the events of a request's choices, whole or streamed."""

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
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import structlog
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from sse_starlette.sse import EventSourceResponse
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from coppice.client.completion import Accumulator, Completion, StreamEvent
from coppice.config.token_bytes import TokenBytes
from coppice.errors import Cancelled, CoppiceError, InvalidField
from coppice.limits import MAX_TOP_LOG_PROBS
from coppice.rpc.server import MAX_DETAILS
from coppice.wire.common import TopLogProbs
from coppice.wire.generation import Chunk, Finished, FinishReason, GenerationRequest, Origin, Started

from ..service import GenerationServicer
from .bodies import ChatBody, CompletionBody
from .tools import AnswerParser, Call, ChatFormat, Json, Part

log = structlog.get_logger()

T = TypeVar("T")
Events = AsyncGenerator[tuple[int, StreamEvent], None]  # of all choices of a request, each with its choice's index

_PING_S = 15  # between two signs of life in a stream
_TAIL_IDS = 32  # of a prompt, in which a template may open what is thought
_CALL_ID_CHARS = 9  # templates of Mistral take no others


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


async def streamed(
    request: Request, parts: AsyncGenerator[Json, None], idle_s: float, headers: Mapping[str, str] = {}
) -> Response:
    """Stream parts, and [DONE] behind them. An error before the first part is raised, a later one is a part."""
    first = await unless_gone(request, anext(parts))
    return EventSourceResponse(_data(first, parts), headers=headers, sep="\n", ping=_PING_S, send_timeout=idle_s)


async def _data(first: Json, parts: AsyncGenerator[Json, None]) -> AsyncIterator[dict[str, str]]:
    async with contextlib.aclosing(parts):
        yield _event(first)
        try:
            async for part in parts:
                yield _event(part)
        except Exception as error:
            yield {"data": json.dumps(describe_error(error)[1])}
    yield {"data": "[DONE]"}


def _event(part: Json) -> dict[str, str]:
    """A part as a server-sent event, which is named where the part has a type."""
    name = {"event": part["type"]} if "type" in part else {}
    return {**name, "data": json.dumps(part)}


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


class ScoredToken(NamedTuple):
    """A token with its log-probability, None at the prompt's beginning, and the best ones in its place."""

    spelling: bytes  # what it adds to the text; b"" when it is left out
    offset: int  # in the text, characters
    log_prob: float | None
    top: list[tuple[bytes, float]]


class AnswerChoice:
    """One answer as its events come in."""

    def __init__(
        self,
        prompt: str | Sequence[int],
        tokens: TokenBytes,
        request: GenerationRequest,
        ends: Collection[int] = (),
        most_top: int = MAX_TOP_LOG_PROBS,
        parser: AnswerParser | None = None,
    ) -> None:
        """prompt: what the answer begins with, "" for nothing. ends: ids that end a text and are no part of it.

        most_top: alternatives that are listed for a token. parser: what splits the text; None: all of it is content.
        """
        self.accumulator = Accumulator()
        self.started = Started(0, "", (), 0)
        self.echo = prompt if isinstance(prompt, str) else tokens.decode(prompt)
        self.prompt: list[ScoredToken] = []
        self.tokens: list[ScoredToken] = []
        self.calls: list[Json] = []
        self._texts = {"content": "", "reasoning_content": ""}
        self._prompt, self._bytes, self._ends, self._parser = prompt, tokens, ends, parser
        self._special, self._most_top = request.keep_special_tokens, most_top
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def add(self, event: StreamEvent) -> list[ScoredToken]:
        """Take in an event; returns its tokens with their log-probabilities, when these were asked for."""
        self.accumulator.add(event)
        if isinstance(event, Started):
            self.started = event
            if self._parser:
                self._parser.begin(self._bytes.decode(event.prompt_ids[-_TAIL_IDS:]))
            if not event.prompt_ids or not self._prompt:
                return []
            text = self._prompt if isinstance(self._prompt, str) else None
            spellings = self._bytes.of_prompt(event.prompt_ids, text)
            self.echo = b"".join(spellings).decode(errors="replace")
            self.prompt = self._scored(spellings, (None, *event.prompt_log_probs), (None, *event.prompt_top))
            self._utf8.reset()
            self._offset = len(self.echo)
            return self.prompt
        if isinstance(event, Chunk) and event.log_probs:
            spellings = [b"" if token in self._ends else self._bytes.of(token, self._special) for token in event.ids]
            scored = self._scored(spellings, event.log_probs, event.top)
            self.tokens += scored
            return scored
        return []

    def deltas(self, event: StreamEvent) -> list[Json]:
        """What an event adds to the message of a chat, in the form of OpenAI's deltas."""
        text = event.text if isinstance(event, Chunk) else ""
        if self._parser is None:
            parts: Sequence[Part | Call] = [Part("content", text)] if text else []
        else:
            parts = self._parser.push(text, ended=isinstance(event, Finished))
        deltas: list[Json] = []
        for part in parts:
            if isinstance(part, Part):
                self._texts[part.kind] += part.text
                deltas.append({part.kind: part.text})
                continue
            index, number = len(self.calls), uuid.uuid4().hex[:_CALL_ID_CHARS]
            call = {"id": number, "type": "function", "function": {"name": part.name, "arguments": part.arguments}}
            head = {"index": index, **call, "function": {"name": part.name, "arguments": ""}}
            self.calls.append(call)
            arguments = {"index": index, "function": {"arguments": part.arguments}}
            deltas += [{"tool_calls": [head]}, {"tool_calls": [arguments]}]
        return deltas

    @property
    def message(self) -> Json:
        """The message of a chat that the deltas until now join to."""
        content, reasoning = self._texts["content"], self._texts["reasoning_content"]
        message: Json = {"role": "assistant", "content": content if content or not self.calls else None}
        message |= {"reasoning_content": reasoning} if reasoning else {}
        return message | ({"tool_calls": self.calls} if self.calls else {})

    def prompt_log_probs(self, most: int) -> list[Json | None]:
        """vLLM's prompt_logprobs: of each id of the prompt, and of the `most` likeliest in its place."""
        started, rows = self.started, list[Json | None]([None])
        tops = itertools.chain(started.prompt_top, itertools.repeat(None))
        for token, log_prob, top in zip(started.prompt_ids[1:], started.prompt_log_probs, tops, strict=False):
            best = dict(zip(top.ids.tolist(), top.log_probs.tolist(), strict=True)) if top and most else {}
            best = dict(itertools.islice(best.items(), most))
            ranks = {likely: rank for rank, likely in enumerate(best, 1)}
            rows.append(
                {
                    str(each): {
                        "logprob": finite(value),
                        "rank": ranks.get(each),
                        "decoded_token": _printed(self._bytes.of(each, True)),
                    }
                    for each, value in ({token: log_prob} | best).items()
                }
            )
        return rows

    def _scored(
        self, spellings: Sequence[bytes], log_probs: Sequence[float | None], top: Sequence[TopLogProbs | None]
    ) -> list[ScoredToken]:
        rows = itertools.chain(top, itertools.repeat(None))
        return [
            ScoredToken(spelling, self._place(spelling), None if value is None else finite(value), self._best(row))
            for spelling, value, row in zip(spellings, log_probs, rows, strict=False)
        ]

    def _place(self, spelling: bytes) -> int:
        """Where in the text the bytes behind those before stand; half a character stands where the whole one will."""
        is_within, text = bool(self._utf8.getstate()[0]), self._utf8.decode(spelling)
        self._offset += len(text)
        return self._offset - len(text) + (is_within and text.startswith(_BROKEN))

    def _best(self, row: TopLogProbs | None) -> list[tuple[bytes, float]]:
        if row is None:
            return []
        spellings = [self._bytes.of(token, True) for token in row.ids.tolist()]
        return list(zip(spellings, map(finite, row.log_probs.tolist()), strict=True))[: self._most_top]


class HttpAnswer:
    """An HTTP request's answer: its choices in one body, or as parts of a stream."""

    def __init__(
        self,
        service: GenerationServicer,
        body: CompletionBody | ChatBody,
        requests: Sequence[GenerationRequest],
        chat: ChatFormat | None = None,
    ) -> None:
        """requests: the body's, one a choice. chat: what the target's templates have it write."""
        self._body, self._is_chat = body, isinstance(body, ChatBody)
        self._only_prompt = body.echoes and body.limit == 0
        top = body.top_logprobs if isinstance(body, ChatBody) else body.logprobs or 0
        ends = {*body.stop_token_ids, *(() if body.ignore_eos else service.target.eos_ids)}
        self._choices = [
            AnswerChoice(
                (request.ids or request.text or "") if body.echoes else "",
                service.token_bytes,
                request,
                () if request.include_stop else ends,
                top,
                body.parser(chat, request) if isinstance(body, ChatBody) else None,
            )
            for request in requests
        ]
        number = ("chatcmpl-" if self._is_chat else "cmpl-") + uuid.uuid4().hex
        self._head: Json = {"id": number, "created": int(time.time()), "model": service.target.names[0]}

    async def whole(self, events: Events) -> Json:
        """The body of a request that is not streamed."""
        async with contextlib.aclosing(events):
            async for index, event in events:
                choice = self._choices[index]
                choice.add(event)
                choice.deltas(event)
        answers = self._completions()
        choices = [
            {"index": index, **self._whole_choice(choice, answer)}
            for index, (choice, answer) in enumerate(zip(self._choices, answers, strict=True))
        ]
        kind = "chat.completion" if self._is_chat else "text_completion"
        usage, coppice = self._usage(answers), self._coppice(answers)
        prompt = self._prompt_fields(self._choices[0]) if self._is_chat else {}
        return {"object": kind, **self._head, "choices": choices, "usage": usage, **prompt, **coppice}

    def _whole_choice(self, choice: AnswerChoice, answer: Completion) -> Json:
        text, tokens, reason = answer.text, choice.tokens, self._reason(choice, answer.finish_reason)
        if self._only_prompt:
            text, tokens = "", []
        content: Json = {"message": choice.message} if self._is_chat else {"text": choice.echo + text}
        content |= {"token_ids": list(answer.ids)} if self._body.return_token_ids else {}
        content |= {} if self._is_chat else self._prompt_fields(choice)
        return {**content, "logprobs": self._log_probs([*choice.prompt, *tokens]), "finish_reason": reason}

    def _reason(self, choice: AnswerChoice, reason: FinishReason) -> str:
        """Why a choice ended, in OpenAI's words."""
        if self._only_prompt:
            return "length"
        return "tool_calls" if choice.calls and reason in ("eos", "stop") else REASONS[reason]

    def _prompt_fields(self, choice: AnswerChoice) -> Json:
        """vLLM's fields about the prompt, as far as they are asked for."""
        fields: Json = {"prompt_token_ids": list(choice.started.prompt_ids)} if self._body.return_token_ids else {}
        most = self._body.prompt_logprobs
        return fields | ({} if most is None else {"prompt_logprobs": choice.prompt_log_probs(most)})

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
        if self._only_prompt and isinstance(event, Chunk):
            return
        fields: Json = {"logprobs": self._log_probs(scored) if scored else None}
        if self._body.return_token_ids and isinstance(event, Chunk):
            fields["token_ids"] = list(event.ids)
        prompt_fields = self._prompt_fields(choice) if isinstance(event, Started) else {}
        contents: Sequence[Json | str]
        if not self._is_chat:
            fields |= prompt_fields
            contents = [choice.echo if isinstance(event, Started) else getattr(event, "text", "")]
        elif isinstance(event, Started):
            contents = [{"role": "assistant", "content": ""}]
        else:
            contents = choice.deltas(event)
        if not any(contents):
            contents = [{"content": ""} if self._is_chat else ""] if scored or len(fields) > 1 else []
        for content in contents:
            part = self._part(index, content, **fields)
            yield part | prompt_fields if self._is_chat else part
            fields = {}
        if isinstance(event, Finished):
            answer = choice.accumulator.completion()
            reason = self._reason(choice, answer.finish_reason)
            yield self._part(index, {} if self._is_chat else "", finish_reason=reason) | self._coppice([answer])

    def _part(self, index: int | None = None, content: Json | str = "", **fields: Json | str | None) -> Json:
        """A part of a stream, of one choice or of none; of completions the content is text."""
        kind, name = ("chat.completion.chunk", "delta") if self._is_chat else ("text_completion", "text")
        choice: Json = {"index": index, name: content, "logprobs": None, "finish_reason": None, **fields}
        return {"object": kind, **self._head, "choices": [] if index is None else [choice]}

    def _completions(self) -> list[Completion]:
        return [choice.accumulator.completion() for choice in self._choices]

    def _log_probs(self, tokens: Sequence[ScoredToken]) -> Json | None:
        """The log-probabilities of tokens, when they were asked for."""
        if not self._body.wants_log_probs:
            return None
        if self._is_chat:
            content = [
                _entry(token.spelling, token.log_prob) | {"top_logprobs": [_entry(*best) for best in token.top]}
                for token in tokens
            ]
            return {"content": content, "refusal": None}
        tops = [{_printed(best): value for best, value in reversed(token.top)} for token in tokens]
        return {
            "tokens": [_printed(token.spelling) for token in tokens],
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
        fields: Json = {"coppice": figures[0] if len(figures) == 1 else figures}
        if self._body.include_metrics:
            fields["metrics"] = {"speculative_decoding": speculative_decoding(answers)}
        return fields


def _count(prompt: int, new: int) -> Json:
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def _entry(spelling: bytes, log_prob: float | None) -> Json:
    return {"token": _printed(spelling), "logprob": log_prob, "bytes": list(spelling)}


def _printed(spelling: bytes) -> str:
    """A token as text. One that is no whole characters is spelled out, and so differs from others."""
    try:
        return spelling.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelling)


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
