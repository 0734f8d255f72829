"""OpenAI's API over HTTP, asked by real clients and by plain HTTP: real services of the demo's target."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coppice.client.client import Client
from coppice.config.settings import load_settings
from coppice.prompts import demo_prompts
from coppice.stack.launch import Stack
from coppice.telemetry import metric
from coppice.testing.reference import Reference
from orchestrator.http.server import FILES, HEADERS, is_page_served
from tests.pipeline.conftest import HEADS, call, parts_of
from tests.signals import eventually

ROOT = Path(__file__).parents[2]
PROMPT = "def read_lines(path):\n"
CONTEXT = f"{PROMPT}    with open(path)"
CODE = [prompt.prompt for prompt in demo_prompts() if prompt.category == "code"][::10]
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


def begun(stack: Stack, **fields: Any) -> HTTPConnection:
    """A completion that is under way and goes on for a while."""
    connection = HTTPConnection(stack.orchestrator.http, timeout=30)
    body = {"prompt": PROMPT, "max_tokens": 900, "temperature": 0, "ignore_eos": True, "policy": "plain", **fields}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    return connection


BIASED = {"temperature": 1.0, "seed": 9, "frequency_penalty": 1.5, "presence_penalty": 0.5, "top_p": 0.9}
BIASED |= {"min_p": 0.01, "top_k": 50}


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, {"temperature": 1.0, "seed": 7, "max_new_tokens": 24}),
        ({"messages": CHAT}, {"temperature": 1.0, "seed": 5, "max_new_tokens": 24}),
        ({"logit_bias": {"65": 5, "66": -100}}, {**BIASED, "max_new_tokens": 24, "logit_bias": {65: 5.0, 66: -100.0}}),
    ],
)
def test_an_answer_is_the_text_of_grpc(
    stack: Stack, grpc_client: Client, fields: dict[str, Any], options: dict[str, Any]
) -> None:
    plain = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi."}]
    expected = grpc_client.generate(plain if "messages" in fields else PROMPT, **options, policy="plain")
    path, prompt = ("/v1/chat/completions", {}) if "messages" in fields else ("/v1/completions", {"prompt": PROMPT})
    shared = {name: value for name, value in options.items() if name not in ("max_new_tokens", "logit_bias")}
    body = {**prompt, **shared, "max_tokens": options["max_new_tokens"], **fields}
    status, _, data = call(stack, path, body)
    assert status == 200, data
    answer = json.loads(data)
    (choice,) = answer["choices"]
    assert (choice["message"]["content"] if "messages" in fields else choice["text"]) == expected.text
    assert choice["finish_reason"] == {"eos": "stop", "length": "length"}[expected.finish_reason]
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (expected.prompt_tokens, expected.new_tokens)


ECHO: Any = {"prompt": [PROMPT, "Once"], "temperature": 0, "echo": True}


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": [PROMPT, "Once"], "n": 2, "seed": 3, "max_tokens": 16},
        {**ECHO, "max_tokens": 8, "logprobs": 3},
        {**ECHO, "max_tokens": 0, "logprobs": 3},
        {"messages": CHAT, "seed": 5, "max_completion_tokens": 24},
        {"messages": CHAT, "temperature": 0, "max_tokens": 6, "logprobs": True, "top_logprobs": 2},
    ],
    ids=str,
)
def test_a_stream_joins_to_what_is_answered_whole(stack: Stack, fields: dict[str, Any]) -> None:
    chat = "messages" in fields
    path = "/v1/chat/completions" if chat else "/v1/completions"
    whole = json.loads(call(stack, path, fields)[2])
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = call(stack, path, {**fields, "stream": True, "stream_options": options})[2].decode()
    *parts, last = parts_of(stream)
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    for expected in whole["choices"]:
        choices = [part["choices"][0] for part in parts if part["choices"][0]["index"] == expected["index"]]
        texts = [choice["delta"].get("content", "") if chat else choice["text"] for choice in choices]
        assert "".join(texts) == (expected["message"]["content"] if chat else expected["text"])
        if fields.get("echo"):
            assert texts[0] == fields["prompt"][expected["index"]]
        ends = [choice["finish_reason"] for choice in choices]
        assert ends == [None] * (len(choices) - 1) + [expected["finish_reason"]]
        joined = [score for choice in choices for score in scores_of(choice["logprobs"])]
        assert joined == [pytest.approx(score, abs=1e-5) for score in scores_of(expected["logprobs"])]
        assert bool(joined) == ("logprobs" in fields)
    counts = [(part["choices"][0]["index"], part["usage"]["completion_tokens"]) for part in parts]
    assert sum(dict(counts).values()) == last["usage"]["completion_tokens"]
    assert sorted(counts) == sorted(counts, key=lambda count: count[0])  # a choice's grows


def scores_of(log_probs: dict[str, Any] | None) -> list[tuple[Any, ...]]:
    """Bytes, log-probability, number of alternatives and offset of each token."""
    if log_probs is None:
        return []
    if entries := log_probs.get("content"):
        return [(*entry["bytes"], entry["logprob"], len(entry["top_logprobs"]), 0) for entry in entries]
    fields = (log_probs[name] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"))
    return [
        (*token.encode(), -1.0 if value is None else value, len(top or ()), offset)
        for token, value, top, offset in zip(*fields, strict=True)
    ]


def test_choices_have_seeds_of_their_own(client: openai.OpenAI, grpc_client: Client) -> None:
    options: Any = {"model": "coppice-demo", "temperature": 1.0, "max_tokens": 16}
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
    drawn = [client.completions.create(prompt=PROMPT, **options) for _ in range(2)]
    assert drawn[0].choices[0].text != drawn[1].choices[0].text  # each with a seed of its own
    ours = (drawn[0].model_extra or {})["coppice"]
    assert set(ours["heads"]) <= set(HEADS)
    again = client.completions.create(prompt=PROMPT, seed=ours["seed"], **options)
    assert again.choices[0].text == drawn[0].choices[0].text


def test_ids_are_prompts_too(client: openai.OpenAI, stack: Stack) -> None:
    _, _, data = call(stack, "/tokenize", {"prompt": PROMPT})
    ids = json.loads(data)["tokens"]
    options: Any = {"model": "coppice-demo", "temperature": 0, "max_tokens": 8}
    texts = [client.completions.create(prompt=prompt, **options).choices[0].text for prompt in (PROMPT, ids, [ids])]
    assert len(set(texts)) == 1
    _, _, data = call(stack, "/detokenize", {"tokens": ids})
    assert json.loads(data)["prompt"] == PROMPT
    echoed = client.completions.create(prompt=[ids, ids], echo=True, **options)
    assert [choice.text for choice in echoed.choices] == [PROMPT + texts[0]] * 2


def test_log_probs_are_the_targets(client: openai.OpenAI, grpc_client: Client) -> None:
    wanted = grpc_client.generate(PROMPT, max_new_tokens=8, log_probs=True)
    options: Any = {"model": "coppice-demo", "temperature": 0, "logprobs": 3}
    answer = client.completions.create(prompt=PROMPT, max_tokens=8, **options).choices[0].logprobs
    assert answer
    assert answer.token_logprobs == pytest.approx(list(wanted.log_probs), abs=1e-3)
    for mine, best in zip(answer.token_logprobs or (), answer.top_logprobs or (), strict=True):
        assert len(best) == 3
        assert max(best.values()) == pytest.approx(mine, abs=1e-5)  # greedy


def test_min_tokens_come_before_any_stop(stack: Stack) -> None:
    stops = {"prompt": PROMPT, "temperature": 0, "stop": ["\n", " "], "max_tokens": 8}
    for least in (0, 8):
        usage = json.loads(call(stack, "/v1/completions", {**stops, "min_tokens": least})[2])["usage"]
        assert (usage["completion_tokens"] < 8) == (least == 0)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1}, "temperature"),
    ({"temperature": math.nan}, "temperature"),
    ({"surprise": 1}, "surprise"),
    ({f"f{number}": 1 for number in range(100)}, "body"),
    ({"n": 3, "prompt": [PROMPT] * 6}, "prompt"),
    ({"logprobs": 21}, "logprobs"),
    *[({"prompt": prompt}, "prompt") for prompt in ([], 5, "\ud800", [99_999_999], [-1])],
    ({"prompt": ["a", 5]}, "prompt.1"),
    *[({"stop": stop}, "stop") for stop in ("\ud800", ["x"] * 17)],
    *[({"policy": "nonsense", "stream": stream}, "policy") for stream in (False, True)],
    ({"budget": 1000}, "budget"),
    ({"max_tokens": 0}, "max_tokens"),
    *[({"min_tokens": 5, **more}, "min_tokens") for more in ({}, {"min_tokens": 2**32, "max_tokens": 0, "echo": True})],
    *[({"seed": seed, "n": 2}, "seed") for seed in (-2, 2**64 - 1)],
    ({"top_k": 2**32}, "top_k"),
    *[
        ({"logit_bias": {key: 1}}, "logit_bias")
        for key in ("x", "", "05", " 5", "+5", "1_0", "٥", "9" * 99, "99999999")
    ],
    *[({"logit_bias": {"1": value}}, "logit_bias") for value in ("1", True, [])],
    ({"logit_bias": dict.fromkeys(map(str, range(2000)), 1)}, "logit_bias"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": "x"}] * 300}, "messages"),
    ({"messages": [{"role": "function", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": "x", "name": 5}]}, "messages.0.name"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type"),
    *[({"messages": [{"role": "user", **more}]}, "messages.0.content") for more in ({"content": None}, {})],
    ({"messages": [{"role": "user", "content": "x", "audio": {"id": "a"}}]}, "messages.0.audio"),
    ({"messages": CHAT, "prompt": "x"}, "prompt"),
    ({"top_logprobs": 3}, "top_logprobs"),
]
CALLED = {"id": "c", "type": "function", "index": 0, "function": {"name": "f", "arguments": '{"a": 1}'}}
TAKEN: list[dict[str, Any]] = [
    {"logit_bias": {"0": 1, "4096": -1.5}},
    {"stream_options": {}, "seed": -1, "metadata": {"a": "b"}, "store": True, "user": "u"},
    {"prompt_cache_key": "k", "safety_identifier": "s", "reasoning_effort": "low", "verbosity": "low"},
    {"tools": [], "suffix": None, "best_of": 1, "service_tier": "flex", "response_format": {"type": "text"}},
    {"max_tokens": 10**6, "stop": [" ", "\n", "e", "a", "t"], "stop_token_ids": [1, 2]},
]


def test_what_is_not_served_is_refused_by_name_and_hints_are_taken(stack: Stack) -> None:
    for change, field in [*REFUSED, *((change, "") for change in TAKEN)]:
        chat = {"messages", "max_completion_tokens", "top_logprobs"} & change.keys()
        path, prompt = ("/v1/chat/completions", {"messages": CHAT}) if chat else ("/v1/completions", {"prompt": PROMPT})
        usual = {"model": "coppice-demo", "max_tokens": 2, "temperature": 0}
        status, _, data = call(stack, path, usual | prompt | change)
        assert status == (400 if field else 200), (change, data)
        if field:
            error = json.loads(data)["error"]
            assert (error["param"], error["type"]) == (field, "invalid_request_error"), change
            assert error["message"].startswith(f"{field}: ")
    status, _, data = call(stack, "/v1/completions", {"model": "gpt-4", "prompt": PROMPT})
    assert (status, json.loads(data)["error"]["type"]) == (404, "not_found_error")


HISTORY = (
    {"role": "assistant", "content": None, "tool_calls": [], "refusal": None, "audio": None, "function_call": None},
    {"role": "assistant"},
    {"role": "assistant", "content": "x", "reasoning_content": "because", "name": "bob"},
    {"role": "assistant", "tool_calls": [CALLED]},
    {"role": "tool", "content": "5", "tool_call_id": "c", "name": "f"},
    {"role": "user", "content": []},
    {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]},
    {"role": "developer", "content": [{"type": "text", "text": "x", "annotations": [1]}]},
)


def test_a_history_that_openai_takes_is_taken(stack: Stack) -> None:
    for messages in (*([message] for message in HISTORY), [*CHAT, *HISTORY]):
        got, _, data = call(stack, "/v1/chat/completions", {"messages": messages, "max_tokens": 1})
        assert got == 200, data
        counted = json.loads(call(stack, "/tokenize", {"messages": messages})[2])["count"]
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
        sent = [clients.submit(call, stack, path, body) for path, body in hostile * 2]
        assert all(call(stack, "/health")[0] == 200 and response.readline() for _ in range(20))
        answers = [each.result() for each in sent]
        refused = {(status, json.loads(data)["error"]["message"]) for status, _, data in answers}
    running.close()
    assert refused == {(400, "body: has more lists, objects, strings or entries than any request")}


CALLS: dict[int, list[tuple[str, Any]]] = {
    200: [
        *((path, None) for path in ("/health", "/ready", "/version", "/v1/models", "/v1/models/coppice-demo")),
        *((path, None) for path in ("/openapi.json", "/docs", "/metrics")),
        ("/tokenize", {"messages": CHAT}),
        ("/detokenize", {"tokens": [5, 6]}),
    ],
    400: [
        *(("/v1/completions", body) for body in (b"{", b"[" * 5000, {"prompt": "a", "\ud800": 1})),
        ("/v1/completions", '{"prompt": "a"}'.encode("utf-16")),
        *(("/tokenize", body) for body in ({}, {"prompt": "\ud800"})),
        ("/tokenize", {"messages": [{"role": "user", "content": ""}] * 257}),
        *(("/detokenize", {"tokens": tokens}) for tokens in ([5] * 5000, [99_999_999])),
    ],
    404: [("/v1/nothing", None), ("/v1/models/other", None)],
    405: [("/v1/completions", None)],
    413: [("/v1/completions", b"x" * (2 << 20))],
}


def test_every_call_is_answered_in_its_form(stack: Stack) -> None:
    for status, calls in CALLS.items():
        for path, body in calls:
            answered, headers, data = call(stack, path, body)
            assert answered == status, (path, data)
            assert "uvicorn" not in headers.get("server", "")
            message = json.loads(data)["error"]["message"] if status >= 400 else ""
            assert bool(message) == (status >= 400)
            if path == "/v1/nothing":
                assert message == "it is not served here; /docs lists what is"
    for kind in ("text/plain", ""):
        status, _, data = call(stack, "/v1/completions", {"prompt": PROMPT, "max_tokens": 1}, kind)
        assert (status, json.loads(data)["error"]["message"]) == (415, "send Content-Type: application/json")


def test_the_description_lists_every_path_and_field(stack: Stack) -> None:
    described = json.loads(call(stack, "/openapi.json")[2])
    for methods in described["paths"].values():
        for method in methods.values():
            assert len(method["description"]) > 9
            assert set(method["responses"]) == {"200", "4XX"}
    assert "text/event-stream" in described["paths"]["/v1/completions"]["post"]["responses"]["200"]["content"]
    names = {name for schema in described["components"]["schemas"].values() for name in schema["properties"]}
    assert {"messages", "prompt", "policy", "include_usage"} <= names


NAMES = (
    *("prompt", "messages", "tokens", "max_tokens", "min_tokens", "temperature", "n", "stop", "stream", "logprobs"),
    *("echo", "seed", "logit_bias", "top_k", "policy", "budget", "other"),
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 40) | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    path=st.sampled_from(("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")),
    body=st.fixed_dictionaries({}, optional=dict.fromkeys(NAMES, VALUES)),
    valid=st.booleans(),
)
def test_no_body_is_an_internal_error(stack: Stack, path: str, body: dict[str, Any], valid: bool) -> None:
    if valid:  # but for one field or two
        base = {"messages": CHAT} if "chat" in path else {"tokens": [1]} if path == "/detokenize" else {"prompt": "a"}
        body = {**base, **({"max_tokens": 2} if path.startswith("/v1") else {}), **dict(list(body.items())[:2])}
    status, _, data = call(stack, path, body)
    assert status in (200, 400, 429), (status, data)
    if status == 400:
        assert json.loads(data)["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_seat_and_its_kv(stack: Stack, grpc_client: Client, stream: bool) -> None:
    def kv_used() -> float:
        return metric(stack.services["verifier"].metrics, "coppice_verifier_kv_tokens_used")

    before = kv_used()
    connection = begun(stack, stream=stream, n=2)
    assert eventually(lambda: kv_used() > before and grpc_client.describe().running == 2, 10)
    connection.close()
    assert eventually(lambda: kv_used() <= before and not grpc_client.describe().running, 2)


def check_heads(stack: Stack, client: Client, policies: Sequence[str], prompts: int) -> None:
    """Assert that the demo's heads draft what its target says of such text as they were trained on, and to some use."""
    reference = Reference(stack.spec.target, "float32", threads=1)
    for prompt in CODE[:prompts]:
        expected = reference.greedy(reference.text.encode(str(prompt)), 24).ids
        for policy in policies:
            answer = client.generate(prompt, policy=policy, budget=8, max_new_tokens=24, ignore_eos=True)
            assert answer.ids == expected, policy
            assert answer.tau > 1.3, policy


