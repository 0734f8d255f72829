"""GenerationService: plain values to messages and back, for the SDK's side and the orchestrator's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from coppice import limits
from coppice.errors import InvalidField
from coppice.limits import Limits
from coppice.messages.generation import (
    ChatMessage,
    Chunk,
    Finished,
    FinishReason,
    GenerationRequest,
    ModelDescription,
    Origin,
    Started,
    StepTree,
    Timings,
)
from coppice.v1 import generation_pb2 as generation
from coppice.wire.common import PENALTY, SAMPLING, check_bias
from coppice.wire.shapes import OneOf, Part, Shape

_REASONS: dict[FinishReason, generation.FinishReason] = {
    "eos": generation.FINISH_REASON_EOS,
    "stop": generation.FINISH_REASON_STOP,
    "length": generation.FINISH_REASON_LENGTH,
}
_REASON_NAMES = {number: name for name, number in _REASONS.items()}
_ROLES = ("system", "user", "assistant")


def _read_reason(owner: Any, name: str, path: str) -> FinishReason:
    number = getattr(owner, name)
    if number not in _REASON_NAMES:
        raise InvalidField(path + name, f"{number} is no reason")
    return _REASON_NAMES[number]


def _read_origins(owner: Any, name: str, path: str) -> tuple[Origin, ...]:
    return tuple(map(Origin, getattr(owner, name)))


def _ids(least: int) -> Part:
    """Ids in a message of their own, at least so many."""

    def read(owner: Any, name: str, path: str) -> tuple[int, ...] | None:
        if not owner.HasField(name):
            return None
        ids = getattr(owner, name).ids
        limits.check_count(path + name, len(ids), least, limits.MAX_CONTEXT)
        return tuple(ids)

    return Part(lambda ids: {"ids": ids}, read)


def _read_chat(owner: Any, name: str, path: str) -> tuple[ChatMessage, ...] | None:
    if not owner.HasField(name):
        return None
    parts = owner.chat.messages
    limits.check_count("chat.messages", len(parts), 1, limits.MAX_CHAT_MESSAGES)
    for part in parts:
        if part.role not in _ROLES:
            raise InvalidField("chat.messages.role", f"{part.role[:32]!r} is not one of {', '.join(_ROLES)}")
    return tuple(map(_MESSAGE.read, parts))


_MESSAGE = Shape(ChatMessage, generation.ChatMessage)
_REQUEST = Shape(
    GenerationRequest,
    generation.GenerateRequest,
    ids=_ids(1),
    chat=Part(lambda parts: {"messages": list(map(_MESSAGE.fields, parts))}, _read_chat),
    prediction_ids=_ids(0),
    sampling=SAMPLING,
)
_STARTED = Shape(Started, generation.Started)
_STEP_TREE = Shape(
    StepTree, generation.StepTree, parallel=("tokens", "parents", "log_probs", "forwards", "pieces", "owners")
)
_CHUNK = Shape(
    Chunk,
    generation.Chunk,
    parallel=("ids", "origins", "pieces", "log_probs", "top"),
    origins=Part(None, _read_origins),
)
_TIMINGS = Shape(Timings, generation.GenerateTimings)
_FINISHED = Shape(Finished, generation.Finished, finish_reason=Part(_REASONS.__getitem__, _read_reason))
_RESPONSE: OneOf[Started | Chunk | Finished, generation.GenerateResponse] = OneOf(
    generation.GenerateResponse, started=_STARTED, chunk=_CHUNK, finished=_FINISHED
)
_MODEL = Shape(ModelDescription, generation.DescribeModelResponse, repetition_penalty=PENALTY)

response_to_wire = _RESPONSE.to_wire
model_to_wire, read_model = _MODEL.to_wire, _MODEL.read


def request_to_wire(request: GenerationRequest) -> generation.GenerateRequest:
    """GenerationRequest to its message. Raises InvalidField for what it cannot hold, and for no prompt or several."""
    if sum(prompt is not None for prompt in (request.text, request.ids, request.chat)) != 1:
        raise InvalidField("prompt", "give exactly one of text, ids and chat")
    rule = generation.ACCEPT_RULE_PQ if request.pq else generation.ACCEPT_RULE_KEYED
    message = generation.GenerateRequest(accept_rule=rule, uncoupled=not request.coupled)
    for name, value in _REQUEST.fields(request).items():
        try:
            message.MergeFrom(generation.GenerateRequest(**{name: value}))
        except (TypeError, ValueError) as error:
            raise InvalidField(name, f"cannot be sent: {error}") from None
    return message


def read_request(message: generation.GenerateRequest, vocab_size: int, bounds: Limits) -> GenerationRequest:
    """Message to GenerationRequest within the deployment's bounds."""
    if message.WhichOneof("prompt") is None:
        raise InvalidField("prompt", "none of text, ids and chat is set")
    limits.check_range("max_new_tokens", message.max_new_tokens, 0, bounds.max_new_tokens)
    for stop in message.stop[: limits.MAX_STOP_STRINGS]:
        limits.check_range("stop", len(stop), 1, limits.MAX_STOP_CHARS)
    if message.accept_rule not in generation.AcceptRule.values():
        raise InvalidField("accept_rule", f"{message.accept_rule} is no rule")
    request = _REQUEST.read(message)
    check_bias(request.sampling, vocab_size)
    if request.resume_ids and request.sampling.temperature and not message.sampling.HasField("seed"):
        raise InvalidField("sampling.seed", "is missing: resume_ids go on with the seed that started told")
    limits.check_ids("resume_ids", request.resume_ids, vocab_size)
    limits.check_ids("ids", request.ids or (), vocab_size)
    limits.check_ids("prediction", request.prediction_ids or (), vocab_size)
    limits.check_range("prediction", len(request.prediction_text or ""), 0, bounds.prompt_chars)
    if request.text is not None:
        limits.check_range("text", len(request.text), 1, bounds.prompt_chars)
    if request.chat is not None:
        characters = sum(len(text) for part in request.chat for text in part.fields.values())
        limits.check_range("chat.messages", characters, 0, bounds.prompt_chars)
    pq = message.accept_rule == generation.ACCEPT_RULE_PQ
    return replace(request, pq=pq, coupled=not message.uncoupled)


def read_response(message: generation.GenerateResponse) -> Started | Chunk | Finished:
    """Message to Started, Chunk or Finished."""
    response = _RESPONSE.read(message)
    if isinstance(response, Chunk) and response.tree is not None:
        for number, parent in enumerate(response.tree.parents):
            limits.check_range("chunk.tree.parents", parent, 0, number)
        for name in ("accepted", "cut"):
            for node in getattr(response.tree, name):
                limits.check_range(f"chunk.tree.{name}", node, 1, len(response.tree.tokens))
    return response
