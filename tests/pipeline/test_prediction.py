"""Predicted outputs through a pipeline of processes: exact, counted, one session's, and the same over HTTP."""

from __future__ import annotations

import random
from typing import Any

import openai
import pytest

from coppice.client.client import Client
from coppice.client.completion import Completion
from coppice.errors import InvalidField
from coppice.stack.launch import Stack
from coppice.wire.generation import Origin
from tests.pipeline.conftest import VOCAB
from tests.reference import EDITS, edited

PROMPTS = [tuple(random.Random(n).randrange(1, VOCAB) for _ in range(6 + 9 * n)) for n in range(3)]
POLICIES = ("single:lookup", "route", "merge", "auto")
NEW = 96
TOLD: dict[str, Any] = {"max_new_tokens": NEW, "ignore_eos": True, "seed": 5}


def accepted_drafts(answer: Completion) -> int:
    return answer.origins.count(Origin.DRAFT)


def test_the_text_is_plains_whatever_is_predicted(client: Client) -> None:
    """Every policy with a prediction that fits and one that nearly does, and two policies with any."""
    for number, policies in enumerate((POLICIES, ("single:lookup",), ("auto",))):
        told: dict[str, Any] = {**TOLD, "temperature": float(number % 2), "max_new_tokens": 48}
        prompt = PROMPTS[number]
        plain = client.generate(prompt, policy="plain", **told)
        rng = random.Random(number)
        predictions = [
            plain.ids,
            edited(plain.ids, EDITS[number], rng),
            tuple(rng.randrange(VOCAB) for _ in range(NEW)),
            plain.ids[20:],
            (plain.ids[0],),
            plain.ids * 40,
        ]
        for policy in policies:
            for prediction in predictions[: 2 if number == 0 else None]:
                answer = client.generate(prompt, policy=policy, prediction=prediction, **told)
                assert answer.ids == plain.ids, policy
                counts = (answer.accepted_prediction_tokens, answer.rejected_prediction_tokens)
                assert min(counts) >= 0
                assert sum(counts) <= len(prediction)
                assert counts[0] <= accepted_drafts(answer)


def test_tokens_of_the_prediction_are_counted_and_no_others(client: Client) -> None:
    options: dict[str, Any] = {"policy": "single:lookup", "temperature": 1.0, **TOLD}
    plain = client.generate(PROMPTS[2], **options)
    assert (plain.accepted_prediction_tokens, plain.rejected_prediction_tokens) == (0, 0)
    fits = client.generate(PROMPTS[2], prediction=plain.ids, **options)
    assert fits.tau > 10
    assert accepted_drafts(fits) - 2 <= fits.accepted_prediction_tokens <= accepted_drafts(fits)
    assert fits.rejected_prediction_tokens < 10
    never = [token for token in range(VOCAB) if token not in {*plain.ids, *PROMPTS[2]}][:30]
    useless = client.generate(PROMPTS[2], prediction=never, **options)
    assert useless.ids == plain.ids
    assert useless.accepted_prediction_tokens == 0
    assert 0 < useless.rejected_prediction_tokens <= len(never)


def test_drafts_behind_the_texts_end_are_not_counted(client: Client) -> None:
    """A stop string ends the text amid a block, whose other drafts were accepted too."""
    plain = client.generate("hello", policy="plain", **TOLD)
    stop = plain.text[10:14]
    answer = client.generate("hello", prediction=plain.ids, policy="single:lookup", stop=stop, **TOLD)
    assert (answer.finish_reason, plain.text[: len(answer.text)]) == ("stop", answer.text)
    assert 0 < answer.accepted_prediction_tokens <= accepted_drafts(answer) < answer.new_tokens
    assert answer.rejected_prediction_tokens > 0  # they did not appear in the answer


@pytest.mark.parametrize(("policy", "kinds"), [("plain", "none"), ("single:self", "lm")])
def test_a_prediction_that_nobody_drafts_from_is_refused(client: Client, policy: str, kinds: str) -> None:
    with pytest.raises(InvalidField, match=f"prediction: .*lookup.*: {kinds}") as refused:
        client.generate(PROMPTS[0], policy=policy, prediction="x", **TOLD)
    assert refused.value.field == "prediction"
    assert client.generate(PROMPTS[0], policy=policy, prediction="", max_new_tokens=1).new_tokens == 1
    with pytest.raises(InvalidField, match="prediction: "):
        client.generate(PROMPTS[0], policy="route", prediction=[VOCAB], **TOLD)


def test_http_predicts_in_text_and_parts(stack: Stack, client: Client) -> None:
    told: Any = {"max_tokens": NEW, "temperature": 0, "model": "", "extra_body": {"policy": "single:lookup"}}
    messages: Any = [{"role": "user", "content": "hello"}]
    with openai.OpenAI(base_url=f"http://{stack.orchestrator.http}/v1", api_key="none", max_retries=0) as asking:
        plain = asking.chat.completions.create(messages=messages, **told)
        text = "".join(map(chr, range(97, 123)))
        for content in (text, [{"type": "text", "text": text[:9]}, {"type": "text", "text": text[9:]}]):
            prediction: Any = {"type": "content", "content": content}
            answer = asking.chat.completions.create(messages=messages, prediction=prediction, **told)
            assert answer.choices[0].message.content == plain.choices[0].message.content
            assert answer.usage
            details = answer.usage.completion_tokens_details
            assert details
            tried = (details.accepted_prediction_tokens or 0) + (details.rejected_prediction_tokens or 0)
            assert 0 < tried <= len(text)
        for wrong in ({"type": "text", "content": "x"}, {"type": "content"}, {"type": "content", "content": [1]}):
            with pytest.raises(openai.BadRequestError, match="prediction"):
                asking.chat.completions.create(messages=messages, prediction=wrong, **told)  # type: ignore[arg-type]
