"""Bodies of OpenAI's requests: every field is served or refused by name, none is ignored."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from coppice.client.request import MEANINGS, Prompt, build_request, to_json
from coppice.errors import InvalidField
from coppice.limits import MAX_BIASES, MAX_CHAT_MESSAGES, MAX_CONTEXT, MAX_TOKEN_ID, MAX_TOP_LOG_PROBS
from coppice.speculation.sampling import MAX_UINT32, SamplingParams
from coppice.wire.generation import ChatMessage, GenerationRequest

from .tools import AnswerParser, ChatFormat, Json

T = TypeVar("T")

MOST_CHOICES = 16
_MOST_FIELDS = 64  # of an object: every refused field costs an error
_MOST_TOOLS = 128
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")  # the only spelling: two keys are two ids
_COMPLETION_TOKENS = 16  # OpenAI's default of /v1/completions
_MOST_LOG_PROBS = 2 * MAX_CONTEXT  # of one answer: a few megabytes of JSON

List = Annotated[list[T], Field(fail_fast=True)]  # reports its first bad entry alone: it may have a million


def _check_unicode(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("holds half of a surrogate pair") from None
    return text


Text = Annotated[str, AfterValidator(_check_unicode)]  # A string that can be sent on: JSON can spell others.
Neutral = dict[str, tuple[object, ...] | None]


def _allow_null(schema: Json) -> None:
    for name in schema["properties"].keys() - {*schema.get("required", ())}:
        schema["properties"][name] = {"anyOf": [schema["properties"][name], {"type": "null"}]}
    schema["additionalProperties"] = {"type": "null"}


class Object(BaseModel):
    """A JSON object. A field that is null counts as one that is not there."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, json_schema_extra=_allow_null)
    NEUTRAL: ClassVar[Neutral] = {}
    """Fields that are not served, and their values that ask for nothing; None: any, as a hint changes no answer"""

    @model_validator(mode="before")
    @classmethod
    def _drop_null_and_neutral(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        if len(fields) > _MOST_FIELDS:
            raise InvalidField("body", f"an object has {_MOST_FIELDS} fields at most")
        neutral = {name: () if name in cls.model_fields else cls.NEUTRAL.get(name, ()) for name in fields}
        return {
            name: value
            for name, value in fields.items()
            if not (value is None or (values := neutral[name]) is None or value in values)
        }


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
        names |= {"stop_ids": "stop_token_ids", "template_arguments": "chat_template_kwargs"}
        return names.get(field, field)


class TextPart(Object):
    """A part of a message's content or of a prediction."""

    NEUTRAL = {"cache_control": None, "annotations": None}
    type: Literal["text"]
    text: Text


def joined(content: str | list[Any]) -> str:
    """The text of content, which may be parts that have texts."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


class Prediction(Object):
    """What the answer is expected to be."""

    type: Literal["content"]
    content: Text | List[TextPart]


def _read_response_format(response_format: Json) -> Json:
    """A response_format as the SDK's structured_outputs; {} for any text. Raises InvalidField."""
    match response_format:
        case {"type": "text"}:
            return {}
        case {"type": "json_object"}:
            return {"json": {"type": "object"}}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return {"json": schema}
    raise InvalidField("response_format", "is of type text, json_object or json_schema, which has a schema")


def _exclude(words: list[str]) -> Json:
    """Any text in which none of some words is."""
    if "" in words:
        raise InvalidField("bad_words", "one is empty")
    texts = " | ".join(json.dumps(word, ensure_ascii=False) for word in words)
    return {"grammar": f"start: TEXT\nTEXT: ANY & ~(ANY ({texts}) ANY)\nANY: /(?s:.*)/"}


FORMS: dict[str, Callable[[Any], Json]] = {
    "structured_outputs": dict,
    "response_format": _read_response_format,
    "guided_json": lambda schema: {"json": schema},
    "guided_regex": lambda regex: {"regex": regex},
    "guided_choice": lambda texts: {"choice": texts},
    "guided_grammar": lambda grammar: {"grammar": grammar},
    "bad_words": _exclude,
}
"""Fields that say what an answer must be, and what they are as the SDK's structured_outputs"""


class Sampled(Body):
    """What completions and chat completions have in common; SamplingParams bounds the fields of its names."""

    NEUTRAL = {
        "tools": ([],),
        "functions": ([],),
        "tool_choice": ("none", "auto"),
        "parallel_tool_calls": (True, False),
        "modalities": (["text"],),
        "suffix": ("",),
        "best_of": (1,),
        "chat_template_kwargs": ({},),
        "add_generation_prompt": (True,),
        "spaces_between_special_tokens": (True,),
        "use_beam_search": (False,),
        "length_penalty": (1,),
        **dict.fromkeys(("user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier")),
        **dict.fromkeys(("reasoning_effort", "verbosity", "guided_decoding_backend")),
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
    stop_token_ids: List[Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]] = []
    include_stop_str_in_output: Annotated[bool, Field(description="also the id that ended the text")] = False
    skip_special_tokens: bool = True
    bad_words: Annotated[List[Text], Field(description="texts that are nowhere in the answer")] = []
    response_format: Annotated[Json | None, Field(description="text, json_object or json_schema")] = None
    structured_outputs: Annotated[Json | None, Field(description="one of json, regex, choice, grammar (Lark)")] = None
    guided_json: Text | Json | None = None
    guided_regex: Text | None = None
    guided_choice: List[Text] | None = None
    guided_grammar: Text | None = None
    min_tokens: Annotated[int, Field(ge=0, description="new tokens before which nothing ends the text")] = 0
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] = 1
    stream: bool = False
    stream_options: Annotated[StreamOptions, Field(description="only with stream")] = StreamOptions()
    ignore_eos: bool = False
    prediction: Annotated[Prediction | None, Field(description="what the answer is expected to be")] = None
    prompt_logprobs: Annotated[
        int | None, Field(ge=0, le=MAX_TOP_LOG_PROBS, description="of the prompt's ids, and of so many best ones")
    ] = None
    return_token_ids: Annotated[bool, Field(description="also answer the ids of prompt and text")] = False
    policy: Annotated[Text, Field(description="Coppice's: plain, single:HEAD, route, merge, auto, ...")] = ""
    budget: Annotated[int | None, Field(description="Coppice's: draft nodes verified a step")] = None
    include_metrics: Annotated[bool, Field(description="also answer vLLM's metrics.speculative_decoding")] = False

    @property
    def wants_log_probs(self) -> bool:
        """Whether log-probabilities are wanted."""
        log_probs = getattr(self, "logprobs", None)
        return log_probs is not None and log_probs is not False  # 0 asks for those of the answer's own tokens

    @property
    def echoes(self) -> bool:
        """Whether the answer begins with the prompt."""
        return getattr(self, "echo", False)

    @property
    def limit(self) -> int:
        """New tokens that are asked for, 0: as many as the server gives."""
        return getattr(self, "max_completion_tokens", None) or getattr(self, "max_tokens", None) or 0

    def name_of(self, field: str) -> str:
        """What the body calls a field of a request."""
        if field == "grammar":
            return self._form[0] or "tools"
        return super().name_of(field)

    @property
    def _form(self) -> tuple[str, Json]:
        """The field that says what the answer must be, and what that is; ("", {}) for none. Raises InvalidField."""
        forms = {}
        for name, read in FORMS.items():
            value = getattr(self, name)
            if value not in (None, []) and (form := read(value)):
                forms[name] = form
        if len(forms) > 1:
            first, second, *_ = forms
            raise InvalidField(second, f"cannot be had beside {first}")
        return next(iter(forms.items()), ("", {}))

    def _requests(self, prompts: Sequence[Prompt], most: int, **fields: Any) -> list[GenerationRequest]:
        """The request of each choice, prompt by prompt, of `most` tokens; a seed is drawn when the body has none.

        fields: of GenerationRequest, that are no options of the SDK. Raises InvalidField.
        """
        if self.stream_options.include_usage and not self.stream:
            raise InvalidField("stream_options", "are for a stream alone")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidField("prompt_logprobs", "are not streamed")
        if self.min_tokens > most > 0:
            limit = self.name_of("max_new_tokens")
            raise InvalidField("min_tokens", f"{self.min_tokens} is more than {limit}, {most}")
        name, form = self._form
        if name and fields.get("grammar"):
            raise InvalidField(name, "cannot be had beside a call that is required")
        first = SamplingParams().with_seed().seed if self.seed == -1 else self.seed
        options: Any = {name: value for name, value in self if name in MEANINGS} | {
            "top_k": max(0, self.top_k),
            "max_new_tokens": most,
            "logit_bias": _read_bias(self.logit_bias),
            "prediction": joined(self.prediction.content) if self.prediction else "",
            "structured_outputs": form or None,
            "log_probs": self.wants_log_probs,
            "seed": first + self.n - 1,  # the largest is checked
        }
        more: Any = {
            "min_tokens": self.min_tokens,
            "stop_token_ids": tuple(self.stop_token_ids),
            "include_stop": self.include_stop_str_in_output,
            "keep_special_tokens": not self.skip_special_tokens,
            "want_prompt_ids": self.return_token_ids,
            "want_prompt_log_probs": self.prompt_logprobs is not None,
            "top_log_probs": max(self.prompt_logprobs or 0, fields.pop("top_log_probs")),
            **{name: value for name, value in fields.items() if value},
        }
        requests = [replace(build_request(prompt, **options), **more) for prompt in prompts]
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

    def requests(self, bound: int = MAX_UINT32, chat: ChatFormat | None = None) -> list[GenerationRequest]:
        """The request of each choice, prompt by prompt, of at most `bound` tokens. Raises InvalidField."""
        if not self.max_tokens and not self.echo:
            raise InvalidField("max_tokens", "is 0 with echo alone")
        several = isinstance(self.prompt, list) and not (self.prompt and isinstance(self.prompt[0], int))
        prompts: Any = self.prompt if several else [self.prompt]
        if not prompts or len(prompts) * self.n > MOST_CHOICES:
            raise InvalidField("prompt", f"with n = {self.n} there are 1 to {MOST_CHOICES // self.n} prompts a request")
        scores_prompt = self.echo and self.wants_log_probs
        most = min(self.max_tokens or 1, bound)
        return self._requests(prompts, most, top_log_probs=self.logprobs or 0, want_prompt_log_probs=scores_prompt)


