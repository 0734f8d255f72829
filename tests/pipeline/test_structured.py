"""Structured output and required calls through the whole pipeline: plain decoding's text, and of its grammar."""

from __future__ import annotations

import itertools
import json
import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonschema import Draft202012Validator
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from coppice.client.client import Client
from coppice.errors import InvalidField
from coppice.speculation.grammar import Guide, compile_grammar
from coppice.speculation.sampling import SamplingParams, decode_row, draw
from coppice.stack.launch import Stack
from coppice.telemetry import metric
from services.verifier.grammars import vocabulary_of
from tests.pipeline.conftest import NAMES, VOCAB, call, parts_of
from tests.schemas import Schema, schemas

PROMPT = "The answer as JSON: "
NEW = 160
AT_ONCE = 8  # answers
BUDGETS = (0, 8, 31)


def check_schemas(client: Client, count: int, *policies: str, every_budget: bool = False) -> int:
    """How many texts ended by themselves: plain decoding's, under every policy and budget, and of their schemas.

    Without `every_budget` schemas and policies take the budgets in turns.
    """

    def ends(number: int, case: tuple[Schema, float]) -> bool:
        schema, temperature = case
        options = {"temperature": temperature, "seed": 7, "max_new_tokens": NEW, "structured_outputs": {"json": schema}}
        ask = partial(client.generate, PROMPT, **options)
        plain = ask(policy="plain")
        for at, policy in enumerate(policies):
            for budget in BUDGETS if every_budget else BUDGETS[(number + at) % 3 :][:1]:
                assert ask(policy=policy, budget=budget).ids == plain.ids, schema
        held = plain.ids[: len(plain.ids) // 2]
        assert held + ask(policy=policies[-1], resume_ids=held).ids == plain.ids
        if plain.finish_reason == "eos":
            value = json.loads(plain.text.replace('"0000-', '"2000-'))  # a year of RFC 3339, but no Python date's
            Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER).validate(value)
        return plain.finish_reason == "eos"

    with ThreadPoolExecutor(AT_ONCE) as threads:
        return sum(threads.map(ends, itertools.count(), product(schemas(count), (0.0, 1.0))))


def test_every_policy_says_the_same_and_it_is_of_its_schema(client: Client) -> None:
    assert check_schemas(client, 4, "single:self", "merge", "auto") > 4


def test_a_step_draws_from_the_targets_own_row_of_what_the_grammar_allows(client: Client, target: Path) -> None:
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    vocabulary = vocabulary_of(tokenizer, VOCAB, [0])
    prompt, pattern = tokenizer.encode(PROMPT).ids, "[A-Z][a-z]{3,9} [0-9]{2}(\\.|!)"
    for temperature in (0.0, 1.0):
        guide, ids = Guide(compile_grammar(vocabulary, "regex", pattern), VOCAB), list(prompt)
        sampling = SamplingParams(temperature=temperature, seed=3)
        while ids[-1] != 0 or ids == prompt:
            with torch.inference_mode():
                row = model(torch.tensor([ids])).logits[0, -1].numpy()
            law = decode_row(guide.masked(row, []), sampling)
            ids.append(draw(*law, sampling.seed, len(ids)))
            guide.append(ids[-1:])
        for policy in ("plain", "merge"):
            options = {"policy": policy, "structured_outputs": {"regex": pattern}, "max_new_tokens": 40}
            answer = client.generate(prompt, sampling=sampling, **options)
            assert list(answer.ids) == ids[len(prompt) :]
            assert re.fullmatch(pattern, answer.text)


def test_forced_text_is_drafted_by_no_head(client: Client) -> None:
    """Of a name that stands in no prompt the look-up head knows nothing."""
    schema = {"properties": {"a name that no other text holds": {"enum": [7]}}, "additionalProperties": False}
    schema |= {"type": "object", "required": list(schema["properties"])}
    told = {"structured_outputs": {"json": schema}, "max_new_tokens": NEW}
    answer = client.generate(PROMPT, policy="single:lookup", budget=8, **told)
    assert answer.ids == client.generate(PROMPT, policy="plain", **told).ids
    assert answer.tau > 3


