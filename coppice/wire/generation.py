"""GenerationService: plain values to messages and back, for the SDK's side and the orchestrator's."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, cast

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
from coppice.speculation.sampling import SamplingParams
from coppice.v1 import generation_pb2 as generation
from coppice.wire.common import read_ids, read_sampling, sampling_to_wire

_REASONS: dict[FinishReason, generation.FinishReason] = {
    "eos": generation.FINISH_REASON_EOS,
    "stop": generation.FINISH_REASON_STOP,
    "length": generation.FINISH_REASON_LENGTH,
}
_REASON_NAMES = {number: name for name, number in _REASONS.items()}
_ROLES = ("system", "user", "assistant")


def request_to_wire(request: GenerationRequest) -> generation.GenerateRequest:
    """GenerationRequest to its message. Raises InvalidField unless exactly one kind of prompt is set."""
    if sum(prompt is not None for prompt in (request.text, request.ids, request.chat)) != 1:
        raise InvalidField("prompt", "give exactly one of text, ids and chat")
    message = generation.GenerateRequest(
        resume_ids=request.resume_ids,
        sampling=sampling_to_wire(request.sampling),
        max_new_tokens=request.max_new_tokens,
        stop=request.stop,
        policy=request.policy,
        budget=request.budget,
        ignore_eos=request.ignore_eos,
        want_log_probs=request.want_log_probs,
        accept_rule=generation.ACCEPT_RULE_PQ if request.pq else generation.ACCEPT_RULE_KEYED,
        uncoupled=not request.coupled,
        want_trees=request.want_trees,
    )
    if request.text is not None:
        message.text = request.text
    elif request.ids is not None:
        message.ids.ids.extend(request.ids)
    else:
        for part in request.chat or ():
            message.chat.messages.add(role=part.role, content=part.content)
    return message


def read_request(message: generation.GenerateRequest, vocab_size: int, bounds: Limits) -> GenerationRequest:
    """Message to GenerationRequest within the deployment's bounds."""
    limits.check_range("max_new_tokens", message.max_new_tokens, 0, bounds.max_new_tokens)
    limits.check_count("stop", len(message.stop), 0, limits.MAX_STOP_STRINGS)
    for stop in message.stop:
        limits.check_range("stop", len(stop), 1, limits.MAX_STOP_CHARS)
    limits.check_count("policy", len(message.policy), 0, limits.MAX_POLICY_CHARS)
    if message.accept_rule not in generation.AcceptRule.values():
        raise InvalidField("accept_rule", f"{message.accept_rule} is no rule")
    text, ids, chat = _read_prompt(message, vocab_size, bounds)
    return GenerationRequest(
        text=text,
        ids=ids,
        chat=chat,
        resume_ids=tuple(read_ids("resume_ids", message.resume_ids, vocab_size, low=0)),
        sampling=read_sampling(message.sampling, vocab_size) if message.HasField("sampling") else SamplingParams(),
        max_new_tokens=message.max_new_tokens,
        stop=tuple(message.stop),
        policy=message.policy,
        budget=_read_budget(message),
        ignore_eos=message.ignore_eos,
        want_log_probs=message.want_log_probs,
        pq=message.accept_rule == generation.ACCEPT_RULE_PQ,
        coupled=not message.uncoupled,
        want_trees=message.want_trees,
    )


def _read_budget(message: generation.GenerateRequest) -> int | None:
    if not message.HasField("budget"):
        return None
    limits.check_range("budget", message.budget, 0, limits.MAX_TREE_NODES)
    return int(message.budget)


def _read_prompt(
    message: generation.GenerateRequest, vocab_size: int, bounds: Limits
) -> tuple[str | None, tuple[int, ...] | None, tuple[ChatMessage, ...] | None]:
    kind = message.WhichOneof("prompt")
    if kind == "ids":
        return None, tuple(read_ids("ids", message.ids.ids, vocab_size)), None
    if kind == "text":
        limits.check_range("text", len(message.text), 1, bounds.prompt_chars)
        return message.text, None, None
    if kind != "chat":
        raise InvalidField("prompt", "none of text, ids and chat is set")
    parts = message.chat.messages
    limits.check_count("chat.messages", len(parts), 1, limits.MAX_CHAT_MESSAGES)
    limits.check_range("chat.messages", sum(len(part.content) for part in parts), 1, bounds.prompt_chars)
    for part in parts:
        if part.role not in _ROLES:
            raise InvalidField("chat.messages.role", f"{part.role[:32]!r} is not one of {', '.join(_ROLES)}")
    return None, None, tuple(ChatMessage(part.role, part.content) for part in parts)


def _values(record: Timings | ModelDescription | StepTree) -> dict[str, Any]:
    return {part.name: getattr(record, part.name) for part in fields(record)}