def _as_object(arguments: str | Json) -> Any:
    """Arguments as templates know them: an object, where they are one."""
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    return arguments


class CalledFunction(Object):
    """The function that an assistant called."""

    NEUTRAL = {"parsed_arguments": None}
    name: Text
    arguments: Annotated[
        Text | Json, AfterValidator(_as_object), Field(description="a JSON object, as text or as itself")
    ] = {}


class ToolCall(Object):
    """A call that an assistant made."""

    NEUTRAL = {"index": None}
    id: Text = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Object):
    """One message of a conversation."""

    NEUTRAL = {"annotations": ([],), "refusal": None, "provider_specific_fields": None, "parsed": None}

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        Text | List[TextPart] | None, Field(validate_default=True, description="null is an assistant's alone")
    ] = None
    reasoning_content: Annotated[Text, Field(description="what an assistant thought: for the template")] = ""
    reasoning: Annotated[Text, Field(description="the same")] = ""
    name: Annotated[Text, Field(description="who speaks: for the template")] = ""
    tool_calls: Annotated[List[ToolCall], Field(max_length=_MOST_TOOLS)] = []
    tool_call_id: Annotated[Text, Field(description="of the call that a tool answers")] = ""

    @field_validator("content")
    @classmethod
    def _null_is_an_assistants(cls, content: Any, others: ValidationInfo) -> Any:
        if content is None and others.data.get("role") != "assistant":
            raise PydanticCustomError("null", "is null")
        return content

    @property
    def plain(self) -> ChatMessage:
        """The message as templates know it. Raises InvalidField."""
        role = "system" if self.role == "developer" else self.role
        calls = to_json("messages", [call.model_dump() for call in self.tool_calls]) if self.tool_calls else ""
        reasoning = self.reasoning_content or self.reasoning
        return ChatMessage(role, joined(self.content or ""), reasoning, self.name, calls, self.tool_call_id)


