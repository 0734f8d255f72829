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
from dataclasses import replace
from typing import TypeVar

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
from .tools import AnswerParser, ChatFormat, Json, Part

log = structlog.get_logger()

T = TypeVar("T")
Events = AsyncGenerator[tuple[int, StreamEvent], None]  # of all choices of a request, each with its choice's index
Scored = tuple[int, Json]  # a token's place in the text, and its log-probabilities as chats have them

_PING_S = 15  # between two signs of life in a stream
_TAIL_IDS = 32  # of a prompt, in which a template may open what is thought
_CALL_ID_CHARS = 9  # templates of Mistral take no others
_CODES = {
    "INVALID_ARGUMENT": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "DEADLINE_EXCEEDED": 408,
    "RESOURCE_EXHAUSTED": 429,
    "CANCELLED": 499,
    "INTERNAL": 500,
    "UNAVAILABLE": 503,
    "FAILED_PRECONDITION": 503,
}
_TYPES = {401: "authentication", 403: "permission", 404: "not_found", 408: "timeout", 429: "rate_limit"}
_LEAST_LOG_PROB = -9999.0  # as OpenAI has it: JSON has no infinity
_BROKEN = "\ufffd"  # stands for bytes that are no character


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

    async def sent() -> AsyncIterator[dict[str, str]]:
        async with contextlib.aclosing(parts):
            yield _event(first)
            try:
                async for part in parts:
                    yield _event(part)
            except Exception as error:
                yield {"data": json.dumps(describe_error(error)[1])}
        yield {"data": "[DONE]"}

    return EventSourceResponse(sent(), headers=headers, sep="\n", ping=_PING_S, send_timeout=idle_s)


def _event(part: Json) -> dict[str, str]:
    """A part as a server-sent event, which is named where the part has a type."""
    name = {"event": part["type"]} if "type" in part else {}
    return {**name, "data": json.dumps(part)}


def describe_error(error: Exception) -> tuple[int, Json]:
    """An error's HTTP status and OpenAI's body. Details of an unexpected one stay in the log under an opaque id."""
    code, message, field = 500, str(error), None
    if isinstance(error, CoppiceError):
        code, field = _CODES[error.status], error.field if isinstance(error, InvalidField) else None
    elif isinstance(error, HTTPException):
        code = error.status_code
        message = "it is not served here; /docs lists what is" if code == 404 else str(error.detail)
    elif isinstance(error, RequestValidationError):
        deepest = max(error.errors(), key=lambda each: len(each["loc"]))
        parts = list(map(str, deepest["loc"][1:]))  # with the names of the types that pydantic tried
        field = ".".join(part for at, part in enumerate(parts) if not (at and (part == "str" or "[" in part))) or None
        reason = "is not served (docs/http.md#fields)" if deepest["type"] == "extra_forbidden" else deepest["msg"]
        code, message = 400, f"{field or 'body'}: {reason}"
    else:
        opaque = secrets.token_hex(8)
        log.error("unexpected error", method="HTTP", error_id=opaque, exc_info=error)
        message = f"internal error {opaque}"
    kind = f"{_TYPES.get(code, 'invalid_request' if code < 500 else 'server')}_error"
    texts = {"message": message, "param": field}  # they may quote what the caller made up
    plain = {name: text and text[:MAX_DETAILS].encode(errors="replace").decode() for name, text in texts.items()}
    return code, {"error": {**plain, "type": kind, "code": code}}


def error_response(error: Exception) -> JSONResponse:
    """The answer that an error is."""
    code, body = describe_error(error)
    headers = dict(getattr(error, "headers", None) or {})
    if isinstance(error, CoppiceError) and error.retry_after_s:
        headers["Retry-After"] = str(math.ceil(error.retry_after_s))
    if code == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(body, code, headers)


def finite(log_prob: float) -> float:
    """A log-probability that JSON can hold."""
    return max(_LEAST_LOG_PROB, log_prob)


def _best(row: TopLogProbs | None, most: int) -> list[tuple[int, float]]:
    return [] if row is None else list(zip(row.ids.tolist(), row.log_probs.tolist(), strict=True))[:most]


def _entry(spelling: bytes, log_prob: float | None) -> Json:
    """A token's log-probability, None at the prompt's beginning. spelling: what it adds to the text, or b""."""
    value = None if log_prob is None else finite(log_prob)
    return {"token": _printed(spelling), "logprob": value, "bytes": list(spelling)}


def _printed(spelling: bytes) -> str:
    """A token as text. One that is no whole characters is spelled out, and so differs from others."""
    try:
        return spelling.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelling)