def test_texts_of_a_shipped_head_are_generates_and_drafts_are_of_use(stack: Stack, grpc_client: Client) -> None:
    """tests/nightly/test_shipped_heads.py has all of them."""
    check_heads(stack, grpc_client, (f"single:{HEADS[0]}", "merge"), 3)


def test_log_likelihoods_are_the_targets_by_lm_evals_protocol(stack: Stack) -> None:
    """What lm-eval's local-completions sends for loglikelihood, and how it reads the answer."""
    reference = Reference(stack.spec.target, "float32")
    context = len(reference.text.encode(CONTEXT))
    prompts = [reference.text.encode(CONTEXT + text) for text in (" as file:", " elephant")]
    sent = {"model": "coppice-demo", "prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234}
    status, _, data = call(stack, "/v1/completions", {**sent, "echo": True})
    assert status == 200, data
    for choice, ids in zip(json.loads(data)["choices"], prompts, strict=True):
        with torch.inference_mode():
            logits = reference._model(torch.tensor([ids])).logits[0, context - 1 : -1]
        expected = logits.float().log_softmax(-1).gather(1, torch.tensor(ids[context:])[:, None])
        values = choice["logprobs"]["token_logprobs"][context:-1]
        best = [max(top.values()) for top in choice["logprobs"]["top_logprobs"][context:-1]]
        assert sum(values) == pytest.approx(float(expected.sum()), abs=1e-2)
        assert (values == best) == (logits.argmax(-1).tolist() == list(ids[context:]))


def test_the_documented_examples_are_answered(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "http.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(example.replace("http://127.0.0.1:8000/v1", url), {})
    assert re.search(r" \d+\.\d+\n$", capsys.readouterr().out)
    (curl,) = re.findall(r"```\n(curl .*?)```", page, re.DOTALL)
    curl = curl.replace("http://127.0.0.1:8000/v1", url)
    answer = subprocess.run(["sh", "-c", curl], capture_output=True, timeout=30)
    assert json.loads(answer.stdout)["usage"]["completion_tokens"] == 32


def test_every_file_is_served_under_a_strict_policy(stack: Stack) -> None:
    for path in FILES:
        status, headers, _ = call(stack, path)
        assert status == 200
        assert {name: headers[name.lower()] for name in HEADERS} == HEADERS
    assert "unsafe" not in HEADERS["Content-Security-Policy"]
    status, _, body = call(stack, "/trace/completions", {"prompt": PROMPT, "temperature": 0, "max_tokens": 8})
    *_, finished = parts_of(body.decode())
    assert (status, finished["finished"]["new_tokens"]) == (200, 8)
    assert math.isclose(sum(finished["finished"]["accept_lengths"]), 7)


def test_by_default_the_page_is_for_loopback_alone() -> None:
    anywhere = ["--server.host", "0.0.0.0"]
    always, never = (["--orchestrator.page", when] for when in ("always", "never"))
    flags = ([], anywhere, [*anywhere, *always], never)
    assert [is_page_served(load_settings(each)) for each in flags] == [True, False, True, False]


def test_a_server_that_stops_ends_a_stream_with_an_error(stack: Stack) -> None:
    connection = begun(stack, stream=True)
    response = connection.getresponse()
    first = response.readline()
    os.kill(stack.orchestrator.pid, signal.SIGTERM)
    rest = response.read().decode()
    try:
        assert first.startswith(b"data: {")
        assert parts_of(rest)[-1]["error"]["message"] == "the server is stopping"
    finally:
        address = stack.orchestrator.http
        assert stack.restart("orchestrator")
    assert stack.orchestrator.http == address  # it comes back where it was