def started_to_wire(started: Started) -> generation.GenerateResponse:
    """Started to its message."""
    return generation.GenerateResponse(
        started=generation.Started(
            prompt_tokens=started.prompt_tokens, policy=started.policy, heads=started.heads, budget=started.budget
        )
    )


def chunk_to_wire(chunk: Chunk) -> generation.GenerateResponse:
    """Chunk to its message."""
    return generation.GenerateResponse(
        chunk=generation.Chunk(
            text=chunk.text,
            ids=chunk.ids,
            origins=cast(list[generation.TokenOrigin], list(chunk.origins)),
            pieces=chunk.pieces,
            log_probs=chunk.log_probs,
            tree=None if chunk.tree is None else generation.StepTree(**_values(chunk.tree)),
        )
    )


def finished_to_wire(finished: Finished) -> generation.GenerateResponse:
    """Finished to its message."""
    timings = generation.GenerateTimings(
        **{part.name: getattr(finished.timings, part.name) for part in fields(Timings)}
    )
    return generation.GenerateResponse(
        finished=generation.Finished(
            finish_reason=_REASONS[finished.finish_reason],
            prompt_tokens=finished.prompt_tokens,
            new_tokens=finished.new_tokens,
            steps=finished.steps,
            accept_lengths=finished.accept_lengths,
            routed=finished.routed,
            verified_nodes=finished.verified_nodes,
            late_drafts=finished.late_drafts,
            bad_drafts=finished.bad_drafts,
            timings=timings,
        )
    )


def read_response(message: generation.GenerateResponse) -> Started | Chunk | Finished:
    """Message to Started, Chunk or Finished."""
    kind = message.WhichOneof("kind")
    if kind == "started":
        started = message.started
        return Started(started.prompt_tokens, started.policy, tuple(started.heads), started.budget)
    if kind == "chunk":
        chunk = message.chunk
        for field in ("origins", "pieces", "log_probs"):
            low = 0 if field == "log_probs" and not chunk.log_probs else len(chunk.ids)
            limits.check_count(f"chunk.{field}", len(getattr(chunk, field)), low, len(chunk.ids))
        for origin in chunk.origins:
            limits.check_range("chunk.origins", origin, min(Origin), max(Origin))
        origins = tuple(Origin(origin) for origin in chunk.origins)
        tree = _read_tree(chunk.tree) if chunk.HasField("tree") else None
        return Chunk(chunk.text, tuple(chunk.ids), origins, tuple(chunk.pieces), tuple(chunk.log_probs), tree)
    if kind != "finished":
        raise InvalidField("kind", "none of started, chunk and finished is set")
    finished = message.finished
    if finished.finish_reason not in _REASON_NAMES:
        raise InvalidField("finished.finish_reason", f"{finished.finish_reason} is no reason")
    read: dict[str, Any] = {part.name: getattr(finished.timings, part.name) for part in fields(Timings)}
    read |= {name: list(value) for name, value in read.items() if not isinstance(value, int)}
    return Finished(
        finish_reason=_REASON_NAMES[finished.finish_reason],
        prompt_tokens=finished.prompt_tokens,
        new_tokens=finished.new_tokens,
        accept_lengths=list(finished.accept_lengths),
        routed=list(finished.routed),
        verified_nodes=list(finished.verified_nodes),
        late_drafts=finished.late_drafts,
        bad_drafts=finished.bad_drafts,
        timings=Timings(**read),
    )


def _read_tree(message: generation.StepTree) -> StepTree:
    nodes = len(message.tokens)
    limits.check_count("chunk.tree.tokens", nodes, 0, limits.MAX_TREE_NODES)
    for field in ("parents", "log_probs", "forwards", "pieces"):
        limits.check_count(f"chunk.tree.{field}", len(getattr(message, field)), nodes, nodes)
    for number, parent in enumerate(message.parents):
        limits.check_range("chunk.tree.parents", parent, 0, number)
    for node in message.accepted:
        limits.check_range("chunk.tree.accepted", node, 1, nodes)
    told: dict[str, Any] = {part.name: getattr(message, part.name) for part in fields(StepTree)}
    told |= {name: tuple(value) for name, value in told.items() if not isinstance(value, int)}
    return StepTree(**told)


def model_to_wire(model: ModelDescription) -> generation.DescribeModelResponse:
    """ModelDescription to its message."""
    return generation.DescribeModelResponse(
        **{part.name: getattr(model, part.name) for part in fields(ModelDescription)}
    )


def read_model(message: generation.DescribeModelResponse) -> ModelDescription:
    """Message to ModelDescription."""
    read: dict[str, Any] = {part.name: getattr(message, part.name) for part in fields(ModelDescription)}
    read |= {name: tuple(value) for name, value in read.items() if not isinstance(value, str | int | float)}
    read["repetition_penalty"] = message.repetition_penalty or 1.0
    return ModelDescription(**read)