class AnswerChoice(Accumulator):
    """One answer as its events come in, in OpenAI's forms."""

    def __init__(
        self,
        tokens: TokenBytes,
        request: GenerationRequest,
        parser: AnswerParser | None = None,
        prompt: str | Sequence[int] = "",
        ends: Collection[int] = (),
        most_top: int = MAX_TOP_LOG_PROBS,
    ) -> None:
        """parser: what splits the text; None: all of it is content. prompt: what the answer begins with. ends: ids that
        end a text and are no part of it. most_top: alternatives that are listed for a token.
        """
        super().__init__()
        self.echo = prompt if isinstance(prompt, str) else tokens.decode(prompt)
        self.scores = list[Scored]()
        self.new_tokens = 0
        self.calls = list[Json]()
        self._texts = {"content": "", "reasoning_content": ""}
        self._prompt, self._bytes, self._ends, self._parser = prompt, tokens, ends, parser
        self._special, self._most_top = request.keep_special_tokens, most_top
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def take(self, event: StreamEvent) -> list[Scored]:
        """Take in an event; returns its tokens with their log-probabilities, when these were asked for."""
        self.add(event)
        scores = list[Scored]()
        if isinstance(event, Started):
            if self._parser:
                self._parser.begin(self._bytes.decode(event.prompt_ids[-_TAIL_IDS:]))
            if event.prompt_ids and self._prompt:
                text = self._prompt if isinstance(self._prompt, str) else None
                spellings = self._bytes.of_prompt(event.prompt_ids, text)
                self.echo = b"".join(spellings).decode(errors="replace")
                scores = self._scored(spellings, (None, *event.prompt_log_probs), (None, *event.prompt_top))
                self._utf8.reset()
                self._offset = len(self.echo)
        elif isinstance(event, Chunk):
            self.new_tokens += len(event.ids)
            if event.log_probs:
                ends, special = self._ends, self._special
                spellings = [b"" if token in ends else self._bytes.of(token, special) for token in event.ids]
                scores = self._scored(spellings, event.log_probs, event.top)
        self.scores += scores
        return scores

    def deltas(self, event: StreamEvent) -> list[Json]:
        """What an event adds to the message of a chat, in the form of OpenAI's deltas."""
        text, deltas = event.text if isinstance(event, Chunk) else "", list[Json]()
        parts = [Part("content", text)] if text else []
        for part in self._parser.push(text, ended=isinstance(event, Finished)) if self._parser else parts:
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
            best = _best(top, most)
            ranks = {likely: rank for rank, (likely, _) in enumerate(best, 1)}
            row = {}
            for each, value in {token: log_prob, **dict(best)}.items():
                text = _printed(self._bytes.of(each, True))
                row[str(each)] = {"logprob": finite(value), "rank": ranks.get(each), "decoded_token": text}
            rows.append(row)
        return rows

    def _scored(
        self, spellings: Sequence[bytes], log_probs: Sequence[float | None], top: Sequence[TopLogProbs | None]
    ) -> list[Scored]:
        scores, rows = list[Scored](), itertools.chain(top, itertools.repeat(None))
        for spelling, value, row in zip(spellings, log_probs, rows, strict=False):
            best = [_entry(self._bytes.of(token, True), each) for token, each in _best(row, self._most_top)]
            scores.append((self._place(spelling), _entry(spelling, value) | {"top_logprobs": best}))
        return scores

    def _place(self, spelling: bytes) -> int:
        """Where in the text the bytes behind those before stand; half a character stands where the whole one will."""
        is_within, text = bool(self._utf8.getstate()[0]), self._utf8.decode(spelling)
        self._offset += len(text)
        return self._offset - len(text) + (is_within and text.startswith(_BROKEN))


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
        self.choices = [
            AnswerChoice(
                service.token_bytes,
                request,
                body.parser(chat, request) if isinstance(body, ChatBody) else None,
                (request.ids or request.text or "") if body.echoes else "",
                () if request.include_stop else ends,
                top,
            )
            for request in requests
        ]
        number = ("chatcmpl-" if self._is_chat else "cmpl-") + uuid.uuid4().hex
        self._head: Json = {"id": number, "created": int(time.time()), "model": service.target.names[0]}

    async def _shown(self, events: Events) -> Events:
        """The events; of a prompt that is scored alone, without the token that was decoded behind it."""
        async with contextlib.aclosing(events):
            async for index, event in events:
                if self._only_prompt and isinstance(event, Finished):
                    yield index, replace(event, finish_reason="length", new_tokens=0)
                elif not (self._only_prompt and isinstance(event, Chunk)):
                    yield index, event

    async def whole(self, events: Events) -> Json:
        """The body of a request that is not streamed."""
        async with contextlib.aclosing(self._shown(events)) as shown:
            async for index, event in shown:
                choice = self.choices[index]
                choice.take(event)
                choice.deltas(event)
        answers, choices = [choice.completion() for choice in self.choices], list[Json]()
        for index, (choice, answer) in enumerate(zip(self.choices, answers, strict=True)):
            content: Json = {"message": choice.message} if self._is_chat else {"text": choice.echo + answer.text}
            content |= {"token_ids": list(answer.ids)} if self._body.return_token_ids else {}
            content |= {} if self._is_chat else self._prompt_fields(choice)
            reason = self._reason(choice, answer.finish_reason)
            log_probs = self._log_probs(choice.scores)
            choices.append({"index": index, **content, "logprobs": log_probs, "finish_reason": reason})
        kind = "chat.completion" if self._is_chat else "text_completion"
        prompt = self._prompt_fields(self.choices[0]) if self._is_chat else {}
        shared = {"object": kind, **self._head, "choices": choices, "usage": self._usage(answers)}
        return {**shared, **prompt, **self._coppice(answers)}

    @staticmethod
    def _reason(choice: AnswerChoice, reason: FinishReason) -> str:
        """Why a choice ended, in OpenAI's words."""
        return "length" if reason == "length" else "tool_calls" if choice.calls and reason != "cancelled" else "stop"

    def _prompt_fields(self, choice: AnswerChoice) -> Json:
        """vLLM's fields about the prompt, as far as they are asked for."""
        fields: Json = {"prompt_token_ids": list(choice.started.prompt_ids)} if self._body.return_token_ids else {}
        most = self._body.prompt_logprobs
        return fields | ({} if most is None else {"prompt_logprobs": choice.prompt_log_probs(most)})

    async def parts(self, events: Events) -> AsyncGenerator[Json, None]:
        """The parts of a stream; usage, if it is asked for, is in one with no choice behind all others."""
        options = self._body.stream_options
        async with contextlib.aclosing(self._shown(events)) as shown:
            async for index, event in shown:
                choice = self.choices[index]
                for part in self._parts_of(index, event):
                    so_far = _count(choice.started.prompt_tokens, choice.new_tokens)
                    usage = so_far if options.continuous_usage_stats else None
                    yield part | ({"usage": usage} if options.include_usage else {})
        if options.include_usage:
            yield {**self._part(), "usage": self._usage([choice.completion() for choice in self.choices])}

    def _parts_of(self, index: int, event: StreamEvent) -> Iterator[Json]:
        """The parts that an event of a choice is."""
        choice = self.choices[index]
        scores = choice.take(event)
        fields: Json = {"logprobs": self._log_probs(scores) if scores else None}
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
            contents = [{"content": ""} if self._is_chat else ""] if scores or len(fields) > 1 else []
        for content in contents:
            part = self._part(index, content, **fields)
            yield part | prompt_fields if self._is_chat else part
            fields = {}
        if isinstance(event, Finished):
            answer = choice.completion()
            reason = self._reason(choice, answer.finish_reason)
            yield self._part(index, {} if self._is_chat else "", finish_reason=reason) | self._coppice([answer])

    def _part(self, index: int | None = None, content: Json | str = "", **fields: Json | str | None) -> Json:
        """A part of a stream, of one choice or of none; of completions the content is text."""
        kind, name = ("chat.completion.chunk", "delta") if self._is_chat else ("text_completion", "text")
        choice: Json = {"index": index, name: content, "logprobs": None, "finish_reason": None, **fields}
        return {"object": kind, **self._head, "choices": [] if index is None else [choice]}

    def _log_probs(self, scores: Sequence[Scored]) -> Json | None:
        """The log-probabilities of tokens, when they were asked for."""
        if not self._body.wants_log_probs:
            return None
        entries = [entry for _, entry in scores]
        if self._is_chat:
            return {"content": entries, "refusal": None}
        tops = [{best["token"]: best["logprob"] for best in reversed(entry["top_logprobs"])} for entry in entries]
        return {
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [top or None for top in tops],
            "text_offset": [offset for offset, _ in scores],
        }

    def _usage(self, answers: Sequence[Completion]) -> Json:
        """OpenAI's count of tokens, in which a prompt counts once for all of its choices."""
        prompts = answers[:: self._body.n]
        kinds = ("accepted_prediction_tokens", "rejected_prediction_tokens")
        return {
            **_count(sum(each.prompt_tokens for each in prompts), sum(answer.new_tokens for answer in answers)),
            "prompt_tokens_details": {"cached_tokens": sum(each.cached_tokens for each in prompts)},
            "completion_tokens_details": {kind: sum(getattr(each, kind) for each in answers) for kind in kinds},
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
