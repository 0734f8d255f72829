"""What clients of OpenAI's and vLLM's API ask for beside text: forms, tools, reasoning, ids. The model is scripted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import openai
import pytest
from langchain_core.messages import ToolMessage
from langchain_openai import ChatOpenAI
from tokenizers import Tokenizer

from coppice.config.token_bytes import TokenBytes
from coppice.wire.common import Grammar, TopLogProbs
from coppice.wire.generation import Chunk, Finished, Origin, Started
from orchestrator.http.bodies import ChatBody, CompletionBody
from orchestrator.http.tools import ChatFormat
from tests.pipeline.conftest import parts_of
from tests.tiny import make_tokenizer
from tests.unit.test_http import STARTED, Front, Service, error
from tests.unit.test_tools import is_taken

TEMPLATE = "{{ messages }} {{ tools }} <tool_call> </tool_call> <think> </think>"
CHAT = ChatFormat.of(TEMPLATE, TokenBytes(None))
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
ADD: Any = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS, "strict": True}}
ASK: Any = {"messages": [{"role": "user", "content": "What is 1 + 1?"}]}
BOUND = 64


def body_of(fields: dict[str, Any]) -> ChatBody | CompletionBody:
    kind = ChatBody if "messages" in fields else CompletionBody
    return kind.model_validate(fields if "messages" in fields else {"prompt": "a", **fields})


OBJECT = Grammar("json", '{"type": "object"}')
SCHEMA = {"name": "n", "schema": PARAMETERS, "strict": True}
FIELDS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"stop_token_ids": [5, 6]}, {"stop_token_ids": (5, 6)}),
    ({"include_stop_str_in_output": True}, {"include_stop": True}),
    ({}, {"keep_special_tokens": False, "want_prompt_ids": False, "grammar": None, "template_arguments": ""}),
    ({"skip_special_tokens": False}, {"keep_special_tokens": True}),
    ({"return_token_ids": True}, {"want_prompt_ids": True}),
    ({"prompt_logprobs": 3}, {"want_prompt_log_probs": True, "top_log_probs": 3, "want_log_probs": False}),
    ({"prompt_logprobs": 0, "logprobs": 2}, {"want_prompt_log_probs": True, "top_log_probs": 2}),
    *(({**more, "max_tokens": 10**30}, {"max_new_tokens": BOUND}) for more in ({}, ASK)),
    ({**ASK, "max_completion_tokens": 65}, {"max_new_tokens": BOUND}),
    (ASK, {"max_new_tokens": 0, "want_prompt_ids": True}),
    ({"response_format": {"type": "text"}}, {"grammar": None}),
    ({"response_format": {"type": "json_object"}}, {"grammar": OBJECT}),
    (
        {"response_format": {"type": "json_schema", "json_schema": SCHEMA}},
        {"grammar": Grammar("json", json.dumps(PARAMETERS))},
    ),
    ({"structured_outputs": {"regex": "a+"}}, {"grammar": Grammar("regex", "a+")}),
    ({"structured_outputs": {}, "bad_words": []}, {"grammar": None}),
    ({"guided_json": "{}"}, {"grammar": Grammar("json", "{}")}),
    ({"guided_json": {}}, {"grammar": Grammar("json", "{}")}),
    ({"guided_choice": ["a", "é"]}, {"grammar": Grammar("choice", '["a", "é"]')}),
    ({"guided_grammar": "start: /a/"}, {"grammar": Grammar("lark", "start: /a/")}),
    ({**ASK, "tools": [], "tool_choice": "none", "parallel_tool_calls": False}, {"template_arguments": ""}),
    ({**ASK, "chat_template_kwargs": {"enable_thinking": False}}, {"template_arguments": '{"enable_thinking": false}'}),
    (
        {**ASK, "add_generation_prompt": False, "continue_final_message": True},
        {"template_arguments": '{"add_generation_prompt": false, "continue_final_message": true}'},
    ),
]


@pytest.mark.parametrize(("fields", "expected"), FIELDS, ids=str)
def test_every_field_reaches_the_request(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    for request in body_of(fields).requests(BOUND, CHAT):
        assert {name: getattr(request, name) for name in expected} == expected


def called(choice: Any, **more: Any) -> dict[str, Any]:
    """A body with a tool that is called so."""
    return {**ASK, "tools": [ADD], "tool_choice": choice, **more}


NAMED = {"type": "function", "function": {"name": "add"}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "response_format"),
    *(({"response_format": form}, "response_format") for form in ({}, {"type": "json_schema"}, {"type": "grammar"})),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ({"structured_outputs": {"ebnf": "a"}}, "structured_outputs"),
    ({"guided_regex": ""}, "guided_regex"),
    ({"guided_regex": "a" * (1 << 17)}, "guided_regex"),
    ({"bad_words": [""]}, "bad_words"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"tools": [ADD]}, "tools"),
    ({**ASK, "tool_choice": "required"}, "tool_choice"),
    *((called(choice), "tool_choice") for choice in ("any", {}, {**NAMED, "function": {"name": "h"}})),
    (called("required", guided_regex="a"), "guided_regex"),
    ({**ASK, "tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
    ({**ASK, "tools": [{"type": "web_search"}]}, "tools.0.type"),
    ({**ASK, "continue_final_message": True}, "continue_final_message"),
    ({**ASK, "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    ({"messages": [{"role": "tool"}]}, "messages.0.content"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages.0.tool_calls.0.function"),
    ({"input": "Hi", "previous_response_id": "x"}, "previous_response_id"),
    ({"input": [{"type": "item_reference"}]}, "input.0.type"),
    ({"input": "Hi", "text": {"format": {"type": "grammar"}}}, "text"),
    ({"input": "Hi", "tools": [{"type": "web_search"}]}, "tools.0.type"),
    ({"input": "Hi", "tool_choice": "required"}, "tool_choice"),
]


@pytest.mark.parametrize(("fields", "field"), REFUSED, ids=str)
async def test_what_cannot_be_had_is_refused_by_name(fields: dict[str, Any], field: str) -> None:
    chat = "chat/completions" if "messages" in fields else "completions"
    path, text = ("responses", {}) if "input" in fields else (chat, {} if "messages" in fields else {"prompt": "a"})
    response = await Front(Scripted(lambda _: "never")).post(f"/v1/{path}", json={**text, **fields})
    assert error(response)[0] == 400
    assert response.json()["error"]["param"] == field


class Scripted(Service):
    """A service whose target says what a script does of each request."""

    codec: Any = SimpleNamespace(chat_template=TEMPLATE)

    def __init__(self, script: Callable[[Any], str], started: Started = STARTED, **limits: Any) -> None:
        super().__init__(**limits)
        self.script, self.started, self.messages = script, started, list[Any]()

    async def _answer(self, message: Any, send: Callable[[Any], None]) -> None:
        self.messages.append(message)
        text = self.script(message)
        send(self.started)
        for at in range(0, len(text), 3):
            await asyncio.sleep(0)
            send(Chunk(text[at : at + 3], (65 + at,), (Origin.ROOT,), (text[at : at + 3],)))
        send(Finished("eos", 1, len(text), [], [], []))


def call_text(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def test_a_limit_above_the_servers_is_cut_and_a_header_says_so() -> None:
    front = Front(Scripted(lambda _: "Hi", max_new_tokens=BOUND))
    for stream in (False, True):
        for limit in (BOUND, BOUND + 1):
            response = await front.complete(max_tokens=limit, stream=stream)
            assert response.status_code == 200
            assert response.headers.get("x-coppice-max-tokens") == ("64" if limit > BOUND else None)


THOUGHT = "<think>\nHm.\n</think>\n\n"


@pytest.mark.parametrize(
    ("choice", "text", "message", "reason"),
    [
        ("auto", "Hi <tool_", {"content": "Hi <tool_"}, "stop"),
        ("auto", f"{THOUGHT}Hi", {"content": "Hi", "reasoning_content": "Hm."}, "stop"),
        ("auto", call_text("add", a=1), {"content": None, "tool_calls": [("add", '{"a": 1}')]}, "tool_calls"),
        (
            "required",
            f"{call_text('add', a=1)}\n{call_text('add', a=2)}",
            {"content": None, "tool_calls": [("add", '{"a": 1}'), ("add", '{"a": 2}')]},
            "tool_calls",
        ),
        (
            "auto",
            f"{THOUGHT}So: {call_text('add', a=1)}",
            {"content": "So:", "reasoning_content": "Hm.", "tool_calls": [("add", '{"a": 1}')]},
            "tool_calls",
        ),
        ("none", call_text("add", a=1), {"content": call_text("add", a=1)}, "stop"),
    ],
)
async def test_an_answer_has_content_reasoning_and_calls_whole_and_streamed(
    choice: str, text: str, message: dict[str, Any], reason: str
) -> None:
    service = Scripted(lambda _: text)
    front = Front(service)
    whole = (await front.post("/v1/chat/completions", json=called(choice))).json()["choices"][0]
    assert whole["finish_reason"] == reason
    calls = whole["message"].pop("tool_calls", [])
    assert all(len(call["id"]) == 9 and call["type"] == "function" for call in calls)
    expected = {"role": "assistant", **message}
    told = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    assert whole["message"] | ({"tool_calls": told} if told else {}) == expected
    async with openai_client(front).chat.completions.stream(model="target", **called(choice)) as stream:
        async for _ in stream:
            pass
        (streamed,) = (await stream.get_final_completion()).choices
    assert (streamed.finish_reason, streamed.message.content or None) == (reason, message["content"])
    assert getattr(streamed.message, "reasoning_content", None) == message.get("reasoning_content")
    assert [(call.function.name, call.function.arguments) for call in streamed.message.tool_calls or ()] == told
    assert {(m.grammar.kind if m.HasField("grammar") else "") for m in service.messages} == {
        "lark" if choice == "required" else ""
    }
    assert all(json.loads(m.template_arguments)["tools"][0]["function"]["name"] == "add" for m in service.messages)


def openai_client(front: Front) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url="http://127.0.0.1/v1", api_key="none", http_client=front, max_retries=0)


def adds(message: Any) -> str:
    """A model that adds 1 to what the last tool answered by a call, or tells it when it was asked to."""
    last = message.chat.messages[-1]
    if last.role == "tool":
        return f"It is {last.content}."
    known = [each.content for each in message.chat.messages if each.role == "tool"]
    return f"{THOUGHT}Let me see. {call_text('add', a=int((known or ['1'])[-1]), b=1)}"


async def chat_turn(front: Front, messages: list[Any], stream: bool) -> str:
    """One answer by OpenAI's client, and what the tools that it calls say."""
    chats, options = openai_client(front).chat.completions, {"model": "target", "tools": [ADD]}
    if stream:
        async with chats.stream(messages=messages, **options) as events:
            message: Any = (await events.get_final_completion()).choices[0].message
    else:
        message = (await chats.create(messages=messages, **options)).choices[0].message
    messages.append(message)
    for call in message.tool_calls or ():
        added = str(sum(json.loads(call.function.arguments).values()))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": added})
    return message.content


