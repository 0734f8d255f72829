"""The pipeline as clients see it: text, ids, chat, stops, limits, resumption, and the target's own words throughout."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool

from coppice.client.client import Client
from coppice.errors import InvalidField
from coppice.prompts import demo_prompts
from coppice.speculation.sampling import SamplingParams
from coppice.stack.launch import Stack
from coppice.stack.spec import HeadSpec
from coppice.telemetry import metric
from coppice.testing.reference import Reference
from coppice.wire.generation import Origin, Timings
from tests.pipeline.conftest import VOCAB
from tests.stacks import serving
from tests.tiny import make_target

ROOT = Path(__file__).parents[2]
PROMPTS = [tuple(random.Random(n).randrange(VOCAB) for _ in range(3 + 9 * n)) for n in range(6)]
NEW = 40
POLICIES = ("plain", "single:self", "single:lookup", "route", "merge", "auto")
BUDGETS = (0, 1, 8, 60, None)
BIAS = {token: (token % 7) - 3.0 for token in range(0, VOCAB, 3)}
ALL = SamplingParams(
    temperature=0.8,
    min_p=0.01,
    repetition_penalty=1.2,
    frequency_penalty=0.6,
    presence_penalty=-0.4,
    logit_bias=BIAS,
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
    """Transformers says it of greedy text itself; of any other it judges what plain decoding draws."""
    sampling, number = SAMPLINGS[name], [*SAMPLINGS].index(name)
    prompt = PROMPTS[number]
    plain = client.generate(prompt, policy="plain", sampling=sampling, **TOLD).ids
    if name in ("greedy", "penalised"):
        assert plain == reference.generate(prompt, NEW, sampling).ids
    else:
        assert reference.judge(prompt, plain, sampling) == "identical"
    for at, policy in enumerate(POLICIES[1:]):
        for budget in BUDGETS if name == "greedy" else (BUDGETS[(at + number) % len(BUDGETS)],):
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


def test_counts_add_up(client: Client) -> None:
    answer = client.generate(PROMPTS[0], max_new_tokens=NEW, ignore_eos=True, policy="route")
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
    plain = client.generate(PROMPTS[0], max_new_tokens=NEW, ignore_eos=True, policy="plain")
    assert plain.tau == 1.0


def test_an_end_of_text_id_ends_the_text_inside_an_accepted_path(client: Client) -> None:
    for seed in range(40):
        told = {"temperature": 1.3, "seed": seed, "max_new_tokens": 96}
        draft = client.generate(PROMPTS[0], policy="single:self", **told)
        if draft.finish_reason == "eos" and draft.origins[-1] is Origin.DRAFT:
            break
    assert draft.ids == client.generate(PROMPTS[0], policy="plain", **told).ids
    assert draft.finish_reason == "eos"
    assert draft.ids.index(0) == len(draft.ids) - 1


def test_limits_hold_to_the_token(client: Client) -> None:
    for limit in (1, 2, 7):
        assert client.generate(PROMPTS[1], max_new_tokens=limit, ignore_eos=True).new_tokens == limit
    long = [1 + n % 200 for n in range(500)]
    answer = client.generate(long, max_new_tokens=100, ignore_eos=True, policy="single:self")
    assert (answer.new_tokens, answer.finish_reason) == (12, "length")  # a context of 512


@pytest.mark.parametrize("ended_by", ["length", "stop", "eos"])
def test_the_text_of_a_resumed_stream_is_that_of_one_stream(client: Client, ended_by: str) -> None:
    told = {"policy": "plain", "max_new_tokens": 40, "ignore_eos": ended_by != "eos", "temperature": 1.0, "seed": 5}
    whole = client.generate(PROMPTS[1], **told)
    if ended_by == "stop":
        told["stop"] = next(whole.text[at : at + 3] for at in range(8, 40) if len(set(whole.text[at : at + 3])) == 3)
    if ended_by == "eos":
        quick = told | {"policy": "single:self", "max_new_tokens": 200}
        seeds = (client.generate(PROMPTS[1], **quick | {"seed": seed}) for seed in range(40))
        told |= {"max_new_tokens": 200, "seed": next(answer.seed for answer in seeds if answer.finish_reason == "eos")}
    events = list(client.stream(PROMPTS[1], **told))
    assert events[-1].finish_reason == ended_by
    chunks = events[1:-1]
    ids, pieces = ([item for chunk in chunks for item in getattr(chunk, name)] for name in ("ids", "pieces"))
    for held in (1, 2, 3, len(ids) - 3, len(ids) - 2, len(ids) - 1, len(ids)):
        rest = client.generate(PROMPTS[1], resume_ids=ids[:held], **told)
        assert (list(rest.ids), rest.finish_reason) == (ids[held:], ended_by)
        assert "".join(pieces[:held]) + rest.text == "".join(pieces)
    if ended_by != "length":
        with pytest.raises(InvalidField, match="resume_ids: go on behind"):
            client.generate(PROMPTS[1], resume_ids=[*ids, 7], **told)


@pytest.mark.parametrize("name", ["greedy", "everything"])
def test_log_probs_are_those_of_the_targets_unadjusted_row(client: Client, reference: Reference, name: str) -> None:
    answer = client.generate(PROMPTS[1], sampling=SAMPLINGS[name], policy="merge", log_probs=True, **TOLD)
    torch, model = reference._torch, reference._model
    with torch.inference_mode():
        rows = model(torch.tensor([[*PROMPTS[1], *answer.ids]])).logits[0, len(PROMPTS[1]) - 1 : -1].log_softmax(-1)
    expected = rows[torch.arange(NEW), torch.tensor(answer.ids)].tolist()
    assert answer.log_probs == pytest.approx(expected, abs=1e-3)


def test_p_q_rejection_runs_under_single_only(client: Client) -> None:
    told = {"max_new_tokens": 24, "ignore_eos": True, "temperature": 1.0, "pq": True, "seed": 0}
    answer = client.generate(PROMPTS[1], policy="single:self", **told)
    assert answer.new_tokens == 24
    assert answer.tau > 5  # the head is the target: p = q accepts everything
    again = {client.generate(PROMPTS[1], policy="single:self", **told).ids for _ in range(4)}
    assert again == {answer.ids}  # while no draft is late, a chain is as long as the budget says
    with pytest.raises(InvalidField, match="accept_rule"):
        client.generate(PROMPTS[1], policy="route", **told)
    biased = told | {"policy": "single:self", "logit_bias": dict.fromkeys(range(100), -100.0)}
    texts = [client.generate(PROMPTS[1], **biased | {"seed": seed}).ids for seed in range(4)]
    assert min(map(min, texts)) >= 100


@pytest.fixture(scope="module")
def penalised(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A target whose own configuration penalises repetition; itself as a head, and one of other random weights."""
    folder = make_target(tmp_path_factory.mktemp("penalised"), VOCAB, layers=6)
    file = folder / "generation_config.json"
    own = {"repetition_penalty": 1.25, "temperature": 0.6, "do_sample": True}
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | own), encoding="utf-8")
    other = make_target(tmp_path_factory.mktemp("random"), VOCAB, seed=1)
    heads = HeadSpec("self", "lm", folder), HeadSpec("random", "lm", other)
    with serving(tmp_path_factory.mktemp("logs"), folder, *heads) as running:
        yield running