@pytest.mark.parametrize(
    ("structured", "field"),
    [
        ({"json": {"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}}, "grammar"),
        ({"json": {}, "regex": "a"}, "structured_outputs"),
        ({"yaml": ""}, "structured_outputs"),
        ({"regex": "a" * 100_000}, "structured_outputs.regex"),
        ({"choice": {1}}, "structured_outputs.choice"),
        ({"regex": "a"}, "ignore_eos"),
    ],
)
def test_a_hostile_grammar_is_refused_and_harms_nobody(client: Client, structured: Schema, field: str) -> None:
    with pytest.raises(InvalidField) as refused:
        client.generate(PROMPT, structured_outputs=structured, ignore_eos=field == "ignore_eos", max_new_tokens=4)
    assert refused.value.field == field
    options = {"structured_outputs": {"choice": ["yes", "no"]}, "timeout": 20}
    assert client.generate(PROMPT, max_new_tokens=8, **options).text in ("yes", "no")


def test_a_least_length_gives_way_where_the_text_is_complete(client: Client, stack: Stack) -> None:
    before = metric(stack.services["verifier"].metrics, "coppice_verifier_grammar_seconds_count")
    body = {"prompt": PROMPT, "structured_outputs": {"regex": "[ab]{2,6}"}, "min_tokens": 40, "max_tokens": 60}
    status, _, answer = call(stack, "/v1/completions", body)
    [choice] = json.loads(answer)["choices"]
    assert (status, len(choice["text"]), choice["finish_reason"]) == (200, 6, "stop")
    cut = client.generate(PROMPT, structured_outputs={"regex": "[ab]{20}"}, max_new_tokens=5)
    assert (cut.finish_reason, len(cut.text)) == ("length", 5)
    assert metric(stack.services["verifier"].metrics, "coppice_verifier_grammar_seconds_count") > before


# A call that is required is made by the real target under every policy, and what is asked of ids is told of them.

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


@pytest.mark.parametrize(("choice", "temperature"), [(NAMED, 0), ("required", 1)], ids=["named", "required"])
def test_a_required_call_is_the_same_under_every_policy(stack: Stack, choice: Any, temperature: float) -> None:
    """tests/unit/test_tools.py has it in the forms of other chat templates than Hermes'."""
    body = {**ASK, **OPTIONS, "tool_choice": choice, "temperature": temperature}

    def asked(**fields: Any) -> bytes:
        return call(stack, "/v1/chat/completions", {**body, **fields})[2]

    answers = [json.loads(asked(policy=policy))["choices"][0] for policy in ("plain", "single:self", "merge")]
    parts = parts_of(asked(stream=True).decode())
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
    whole = json.loads(call(stack, "/v1/completions", body)[2])["choices"][0]
    ids, end = whole["token_ids"], whole["token_ids"][7]
    first = ids.index(end)
    for include in (False, True):
        fields = {**body, "stop_token_ids": [end], "include_stop_str_in_output": include}
        choice = json.loads(call(stack, "/v1/completions", fields)[2])["choices"][0]
        assert (choice["token_ids"], choice["finish_reason"]) == (ids[: first + 1], "stop")
        text = json.loads(call(stack, "/detokenize", {"tokens": ids[: first + include]})[2])["prompt"]
        assert choice["text"] == text
    assert len(whole["prompt_token_ids"]) == 3


def test_a_target_has_the_names_that_it_was_given(stack: Stack) -> None:
    assert [model["id"] for model in json.loads(call(stack, "/v1/models")[2])["data"]] == list(NAMES)
    answers = [call(stack, "/tokenize", {"model": name, "prompt": "Hi"}) for name in (*NAMES, "third")]
    assert [status for status, _, _ in answers] == [200, 200, 404]
    assert answers[0][2] == answers[1][2]