async def langchain_turn(front: Front, messages: list[Any], stream: bool) -> str:
    """The same by LangChain's."""
    model = ChatOpenAI(model="target", base_url="http://127.0.0.1/v1", api_key="none", http_async_client=front)  # type: ignore[arg-type]
    bound, message = model.bind_tools([ADD]), None
    if stream:
        async for chunk in bound.astream(messages):
            message = chunk if message is None else message + chunk
    else:
        message = await bound.ainvoke(messages)
    messages.append(message)
    messages.extend(
        ToolMessage(str(sum(call["args"].values())), tool_call_id=call["id"]) for call in message.tool_calls
    )
    return message.content


async def response_turn(front: Front, items: list[Any], stream: bool) -> str:
    """The same by OpenAI's Responses."""
    client, tool = openai_client(front).responses, {"type": "function", **ADD["function"]}
    options: Any = {"model": "target", "tools": [tool], "store": False, "include": ["reasoning.encrypted_content"]}
    if stream:
        async with client.stream(input=items, **options) as events:
            names = [event.type async for event in events]
            response: Any = await events.get_final_response()
        assert (names[0], names[-1]) == ("response.created", "response.completed")
    else:
        response = await client.create(input=items, **options)
    assert response.status == "completed"
    assert response.usage.total_tokens == 1 + response.usage.output_tokens
    items += response.output
    for call in [item for item in response.output if item.type == "function_call"]:
        answer = str(sum(json.loads(call.arguments).values()))
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": answer})
    return response.output_text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("turn", [chat_turn, langchain_turn, response_turn])
