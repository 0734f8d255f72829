"""GenerationService: its messages as plain values, for the SDK's side and the orchestrator's."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, field, replace
from enum import IntEnum
from itertools import chain
from typing import Annotated, Any, Literal, Self

from coppice import limits
from coppice.errors import InvalidField
from coppice.limits import Limits
from coppice.speculation.sampling import SamplingParams
from coppice.v1 import generation_pb2 as generation
from coppice.wire import common
from coppice.wire.codec import Among, AsLongAs, Conversion, Length, OneOf, Within, carried_by, codec

FinishReason = Literal["eos", "stop", "length", "cancelled"]


class Origin(IntEnum):
    """Where a token came from."""

    ROOT = 1  # sampled from the target
    DRAFT = 2  # drafted and accepted


@carried_by(generation.ChatMessage)
class ChatMessage:
    """One message of a conversation; role is system, user, assistant or tool. What is empty is not there."""

    role: Annotated[str, Among(("system", "user", "assistant", "tool"))]
    content: str
    reasoning_content: str = ""
    """what an assistant thought before it answered"""
    name: str = ""
    """of who speaks, or of the tool that answers"""
    tool_calls: str = ""
    """an assistant's calls of tools, as a JSON list in OpenAI's form"""
    tool_call_id: str = ""
    """of the call that a tool answers"""

    @property
    def fields(self) -> dict[str, Any]:
        """The message as chat templates know it."""
        fields = {key: text for key, text in asdict(self).items() if text or key in ("role", "content")}
        try:
            return fields | ({"tool_calls": json.loads(self.tool_calls)} if self.tool_calls else {})
        except (ValueError, RecursionError):
            raise InvalidField("chat.messages.tool_calls", "is no JSON") from None


def _wrapped(inner: str, least: int, most: int, field: str = "") -> Conversion:
    """Ids, or messages of a chat, in a message of their own. field: what a refusal names, if not the field itself."""
    message = codec(ChatMessage)

    def read(owner: Any, name: str, path: str) -> tuple[Any, ...] | None:
        if not owner.HasField(name):
            return None
        values = getattr(getattr(owner, name), inner)
        limits.check_count(field or path + name, len(values), least, most)
        return tuple(message.read(value, f"{field}.") for value in values) if field else tuple(values)

    return Conversion(lambda values: {inner: [*map(message.fields, values)] if field else values}, read)


_CHAT = _wrapped("messages", 1, limits.MAX_CHAT_MESSAGES, "chat.messages")


@carried_by(generation.GenerateRequest)
class GenerationRequest:
    """One request. Exactly one of text, ids and chat is set; budget None and policy "" mean the server's defaults."""

    text: str | None = None
    ids: Annotated[tuple[int, ...] | None, _wrapped("ids", 1, limits.MAX_CONTEXT)] = None
    chat: Annotated[tuple[ChatMessage, ...] | None, _CHAT] = None
    resume_ids: Annotated[tuple[int, ...], common.ANYWHERE] = ()
    sampling: common.Sampling = field(default_factory=SamplingParams)
    max_new_tokens: int = 0
    stop: Annotated[tuple[str, ...], Length(0, limits.MAX_STOP_STRINGS)] = ()
    policy: Annotated[str, Length(0, limits.MAX_POLICY_CHARS)] = ""
    budget: common.Node | None = None
    ignore_eos: bool = False
    want_log_probs: bool = False
    want_trees: bool = False
    top_log_probs: Annotated[int, Within(0, limits.MAX_TOP_LOG_PROBS)] = 0
    want_prompt_log_probs: bool = False
    min_tokens: common.Position = 0
    prediction_text: str | None = None
    prediction_ids: Annotated[tuple[int, ...] | None, _wrapped("ids", 0, limits.MAX_CONTEXT)] = None
    """what the answer is expected to be, as text or as ids; not both"""
    grammar: common.Grammar | None = None
    """what the whole answer must be"""
    template_arguments: Annotated[str, Length(0, limits.MAX_PROMPT_CHARS)] = ""
    """what the chat template is given beside the messages, as a JSON object"""
    stop_token_ids: Annotated[tuple[common.TokenId, ...], Length(0, limits.MAX_STOP_IDS)] = ()
    """ids that end the text beside the end-of-text ids"""
    include_stop: bool = False
    """what ended the text is part of it"""
    keep_special_tokens: bool = False
    """special tokens are part of the text"""
    want_prompt_ids: bool = False
    pq: bool = False
    coupled: bool = True
    whole_tree: bool = False
    """verify every node that is drafted, whether or not it pays; the orchestrator decides it"""


