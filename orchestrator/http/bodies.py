"""Bodies of OpenAI's requests: every field is served or refused by name, none is ignored."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from coppice.client.request import MEANINGS, Prompt, build_request
from coppice.errors import InvalidField
from coppice.limits import MAX_BIASES, MAX_CHAT_MESSAGES, MAX_CONTEXT, MAX_TOP_LOG_PROBS
from coppice.speculation.sampling import SamplingParams
from coppice.wire.generation import ChatMessage, GenerationRequest

T = TypeVar("T")

MOST_CHOICES = 16
_MOST_FIELDS = 64  # of an object: each that is refused is an error to make
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")  # the only spelling: two keys are two ids
_COMPLETION_TOKENS = 16  # OpenAI's default of /v1/completions
_MOST_LOG_PROBS = 2 * MAX_CONTEXT  # that one answer tells: they are a few megabytes of JSON

List = Annotated[list[T], Field(fail_fast=True)]  # A list of which the first bad entry is told: it may have a million.


def _check_unicode(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("holds half of a surrogate pair") from None
    return text


Text = Annotated[str, AfterValidator(_check_unicode)]  # A string that can be sent on: JSON can spell others.


class Object(BaseModel):
    """A JSON object. A field that is null counts as one that is not there."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    NEUTRAL: ClassVar[dict[str, tuple[object, ...] | None]] = {}
    """Fields that are not served, and their values that ask for nothing; None: any, as a hint changes no answer"""

    @model_validator(mode="before")
    @classmethod
    def _drop_null_and_neutral(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        if len(fields) > _MOST_FIELDS:
            raise InvalidField("body", f"an object has {_MOST_FIELDS} fields at most")
        return {name: value for name, value in fields.items() if not cls._asks_for_nothing(name, value)}

    @classmethod
    def _asks_for_nothing(cls, name: str, value: Any) -> bool:
        neutral = cls.NEUTRAL.get(name, ())
        return value is None or neutral is None or value in neutral


class StreamOptions(Object):
    """How an answer is streamed."""

    NEUTRAL = {"include_obfuscation": (False,)}
    include_usage: bool = False
    continuous_usage_stats: Annotated[bool, Field(description="with include_usage: in each part")] = False


class Body(Object):
    """A request's body."""

    model: Annotated[Text, Field(description="the served model's name; empty: whichever is served")] = ""

    def name_of(self, field: str) -> str:
        """What the body calls a field of a request."""
        prompt = "messages" if getattr(self, "messages", None) else "prompt"
        limit = "max_completion_tokens" if getattr(self, "max_completion_tokens", None) else "max_tokens"
        names = {**dict.fromkeys(("text", "ids", "chat", "prompt"), prompt), "max_new_tokens": limit}
        return names.get(field, field)


class TextPart(Object):
    """A part of a message's content or of a prediction."""

    NEUTRAL = {"cache_control": None, "annotations": None}
    type: Literal["text"]
    text: Text


def _joined(content: str | list[TextPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class Prediction(Object):
    """What the answer is expected to be."""

    type: Literal["content"]
    content: Text | List[TextPart]


class Sampled(Body):
    """What completions and chat completions have in common; SamplingParams bounds the fields of its names."""

    NEUTRAL = {
        "tools": ([],),
        "functions": ([],),
        "tool_choice": ("none", "auto"),
        "parallel_tool_calls": (True, False),
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
        "suffix": ("",),
        "best_of": (1,),
        "service_tier": ("auto", "default"),
        "chat_template_kwargs": ({},),
        "add_generation_prompt": (True,),
        "skip_special_tokens": (True,),
        "spaces_between_special_tokens": (True,),
        "use_beam_search": (False,),
        "length_penalty": (1,),
        **dict.fromkeys(("user", "metadata", "store", "prompt_cache_key", "safety_identifier")),
        **dict.fromkeys(("reasoning_effort", "verbosity")),
    }
    temperature: Annotated[float, Field(description="0 is greedy")] = 1.0
    top_p: float = 1.0
    top_k: Annotated[int, Field(ge=-1, description="-1 and 0 keep all ids")] = 0
    min_p: float = 0.0
    repetition_penalty: float | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Annotated[dict[str, Any], Field(description="numbers by token id")] = {}
    seed: Annotated[int, Field(ge=-1, description="of choice 0; choice i has seed + i; -1: one is drawn")] = -1
    stop: Text | List[Text] = []
    min_tokens: Annotated[int, Field(ge=0, description="new tokens before which nothing ends the text")] = 0
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] = 1
    stream: bool = False
    stream_options: Annotated[StreamOptions, Field(description="only with stream")] = StreamOptions()
    ignore_eos: bool = False
    prediction: Annotated[Prediction | None, Field(description="what the answer is expected to be")] = None
    policy: Annotated[Text, Field(description="Coppice's: plain, single:HEAD, route, merge, auto, ...")] = ""
    budget: Annotated[int | None, Field(description="Coppice's: draft nodes verified a step")] = None
    include_metrics: Annotated[bool, Field(description="also answer vLLM's metrics.speculative_decoding")] = False

    @property
    def scored(self) -> bool:
        """Whether log-probabilities are wanted."""
        log_probs = getattr(self, "logprobs", None)
        return log_probs is not None and log_probs is not False  # 0 asks for those of the answer's own tokens

    @property
    def echoes(self) -> bool:
        """Whether the answer begins with the prompt."""
        return getattr(self, "echo", False)

    def _requests(self, prompts: Sequence[Prompt], most: int, **fields: Any) -> list[GenerationRequest]:
        """The request of each choice, prompt by prompt, of `most` tokens; a seed is drawn when the body has none.

        fields: of GenerationRequest, that are no options of the SDK. Raises InvalidField.
        """
        if self.stream_options.include_usage and not self.stream:
            raise InvalidField("stream_options", "are for a stream alone")
        if self.min_tokens > most > 0:
            limit = self.name_of("max_new_tokens")
            raise InvalidField("min_tokens", f"{self.min_tokens} is more than {limit}, {most}")
        first = SamplingParams().with_seed().seed if self.seed == -1 else self.seed
        options: Any = {name: value for name, value in self if name in MEANINGS} | {
            "top_k": max(0, self.top_k),
            "max_new_tokens": most,
            "logit_bias": _read_bias(self.logit_bias),
            "prediction": _joined(self.prediction.content) if self.prediction else "",
            "log_probs": self.scored,
            "seed": first + self.n - 1,  # the largest is checked
        }
        fields |= {"min_tokens": self.min_tokens}
        requests = [replace(build_request(prompt, **options), **fields) for prompt in prompts]
        return [
            replace(request, sampling=request.sampling.model_copy(update={"seed": seed}))
            for request in requests
            for seed in range(first, first + self.n)
        ]


def _read_bias(bias: dict[str, Any]) -> dict[int, float]:
    if len(bias) > MAX_BIASES:
        raise InvalidField("logit_bias", f"has {len(bias)} entries, allowed are {MAX_BIASES}")
    for token, value in bias.items():
        if not _TOKEN_ID.fullmatch(token) or type(value) not in (int, float):
            raise InvalidField("logit_bias", f"{token[:32]!r}: {str(value)[:32]} is not a token id with a number")
    return {int(token): value for token, value in bias.items()}


class CompletionBody(Sampled):
    """The body of POST /v1/completions."""

    prompt: Annotated[Text | List[Text] | List[int] | List[List[int]], Field(description="text or ids, one or several")]
    max_tokens: Annotated[int, Field(ge=0, description="0 only with echo")] = _COMPLETION_TOKENS
    logprobs: Annotated[
        int | None,
        Field(ge=0, le=MAX_TOP_LOG_PROBS, description="log-probabilities of the tokens, and of so many best"),
    ] = None
    echo: Annotated[bool, Field(description="begin with the prompt")] = False

    def requests(self) -> list[GenerationRequest]:
        """The request of each choice, prompt by prompt. Raises InvalidField."""
        if not self.max_tokens and not self.echo:
            raise InvalidField("max_tokens", "is 0 with echo alone")
        several = isinstance(self.prompt, list) and not (self.prompt and isinstance(self.prompt[0], int))
        prompts: Any = self.prompt if several else [self.prompt]
        if not prompts or len(prompts) * self.n > MOST_CHOICES:
            raise InvalidField("prompt", f"with n = {self.n} there are 1 to {MOST_CHOICES // self.n} prompts a request")
        scores_prompt = self.echo and self.scored
        return self._requests(
            prompts, self.max_tokens or 1, top_log_probs=self.logprobs or 0, want_prompt_log_probs=scores_prompt
        )


class Message(Object):
    """One message of a conversation."""

    NEUTRAL = {"tool_calls": ([],), "annotations": ([],), "refusal": ("",)}

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        Text | List[TextPart] | None, Field(validate_default=True, description="null is an assistant's alone")
    ] = None
    reasoning_content: Annotated[Text, Field(description="what an assistant thought: for the template")] = ""
    name: Annotated[Text, Field(description="who speaks: for the template")] = ""

    @field_validator("content")
    @classmethod
    def _null_is_an_assistants(cls, content: Any, others: ValidationInfo) -> Any:
        if content is None and others.data.get("role") != "assistant":
            raise PydanticCustomError("null", "is null")
        return content

    @property
    def plain(self) -> ChatMessage:
        """The message as templates know it."""
        role = "system" if self.role == "developer" else self.role
        return ChatMessage(role, _joined(self.content or ""), self.reasoning_content, self.name)


Messages = Annotated[List[Message], Field(min_length=1, max_length=MAX_CHAT_MESSAGES)]


class ChatBody(Sampled):
    """The body of POST /v1/chat/completions."""

    messages: Messages
    max_tokens: Annotated[int | None, Field(ge=1, description="the older name of max_completion_tokens")] = None
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOG_PROBS, description="only with logprobs")] = 0

    def requests(self) -> list[GenerationRequest]:
        """The request of each choice. Raises InvalidField."""
        if self.top_logprobs and not self.logprobs:
            raise InvalidField("top_logprobs", "needs logprobs")
        most = self.max_completion_tokens or self.max_tokens or 0
        return self._requests([[message.plain for message in self.messages]], most, top_log_probs=self.top_logprobs)