async def test_clients_run_a_session_with_tools(turn: Callable[..., Awaitable[str]], stream: bool) -> None:
    """20 turns of the assistant, of which every other one calls a tool."""
    service, messages = Scripted(adds), list[Any]()
    for _ in range(10):
        messages.append({"role": "user", "content": "And one more?"})
        await turn(Front(service), messages, stream)
        text = await turn(Front(service), messages, stream)
    assert text == "It is 11."
    *_, last = service.messages
    assert len(service.messages) == 20
    roles = ["user", "assistant", "tool", "assistant"]  # of the whole session, as templates want it
    assert [each.role for each in last.chat.messages] == [*roles * 9, *roles[:3]]
    calls = [json.loads(each.tool_calls)[0] for each in last.chat.messages if each.tool_calls]
    assert [call["function"]["arguments"] for call in calls] == [{"a": number, "b": 1} for number in range(1, 11)]
    assert [call["id"] for call in calls] == [each.tool_call_id for each in last.chat.messages if each.role == "tool"]
    assert turn is not response_turn or last.chat.messages[1].reasoning_content == "Hm."


async def test_a_response_has_a_form_a_limit_and_required_calls() -> None:
    service = Scripted(lambda _: "[1]", max_new_tokens=BOUND)
    front = Front(service)
    form = {"format": {"type": "json_schema", "name": "n", "schema": PARAMETERS}}
    asking = {"input": "Hi", "instructions": "Be brief.", "text": form, "max_output_tokens": BOUND + 1}
    response = await front.post("/v1/responses", json=asking)
    assert response.headers["x-coppice-max-tokens"] == "64"
    assert response.json()["output"][0]["content"][0]["text"] == "[1]"
    choice = {"tools": [{"type": "function", **ADD["function"]}], "tool_choice": {"type": "function", "name": "add"}}
    await front.post("/v1/responses", json={"input": [{"role": "user", "content": "Hi"}], **choice})
    first, second = service.messages
    assert [message.role for message in first.chat.messages] == ["system", "user"]
    assert (first.grammar.text, first.max_new_tokens) == (json.dumps(PARAMETERS), BOUND)
    assert second.grammar.kind == "lark"