@carried_by(generation.Started)
class Started:
    """The request was admitted."""

    prompt_tokens: int
    policy: str
    heads: tuple[str, ...]
    budget: int
    seed: int = 0
    """of the draws: the request's own, or the one that was drawn for it"""
    prompt_ids: tuple[int, ...] = ()
    """of a request that wants them, or their log-probabilities, which are those of the ids behind the first one"""
    prompt_log_probs: tuple[float, ...] = ()
    prompt_top: tuple[common.TopLogProbs, ...] = ()


@carried_by(generation.StepTree)
class StepTree:
    """The tree a step chose, by node: ids, parents (0: the root), cumulative log-scores, the drafter's forward that
    made it (from 1) and its text; the numbers of the accepted nodes from the root down; the root's text."""

    root: int
    tokens: Annotated[tuple[int, ...], common.NODES]
    parents: Annotated[tuple[int, ...], AsLongAs("tokens")]
    log_probs: Annotated[tuple[float, ...], AsLongAs("tokens")]
    forwards: Annotated[tuple[int, ...], AsLongAs("tokens")]
    pieces: Annotated[tuple[str, ...], AsLongAs("tokens")]
    accepted: tuple[int, ...]
    root_piece: str = ""
    owners: Annotated[tuple[int, ...], AsLongAs("tokens")] = ()
    """by node, the heads that drafted it: bit h is number h of `Started.heads`"""
    cut: tuple[int, ...] = ()
    """numbers of the nodes that the verifier left out"""
    routed: int = -1
    """index of the head whose tree it is; -1: none, -2: a union"""
    draft_ns: int = 0
    """of waiting for drafts"""
    verify_ns: int = 0
    """from the verifier's question to its answer"""


_ORIGINS = Conversion(None, lambda owner, name, path: tuple(map(Origin, getattr(owner, name))))


@carried_by(generation.Chunk)
class Chunk:
    """Tokens of one commit or of several. `pieces` are the text of each id's contribution; joined they are `text`."""

    text: str
    ids: tuple[int, ...]
    origins: Annotated[tuple[Origin, ...], Within(1, 2), AsLongAs("ids"), _ORIGINS]
    pieces: Annotated[tuple[str, ...], AsLongAs("ids")]
    log_probs: Annotated[tuple[float, ...], AsLongAs("ids")] = ()
    tree: StepTree | None = None
    top: Annotated[tuple[common.TopLogProbs, ...], AsLongAs("ids")] = ()
    others: tuple[StepTree, ...] = ()
    """of the heads that lost the routing; accepted are the nodes that the target said too"""

    @classmethod
    def joined(cls, chunks: Sequence[Self]) -> Self:
        """Several without trees, one behind the other, as one."""
        text, *rows = zip(*((c.text, c.ids, c.origins, c.pieces, c.log_probs, c.top) for c in chunks), strict=True)
        ids, origins, pieces, log_probs, top = (tuple(chain.from_iterable(row)) for row in rows)
        return cls("".join(text), ids, origins, pieces, log_probs, None, top)