def test_the_targets_own_penalty_is_the_default(penalised: Stack) -> None:
    reference = Reference(penalised.spec.target, "float32", threads=1)
    with Client(penalised.address) as client:
        assert client.describe().repetition_penalty == 1.25
        expected = reference.greedy(PROMPTS[0], NEW).ids
        assert expected == reference.generate(PROMPTS[0], NEW, SamplingParams(repetition_penalty=1.25)).ids
        for policy in ("plain", "single:self", "auto"):
            assert client.generate(PROMPTS[0], policy=policy, **TOLD).ids == expected, policy
        without = reference.generate(PROMPTS[0], NEW, SamplingParams(repetition_penalty=1.0)).ids
        assert client.generate(PROMPTS[0], repetition_penalty=1.0, **TOLD).ids == without != expected
        sampled = client.generate(PROMPTS[0], temperature=0.8, seed=3, policy="single:self", **TOLD)
        assert reference.judge(PROMPTS[0], sampled.ids, SamplingParams(temperature=0.8, seed=3)) == "identical"


def test_what_is_left_out_of_a_random_heads_trees_changes_no_text_and_auto_soon_leaves_it_alone(
    penalised: Stack,
) -> None:
    told = {"policy": "single:random", "max_new_tokens": 80, "ignore_eos": True}
    with Client(penalised.address) as client:
        named, free = client.generate(PROMPTS[1], budget=31, **told), client.generate(PROMPTS[1], **told)
        auto = client.generate(PROMPTS[1], **told | {"policy": "auto", "max_new_tokens": 240})
    assert free.ids == named.ids == auto.ids[:80]
    assert min(named.verified_nodes[:-1]) == 31
    assert sum(free.verified_nodes) <= sum(named.verified_nodes)
    assert auto.routed.count(auto.heads.index("random")) < auto.steps / 2
    assert metric(penalised.orchestrator.metrics, "coppice_auto_choices_total") > 0


# --- trained heads ---

CODE = [prompt.prompt for prompt in demo_prompts() if prompt.category in ("code", "maths")][::30]
SHIPPED = ("dspark-code", "specblock-code", "eagle3-code")


def test_texts_of_the_shipped_heads_are_generates_and_drafts_are_of_use() -> None:
    with (
        serving(None, None, *map(HeadSpec.parse, SHIPPED), draft_deadline_ms=3000) as trained,
        Client(trained.address) as client,
    ):
        reference = Reference(trained.spec.target, "float32", threads=1)
        for number, prompt in enumerate(CODE):
            expected = reference.greedy(reference.text.encode(str(prompt)), 24).ids
            for at, policy in enumerate((*(f"single:{head}" for head in SHIPPED), "route", "merge")):
                budget = 8 if number else (8, 31, 1)[at % 3]
                answer = client.generate(prompt, policy=policy, budget=budget, max_new_tokens=24, ignore_eos=True)
                assert answer.ids == expected, policy
                assert answer.late_drafts == 0
                assert budget == 1 or answer.tau > 1.3, policy  # they were trained on such text


# --- clients that are not the SDK: one that has the descriptor set alone, and the documented one for Node ---


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
