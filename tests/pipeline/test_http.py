"""OpenAI's API over HTTP, asked by real clients and by plain HTTP: real services of the demo's target."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import openai
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from coppice.client.client import Client
from coppice.stack.launch import Stack
from coppice.testing.reference import Reference
from tests.pipeline.conftest import HEADS, SEATS
from tests.signals import eventually

ROOT = Path(__file__).parents[2]
PROMPT = "def read_lines(path):\n"
CHAT: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Hi."}]}]


@pytest.fixture(scope="module")
def stack(demo: Stack) -> Stack:
    return demo


@pytest.fixture(scope="module")
def url(stack: Stack) -> str:
    """What OpenAI's clients are told."""
    return f"http://{stack.orchestrator.http}/v1"


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def grpc_client(stack: Stack) -> Iterator[Client]:
    with Client(stack.address) as made:
        yield made


def asked(stack: Stack, path: str, body: Any = None, method: str = "") -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of one call."""
    connection = HTTPConnection(stack.orchestrator.http, timeout=30)
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    connection.request(method or ("GET" if body is None else "POST"), path, data, {"Content-Type": "application/json"})
    response = connection.getresponse()
    return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()


def begun(stack: Stack, **fields: Any) -> HTTPConnection:
    """A completion that is under way and goes on for a while."""
    connection = HTTPConnection(stack.orchestrator.http, timeout=30)
    body = {"prompt": PROMPT, "max_tokens": 900, "temperature": 0, "ignore_eos": True, "policy": "plain", **fields}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    return connection


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_completion_is_the_text_of_grpc_whole_and_streamed(
    client: openai.OpenAI, grpc_client: Client, temperature: float
) -> None:
    wanted = grpc_client.generate(PROMPT, temperature=temperature, seed=7, max_new_tokens=48, policy="plain")
    options: Any = {"model": "target", "prompt": PROMPT, "temperature": temperature, "seed": 7, "max_tokens": 48}
    whole = client.completions.create(**options)
    assert whole.choices[0].text == wanted.text
    assert whole.choices[0].finish_reason == {"eos": "stop", "length": "length"}[wanted.finish_reason]
    assert whole.usage
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (wanted.prompt_tokens, wanted.new_tokens)
    parts = list(client.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(part.choices[0].text for part in parts if part.choices) == wanted.text
    assert parts[-1].usage == whole.usage
    assert len(parts) > 3


def test_a_chat_is_the_text_of_grpc_whole_and_streamed(client: openai.OpenAI, grpc_client: Client) -> None:
    plain = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi."}]
    wanted = grpc_client.generate(plain, temperature=1.0, seed=5, max_new_tokens=24)
    options: Any = {"model": "target", "messages": CHAT, "seed": 5, "max_completion_tokens": 24}
    whole = client.chat.completions.create(**options)
    message = whole.choices[0].message
    assert (message.role, message.content) == ("assistant", wanted.text)
    parts = list(client.chat.completions.create(**options, stream=True))
    assert parts[0].choices[0].delta.role == "assistant"
    assert "".join(part.choices[0].delta.content or "" for part in parts) == wanted.text
    assert parts[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    again = client.chat.completions.create(
        model="target", messages=[*CHAT, message, {"role": "user", "content": "And?"}], max_tokens=2
    )
    assert again.usage
    assert again.usage.completion_tokens == 2


def test_choices_have_seeds_of_their_own(client: openai.OpenAI, grpc_client: Client) -> None:
    options: Any = {"model": "target", "temperature": 1.0, "max_tokens": 16}
    both = client.completions.create(prompt=[PROMPT, "Once"], n=2, seed=3, **options)
    answers = [
        grpc_client.generate(prompt, temperature=1.0, seed=seed, max_new_tokens=16)
        for prompt in (PROMPT, "Once")
        for seed in (3, 4)
    ]
    assert [choice.text for choice in both.choices] == [answer.text for answer in answers]
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert both.usage
    assert both.usage.prompt_tokens == answers[0].prompt_tokens + answers[2].prompt_tokens
    texts = ["", "", "", ""]
    for part in client.completions.create(prompt=[PROMPT, "Once"], n=2, seed=3, stream=True, **options):
        texts[part.choices[0].index] += part.choices[0].text
    assert texts == [answer.text for answer in answers]
    drawn = [client.completions.create(prompt=PROMPT, **options) for _ in range(2)]
    assert drawn[0].choices[0].text != drawn[1].choices[0].text  # each with a seed of its own
    seed = (drawn[0].model_extra or {})["coppice"]["seed"]
    again = client.completions.create(prompt=PROMPT, seed=seed, **options)
    assert again.choices[0].text == drawn[0].choices[0].text


def test_ids_are_prompts_too(client: openai.OpenAI, stack: Stack) -> None:
    _, _, data = asked(stack, "/tokenize", {"prompt": PROMPT})
    ids = json.loads(data)["tokens"]
    options: Any = {"model": "target", "temperature": 0, "max_tokens": 8}
    texts = [client.completions.create(prompt=prompt, **options).choices[0].text for prompt in (PROMPT, ids, [ids])]
    assert len(set(texts)) == 1
    _, _, data = asked(stack, "/detokenize", {"tokens": ids})
    assert json.loads(data)["prompt"] == PROMPT
    echoed = client.completions.create(prompt=[ids, ids], echo=True, **options)
    assert [choice.text for choice in echoed.choices] == [PROMPT + texts[0]] * 2


def test_log_probs_are_the_targets_and_echo_scores_the_prompt(client: openai.OpenAI, grpc_client: Client) -> None:
    wanted = grpc_client.generate(PROMPT, max_new_tokens=8, log_probs=True)
    options: Any = {"model": "target", "temperature": 0, "logprobs": 3}
    answer = client.completions.create(prompt=PROMPT, max_tokens=8, **options).choices[0].logprobs
    assert answer
    assert answer.token_logprobs == pytest.approx(list(wanted.log_probs), abs=1e-3)
    for mine, best in zip(answer.token_logprobs or (), answer.top_logprobs or (), strict=True):
        assert len(best) == 3
        assert max(best.values()) == pytest.approx(mine, abs=1e-5)  # greedy
    echoed = client.completions.create(prompt=PROMPT, max_tokens=1, echo=True, **options).choices[0]
    assert echoed.text.startswith(PROMPT)
    scored = echoed.logprobs
    assert scored
    tokens, values = scored.tokens or [], scored.token_logprobs or []
    assert "".join(tokens) == echoed.text
    assert scored.text_offset == [len("".join(tokens[:at])) for at in range(len(tokens))]
    assert values[0] is None
    # Each prefix as a prompt says the same of its next token.
    for at in (1, len(values) // 2, len(values) - 2):
        prefix = "".join(tokens[:at])
        best = client.completions.create(prompt=prefix, max_tokens=1, **{**options, "logprobs": 20}).choices[0].logprobs
        assert best
        assert best.top_logprobs
        if tokens[at] in best.top_logprobs[0]:
            assert best.top_logprobs[0][tokens[at]] == pytest.approx(values[at], abs=1e-3)
    only = client.completions.create(prompt=PROMPT, max_tokens=0, echo=True, **options)
    assert (only.choices[0].text, only.choices[0].finish_reason) == (PROMPT, "length")
    assert only.usage
    assert only.usage.completion_tokens == 0


@pytest.mark.parametrize("most", [0, 8])
def test_a_stream_with_echo_begins_with_the_prompt(client: openai.OpenAI, most: int) -> None:
    options: Any = {"model": "target", "prompt": [PROMPT, "Once"], "temperature": 0, "max_tokens": most, "echo": True}
    for scored in ({}, {"logprobs": 3}):
        whole = client.completions.create(**options, **scored)
        stream = client.completions.create(**options, **scored, stream=True, stream_options={"include_usage": True})
        *parts, last = list(stream)
        assert last.usage == whole.usage
        for wanted in whole.choices:
            choices = [part.choices[0] for part in parts if part.choices[0].index == wanted.index]
            assert choices[0].text == options["prompt"][wanted.index]
            assert "".join(one.text for one in choices) == wanted.text
            assert [one.finish_reason for one in choices] == [None] * (len(choices) - 1) + [wanted.finish_reason]
            if not wanted.logprobs:
                assert {one.logprobs for one in choices} == {None}
                continue
            told = [one.logprobs.model_dump() for one in choices if one.logprobs]
            joined = {name: [value for one in told for value in one[name]] for name in told[0]}
            assert joined["tokens"] == wanted.logprobs.tokens
            assert joined["text_offset"] == wanted.logprobs.text_offset
            assert joined["token_logprobs"] == pytest.approx(wanted.logprobs.token_logprobs, abs=1e-5)
            assert [len(best or ()) for best in joined["top_logprobs"]] == [0] + [3] * (len(joined["tokens"]) - 1)


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_tells_log_probs(client: openai.OpenAI, stream: bool) -> None:
    options: Any = {"model": "target", "messages": CHAT, "temperature": 0, "max_tokens": 6, "logprobs": True}
    answer = client.chat.completions.create(**options, top_logprobs=2, stream=stream)
    logs = [part.choices[0].logprobs for part in (answer if stream else [answer])]
    content = [one for log in logs if log for one in log.content or ()]
    assert len(content) == 6
    for one in content:
        assert bytes(one.bytes or ()) == one.token.encode()
        assert one.top_logprobs[0].logprob == pytest.approx(one.logprob, abs=1e-5)
        assert len(one.top_logprobs) == 2


def test_lengths_bias_and_penalties_are_those_of_grpc(client: openai.OpenAI, grpc_client: Client) -> None:
    stops: Any = {"model": "target", "prompt": PROMPT, "temperature": 0, "stop": ["\n", " "], "max_tokens": 8}
    answers = [client.completions.create(**stops, extra_body={"min_tokens": least}).usage for least in (0, 8)]
    assert [answer and answer.completion_tokens < 8 for answer in answers] == [True, False]
    options: Any = {"temperature": 1.0, "seed": 9, "frequency_penalty": 1.5, "presence_penalty": 0.5, "top_p": 0.9}
    more: Any = {"min_p": 0.01, "top_k": 50}
    wanted = grpc_client.generate(PROMPT, max_new_tokens=24, logit_bias={65: 5.0, 66: -100.0}, **more, **options)
    options |= {"model": "target", "prompt": PROMPT, "max_tokens": 24, "logit_bias": {"65": 5, "66": -100}}
    assert client.completions.create(**options, extra_body=more).choices[0].text == wanted.text


@pytest.mark.parametrize(
    ("change", "status", "field"),
    [
        ({"temperature": -1}, 400, "temperature"),
        ({"temperature": math.nan}, 400, "temperature"),
        ({"tools": [{"type": "function"}]}, 400, "tools"),
        ({"surprise": 1}, 400, "surprise"),
        ({f"f{number}": 1 for number in range(100)}, 400, "body"),
        ({"n": 3, "prompt": [PROMPT] * 6}, 400, "prompt"),
        ({"logprobs": 21}, 400, "logprobs"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": 5}, 400, "prompt"),
        ({"prompt": ["a", 5]}, 400, "prompt.1"),
        ({"prompt": "\ud800"}, 400, "prompt"),
        ({"stop": "\ud800"}, 400, "stop"),
        ({"prompt": [99_999_999]}, 400, "prompt"),
        ({"prompt": [-1]}, 400, "prompt"),
        ({"policy": "nonsense"}, 400, "policy"),
        ({"budget": 1000}, 400, "budget"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"min_tokens": 5}, 400, "min_tokens"),
        ({"seed": -2}, 400, "seed"),
        ({"seed": 2**64 - 1, "n": 2}, 400, "seed"),
        ({"top_k": 2**32}, 400, "top_k"),
        ({"min_tokens": 2**32, "max_tokens": 0, "echo": True}, 400, "min_tokens"),
        *[({"logit_bias": {key: 1}}, 400, "logit_bias") for key in ("x", "", "05", " 5", "+5", "1_0", "٥", "9" * 99)],
        *[({"logit_bias": {"1": value}}, 400, "logit_bias") for value in ("1", True, [])],
        ({"logit_bias": {"99999999": 1}}, 400, "logit_bias"),
        ({"logit_bias": dict.fromkeys(map(str, range(2000)), 1)}, 400, "logit_bias"),
        ({"logit_bias": {"0": 1, "4096": -1.5}}, 200, None),
        ({"stop": ["x"] * 17}, 400, "stop"),
        ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
        ({"stream_options": {}, "seed": -1, "metadata": {"a": "b"}, "store": True, "user": "u"}, 200, None),
        ({"prompt_cache_key": "k", "safety_identifier": "s", "reasoning_effort": "low", "verbosity": "low"}, 200, None),
        ({"chat_template_kwargs": {"enable_thinking": False}}, 400, "chat_template_kwargs"),
        ({"stream": True, "policy": "nonsense"}, 400, "policy"),
        ({"model": "gpt-4"}, 404, None),
        ({"tools": [], "suffix": None, "best_of": 1}, 200, None),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, 400, "messages.0.role"),
        ({"messages": [{"role": "user", "content": "x", "name": 5}]}, 400, "messages.0.name"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages.0.content.0.type"),
        ({"messages": [{"role": "user", "content": None}]}, 400, "messages.0.content"),
        ({"messages": [{"role": "system"}]}, 400, "messages.0.content"),
        (
            {"messages": [*CHAT, {"role": "assistant", "content": None, "tool_calls": [{}]}]},
            400,
            "messages.2.tool_calls",
        ),
        ({"messages": [{"role": "user", "content": "x", "audio": {"id": "a"}}]}, 400, "messages.0.audio"),
        ({"messages": [{"role": "user", "content": "x"}] * 300}, 400, "messages"),
        ({"max_completion_tokens": 10**6}, 400, "max_completion_tokens"),
        ({"max_tokens": 10**6}, 400, "max_tokens"),
        ({"top_logprobs": 3}, 400, "top_logprobs"),
        ({"messages": CHAT, "prompt": "x"}, 400, "prompt"),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    stack: Stack, change: dict[str, Any], status: int, field: str | None
) -> None:
    chat = {"messages", "max_completion_tokens", "top_logprobs"} & change.keys()
    path, prompt = ("/v1/chat/completions", {"messages": CHAT}) if chat else ("/v1/completions", {"prompt": PROMPT})
    got, _, data = asked(stack, path, {"model": "target", "max_tokens": 2, "temperature": 0} | prompt | change)
    assert got == status, data
    if status != 200:
        error = json.loads(data)["error"]
        assert error["param"] == field
        assert error["message"].startswith(f"{field}: " if field else "the model")
        assert error["type"] in ("invalid_request_error", "not_found_error")


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None, "tool_calls": [], "refusal": None, "audio": None, "function_call": None},
        {"role": "assistant"},
        {"role": "assistant", "content": "x", "reasoning_content": "because", "name": "bob"},
        {"role": "user", "content": []},
        {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]},
        {"role": "developer", "content": [{"type": "text", "text": "x", "annotations": [1]}]},
    ],
)
def test_a_history_that_openai_takes_is_taken(stack: Stack, message: dict[str, Any]) -> None:
    for messages in ([message], [*CHAT, message]):
        got, _, data = asked(stack, "/v1/chat/completions", {"messages": messages, "max_tokens": 1})
        assert got == 200, data
        counted = json.loads(asked(stack, "/tokenize", {"messages": messages})[2])["count"]
        assert json.loads(data)["usage"]["prompt_tokens"] == counted


def test_hostile_bodies_do_not_stop_what_runs_beside_them(stack: Stack) -> None:
    """Each is refused for its size before it is parsed, as none of them ends; a stream beside them goes on."""
    hostile = (
        ("/v1/completions", b'{"prompt": [' + b"[]," * 400_000),
        ("/tokenize", b'{"messages": [' + b'{"role":"user","content":""},' * 50_000),
        ("/detokenize", b'{"tokens": [' + b"5," * 790_000),
    )
    running = begun(stack, stream=True)
    response = running.getresponse()
    with ThreadPoolExecutor(4) as clients:
        sent = [clients.submit(asked, stack, path, body) for path, body in hostile * 2]
        assert all(asked(stack, "/health")[0] == 200 and response.readline() for _ in range(20))
        refused = {
            (status, json.loads(data)["error"]["message"]) for status, _, data in (each.result() for each in sent)
        }
    running.close()
    assert refused == {(400, "body: has more lists, objects, strings or entries than any request")}


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", b"{", 400),
        ("/v1/completions", b"[" * 5000, 400),
        ("/v1/completions", {"prompt": "a", "\ud800": 1}, 400),
        ("/tokenize", {"prompt": "\ud800"}, 400),
        ("/v1/completions", b"x" * (2 << 20), 413),
        ("/v1/completions", None, 405),
        ("/v1/nothing", None, 404),
        ("/v1/completions", '{"prompt": "a"}'.encode("utf-16"), 400),
        ("/tokenize", {"messages": [{"role": "user", "content": ""}] * 257}, 400),
        ("/detokenize", {"tokens": [5] * 5000}, 400),
        ("/health", None, 200),
        ("/ready", None, 200),
        ("/version", None, 200),
        ("/v1/models", None, 200),
        ("/v1/models/target", None, 200),
        ("/v1/models/other", None, 404),
        ("/tokenize", {"messages": CHAT}, 200),
        ("/tokenize", {}, 400),
        ("/detokenize", {"tokens": [5, 6]}, 200),
        ("/detokenize", {"tokens": [99_999_999]}, 400),
        ("/openapi.json", None, 200),
        ("/docs", None, 200),
    ],
)
def test_every_call_is_answered_in_its_form(stack: Stack, path: str, body: Any, status: int) -> None:
    got, headers, data = asked(stack, path, body)
    assert got == status, data
    if status >= 400:
        assert json.loads(data)["error"]["message"]
    if status == 404 and path != "/v1/models/other":
        assert json.loads(data)["error"]["message"] == "it is not served here; /docs lists what is"
    assert "uvicorn" not in headers.get("server", "")


def test_the_description_lists_every_path_and_field(stack: Stack) -> None:
    described = json.loads(asked(stack, "/openapi.json")[2])
    for methods in described["paths"].values():
        for method in methods.values():
            assert len(method["description"]) > 9
            assert set(method["responses"]) == {"200", "4XX"}
    names = {name for schema in described["components"]["schemas"].values() for name in schema["properties"]}
    assert {"messages", "prompt", "policy", "include_usage"} <= names


def test_a_body_that_is_not_declared_as_json_is_none(stack: Stack) -> None:
    connection = HTTPConnection(stack.orchestrator.http, timeout=30)
    for kind in ({"Content-Type": "text/plain"}, {}):
        connection.request("POST", "/v1/completions", json.dumps({"prompt": PROMPT, "max_tokens": 1}), kind)
        response = connection.getresponse()
        said = json.loads(response.read())["error"]["message"]
        assert (response.status, said) == (415, "send Content-Type: application/json")


NAMES = (
    *("prompt", "messages", "tokens", "max_tokens", "min_tokens", "temperature", "n", "stop", "stream", "logprobs"),
    *("echo", "seed", "logit_bias", "top_k", "policy", "budget", "other"),
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 40) | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    path=st.sampled_from(("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")),
    body=st.fixed_dictionaries({}, optional=dict.fromkeys(NAMES, VALUES)),
    valid=st.booleans(),
)
def test_no_body_is_an_internal_error(stack: Stack, path: str, body: dict[str, Any], valid: bool) -> None:
    if valid:  # but for one field or two
        base = {"messages": CHAT} if "chat" in path else {"tokens": [1]} if path == "/detokenize" else {"prompt": "a"}
        body = {**base, **({"max_tokens": 2} if path.startswith("/v1") else {}), **dict(list(body.items())[:2])}
    status, _, data = asked(stack, path, body)
    assert status in (200, 400, 429), (status, data)
    if status == 400:
        assert json.loads(data)["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_seat_and_its_kv(stack: Stack, grpc_client: Client, stream: bool) -> None:
    page = f"http://{stack.services['verifier'].metrics}/metrics"

    def kv_used() -> float:
        with urlopen(page, timeout=10) as metrics:
            (line,) = re.findall(r"^coppice_verifier_kv_tokens_used\S* (\S+)$", metrics.read().decode(), re.MULTILINE)
        return float(line)

    before = kv_used()
    connection = begun(stack, stream=stream, n=2)
    assert eventually(lambda: kv_used() > before and grpc_client.describe().running == 2, 10)
    connection.close()
    assert eventually(lambda: kv_used() <= before and not grpc_client.describe().running, 2)


def test_a_full_server_says_when_to_come_back(stack: Stack, client: openai.OpenAI, grpc_client: Client) -> None:
    connection = begun(stack, n=SEATS)
    assert eventually(lambda: grpc_client.describe().running == SEATS, 10)
    with pytest.raises(openai.RateLimitError) as refused:
        client.completions.create(model="target", prompt=PROMPT, max_tokens=1)
    connection.close()
    assert int(refused.value.response.headers["retry-after"]) >= 1
    assert refused.value.type == "rate_limit_error"
    assert eventually(lambda: not grpc_client.describe().running, 5)


def test_drafts_and_their_metrics_are_told(client: openai.OpenAI) -> None:
    options: Any = {"include_metrics": True, "policy": "route", "budget": 8}
    answer = client.completions.create(model="target", prompt=PROMPT, temperature=0, max_tokens=32, extra_body=options)
    figures, ours = answer.model_extra["metrics"]["speculative_decoding"], answer.model_extra["coppice"]  # type: ignore[index]
    assert figures["num_spec_steps"] == sum(figures["acceptance_histogram"]) > 0
    assert (ours["policy"], ours["heads"]) == ("route", list(HEADS))
    assert math.isclose(ours["tau"], sum(ours["accept_lengths"]) / len(ours["accept_lengths"]))


def test_langchain_is_answered(url: str, grpc_client: Client) -> None:
    model = ChatOpenAI(base_url=url, api_key=SecretStr("none"), model="target", temperature=0, max_tokens=16)
    messages = [("system", "Be brief."), ("user", "Hi.")]
    plain = [{"role": role, "content": content} for role, content in messages]
    wanted = grpc_client.generate(plain, max_new_tokens=16)
    assert model.invoke(messages).text == wanted.text
    parts = list(model.stream(messages, stream_usage=True))
    assert "".join(part.text for part in parts) == wanted.text
    usage = [part.usage_metadata for part in parts if part.usage_metadata]
    assert sum(one["output_tokens"] for one in usage) == wanted.new_tokens
    with pytest.raises(openai.BadRequestError, match="tools: is not served"):
        model.bind_tools([{"type": "function", "function": {"name": "f", "parameters": {}}}]).invoke(messages)


CONTEXT, CONTINUATIONS = "def read_lines(path):\n    with open(path)", (" as file:", " elephant")


def scores(reference: Reference) -> list[tuple[float, bool]]:
    """Of each continuation: its log-probability behind the context, and whether greedy decoding would say it."""
    context = reference.text.encode(CONTEXT)
    found = []
    for text in CONTINUATIONS:
        ids = reference.text.encode(CONTEXT + text)
        with torch.inference_mode():
            rows = reference._model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        rows, rest = rows[len(context) - 1 : -1], torch.tensor(ids[len(context) :])
        greedy = bool((rows.argmax(-1) == rest).all())
        found.append((float(rows.gather(1, rest[:, None]).sum()), greedy))
    return found


@pytest.fixture(scope="module")
def reference(stack: Stack) -> Reference:
    return Reference(stack.spec.target, "float32")


def test_log_likelihoods_are_the_targets_by_lm_evals_protocol(stack: Stack, reference: Reference) -> None:
    """What lm-eval's local-completions sends for loglikelihood, and how it reads the answer."""
    context = len(reference.text.encode(CONTEXT))
    prompts = [reference.text.encode(CONTEXT + text) for text in CONTINUATIONS]
    sent = {"model": "target", "prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234}
    status, _, data = asked(stack, "/v1/completions", {**sent, "echo": True})
    assert status == 200, data
    for choice, (wanted, greedy) in zip(json.loads(data)["choices"], scores(reference), strict=True):
        values = choice["logprobs"]["token_logprobs"][context:-1]
        best = [max(top.values()) for top in choice["logprobs"]["top_logprobs"][context:-1]]
        assert sum(values) == pytest.approx(wanted, abs=1e-2)
        assert (values == best) == greedy


def test_the_documented_examples_are_answered(url: str) -> None:
    page = (ROOT / "docs" / "http.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    command = [sys.executable, "-c", example.replace("http://127.0.0.1:8000/v1", url)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert re.search(r" \d+\.\d+\n$", run.stdout), run.stderr
    (curl,) = re.findall(r"```\n(curl .*?)```", page, re.DOTALL)
    curl = curl.replace("http://127.0.0.1:8000/v1", url)
    answer = subprocess.run(["sh", "-c", curl], capture_output=True, timeout=30)
    assert json.loads(answer.stdout)["usage"]["completion_tokens"] == 32


def test_a_server_that_stops_ends_a_stream_with_an_error(stack: Stack) -> None:
    connection = begun(stack, stream=True)
    response = connection.getresponse()
    first = response.readline()
    os.kill(stack.orchestrator.pid, signal.SIGTERM)
    rest = response.read().decode()
    try:
        assert first.startswith(b"data: {")
        *_, error, done = [line.removeprefix("data: ") for line in rest.splitlines() if line.startswith("data: ")]
        assert json.loads(error)["error"]["message"] == "the server is stopping"
        assert done == "[DONE]"
    finally:
        address = stack.orchestrator.http
        assert stack.restart("orchestrator")
    assert stack.orchestrator.http == address  # it comes back where it was