Messages = Annotated[List[Message], Field(min_length=1, max_length=MAX_CHAT_MESSAGES)]


class Function(Object):
    """A function that the model may call."""

    NEUTRAL = {"strict": None}
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]
    description: Text = ""
    parameters: Annotated[Json, Field(description="a JSON schema of an object")] = {}


class Tool(Object):
    """A tool that the model may use."""

    NEUTRAL = {"cache_control": None}
    type: Literal["function"]
    function: Function


class Rendered(Body):
    """What a conversation is rendered with."""

    tools: Annotated[List[Tool], Field(max_length=_MOST_TOOLS)] = []
    chat_template_kwargs: Annotated[Json, Field(description="names of the template's own")] = {}
    add_generation_prompt: Annotated[bool, Field(description="up to where the assistant answers")] = True
    continue_final_message: Annotated[bool, Field(description="go on in the last message")] = False

    @property
    def template_arguments(self) -> str:
        """What the template is given beside the messages, as JSON; "" for what it always is. Raises InvalidField."""
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidField("continue_final_message", "needs an add_generation_prompt of false")
        tools = [tool.model_dump(exclude_unset=True) for tool in self.tools]
        arguments: Json = {"tools": tools} if tools else {}
        arguments |= {} if self.add_generation_prompt else {"add_generation_prompt": False}
        arguments |= {"continue_final_message": True} if self.continue_final_message else {}
        own = self.chat_template_kwargs
        if reserved := own.keys() & {"tools", "add_generation_prompt", "continue_final_message"}:
            raise InvalidField("chat_template_kwargs", f"{min(reserved)} is a field of the body")
        return to_json("chat_template_kwargs", arguments | own) if arguments or own else ""


