"""Structured output through the whole pipeline: plain decoding's text under every policy, and of its grammar."""

from __future__ import annotations

import json
import re
import time
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from jsonschema import Draft202012Validator
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from coppice.client.client import Client
from coppice.client.completion import Completion
from coppice.errors import InvalidField
from coppice.speculation.grammar import Guide, compile_grammar
from coppice.speculation.sampling import SamplingParams, decode_row, draw
from coppice.stack.launch import Stack
from coppice.telemetry import metric
from services.verifier.grammars import vocabulary_of
from tests.pipeline.conftest import VOCAB, call
from tests.schemas import Schema, schemas

PROMPT = "The answer as JSON: "
WAYS = ("single:self", "merge", "auto")
NEW = 160


@pytest.fixture
def count() -> int:
    """Schemas that are tried; tests/nightly tries more."""
    return 10


def answers(client: Client, schema: Schema, temperature: float, *policies: str) -> list[Completion]:
    """Under plain decoding and under every policy with every budget, and what goes on behind its beginning."""
    options = {"temperature": temperature, "seed": 7, "max_new_tokens": NEW, "structured_outputs": {"json": schema}}
    plain = client.generate(PROMPT, policy="plain", **options)
    ways = product(policies, (0, 8, 31))
    given = [client.generate(PROMPT, policy=policy, budget=budget, **options) for policy, budget in ways]
    held = plain.ids[: len(plain.ids) // 2]
    rest = client.generate(PROMPT, policy=policies[-1], resume_ids=held, **options)
    assert held + rest.ids == plain.ids
    return [plain, *given]


def check_schemas(client: Client, count: int, *policies: str) -> int:
    """How many answers ended by themselves; all of these are of their schema, and all policies say the same."""
    ended = 0
    for schema, temperature in product(schemas(count), (0.0, 1.0)):
        plain, *others = answers(client, schema, temperature, *policies)
        assert {other.ids for other in others} == {plain.ids}, schema
        if plain.finish_reason == "eos":
            ended += 1
            checker = Draft202012Validator.FORMAT_CHECKER
            Draft202012Validator(schema, format_checker=checker).validate(json.loads(plain.text))
    return ended


@pytest.mark.timeout(0)
def test_every_policy_says_the_same_and_it_is_of_its_schema(client: Client, count: int) -> None:
    assert check_schemas(client, count, *WAYS) > count


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
            law = decode_row(np.where(guide.allowed([]), row, -np.inf), sampling)
            ids.append(draw(*law, sampling.seed, len(ids)))
            guide.append(ids[-1:])
        for policy in ("plain", "merge"):
            answer = client.generate(
                prompt, sampling=sampling, policy=policy, structured_outputs={"regex": pattern}, max_new_tokens=40
            )
            assert list(answer.ids) == ids[len(prompt) :]
            assert re.fullmatch(pattern, answer.text)


def test_forced_text_drafts_for_free(client: Client) -> None:
    """Under a grammar a step commits at least what it does on the same text without one."""
    keys = {f"a_rather_long_name_{number}": {"type": "boolean"} for number in range(5)}
    schema = {"type": "object", "properties": keys, "required": list(keys), "additionalProperties": False}
    guided = client.generate(
        PROMPT, policy="single:lookup", max_new_tokens=NEW, budget=8, structured_outputs={"json": schema}
    )
    assert guided.finish_reason == "eos"
    assert guided.tau > 4
    assert client.generate(PROMPT, policy="plain", max_new_tokens=NEW, structured_outputs={"json": schema}).tau == 1


@pytest.mark.parametrize(
    ("structured", "field"),
    [
        ({"json": {"not": {"type": "string"}}}, "grammar"),
        ({"json": {"type": "integer", "multipleOf": 999983}}, "grammar"),
        ({"json": {"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}}, "grammar"),
        ({"regex": "(a"}, "grammar"),
        ({"grammar": "start: " + "(" * 30000 + '"a"' + ")" * 30000}, "grammar"),
        ({"json": {}, "regex": "a"}, "structured_outputs"),
        ({"yaml": ""}, "structured_outputs"),
        ({"regex": "a" * 100_000}, "structured_outputs.regex"),
        ({"choice": {1}}, "structured_outputs.choice"),
    ],
)
def test_a_hostile_grammar_is_refused_and_harms_nobody(client: Client, structured: Schema, field: str) -> None:
    with pytest.raises(InvalidField) as refused:
        client.generate(PROMPT, structured_outputs=structured, max_new_tokens=4)
    assert refused.value.field == field
    began = time.monotonic()
    assert client.generate(PROMPT, structured_outputs={"choice": ["yes", "no"]}, max_new_tokens=8).text in ("yes", "no")
    assert time.monotonic() - began < 20


def test_a_least_length_gives_way_where_the_text_is_complete(client: Client, stack: Stack) -> None:
    before = metric(stack.services["verifier"].metrics, "coppice_verifier_grammar_seconds_count")
    body = {"prompt": PROMPT, "structured_outputs": {"regex": "[ab]{2,6}"}, "min_tokens": 40, "max_tokens": 60}
    status, _, answer = call(stack, "/v1/completions", body)
    [choice] = json.loads(answer)["choices"]
    assert (status, len(choice["text"]), choice["finish_reason"]) == (200, 6, "stop")
    cut = client.generate(PROMPT, structured_outputs={"regex": "[ab]{20}"}, max_new_tokens=5)
    assert (cut.finish_reason, len(cut.text)) == ("length", 5)
    assert metric(stack.services["verifier"].metrics, "coppice_verifier_grammar_seconds_count") > before


def test_a_grammar_and_ignore_eos_exclude_each_other(client: Client) -> None:
    with pytest.raises(InvalidField, match="ignore_eos"):
        client.generate(PROMPT, structured_outputs={"regex": "a"}, ignore_eos=True)
