"""A request from a prompt and options: what the options mean, and which values the SDK refuses before it calls."""

import difflib
import inspect
import json
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from typing import Annotated, Any, TypedDict, TypeVar, Unpack, cast, get_type_hints

from pydantic import ValidationError

from coppice import limits
from coppice.errors import InvalidField
from coppice.speculation.sampling import MAX_UINT32, SamplingParams
from coppice.wire.common import Grammar
from coppice.wire.generation import ChatMessage, GenerationRequest

Prompt = str | Sequence[int] | Sequence[ChatMessage] | Sequence[Mapping[str, str]]
F = TypeVar("F", bound=Callable[..., Any])


class Options(TypedDict, total=False):
    """How to answer a prompt; whatever is left out is the server's default, greedy decoding and no stop strings."""

    # Fields of SamplingParams, which says what they mean.
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float | None
    frequency_penalty: float
    presence_penalty: float
    logit_bias: dict[int, float]
    seed: int | None
    sampling: Annotated[SamplingParams | None, "instead of temperature to seed"]
    max_new_tokens: Annotated[int, "limit on new tokens, resume_ids included; 0 is the server's"]
    stop: Annotated[str | Sequence[str], "strings that end the text, excluded from it"]
    policy: Annotated[str, "plain, single:HEAD, route, merge, auto or another that the server has"]
    budget: Annotated[int | None, "draft nodes verified a step"]
    ignore_eos: Annotated[bool, "go on past end-of-text ids"]
    log_probs: Annotated[bool, "also return the target's raw log-probabilities"]
    prediction: Annotated[str | Sequence[int], "what the answer is expected to be: a look-up head drafts from it"]
    structured_outputs: Annotated[
        Mapping[str, Any] | None, "what the whole answer must be: one of json (a schema), regex, choice, grammar (Lark)"
    ]
    resume_ids: Annotated[Sequence[int], "new tokens held from an earlier stream of this request, to go on behind"]
    trees: Annotated[bool, "also return the tree that each step verified"]
    pq: Annotated[bool, "classic p/q rejection of a sampled chain instead of keyed noise"]
    coupled: Annotated[bool, "let drafters use the keyed noise at temperature > 0 (the default)"]
    timeout: Annotated[float, "deadline of the whole call, seconds"]


_DRAWS = SamplingParams.model_fields
MEANINGS = {
    name: str(_DRAWS[name].description if name in _DRAWS else hint.__metadata__[0])
    for name, hint in get_type_hints(Options, include_extras=True).items()
}
"""What each option does, in one line"""


def lists_options(function: F) -> F:
    """Add every option and what it does to a function's docstring."""
    lines = [f"    {name}: {meaning}" for name, meaning in MEANINGS.items()]
    function.__doc__ = "\n".join([inspect.cleandoc(function.__doc__ or ""), "", "Options:", *lines])
    return function


def build_request(prompt: Prompt, caller: str = "build_request", /, **options: Unpack[Options]) -> GenerationRequest:
    """The request of a prompt and Options, of which `timeout` is not a part.

    Raises InvalidField naming what is unusable, TypeError for other options than these in the name of `caller`.
    """
    if unknown := sorted(options.keys() - MEANINGS.keys()):
        near = difflib.get_close_matches(unknown[0], MEANINGS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise TypeError(f"{caller}() got an unexpected keyword argument {unknown[0]!r}{hint}")
    fields: dict[str, Any] = {name: value for name, value in options.items() if name != "timeout"}
    draws = {name: value for name in _DRAWS if (value := fields.pop(name, None)) is not None}
    sampling = fields.pop("sampling", None)
    if sampling is None:
        try:
            sampling = SamplingParams(**draws)
        except ValidationError as error:
            first = error.errors()[0]
            raise InvalidField(str(first["loc"][0]), first["msg"]) from None
    elif draws:
        raise InvalidField("sampling", f"give it or {', '.join(draws)}, not both")
    limits.check_range("max_new_tokens", fields.get("max_new_tokens", 0), 0, MAX_UINT32)
    if fields.get("budget") is not None:
        limits.check_range("budget", fields["budget"], 0, limits.MAX_TREE_NODES)
    structured = fields.pop("structured_outputs", None)
    stop, prediction = fields.pop("stop", ()), fields.pop("prediction", ())
    is_text = isinstance(prediction, str)
    return GenerationRequest(
        **_read_prompt(prompt),
        resume_ids=_read_ids("resume_ids", fields.pop("resume_ids", ())),
        sampling=sampling,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        want_log_probs=fields.pop("log_probs", False),
        want_trees=fields.pop("trees", False),
        prediction_text=prediction if is_text else None,
        prediction_ids=None if is_text or not len(prediction) else _read_ids("prediction", prediction),
        grammar=None if structured is None else _read_grammar(structured),
        **fields,
    )


def to_json(field: str, value: Any) -> str:
    """A value as JSON. Raises InvalidField naming the field when it is no JSON, or is nested too deeply."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidField(field, f"is no JSON: {error}") from None


_GRAMMARS = {"json": "json", "regex": "regex", "choice": "choice", "grammar": "lark"}  # by the option's names


def _read_grammar(structured: Mapping[str, Any]) -> Grammar:
    """The grammar of the option `structured_outputs`."""
    if len(structured) != 1 or not structured.keys() <= _GRAMMARS.keys():
        raise InvalidField("structured_outputs", f"gives one of {', '.join(_GRAMMARS)}")
    [(name, value)] = structured.items()
    field = f"structured_outputs.{name}"
    if name in ("json", "choice") and not isinstance(value, str):
        value = to_json(field, value)
    if not isinstance(value, str):
        raise InvalidField(field, "is no text")
    limits.check_range(field, len(value), 1, limits.MAX_GRAMMAR_CHARS)
    return Grammar(_GRAMMARS[name], value)


def _read_prompt(prompt: Prompt) -> dict[str, Any]:
    """The field of a request that a prompt is: text, ids or chat."""
    if len(prompt) == 0:
        raise InvalidField("prompt", "is empty")
    if isinstance(prompt, str):
        return {"text": prompt}
    if not isinstance(prompt[0], ChatMessage | Mapping):
        return {"ids": _read_ids("prompt", cast(Sequence[int], prompt))}
    parts = cast(Sequence[ChatMessage | Mapping[str, str]], prompt)
    try:
        chat = tuple(ChatMessage(**part) if isinstance(part, Mapping) else part for part in parts)
        texts = [text for message in chat for text in astuple(message)]
    except TypeError as error:
        raise InvalidField("prompt", f"consists of messages with role and content: {error}") from None
    if not all(isinstance(text, str) for text in texts):
        raise InvalidField("prompt", "messages consist of texts alone")
    return {"chat": chat}


def _read_ids(field: str, ids: Sequence[int]) -> tuple[int, ...]:
    """Token ids as plain ints (numpy's are taken too)."""
    try:
        read = tuple(operator.index(token) for token in ids)
    except TypeError:
        raise InvalidField(field, "is neither text, nor token ids, nor messages") from None
    for token in (min(read), max(read)) if read else ():
        limits.check_range(field, token, 0, MAX_UINT32)
    return read