class ChatBody(Sampled, Rendered):
    """The body of POST /v1/chat/completions."""

    messages: Messages
    max_tokens: Annotated[int | None, Field(ge=1, description="the older name of max_completion_tokens")] = None
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOG_PROBS, description="only with logprobs")] = 0
    tool_choice: Annotated[Text | Json, Field(description="none, auto, required or a function by its name")] = "auto"
    parallel_tool_calls: Annotated[bool, Field(description="false: one call, where one is required")] = True

    def requests(self, bound: int = MAX_UINT32, chat: ChatFormat | None = None) -> list[GenerationRequest]:
        """The request of each choice, of at most `bound` tokens. Raises InvalidField.

        chat: what the target's templates have it write.
        """
        if self.top_logprobs and not self.logprobs:
            raise InvalidField("top_logprobs", "needs logprobs")
        required, tags = self._required, list[str]()
        fields: Json = {"top_log_probs": self.top_logprobs, "template_arguments": self.template_arguments}
        if self.tools:
            if chat is None or chat.tools is None:
                raise InvalidField("tools", "this target's chat template has no form of calls that is known here")
            tags += chat.tools.tags if self._may_call else ()
            if required:
                tools = [(tool.name, tool.parameters) for tool in required]
                fields["grammar"] = chat.tools.grammar(tools, self.parallel_tool_calls, chat.tokens.special)
        if chat and chat.reasoning:
            tags += chat.reasoning
            fields["want_prompt_ids"] = True
        fields["keep_special_tokens"] = bool(chat and not chat.tokens.special.keys().isdisjoint(tags))
        prompt = [message.plain for message in self.messages]
        return self._requests([prompt], min(self.limit, bound), **fields)

    @property
    def _may_call(self) -> bool:
        """Whether the answer may hold calls."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def _required(self) -> list[Function]:
        """The functions of which one must be called; none where the model is free. Raises InvalidField."""
        functions = [tool.function for tool in self.tools]
        match self.tool_choice:
            case "none" | "auto":
                return []
            case {"type": "function", "function": {"name": str(name)}}:
                functions = [function for function in functions if function.name == name]
            case choice if choice != "required":
                raise InvalidField("tool_choice", "is none, auto, required or a function by its name")
        if not functions:
            raise InvalidField("tool_choice", "names no function in tools")
        return functions

    def parser(self, chat: ChatFormat | None, request: GenerationRequest) -> AnswerParser | None:
        """What splits the answer to a request of this body; None: its text is the content."""
        form, _ = self._form
        if form and not self.bad_words:
            return None
        # Nothing is thought in front of a call that is required.
        reasoning = chat.reasoning if chat and (form or not request.grammar) else None
        tools = chat.tools if chat and self._may_call else None
        if not reasoning and not tools:
            return None
        return AnswerParser(reasoning, tools, {tool.function.name for tool in self.tools})


class TokenizeBody(Rendered):
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
        path, reason = error.field.split("."), str(error).partition(": ")[2]
        is_form = not {"grammar", "structured_outputs"}.isdisjoint(path)
        raise InvalidField(body.name_of("grammar" if is_form else path[-1]), reason) from None


def check_log_probs(requests: Sequence[GenerationRequest], context: int, new_tokens: int) -> None:
    """Raise InvalidField when choices, of `new_tokens` if they set no limit, may tell too many log-probabilities."""
    count = 0
    for request in requests:
        prompt = context if request.chat else len(request.ids or (request.text or "").encode())
        tokens = prompt if request.want_prompt_log_probs else 0
        tokens += (request.max_new_tokens or new_tokens) if request.want_log_probs else 0
        tokens = min(context, tokens)
        count += tokens * (1 + request.top_log_probs)
    if count > _MOST_LOG_PROBS:
        raise InvalidField("logprobs", f"may be {count} in all choices, allowed are {_MOST_LOG_PROBS}")