async def test_ids_and_log_probabilities_of_the_prompt_are_told() -> None:
    top = TopLogProbs(np.array([66, 67]), np.array([-0.5, -1.5], np.float32))
    started = Started(2, "plain", (), 0, 7, (65, 67), (-1.5,), (top,))
    fields = {"return_token_ids": True, "prompt_logprobs": 1}
    scores = {"67": (-1.5, None), "66": (-0.5, 1)}
    rows = [None, {id: {"logprob": value, "rank": rank, "decoded_token": ""} for id, (value, rank) in scores.items()}]
    front = Front(Scripted(lambda _: "Hi!!", started))
    for path, text in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", ASK)):
        answer = (await front.post(path, json={**text, **fields})).json()
        choice = answer["choices"][0]
        told = choice if "prompt" in text else answer
        assert (told["prompt_token_ids"], choice["token_ids"], told["prompt_logprobs"]) == ([65, 67], [65, 68], rows)
    parts = parts_of((await front.complete(return_token_ids=True, stream=True)).text)
    choices = [part["choices"][0] for part in parts]
    assert [choice["prompt_token_ids"] for choice in choices if "prompt_token_ids" in choice] == [[65, 67]]
    assert [token for choice in choices for token in choice.get("token_ids", ())] == [65, 68]


def test_bad_words_are_in_no_text_of_their_grammar(tmp_path: Any) -> None:
    make_tokenizer(tmp_path, 64, None)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    (request,) = body_of({"bad_words": ["bad", 'w"o\n', "é"]}).requests()
    assert request.grammar
    for text, allowed in (("", True), ("ba d\n\nworse", True), ("a bad", False), ('xw"o\n', False), ("né", False)):
        assert is_taken(tokenizer, request.grammar.text, text) == allowed, text
