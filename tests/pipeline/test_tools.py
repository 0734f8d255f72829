"""A call that is required is made by the real target under every policy, and what is asked of ids is told of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import grpc
import httpx
import pytest
from tokenizers import Tokenizer

from coppice.config.token_bytes import TokenBytes
from coppice.rpc.channels import Stub
from coppice.stack.launch import Stack
from coppice.v1 import generation_pb2
from coppice.wire.generation import read_response
from tests.pipeline.conftest import NAMES, SPECIAL, call, parts_of
from tests.unit.test_http import Front, Service

PARAMETERS = {
    "type": "object",
    "properties": {"unit": {"enum": ["celsius", "kelvin"]}, "places": {"type": "array", "items": {"enum": [1, 2]}}},
    "required": ["unit"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS, "strict": True}}
    for name in ("weather", "climate")
]
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "How warm is it?"}], "tools": TOOLS, "seed": 5}
NAMED = {"type": "function", "function": {"name": "climate"}}
OPTIONS = {"parallel_tool_calls": False, "max_tokens": 160}
MARKS = (*SPECIAL[:3], "<|python_start|>", "<|python_tag|>")
"""of templates: Mistral's two forms, and those of LFM2, Llama 4 and Llama 3; the stack's own has Hermes'"""


class Relay(Service):
    """A front that takes a stack's target for one with another chat template."""

    def __init__(self, stack: Stack, template: str) -> None:
        super().__init__()
        self.codec, self.address = SimpleNamespace(chat_template=template), stack.address
        self.token_bytes = TokenBytes(Tokenizer.from_file(str(stack.spec.target / "tokenizer.json")))

    async def _answer(self, message: Any, send: Callable[[Any], None]) -> None:
        async with grpc.aio.insecure_channel(self.address) as channel:
            async for response in Stub(channel, generation_pb2).Generate(message):
                send(read_response(response))


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize(("template", "choice"), [("", NAMED), *((mark, "required") for mark in ("", *MARKS))])
async def test_a_required_call_is_the_same_under_every_policy(
    stack: Stack, template: str, choice: Any, temperature: float
) -> None:
    body = {**ASK, **OPTIONS, "tool_choice": choice, "temperature": temperature}
    own = f"http://{stack.orchestrator.http}"
    async with Front(Relay(stack, template)) if template else httpx.AsyncClient(base_url=own, timeout=60) as front:

        async def ask(**fields: Any) -> httpx.Response:
            return await front.post("/v1/chat/completions", json={**body, **fields})

        answers = [(await ask(policy=policy)).json()["choices"][0] for policy in ("plain", "single:self", "merge")]
        parts = parts_of((await ask(stream=True)).text)
    assert {answer["finish_reason"] for answer in answers} == {"tool_calls"}
    functions = [[each["function"] for each in answer["message"]["tool_calls"]] for answer in answers]
    ((function,), *_) = functions
    assert functions == [[function]] * 3
    assert function["name"] in (("climate",) if choice == NAMED else ("climate", "weather"))
    arguments = json.loads(function["arguments"])
    assert arguments["unit"] in ("celsius", "kelvin")
    assert arguments.keys() <= {"unit", "places"}
    deltas = [part["choices"][0]["delta"] for part in parts]
    streamed = [delta["tool_calls"][0]["function"] for delta in deltas if "tool_calls" in delta]
    assert {"name": streamed[0]["name"], "arguments": "".join(each["arguments"] for each in streamed)} == function


def test_a_schema_that_cannot_be_done_is_refused_by_the_name_of_its_field(stack: Stack) -> None:
    impossible = {"not": {"type": "string"}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": impossible}}]
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": impossible}}
    for field, more in {
        "tools": {"tools": tools, "tool_choice": "required"},
        "response_format": {"tools": [], "response_format": form},
        "guided_regex": {"tools": [], "guided_regex": "(a"},
    }.items():
        for stream in (False, True):
            status, _, data = call(stack, "/v1/chat/completions", {**ASK, **more, "stream": stream})
            assert (status, json.loads(data)["error"]["param"]) == (400, field), data


def test_ids_end_texts_and_are_told(stack: Stack) -> None:
    body = {"prompt": "abc", "temperature": 0, "max_tokens": 24, "return_token_ids": True}
    whole = json.loads(call(stack, "/v1/completions", {**body, "prompt_logprobs": 2})[2])["choices"][0]
    ids, end = whole["token_ids"], whole["token_ids"][7]
    first = ids.index(end)
    for include in (False, True):
        fields = {**body, "stop_token_ids": [end], "include_stop_str_in_output": include}
        choice = json.loads(call(stack, "/v1/completions", fields)[2])["choices"][0]
        assert (choice["token_ids"], choice["finish_reason"]) == (ids[: first + 1], "stop")
        text = json.loads(call(stack, "/detokenize", {"tokens": ids[: first + include]})[2])["prompt"]
        assert choice["text"] == text
    assert len(whole["prompt_token_ids"]) == len(whole["prompt_logprobs"]) == 3
    echoed = json.loads(call(stack, "/v1/completions", {**body, "echo": True, "logprobs": 0})[2])["choices"][0]
    rows = zip(whole["prompt_token_ids"][1:], whole["prompt_logprobs"][1:], strict=True)
    own = [row[str(token)]["logprob"] for token, row in rows]
    assert own == pytest.approx(echoed["logprobs"]["token_logprobs"][1:3], abs=1e-5)


def test_a_target_has_the_names_that_it_was_given(stack: Stack) -> None:
    assert [model["id"] for model in json.loads(call(stack, "/v1/models")[2])["data"]] == list(NAMES)
    answers = [call(stack, "/tokenize", {"model": name, "prompt": "Hi"}) for name in (*NAMES, "third")]
    assert [status for status, _, _ in answers] == [200, 200, 404]
    assert answers[0][2] == answers[1][2]


def test_words_are_kept_out_of_a_text(stack: Stack) -> None:
    body = {"prompt": "abc", "temperature": 0, "max_tokens": 40}
    plain = json.loads(call(stack, "/v1/completions", body)[2])["choices"][0]["text"]
    words = sorted({character for character in plain if character.isascii()})[:2]
    status, _, data = call(stack, "/v1/completions", {**body, "bad_words": words})
    assert status == 200, data
    text = json.loads(data)["choices"][0]["text"]
    assert all(word in plain and word not in text for word in words)
