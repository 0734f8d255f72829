"""OpenAI's Responses API for text and function tools: a body becomes a chat's, and its answer becomes items.

Nothing is stored: a conversation is sent whole, as with chats.
"""

import contextlib
import itertools
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator
from typing import Annotated, Any, ClassVar, Literal

from fastapi.exceptions import RequestValidationError
from pydantic import Field, ValidationError

from coppice.wire.generation import Started

from ..service import GenerationServicer
from .answers import AnswerChoice, Events
from .bodies import Body, ChatBody, Function, List, Neutral, Object, Text, joined
from .tools import Json


class ItemPart(Object):
    """A part of an item's content."""

    NEUTRAL: ClassVar[Neutral] = {"annotations": None, "logprobs": None}
    type: Literal["input_text", "output_text", "reasoning_text", "text"]
    text: Text


Content = Text | List[ItemPart]


class Item(Object):
    """A message, reasoning, a call or a tool's output."""

    NEUTRAL: ClassVar[Neutral] = {"id": None, "status": None, "summary": None, "encrypted_content": None, "phase": None}
    type: Literal["message", "reasoning", "function_call", "function_call_output"] = "message"
    role: Literal["system", "developer", "user", "assistant"] = "assistant"
    content: Content = ""
    call_id: Text = ""
    name: Text = ""
    arguments: Text = ""
    output: Content = ""

    def add_to(self, messages: list[Json]) -> None:
        """Put the item behind a chat's messages; what an assistant does without a break is one message."""
        if self.type == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": self.call_id, "content": joined(self.output)})
            return
        if self.type == "message" and self.role != "assistant":
            messages.append({"role": self.role, "content": joined(self.content)})
            return
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []})
        if self.type == "function_call":
            function = {"name": self.name, "arguments": self.arguments}
            messages[-1]["tool_calls"].append({"id": self.call_id, "type": "function", "function": function})
        else:
            messages[-1]["content" if self.type == "message" else "reasoning_content"] += joined(self.content)


class Typed(Object):
    """The type of a tool. It stands before all other fields, so that a tool of another type is refused for its type."""

    type: Literal["function"]


class FunctionTool(Function, Typed):
    """A function that the model may call."""

    NEUTRAL: ClassVar[Neutral] = {"output_schema": None, "allowed_callers": None, "defer_loading": (False,)}
    NEUTRAL |= Function.NEUTRAL


class TextConfig(Object):
    """What the text of the answer is."""

    NEUTRAL: ClassVar[Neutral] = {"verbosity": None}
    format: Annotated[Json | None, Field(description="text, json_object or json_schema")] = None


class ResponsesBody(Body):
    """The body of POST /v1/responses."""

    NEUTRAL: ClassVar[Neutral] = {
        "background": (False,),
        "truncation": ("disabled",),
        "top_logprobs": (0,),
        "stream_options": ({}, {"include_obfuscation": False}),
        **dict.fromkeys(("user", "metadata", "store", "service_tier", "safety_identifier", "reasoning", "include")),
        **dict.fromkeys(("prompt_cache_key", "prompt_cache_retention", "max_tool_calls")),
    }
    input: Text | List[Item]
    instructions: Text = ""
    max_output_tokens: Annotated[int | None, Field(ge=1)] = None
    temperature: float = 1.0
    top_p: float = 1.0
    stream: bool = False
    text: TextConfig = TextConfig()
    tools: Annotated[List[FunctionTool], Field(default_factory=list)]
    tool_choice: Text | Json = "auto"
    parallel_tool_calls: bool = True
    policy: Annotated[Text, Field(description="Coppice's: as of chats")] = ""
    budget: Annotated[int | None, Field(description="Coppice's: as of chats")] = None

    def name_of(self, field: str) -> str:
        """What the body calls a field of a chat's request."""
        names = {"messages": "input", "response_format": "text", "grammar": "text", "max_tokens": "max_output_tokens"}
        names |= dict.fromkeys(("text", "chat", "prompt"), "input") | {"max_new_tokens": "max_output_tokens"}
        return names.get(field, field)

    @property
    def chat(self) -> ChatBody:
        """The same as a chat. Raises InvalidField and RequestValidationError."""
        messages: list[Json] = [{"role": "system", "content": self.instructions}] if self.instructions else []
        for item in [Item(role="user", content=self.input)] if isinstance(self.input, str) else self.input:
            item.add_to(messages)
        choice, form = self.tool_choice, self.text.format or {"type": "text"}
        if isinstance(choice, dict) and "name" in choice:
            choice = {"type": choice.get("type"), "function": {"name": choice["name"]}}
        if form.get("type") == "json_schema":
            form = {"type": "json_schema", "json_schema": form}
        functions = [tool.model_dump(exclude_unset=True, exclude={"type"}) for tool in self.tools]
        tools = [{"type": "function", "function": function} for function in functions]
        shared = self.model_dump(include={"temperature", "top_p", "parallel_tool_calls", "policy", "budget"})
        fields = {"messages": messages, "tools": tools, "tool_choice": choice, "response_format": form}
        try:
            return ChatBody.model_validate({**shared, **fields, "max_completion_tokens": self.max_output_tokens})
        except ValidationError as error:
            raise RequestValidationError([{**each, "loc": ("body", *each["loc"])} for each in error.errors()]) from None


