"""OpenAI's API over HTTP, asked by real clients and by plain HTTP: real services of the demo's target."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any

import openai
import pytest

from coppice.client.client import Client
from coppice.stack.launch import Stack
from coppice.stack.spec import HeadSpec, StackSpec

PROMPT = "def read_lines(path):\n"
HEADS = ("specblock-code", "lookup")


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    extra = {"orchestrator": {"orchestrator.http_port": 0}}
    spec = StackSpec.demo(heads=tuple(map(HeadSpec.shipped, HEADS)), dtype="float32", extra=extra)
    with Stack(spec) as running:
        yield running


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://{stack.orchestrator.http}/v1", api_key="none", max_retries=0) as made:
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


def test_choices_have_seeds_of_their_own(client: openai.OpenAI, grpc_client: Client) -> None:
    options: Any = {"model": "target", "temperature": 1.0, "max_tokens": 16}
    both = client.completions.create(prompt=[PROMPT, "Once"], n=2, seed=3, **options)
    texts = [
        grpc_client.generate(prompt, temperature=1.0, seed=seed, max_new_tokens=16).text
        for prompt in (PROMPT, "Once")
        for seed in (3, 4)
    ]
    assert [choice.text for choice in both.choices] == texts
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    drawn = [client.completions.create(prompt=PROMPT, **options) for _ in range(2)]
    assert drawn[0].choices[0].text != drawn[1].choices[0].text  # each with a seed of its own
    again = client.completions.create(prompt=PROMPT, seed=drawn[0].model_extra["coppice"]["seed"], **options)  # type: ignore[index]
    assert again.choices[0].text == drawn[0].choices[0].text


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
    assert values[0] is None
    # Each prefix as a prompt says the same of its next token.
    for at in (1, len(values) // 2, len(values) - 2):
        prefix = "".join(tokens[:at])
        best = client.completions.create(prompt=prefix, max_tokens=1, **{**options, "logprobs": 20}).choices[0].logprobs
        assert best
        assert best.top_logprobs
        if tokens[at] in best.top_logprobs[0]:
            assert best.top_logprobs[0][tokens[at]] == pytest.approx(values[at], abs=1e-3)
    only = client.completions.create(prompt=PROMPT, max_tokens=0, echo=True, **options).choices[0]
    assert only.text == PROMPT


def test_least_lengths_hold_off_the_end(client: openai.OpenAI) -> None:
    ended = client.completions.create(model="target", prompt=PROMPT, temperature=0, max_tokens=4, stop=["\n", " "])
    assert ended.usage
    assert ended.usage.completion_tokens < 4
    longer = client.completions.create(
        model="target", prompt=PROMPT, temperature=0, max_tokens=8, stop=["\n", " "], extra_body={"min_tokens": 8}
    )
    assert longer.usage
    assert longer.usage.completion_tokens == 8


@pytest.mark.parametrize(
    ("change", "status", "field"),
    [
        ({"temperature": -1}, 400, "temperature"),
        ({"temperature": "1"}, 400, "temperature"),
        ({"tools": [{"type": "function"}]}, 400, "tools"),
        ({"response_format": {"type": "json_object"}}, 400, "response_format"),
        ({"surprise": 1}, 400, "surprise"),
        ({"n": 0}, 400, "n"),
        ({"logprobs": 21}, 400, "logprobs"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": [99_999_999]}, 400, "ids"),
        ({"policy": "nonsense"}, 400, "policy"),
        ({"max_tokens": 10**9}, 400, "max_new_tokens"),
        ({"logit_bias": {"x": 1}}, 400, "logit_bias"),
        ({"model": "gpt-4"}, 404, None),
        ({"tools": [], "suffix": None, "best_of": 1}, 200, None),
    ],
)
def test_what_is_not_served_is_refused_by_name(stack: Stack, change: dict[str, Any], status: int, field: str) -> None:
    body = {"model": "target", "prompt": PROMPT, "max_tokens": 2, "temperature": 0} | change
    got, _, data = asked(stack, "/v1/completions", body)
    assert got == status, data
    if status != 200:
        error = json.loads(data)["error"]
        assert error["param"] == field
        assert error["message"]
        assert error["type"] in ("invalid_request_error", "not_found_error")


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", b"{", 400),
        ("/v1/completions", b"[" * 5000, 400),
        ("/v1/completions", b"x" * (2 << 20), 413),
        ("/v1/nothing", None, 404),
        ("/health", None, 200),
        ("/ready", None, 200),
        ("/version", None, 200),
        ("/v1/models", None, 200),
        ("/v1/models/target", None, 200),
        ("/v1/models/other", None, 404),
        ("/tokenize", {"prompt": PROMPT}, 200),
        ("/detokenize", {"tokens": [5, 6]}, 200),
        ("/detokenize", {"tokens": [99_999_999]}, 400),
        ("/openapi.json", None, 200),
    ],
)
def test_every_call_is_answered_in_its_form(stack: Stack, path: str, body: Any, status: int) -> None:
    got, headers, data = asked(stack, path, body)
    assert got == status, data
    if status >= 400:
        assert json.loads(data)["error"]["message"]
    assert headers.get("server") != "uvicorn"


def test_a_client_that_leaves_frees_its_seat(stack: Stack, grpc_client: Client) -> None:
    for stream in (False, True):
        connection = HTTPConnection(stack.orchestrator.http, timeout=30)
        body = {"prompt": PROMPT, "max_tokens": 900, "temperature": 0, "stream": stream, "ignore_eos": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        until = time.monotonic() + 10
        while not grpc_client.describe().running:
            assert time.monotonic() < until
            time.sleep(0.01)
        connection.close()
        until = time.monotonic() + 5
        while grpc_client.describe().running:
            assert time.monotonic() < until, f"stream={stream}"
            time.sleep(0.05)


def test_metrics_of_speculative_decoding_add_up(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="target", prompt=PROMPT, temperature=0, max_tokens=32, extra_body={"include_metrics": True}
    )
    assert answer.model_extra
    told, ours = answer.model_extra["metrics"]["speculative_decoding"], answer.model_extra["coppice"]
    assert told["num_spec_steps"] == sum(told["acceptance_histogram"])
    assert told["num_accepted_draft_tokens"] == sum(at * count for at, count in enumerate(told["acceptance_histogram"]))
    assert told["draft_acceptance_rate"] == told["num_accepted_draft_tokens"] / told["num_draft_tokens"]
    assert ours["heads"] == list(HEADS)
    assert math.isclose(ours["tau"], sum(ours["accept_lengths"]) / len(ours["accept_lengths"]))
