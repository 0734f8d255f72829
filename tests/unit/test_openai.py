"""What clients of OpenAI's and vLLM's API ask for beside text: forms, tools, reasoning, ids; the model is scripted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from tokenizers import Tokenizer

from coppice.config.token_bytes import TokenBytes
from coppice.errors import InvalidField
from coppice.speculation.grammar import compile_grammar
from coppice.wire.common import Grammar, TopLogProbs
from coppice.wire.generation import Chunk, Finished, Origin, Started
from orchestrator.http.bodies import ChatBody, CompletionBody
from orchestrator.http.tools import FORMATS, REASONING_TAGS, AnswerParser, Call, ChatFormat, Part, ToolFormat
from services.verifier.grammars import vocabulary_of
from tests.pipeline.conftest import parts_of
from tests.tiny import make_tokenizer
from tests.unit.test_http import STARTED, Front, Service, error

HERMES, MISTRAL_ARGS, MISTRAL, LFM, PYTHONIC, LLAMA = FORMATS
THINK = REASONING_TAGS[0]
NAMES = ("f", "g", "get.time")
NESTED = {"a": [1, {"b": "}]</x>\n\"'"}], "é": None, "c": -1.5, "d": True}
F, G = Call("f", json.dumps({"a": 1})), Call("g", "{}")
DEEP = Call("f", json.dumps(NESTED, ensure_ascii=False))
PYTHON_NESTED = """[f(a=[1, {'b': '}]</x>\\n"\\''}], é=None, c=-1.5, d=true), g()]"""

Expected = tuple[str, str, list[Call]]  # content, reasoning, calls
SPLIT: list[tuple[ToolFormat | None, str, Expected]] = [
    (None, "<think>\nWhy?\n\nSo.\n</think>\n\nHi ", ("Hi ", "Why?\n\nSo.", [])),
    (None, "\n<think></think>\n\nHi", ("Hi", "", [])),
    (None, "<think>on and on", ("", "on and on", [])),
    (HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', ("", "", [F])),
    (
        HERMES,
        '<think>x</think>\n\nWait.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>{"name": "g"}</tool_call>\n Done ',
        ("Wait.Done ", "x", [F, G]),
    ),
    (HERMES, f'<tool_call>{{"name": "f", "arguments": {json.dumps(NESTED)}}}', ("", "", [DEEP])),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', ("", "", [F])),
    (LLAMA, '{"name": "f", "parameters": {"a": 1}}', ("", "", [F])),
    (LLAMA, '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}', ("", "", [F, G])),
    (MISTRAL, '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]', ("", "", [F, G])),
    (MISTRAL_ARGS, '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]x1[ARGS]{}', ("", "", [F, G])),
    (PYTHONIC, "[f(a=1), g()]", ("", "", [F, G])),
    (PYTHONIC, PYTHON_NESTED, ("", "", [DEEP, G])),
    (PYTHONIC, "[f(**{'a': 1}), g()]", ("", "", [F, G])),
    (PYTHONIC, '[get.time(zone="UTC")]', ("", "", [Call("get.time", '{"zone": "UTC"}')])),
    (PYTHONIC, '[f(a="\\ud83d\\ude42")]', ("", "", [Call("f", '{"a": "🙂"}')])),
    (LFM, "<|tool_call_start|>[f(a=1)]<|tool_call_end|>Wait", ("Wait", "", [F])),
]
CONTENT: dict[ToolFormat | None, list[str]] = {  # what cannot be read is content
    None: ["", " \n ", " Hi <think> there</think> ", "<thin"],
    HERMES: [
        *("Hi", "5 <tool < 6", "<tool_call>" + "[" * 100_000, '<tool_call>{"name": 5}</tool_call>'),
        *("a <tool_call>{broken}</tool_call> b", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
        '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>',
    ],
    LLAMA: ['{"name": "h", "parameters": {}}', '{"answer": 5}', 'It is {"name": "f", "parameters": {}}'],
    MISTRAL: ['Hm.[TOOL_CALLS][{"name": "f"'],
    MISTRAL_ARGS: ["[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]"],
    PYTHONIC: [
        *("[1, 2]", "[f(1)]", "[f(a=b'x')]", "[h()]", "[f(a=open('x'))]", "[f(a=1 + x)]", "[" * 5000, "[f(a="),
    ],
}
ANSWERS = [*SPLIT, *((form, text, (text, "", [])) for form, texts in CONTENT.items() for text in texts)]


def joined(parts: list[Part | Call]) -> Expected:
    """What the parts of an answer say together."""
    texts = {
        kind: "".join(part.text for part in parts if isinstance(part, Part) and part.kind == kind)
        for kind in ("content", "reasoning_content")
    }
    return *texts.values(), [part for part in parts if isinstance(part, Call)]  # type: ignore[return-value]


@pytest.mark.parametrize(("form", "text", "expected"), ANSWERS, ids=[text[:40] for _, text, _ in ANSWERS])
def test_an_answer_is_split_the_same_in_whatever_slices_it_comes(
    form: ToolFormat | None, text: str, expected: Expected
) -> None:
    for size in (1, 2, 3, 5, 8, 13, len(text) or 1):
        if len(text) / size > 500:
            continue
        parser = AnswerParser(THINK, form, NAMES)
        parts = [part for at in range(0, len(text), size) for part in parser.push(text[at : at + size])]
        assert all(part.text for part in parts if isinstance(part, Part))
        assert joined([*parts, *parser.push("", ended=True)]) == expected


def test_text_is_held_back_only_while_it_may_be_a_tag() -> None:
    parser = AnswerParser(THINK, HERMES, NAMES)
    for text, told in (("Hi", "Hi"), (" <to", ""), ("ol", ""), ("s>", " <tools>"), (" b", " b")):
        assert joined(parser.push(text))[0] == told


def test_what_a_prompt_opens_is_thought() -> None:
    for prompt, text, expected in (
        ("<|assistant|><think>\n", "Why?\n</think>\nHi", ("Hi", "Why?", [])),
        ("<|assistant|><think>\n\n</think>\n\n", "Hi", ("Hi", "", [])),
        ("", "Hi</think>", ("Hi</think>", "", [])),
    ):
        parser = AnswerParser(THINK, HERMES, NAMES)
        parser.begin(prompt)
        assert joined([*parser.push(text), *parser.push("", ended=True)]) == expected


TEMPLATES = Path(__file__).parents[1] / "chat_templates"
KNOWN = {"mistral": MISTRAL, "llama-32": LLAMA}
MARKS = {
    "<tool_call>": HERMES,
    "<tool_call>\n<function=f>": None,
    "[TOOL_CALLS] name [ARGS]": MISTRAL_ARGS,
    "[func_name1(params_name1=params_value1)]": PYTHONIC,
    "<|tool_call_start|>": LFM,
    "{{ messages }}": None,
    "": None,
}


def test_a_template_tells_its_format() -> None:
    for file in sorted(TEMPLATES.glob("*.jinja")):
        chat = ChatFormat.of(file.read_text(encoding="utf-8"), TokenBytes(None))
        assert chat.tools == KNOWN.get(file.stem), file.stem
        assert (chat.reasoning == THINK) == (file.stem in ("qwen-3", "deepseek-r1", "smollm-3", "names")), file.stem
    for template, form in MARKS.items():
        assert ChatFormat.of(template, TokenBytes(None)).tools == form


DEFS = {"$defs": {"P": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}}}
TOOLS: list[tuple[str, dict[str, Any]]] = [
    ("f", {"properties": {"o": {"type": "string"}, "a": {"type": "integer"}}, "required": ["a"]}),
    ("g", {}),
    ("at", {**DEFS, "properties": {"p": {"$ref": "#/$defs/P"}}, "required": ["p"], "additionalProperties": False}),
]
CALLS: list[tuple[ToolFormat, list[str], list[str]]] = [  # by format: what is taken, and what is not
    (
        HERMES,
        [
            '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
            '<tool_call>\n{"name": "at", "arguments": {"p": {"x": 1}}}\n</tool_call>\n'
            '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
        ],
        [
            "Hi",
            '<tool_call>\n{"name": "h", "arguments": {}}\n</tool_call>',
            '<tool_call>\n{"name": "at", "arguments": {"p": {"x": "1"}}}\n</tool_call>',
        ],
    ),
    (MISTRAL, ['[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]'], ["[TOOL_CALLS][]"]),
    (MISTRAL_ARGS, ['[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}'], ["[TOOL_CALLS]f"]),
    (LLAMA, ['{"name": "f", "parameters": {"a": 1}}'], ['{"name": "f", "parameters": {"a": "x"}}', "{}"]),
    (
        PYTHONIC,
        ['[f(**{"a": 1})]', '[f(**{"o": "x", "a": 1}), at(**{"p": {"x": 1}})]'],
        ["[]", "[f(a=1)]", '[f(**{"o": "x"})]', "[h(**{})]"],
    ),
    (LFM, ['<|tool_call_start|>[f(**{"a": 1})]<|tool_call_end|>'], ['[f(**{"a": 1})]']),
]


@pytest.fixture(scope="module", params=[False, True], ids=["tags as text", "tags as tokens"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder, 512, None)
    made: Tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    if request.param:
        made.add_special_tokens(["[TOOL_CALLS]", "[ARGS]", "<|tool_call_start|>"])
        made.add_tokens(["<tool_call>", "</tool_call>"])
    return made


def is_taken(tokenizer: Tokenizer, grammar: str, text: str) -> bool:
    """Whether a text is one of a grammar's, token by token."""
    size, ids = tokenizer.get_vocab_size(), tokenizer.encode(text).ids
    vocabulary = vocabulary_of(Tokenizer.from_str(tokenizer.to_str()), size, [0])
    matcher = compile_grammar(vocabulary, "lark", grammar)
    return matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and bool(matcher.is_accepting())


@pytest.mark.parametrize(("form", "taken", "refused"), CALLS)
def test_what_is_required_is_a_call_that_is_read(
    tokenizer: Tokenizer, form: ToolFormat, taken: list[str], refused: list[str]
) -> None:
    names, special = {name for name, _ in TOOLS}, TokenBytes(tokenizer).special
    several, single = (form.grammar(TOOLS, parallel, special).text for parallel in (True, False))
    for text in taken:
        content, _, calls = joined(AnswerParser(None, form, names).push(text, ended=True))
        assert (content, {call.name for call in calls} <= names) == ("", True)
        assert is_taken(tokenizer, several, text), text
        assert is_taken(tokenizer, single, text) == (len(calls) == 1), text
    assert not [text for text in refused if is_taken(tokenizer, several, text)]


def test_tools_that_cannot_be_called_are_refused_by_name() -> None:
    long: list[tuple[str, dict[str, Any]]] = [("f", {"description": "x" * (1 << 17)})]
    for form, tools in ((PYTHONIC, [("get-time", {})]), (HERMES, long)):
        with pytest.raises(InvalidField, match=r"^tools: "):
            form.grammar(tools, True, {})


# --- the API ---


TEMPLATE = "{{ messages }} {{ tools }} <tool_call> </tool_call> <think> </think>"
CHAT = ChatFormat.of(TEMPLATE, TokenBytes(None))
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
ADD: Any = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS, "strict": True}}
FUNCTION = {"type": "function", **ADD["function"]}  # as responses have it
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


@pytest.mark.parametrize(("fields", "expected"), FIELDS)
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


@pytest.mark.parametrize(("fields", "field"), REFUSED)
async def test_what_cannot_be_had_is_refused_by_name(fields: dict[str, Any], field: str) -> None:
    chat = "chat/completions" if "messages" in fields else "completions"
    path, text = ("responses", {}) if "input" in fields else (chat, {} if "messages" in fields else {"prompt": "a"})
    response = await Front(Scripted(lambda _: "never")).post(f"/v1/{path}", json={**text, **fields})
    assert error(response)[0] == 400
    assert response.json()["error"]["param"] == field


class Scripted(Service):
    """A service whose target says what a script does of each request."""

    codec: Any = SimpleNamespace(chat_template=TEMPLATE)
    reason: Any = "eos"

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
        send(Finished(self.reason, 1, len(text), [], [], []))


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
    ("choice", "text", "expected"),
    [
        ("auto", "Hi <tool_", ("Hi <tool_", None, [])),
        ("auto", f"{THOUGHT}Hi", ("Hi", "Hm.", [])),
        ("auto", call_text("add", a=1), (None, None, [{"a": 1}])),
        ("required", f"{call_text('add', a=1)}\n{call_text('add', a=2)}", (None, None, [{"a": 1}, {"a": 2}])),
        ("auto", f"{THOUGHT}So: {call_text('add', a=1)}", ("So:", "Hm.", [{"a": 1}])),
        ("none", call_text("add", a=1), (call_text("add", a=1), None, [])),
    ],
)
async def test_an_answer_has_content_reasoning_and_calls_whole_and_streamed(
    choice: str, text: str, expected: tuple[str | None, str | None, list[dict[str, Any]]]
) -> None:
    service = Scripted(lambda _: text)
    for stream in (False, True):
        answer = await openai_choice(Front(service), stream, **called(choice))
        message, calls = answer.message, answer.message.tool_calls or ()
        assert all((len(call.id), call.type, call.function.name) == (9, "function", "add") for call in calls)
        arguments = [json.loads(call.function.arguments) for call in calls]
        assert (message.content or None, getattr(message, "reasoning_content", None), arguments) == expected
        assert stream or message.content == expected[0]
        assert answer.finish_reason == ("tool_calls" if calls else "stop")
    for message in service.messages:
        assert message.grammar.kind == ("lark" if choice == "required" else "")
        assert json.loads(message.template_arguments)["tools"][0]["function"]["name"] == "add"


SERVER: Any = {"base_url": "http://127.0.0.1/v1", "api_key": "none", "max_retries": 0}


def openai_client(front: Front) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(http_client=front, **SERVER)


def adds(message: Any) -> str:
    """A model that adds 1 to what the last tool answered by a call, or tells it when it was asked to."""
    last = message.chat.messages[-1]
    if last.role == "tool":
        return f"It is {last.content}."
    known = [each.content for each in message.chat.messages if each.role == "tool"]
    return f"{THOUGHT}Let me see. {call_text('add', a=int((known or ['1'])[-1]), b=1)}"


def add(a: int, b: int) -> str:
    """The sum of two numbers."""
    return str(a + b)


async def openai_choice(front: Front, stream: bool, **options: Any) -> Any:
    """A chat's answer by OpenAI's client."""
    chats = openai_client(front).chat.completions
    if not stream:
        return (await chats.create(model="target", **options)).choices[0]
    async with chats.stream(model="target", **options) as events:
        return (await events.get_final_completion()).choices[0]


async def litellm_choice(front: Front, stream: bool, **options: Any) -> Any:
    """The same by LiteLLM."""
    import litellm

    options |= {"model": "openai/target", "client": openai_client(front), "stream": stream}
    answer: Any = await litellm.acompletion(**options)
    if stream:
        answer = litellm.stream_chunk_builder([part async for part in answer])
    return answer.choices[0]


async def chat_turn(choice_of: Any, front: Front, messages: list[Any], stream: bool) -> str:
    """One answer, and what the tools that it calls say."""
    message = (await choice_of(front, stream, messages=messages, tools=[ADD])).message
    messages.append(message)
    for call in message.tool_calls or ():
        answer = add(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": answer})
    return message.content


async def response_turn(front: Front, items: list[Any], stream: bool) -> str:
    """The same by OpenAI's Responses."""
    client = openai_client(front).responses
    options: Any = {"model": "target", "tools": [FUNCTION], "store": False, "include": ["reasoning.encrypted_content"]}
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
        answer = add(**json.loads(call.arguments))
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": answer})
    return response.output_text


async def agents_turn(front: Front, items: list[Any], stream: bool) -> str:
    """All answers to a question by OpenAI's Agents, which call the tools."""
    import agents

    model = agents.OpenAIResponsesModel("target", openai_client(front))
    agent = agents.Agent("adder", tools=[agents.function_tool(add)], model=model)
    config = agents.RunConfig(tracing_disabled=True)  # a trace is sent to OpenAI
    if stream:
        run = agents.Runner.run_streamed(agent, items, run_config=config)
        async for _ in run.stream_events():
            pass
    else:
        run = await agents.Runner.run(agent, items, run_config=config)
    items[:] = run.to_input_list()
    return run.final_output


TURNS: dict[str, Callable[[Front, list[Any], bool], Awaitable[str]]] = {
    "openai's chats": partial(chat_turn, openai_choice),
    "openai's responses": response_turn,
    "litellm": partial(chat_turn, litellm_choice),
    "openai-agents": agents_turn,
}


@pytest.mark.parametrize(
    ("client", "stream"),
    [(client, stream) for stream in (False, True) for client in TURNS if "openai" in client or stream],
)
async def test_clients_run_a_session_with_tools(client: str, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """8 turns of the assistant, of which every other one calls a tool."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would download one
    service, messages = Scripted(adds), list[Any]()
    while len(service.messages) < 8:
        if len(service.messages) % 2 == 0:
            messages.append({"role": "user", "content": "And one more?"})
        text = await TURNS[client](Front(service), messages, stream)
    assert text == "It is 5."
    *_, last = service.messages
    assert len(service.messages) == 8
    roles = ["user", "assistant", "tool", "assistant"]  # of the whole session, as templates want it
    assert [each.role for each in last.chat.messages] == [*roles * 3, *roles[:3]]
    calls = [json.loads(each.tool_calls)[0] for each in last.chat.messages if each.tool_calls]
    assert [call["function"]["arguments"] for call in calls] == [{"a": number, "b": 1} for number in range(1, 5)]
    assert [call["id"] for call in calls] == [each.tool_call_id for each in last.chat.messages if each.role == "tool"]
    assert last.chat.messages[1].reasoning_content == "Hm."


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("text", ["", "Hi", THOUGHT, f"{THOUGHT}So: {call_text('add', a=1)}", call_text("add") * 2])
async def test_strict_clients_accept_every_answer(text: str, stream: bool) -> None:
    for path, body, whole, part in (
        ("chat/completions", called("auto"), ChatCompletion, ChatCompletionChunk),
        ("responses", {"input": "Hi", "tools": [FUNCTION]}, Response, ResponseStreamEvent),
    ):
        for reason, status in (("eos", "completed"), ("length", "incomplete")):
            service = Scripted(lambda _: text)
            service.reason = reason
            answer = await Front(service).post(f"/v1/{path}", json={**body, "stream": stream})
            parts = parts_of(answer.text) if stream else [answer.json()]
            for each in parts:
                TypeAdapter(part if stream else whole).validate_python(each)
            if path == "responses":
                response = parts[-1].get("response", parts[-1])
                *_, item = response["output"]
                assert response["status"] == status
                assert item["status"] == ("completed" if item["type"] == "function_call" else status)


async def test_a_response_has_a_form_a_limit_and_required_calls() -> None:
    service = Scripted(lambda _: "[1]", max_new_tokens=BOUND)
    front = Front(service)
    form = {"format": {"type": "json_schema", "name": "n", "schema": PARAMETERS}}
    asking = {"input": "Hi", "instructions": "Be brief.", "text": form, "max_output_tokens": BOUND + 1}
    response = await front.post("/v1/responses", json=asking)
    assert response.headers["x-coppice-max-tokens"] == "64"
    assert response.json()["output"][0]["content"][0]["text"] == "[1]"
    choice = {"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "add"}}
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