@carried_by(generation.GenerateTimings, frozen=False)
class Timings:
    """Sums over a request, nanoseconds (protos/coppice/v1/generation.proto says what each covers)."""

    queue_ns: int = 0
    prefill_ns: int = 0
    draft_ns: int = 0
    transport_ns: int = 0
    verify_ns: int = 0
    accept_ns: int = 0
    commit_ns: int = 0
    target_forward_ns: int = 0
    head_forward_ns: int = 0
    decode_ns: int = 0
    step_ns: list[int] = field(default_factory=list)
    split_ns: list[int] = field(default_factory=list)


_REASONS: tuple[FinishReason, ...] = ("eos", "stop", "length")  # as the message numbers them, from 1


def _read_reason(owner: Any, name: str, path: str) -> FinishReason:
    number: int = getattr(owner, name)
    limits.check_range(path + name, number, 1, len(_REASONS))
    return _REASONS[number - 1]


@carried_by(generation.Finished, frozen=False)
class Finished:
    """The answer is complete. Lists have one entry a step; `routed` is a head's index, -1 none, -2 a union.

    `resumed`: how often the client went on with another server; lists and timings are then of the last one alone.
    """

    finish_reason: Annotated[FinishReason, Conversion(lambda reason: _REASONS.index(reason) + 1, _read_reason)]
    prompt_tokens: int
    new_tokens: int
    accept_lengths: list[int]
    routed: list[int]
    verified_nodes: list[int]
    late_drafts: int = 0
    bad_drafts: int = 0
    timings: Timings = field(default_factory=Timings)
    accepted_prediction_tokens: int = 0
    """tokens of the prediction that were accepted as drafts, each counted once"""
    rejected_prediction_tokens: int = 0
    """those that were verified and never accepted"""
    cached_tokens: int = 0
    """of the prompt, that were not prefilled again"""
    resumed: int = 0

    @property
    def steps(self) -> int:
        """Target forwards after the prefill."""
        return len(self.accept_lengths)

    @property
    def tau(self) -> float:
        """Committed tokens per target forward, root included; the first token costs no step. 1 without a step."""
        return sum(self.accept_lengths) / self.steps if self.steps else 1.0


@carried_by(generation.DescribeModelResponse)
class ModelDescription:
    """What a deployment serves; `repetition_penalty` is that of requests that set none."""

    name: str
    vocab_size: int
    max_len: int
    heads: tuple[str, ...]
    policies: tuple[str, ...]
    default_policy: str
    default_budget: int
    has_tokenizer: bool
    has_chat_template: bool
    running: int = 0
    version: str = ""
    repetition_penalty: common.DefaultPenalty = 1.0


_REQUEST = codec(GenerationRequest)
_RESPONSE: OneOf[Started | Chunk | Finished, generation.GenerateResponse] = OneOf(generation.GenerateResponse)

response_to_wire = _RESPONSE.to_wire
model_to_wire: Callable[[ModelDescription], generation.DescribeModelResponse] = codec(ModelDescription).to_wire
read_model = codec(ModelDescription).read


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
    common.check_bias(request.sampling, vocab_size)
    if request.resume_ids and request.sampling.temperature and not message.sampling.HasField("seed"):
        raise InvalidField("sampling.seed", "is missing: resume_ids need the seed of `started`")
    for name in ("ids", "resume_ids", "stop_token_ids"):
        limits.check_ids(name, getattr(request, name) or (), vocab_size)
    limits.check_ids("prediction", request.prediction_ids or (), vocab_size)
    limits.check_range("prediction", len(request.prediction_text or ""), 0, limits.MAX_PROMPT_CHARS)
    if request.text is not None:
        limits.check_range("text", len(request.text), 1, limits.MAX_PROMPT_CHARS)
    if request.chat is not None:
        characters = sum(len(text) for part in request.chat for text in astuple(part))
        limits.check_range("chat.messages", characters, 0, limits.MAX_PROMPT_CHARS)
    return replace(request, pq=message.accept_rule == generation.ACCEPT_RULE_PQ, coupled=not message.uncoupled)


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