class TokenizeBody(Body):
    """The body of POST /tokenize: `prompt` or `messages`."""

    prompt: Text | None = None
    messages: Messages | None = None
    add_special_tokens: Literal[True] = True

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidField("prompt", "give it or messages")
        return self


class DetokenizeBody(Body):
    """The body of POST /detokenize."""

    tokens: List[Annotated[int, Field(ge=0)]]


@contextlib.contextmanager
def naming_fields_of(body: Body) -> Iterator[None]:
    """Have every InvalidField inside the block name the body's field."""
    try:
        yield
    except InvalidField as error:
        reason = str(error).partition(": ")[2]
        raise InvalidField(body.name_of(error.field.rpartition(".")[2]), reason) from None


def check_log_probs(requests: Sequence[GenerationRequest], context: int, new_tokens: int) -> None:
    """Raise InvalidField when choices, of `new_tokens` if they set no limit, may tell too many log-probabilities."""
    count = 0
    for request in requests:
        prompt = len(request.ids or (request.text or "").encode()) if request.want_prompt_log_probs else 0
        tokens = min(context, prompt + (request.max_new_tokens or new_tokens)) if request.want_log_probs else 0
        count += tokens * (1 + request.top_log_probs)
    if count > _MOST_LOG_PROBS:
        raise InvalidField("logprobs", f"may be {count} in all choices, allowed are {_MOST_LOG_PROBS}")
