"""Bodies of OpenAI's requests: every field is served or refused by name, none is ignored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from coppice.client.client import Options, build_request
from coppice.errors import InvalidField
from coppice.limits import MAX_TOP_LOG_PROBS
from coppice.messages.generation import ChatMessage, GenerationRequest

MOST_CHOICES = 16
_COMPLETION_TOKENS = 16  # OpenAI's default of /v1/completions

NEUTRAL: dict[str, tuple[object, ...]] = {
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "suffix": ("",),
    "best_of": (1,),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "metadata": ({},),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
}
"""Fields that are not served, and their values that ask for nothing: clients send these."""


class StreamOptions(BaseModel):
    """How an answer is streamed."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False


class Body(BaseModel):
    """A request's body. A field that is null counts as one that is not there."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: Annotated[str, Field(description="the served model's name; empty: whichever is served")] = ""

    @model_validator(mode="before")
    @classmethod
    def _drop_what_says_nothing(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        return {
            name: value
            for name, value in body.items()
            if value is not None and not (name in NEUTRAL and value in NEUTRAL[name] and name not in cls.model_fields)
        }


class TextPart(BaseModel):
    """A part of a message's content or of a prediction."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text"]
    text: str


def _joined(content: str | list[TextPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class Prediction(BaseModel):
    """What the answer is expected to be."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["content"]
    content: str | list[TextPart]


class Sampled(Body):
    """What completions and chat completions have in common."""

    temperature: Annotated[float, Field(ge=0, le=10, description="0 is greedy")] = 1.0
    top_p: float = 1.0
    top_k: Annotated[int, Field(ge=-1, description="-1 and 0 keep all ids")] = 0
    min_p: float = 0.0
    repetition_penalty: float | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Annotated[dict[str, float], Field(description="by token id")] = {}
    seed: Annotated[int | None, Field(description="of choice 0; choice i has seed + i; none: one is drawn")] = None
    stop: str | list[str] = []
    min_tokens: Annotated[int, Field(ge=0, description="new tokens before which nothing ends the text")] = 0
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] = 1
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    ignore_eos: bool = False
    user: Annotated[str, Field(description="taken, and used for nothing")] = ""
    prediction: Annotated[Prediction | None, Field(description="what the answer is expected to be")] = None
    policy: Annotated[str, Field(description="Coppice's: plain, single:HEAD, route, merge, auto, ...")] = ""
    budget: Annotated[int | None, Field(description="Coppice's: draft nodes verified a step")] = None
    include_metrics: Annotated[bool, Field(description="also answer vLLM's metrics.speculative_decoding")] = False

    @property
    def asks(self) -> Options:
        """The options of choice 0 that all kinds of body have, but for the limit of tokens."""
        try:
            bias = {int(token): value for token, value in self.logit_bias.items()}
        except ValueError:
            raise InvalidField("logit_bias", "has a key that is no token id") from None
        options: Options = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": max(0, self.top_k),
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "logit_bias": bias,
            "stop": self.stop,
            "ignore_eos": self.ignore_eos,
            "policy": self.policy,
            "budget": self.budget,
            "prediction": _joined(self.prediction.content) if self.prediction else "",
        }
        return options

    def seeds(self, drawn: int) -> Iterator[int]:
        """The seed of each choice; `drawn` is used when the body has none."""
        first = drawn if self.seed is None else self.seed
        return iter(range(first, first + self.n))


class CompletionBody(Sampled):
    """The body of POST /v1/completions."""

    prompt: Annotated[str | list[str] | list[int] | list[list[int]], Field(description="text or ids, one or several")]
    max_tokens: Annotated[int, Field(ge=0, description="0 only with echo")] = _COMPLETION_TOKENS
    logprobs: Annotated[
        int | None,
        Field(ge=0, le=MAX_TOP_LOG_PROBS, description="log-probabilities of the tokens, and of so many best"),
    ] = None
    echo: Annotated[bool, Field(description="begin with the prompt; not in a stream")] = False

    @model_validator(mode="after")
    def _echo_fits(self) -> CompletionBody:
        if self.echo and self.stream:
            raise ValueError("echo is served without stream")
        if not self.max_tokens and not self.echo:
            raise ValueError("max_tokens is 0 with echo alone")
        return self

    def prompts(self) -> list[str | list[int]]:
        """Each of the prompts. Raises InvalidField when there is none."""
        several = isinstance(self.prompt, list) and not (self.prompt and isinstance(self.prompt[0], int))
        prompts: Any = self.prompt if several else [self.prompt]
        if not prompts or len(prompts) * self.n > MOST_CHOICES:
            raise InvalidField("prompt", f"with n = {self.n} there are 1 to {MOST_CHOICES // self.n} prompts a request")
        return list(prompts)

    def requests(self, drawn: int) -> list[tuple[int, GenerationRequest]]:
        """The seed and the request of each choice, prompt by prompt. Raises InvalidField."""
        scored = self.logprobs is not None
        options: Options = {**self.asks, "max_new_tokens": self.max_tokens or 1, "log_probs": scored}
        told = {"top_log_probs": self.logprobs or 0, "want_prompt_log_probs": self.echo, "min_tokens": self.min_tokens}
        return [
            (seed, replace(build_request(prompt, **{**options, "seed": seed}), **told))
            for prompt in self.prompts()
            for seed in self.seeds(drawn)
        ]


class Message(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(extra="forbid", strict=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: Annotated[str | None, Field(description="taken, and used for nothing")] = None

    @property
    def plain(self) -> ChatMessage:
        """The message as templates know it."""
        return ChatMessage("system" if self.role == "developer" else self.role, _joined(self.content))


class ChatBody(Sampled):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[int | None, Field(ge=1, description="the older name of max_completion_tokens")] = None
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOG_PROBS, description="only with logprobs")] = 0

    @model_validator(mode="after")
    def _top_fits(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs")
        return self

    def requests(self, drawn: int) -> list[tuple[int, GenerationRequest]]:
        """The seed and the request of each choice. Raises InvalidField."""
        most = self.max_completion_tokens or self.max_tokens or 0
        options: Options = {**self.asks, "max_new_tokens": most, "log_probs": self.logprobs}
        messages = [message.plain for message in self.messages]
        told = {"top_log_probs": self.top_logprobs, "min_tokens": self.min_tokens}
        return [
            (seed, replace(build_request(messages, **{**options, "seed": seed}), **told)) for seed in self.seeds(drawn)
        ]


class TokenizeBody(Body):
    """The body of POST /tokenize."""

    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: Literal[True] = True

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give prompt or messages")
        return self


class DetokenizeBody(Body):
    """The body of POST /detokenize."""

    tokens: list[Annotated[int, Field(ge=0)]]
