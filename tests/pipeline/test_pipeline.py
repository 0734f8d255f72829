"""The pipeline as clients see it: text, ids, stops, limits, resumption, and the target's own words throughout."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool

from coppice.client.client import Client
from coppice.client.completion import Completion
from coppice.errors import InvalidField
from coppice.speculation.sampling import SamplingParams
from coppice.stack.launch import Stack
from coppice.telemetry import metric
from coppice.testing.reference import Reference
from coppice.wire.generation import Origin, Timings
from tests.pipeline.conftest import VOCAB
from tests.reference import EDITS, edited
from tests.sessions import last_row

ROOT = Path(__file__).parents[2]
PROMPTS = [tuple(random.Random(n).randrange(VOCAB) for _ in range(3 + 9 * n)) for n in range(6)]
NEW = 32
POLICIES = ("single:self", "single:lookup", "route", "merge", "auto")
BUDGETS = (0, 1, 8, 60, None)
ALL = SamplingParams(
    temperature=0.8,
    min_p=0.01,
    repetition_penalty=1.2,
    frequency_penalty=0.6,
    presence_penalty=-0.4,
    logit_bias={token: (token % 7) - 3.0 for token in range(0, VOCAB, 3)},
    seed=11,
)
SAMPLINGS = {
    "greedy": SamplingParams(),
    "penalised": SamplingParams(repetition_penalty=1.3),
    "sampled": SamplingParams(temperature=1.0, seed=5),
    "truncated": SamplingParams(temperature=1.0, seed=5, top_p=0.8, top_k=40),
    "everything": ALL,
    "everything, greedy": ALL.model_copy(update={"temperature": 0.0, "min_p": 0.0}),
}
TOLD: dict[str, Any] = {"max_new_tokens": NEW, "ignore_eos": True}


@pytest.mark.parametrize("name", SAMPLINGS)
def test_text_is_the_targets_under_every_policy_and_budget(client: Client, reference: Reference, name: str) -> None:
    """Transformers says it of greedy text itself; of any other it judges what plain decoding draws. Each policy meets
    each budget under one of the samplings.
    """
    sampling, number = SAMPLINGS[name], [*SAMPLINGS].index(name)
    prompt = PROMPTS[number]
    plain = client.generate(prompt, policy="plain", sampling=sampling, **TOLD).ids
    if name in ("greedy", "penalised"):
        assert plain == reference.generate(prompt, NEW, sampling).ids
    else:
        assert reference.judge(prompt, plain, sampling) == "identical"
    for at, policy in enumerate(POLICIES):
        budget = BUDGETS[(at + number) % len(BUDGETS)]
        answer = client.generate(prompt, policy=policy, budget=budget, sampling=sampling, **TOLD)
        assert answer.ids == plain, (policy, budget)
    held = (1, 20, NEW - 1)[number % 3]
    rest = client.generate(prompt, policy="merge", sampling=sampling, resume_ids=plain[:held], **TOLD)
    assert rest.ids == plain[held:]


def test_a_perfect_head_is_accepted_and_coupling_makes_it_guess_the_draw(client: Client) -> None:
    told = {"policy": "single:self", "max_new_tokens": 96, "ignore_eos": True, "seed": 0}
    assert client.generate(PROMPTS[1], **told).tau > 2.5
    coupled = client.generate(PROMPTS[1], temperature=1.0, **told)
    assert coupled.tau > 3
    assert client.generate(PROMPTS[1], temperature=1.0, coupled=False, **told).tau < coupled.tau - 0.5


def test_counts_add_up_and_a_named_budget_is_verified_whole(client: Client) -> None:
    answer = client.generate(PROMPTS[0], policy="route", **TOLD)
    assert answer.new_tokens == NEW == 1 + sum(answer.accept_lengths)
    assert answer.tau == (NEW - 1) / answer.steps
    assert answer.origins.count(Origin.ROOT) + answer.origins.count(Origin.DRAFT) == NEW
    assert answer.origins[0] is Origin.ROOT
    assert len(answer.routed) == len(answer.verified_nodes) == answer.steps
    assert max(answer.verified_nodes) <= 31
    timings = answer.timings
    assert isinstance(timings, Timings)
    assert len(timings.step_ns) == len(timings.split_ns) == answer.steps
    assert all(split < step for split, step in zip(timings.split_ns, timings.step_ns, strict=True))
    assert client.generate(PROMPTS[0], policy="plain", **TOLD).tau == 1.0
    named = client.generate(PROMPTS[0], policy="single:self", budget=31, temperature=1.0, coupled=False, **TOLD)
    assert min(named.verified_nodes[:-1]) == 31


def test_limits_hold_to_the_token(client: Client) -> None:
    for limit in (1, 2, 7):
        assert client.generate(PROMPTS[1], max_new_tokens=limit, ignore_eos=True).new_tokens == limit
    long = [1 + n % 200 for n in range(500)]
    answer = client.generate(long, max_new_tokens=100, ignore_eos=True, policy="single:self")
    assert (answer.new_tokens, answer.finish_reason) == (12, "length")  # a context of 512


@pytest.fixture(scope="module")
def ended(client: Client) -> Completion:
    """An answer that an end-of-text id ends inside an accepted path."""
    told = {"policy": "single:self", "temperature": 1.3, "max_new_tokens": 96}
    answers = (client.generate(PROMPTS[0], seed=seed, **told) for seed in range(40))
    return next(one for one in answers if one.finish_reason == "eos" and one.origins[-1] is Origin.DRAFT)


@pytest.mark.parametrize("ended_by", ["length", "stop", "eos"])
def test_the_text_of_a_resumed_stream_is_that_of_one_stream(client: Client, ended: Completion, ended_by: str) -> None:
    told = {"policy": "plain", "temperature": 1.3, "seed": ended.seed, "max_new_tokens": 96}
    if ended_by != "eos":
        told |= {"max_new_tokens": 24, "ignore_eos": True}
    if ended_by == "stop":
        text = client.generate(PROMPTS[0], **told).text
        told["stop"] = next(text[at : at + 3] for at in range(8, 24) if len(set(text[at : at + 3])) == 3)
    events = list(client.stream(PROMPTS[0], **told))
    assert events[-1].finish_reason == ended_by
    chunks = events[1:-1]
    ids, pieces = ([item for chunk in chunks for item in getattr(chunk, name)] for name in ("ids", "pieces"))
    if ended_by == "eos":
        assert tuple(ids) == ended.ids
        assert ids.index(0) == len(ids) - 1
    for held in (1, len(ids) - 2, len(ids) - 1, len(ids)):
        rest = client.generate(PROMPTS[0], resume_ids=ids[:held], **told)
        assert (list(rest.ids), rest.finish_reason) == (ids[held:], ended_by)
        assert "".join(pieces[:held]) + rest.text == "".join(pieces)
    if ended_by != "length":
        with pytest.raises(InvalidField, match="resume_ids: go on behind"):
            client.generate(PROMPTS[0], resume_ids=[*ids, 7], **told)


def test_log_probs_are_those_of_the_targets_unadjusted_row(client: Client, model: Any) -> None:
    answer = client.generate(PROMPTS[1], sampling=ALL, policy="merge", log_probs=True, **TOLD)
    for at in range(0, NEW, 5):
        row = last_row(model, [*PROMPTS[1], *answer.ids[:at]]).log_softmax(-1)
        assert answer.log_probs[at] == pytest.approx(float(row[answer.ids[at]]), abs=1e-3)


def test_p_q_rejection_runs_under_single_only(client: Client) -> None:
    told = {"max_new_tokens": 24, "ignore_eos": True, "temperature": 1.0, "pq": True, "seed": 0}
    answer, again = (client.generate(PROMPTS[1], policy="single:self", **told) for _ in range(2))
    assert answer.new_tokens == 24
    assert answer.tau > 5  # the head is the target: p = q accepts everything
    assert again.ids == answer.ids  # while no draft is late, a chain is as long as the budget says
    with pytest.raises(InvalidField, match="accept_rule"):
        client.generate(PROMPTS[1], policy="route", **told)
    biased = client.generate(PROMPTS[1], policy="single:self", logit_bias=dict.fromkeys(range(100), -100.0), **told)
    assert min(biased.ids) >= 100


def test_the_descriptor_set_is_all_that_a_caller_needs(stack: Stack, client: Client) -> None:
    pool = DescriptorPool()
    for file in FileDescriptorSet.FromString((ROOT / "coppice" / "v1" / "coppice.binpb").read_bytes()).file:
        pool.Add(file)
    method = pool.FindMethodByName("coppice.v1.GenerationService.Generate")
    request, response = (message_factory.GetMessageClass(one) for one in (method.input_type, method.output_type))
    with grpc.insecure_channel(stack.address) as channel:
        call = channel.unary_stream(
            "/coppice.v1.GenerationService/Generate",
            request_serializer=request.SerializeToString,
            response_deserializer=response.FromString,
        )
        asked = request(ids={"ids": PROMPTS[3]}, sampling={"temperature": 1.0}, max_new_tokens=16, ignore_eos=True)
        events = list(call(asked))
    ids, seed = tuple(token for event in events for token in event.chunk.ids), events[0].started.seed
    assert ids == client.generate(PROMPTS[3], temperature=1.0, seed=seed, max_new_tokens=16, ignore_eos=True).ids
    assert metric(stack.services["verifier"].metrics, "coppice_verifier_links") >= 1


# Predicted outputs: exact, counted, one session's, and the same over HTTP.

LONG = 96
PREDICTED: dict[str, Any] = {"max_new_tokens": LONG, "ignore_eos": True, "seed": 5}


def accepted_drafts(answer: Completion) -> int:
    return answer.origins.count(Origin.DRAFT)


def test_tokens_of_the_prediction_are_counted_and_no_others(client: Client) -> None:
    options: dict[str, Any] = {"policy": "single:lookup", "temperature": 1.0, **PREDICTED}
    plain = client.generate(PROMPTS[2], **options)
    assert (plain.accepted_prediction_tokens, plain.rejected_prediction_tokens) == (0, 0)
    fits = client.generate(PROMPTS[2], prediction=plain.ids, **options)
    assert fits.ids == plain.ids
    assert fits.tau > 10
    assert accepted_drafts(fits) - 2 <= fits.accepted_prediction_tokens <= accepted_drafts(fits)
    assert fits.rejected_prediction_tokens < 10
    never = [token for token in range(VOCAB) if token not in {*plain.ids, *PROMPTS[2]}][:30]
    useless = client.generate(PROMPTS[2], prediction=never, **options)
    assert useless.ids == plain.ids
    assert useless.accepted_prediction_tokens == 0
    assert 0 < useless.rejected_prediction_tokens <= len(never)
    nearly = edited(plain.ids, EDITS[0], random.Random(0))
    for policy in ("route", "merge", "auto"):
        answer = client.generate(PROMPTS[2], prediction=nearly, **options | {"policy": policy})
        assert answer.ids == plain.ids, policy


def test_drafts_behind_the_texts_end_are_not_counted(client: Client) -> None:
    """A stop string ends the text amid a block, whose other drafts were accepted too."""
    plain = client.generate("hello", policy="plain", **PREDICTED)
    stop = plain.text[10:14]
    answer = client.generate("hello", prediction=plain.ids, policy="single:lookup", stop=stop, **PREDICTED)
    assert (answer.finish_reason, plain.text[: len(answer.text)]) == ("stop", answer.text)
    assert 0 < answer.accepted_prediction_tokens <= accepted_drafts(answer) < answer.new_tokens
    assert answer.rejected_prediction_tokens > 0  # they did not appear in the answer


@pytest.mark.parametrize(("policy", "kinds"), [("plain", "none"), ("single:self", "lm")])
def test_a_prediction_that_nobody_drafts_from_is_refused(client: Client, policy: str, kinds: str) -> None:
    with pytest.raises(InvalidField, match=f"prediction: .*lookup.*: {kinds}") as refused:
        client.generate(PROMPTS[0], policy=policy, prediction="x", **PREDICTED)
    assert refused.value.field == "prediction"
    assert client.generate(PROMPTS[0], policy=policy, prediction="", max_new_tokens=1).new_tokens == 1
    with pytest.raises(InvalidField, match="prediction: "):
        client.generate(PROMPTS[0], policy="route", prediction=[VOCAB], **PREDICTED)


def test_http_predicts_in_text_and_parts(stack: Stack, client: Client) -> None:
    told: Any = {"max_tokens": LONG, "temperature": 0, "model": "", "extra_body": {"policy": "single:lookup"}}
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