_KINDS = {"content": ("message", "msg", "output_text"), "reasoning_content": ("reasoning", "rs", "reasoning_text")}
"""Of texts: an item's type, what its id begins with, and the type of its only part"""


class ResponsesAnswer:
    """The answer to a body: its events, the last of which holds all of it."""

    def __init__(self, service: GenerationServicer, body: ResponsesBody, choice: AnswerChoice) -> None:
        """choice: the only one of the body's chat."""
        self._choice = choice
        self._items: list[Json] = []
        self._told, self._numbers = deque[Json](), itertools.count()  # events that are to be sent
        self._reasoning_tokens = 0  # of events that have some reasoning
        echoed = ("max_output_tokens", "temperature", "top_p", "tool_choice", "parallel_tool_calls")
        self._head = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": service.target.names[0],
            "tools": [{"strict": False, **tool.model_dump(exclude_unset=True)} for tool in body.tools],
            "text": {"format": body.text.format or {"type": "text"}},
            "error": None,
            "instructions": body.instructions or None,
            **{name: getattr(body, name) for name in echoed},
        }

    async def parts(self, events: Events) -> AsyncGenerator[Json, None]:
        """The events of the answer."""
        async with contextlib.aclosing(events):
            async for _, event in events:
                self._choice.take(event)
                if isinstance(event, Started):
                    self._tell("created", response=self._response("in_progress"))
                deltas = self._choice.deltas(event)
                if any("reasoning_content" in delta for delta in deltas):
                    self._reasoning_tokens += len(getattr(event, "ids", ()))
                for delta in deltas:
                    self._take(delta)
                while self._told:
                    yield self._told.popleft()
        reason = self._choice.completion().finish_reason
        status = "incomplete" if reason == "length" else "completed"
        if not self._items:
            self._begin("content")
        self._end(status)
        self._tell(status, response=self._response(status))
        for last in self._told:
            yield last

    async def whole(self, events: Events) -> Json:
        """The whole answer."""
        *_, last = [event async for event in self.parts(events)]
        response: Json = last["response"]
        return response

    def _tell(self, name: str, /, **fields: Any) -> None:
        self._told.append({"type": f"response.{name}", "sequence_number": next(self._numbers), **fields})

    def _tell_of_item(self, name: str, /, **fields: Any) -> None:
        """An event about the last item."""
        self._tell(name, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **fields)

    def _response(self, status: str) -> Json:
        answer = self._choice.completion()
        usage = {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": answer.cached_tokens, "cache_write_tokens": 0},  # none is billed
            "output_tokens": answer.new_tokens,
            "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
            "total_tokens": answer.prompt_tokens + answer.new_tokens,
        }
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        fields = {"status": status, "output": list(self._items), "incomplete_details": cut}
        return {**self._head, **fields, "usage": None if status == "in_progress" else usage}

    def _take(self, delta: Json) -> None:
        """Tell of a chat's delta."""
        ((kind, value),) = delta.items()
        if kind == "tool_calls":
            (call,) = value
            if "id" in call:
                self._begin(kind, call_id=call["id"], name=call["function"]["name"], arguments="")
            elif text := call["function"]["arguments"]:
                self._items[-1]["arguments"] += text
                self._tell_of_item("function_call_arguments.delta", delta=text)
            return
        if not self._items or self._items[-1]["type"] != _KINDS[kind][0]:
            self._begin(kind)
        self._items[-1]["content"][0]["text"] += value
        more: Json = {"logprobs": []} if kind == "content" else {}
        self._tell_of_item(f"{_KINDS[kind][2]}.delta", content_index=0, delta=value, **more)

    def _begin(self, kind: str, **fields: Any) -> None:
        """End the last item and begin one."""
        self._end()
        kind_of_item, prefix, part_type = _KINDS.get(kind, ("function_call", "fc", ""))
        item: Json = {"id": f"{prefix}_{uuid.uuid4().hex}", "type": kind_of_item, "status": "in_progress", **fields}
        if part_type:
            item |= {"role": "assistant", "content": []} if kind == "content" else {"summary": [], "content": []}
        self._items.append(item)
        self._tell("output_item.added", output_index=len(self._items) - 1, item=dict(item))
        if part_type:
            part: Json = {"type": part_type, "text": ""}
            part |= {"annotations": [], "logprobs": []} if kind == "content" else {}
            self._items[-1] = {**item, "content": [part]}
            self._tell_of_item("content_part.added", content_index=0, part=dict(part))

    def _end(self, status: str = "completed") -> None:
        """End the last item. A call is complete in any case."""
        if not self._items:
            return
        item = self._items[-1]
        item["status"] = status if "content" in item else "completed"
        if "content" in item:
            (part,) = item["content"]
            more: Json = {"logprobs": []} if item["type"] == "message" else {}
            self._tell_of_item(f"{part['type']}.done", content_index=0, text=part["text"], **more)
            self._tell_of_item("content_part.done", content_index=0, part=part)
        else:
            self._tell_of_item("function_call_arguments.done", name=item["name"], arguments=item["arguments"])
        self._tell("output_item.done", output_index=len(self._items) - 1, item=item)
