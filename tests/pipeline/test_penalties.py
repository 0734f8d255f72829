"""Bias and penalties through a pipeline of processes: `generate`'s own text, plain decoding's under every policy."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coppice.client.client import Client
from coppice.speculation.sampling import SamplingParams
from coppice.stack.launch import Stack
from coppice.stack.spec import HeadSpec, StackSpec
from coppice.testing.reference import Reference
from tests.pipeline.conftest import VOCAB
from tests.tiny import make_target

PROMPTS = [tuple(random.Random(n).randrange(VOCAB) for _ in range(4 + 13 * n)) for n in range(3)]
NEW = 32
BUDGETS = (0, 1, 8, 31, 60)
POLICIES = ("plain", "single:self", "single:lookup", "route", "merge", "auto")
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
COUNTED = ALL.model_copy(update={"temperature": 0.0, "min_p": 0.0})
TOLD: dict[str, Any] = {"max_new_tokens": NEW, "ignore_eos": True}


@pytest.fixture(scope="module")
def penalised_texts(reference: Reference) -> dict[tuple[int, ...], tuple[int, ...]]:
    """What `generate` says to each prompt with a repetition penalty, which is not what it says without."""
    penalty = SamplingParams(repetition_penalty=1.3)
    texts = {prompt: reference.generate(prompt, NEW, penalty).ids for prompt in PROMPTS}
    for prompt, ids in texts.items():
        assert ids != reference.greedy(prompt, NEW).ids
    return texts


@pytest.mark.parametrize("policy", POLICIES)
def test_greedy_text_with_a_repetition_penalty_is_generates(
    client: Client, penalised_texts: dict[tuple[int, ...], tuple[int, ...]], policy: str
) -> None:
    for prompt, budget in zip(itertools.cycle(PROMPTS), BUDGETS, strict=False):
        answer = client.generate(prompt, policy=policy, budget=budget, repetition_penalty=1.3, **TOLD)
        assert answer.ids == penalised_texts[prompt], budget


@pytest.mark.parametrize("sampling", [ALL, COUNTED], ids=["sampled", "greedy"])
def test_text_with_everything_set_is_plains_under_every_policy(client: Client, sampling: SamplingParams) -> None:
    for prompt in PROMPTS:
        told = {"sampling": sampling, **TOLD}
        plain = client.generate(prompt, policy="plain", **told)
        for number, policy in enumerate(POLICIES[1:], PROMPTS.index(prompt)):
            budget = (None, 60)[number % 2]
            answer = client.generate(prompt, policy=policy, budget=budget, **told)
            assert answer.ids == plain.ids, (policy, budget)


def test_plain_text_with_everything_set_is_the_references(client: Client, reference: Reference) -> None:
    for sampling in (ALL, COUNTED):
        answer = client.generate(PROMPTS[2], policy="merge", sampling=sampling, **TOLD)
        assert reference.judge(PROMPTS[2], answer.ids, sampling) == "identical"


def test_p_q_rejection_obeys_a_bias(client: Client) -> None:
    told = {"temperature": 1.0, "pq": True, "policy": "single:self", "logit_bias": dict.fromkeys(range(100), -100.0)}
    for seed in range(4):
        assert min(client.generate(PROMPTS[1], seed=seed, **told, **TOLD).ids) >= 100


def test_log_probs_are_those_of_the_unadjusted_row(client: Client, reference: Reference) -> None:
    for sampling in (ALL, COUNTED):
        answer = client.generate(PROMPTS[1], sampling=sampling, log_probs=True, **TOLD)
        torch, model = reference._torch, reference._model
        with torch.inference_mode():
            rows = model(torch.tensor([[*PROMPTS[1], *answer.ids]])).logits[0, len(PROMPTS[1]) - 1 : -1].log_softmax(-1)
        expected = rows[torch.arange(NEW), torch.tensor(answer.ids)].tolist()
        assert answer.log_probs == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("sampling", [ALL, COUNTED], ids=["sampled", "greedy"])
def test_resumed_ids_are_generated_ones(client: Client, sampling: SamplingParams) -> None:
    whole = client.generate(PROMPTS[1], policy="plain", sampling=sampling, **TOLD).ids
    for held in (1, 20, NEW - 1):
        rest = client.generate(PROMPTS[1], policy="merge", sampling=sampling, resume_ids=whole[:held], **TOLD)
        assert rest.ids == whole[held:]


@pytest.fixture(scope="module")
def penalised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose own configuration penalises repetition."""
    folder = make_target(tmp_path_factory.mktemp("penalised"), VOCAB, layers=6)
    file = folder / "generation_config.json"
    told = json.loads(file.read_text(encoding="utf-8")) | {"repetition_penalty": 1.25, "temperature": 0.6}
    file.write_text(json.dumps(told | {"do_sample": True}), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def own_penalty(penalised: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack of that target."""
    spec = StackSpec(
        target=penalised,
        heads=(HeadSpec("self", "lm", penalised), HeadSpec("lookup", "lookup")),
        dtype="float32",
        verifier_threads=1,
        drafter_threads=1,
        extra={"orchestrator": {"orchestrator.draft_deadline_ms": 2000}},
    )
    with Stack(spec, log_dir=tmp_path_factory.mktemp("own")) as running:
        yield running


def test_the_targets_own_penalty_is_the_default(own_penalty: Stack, penalised: Path) -> None:
    reference = Reference(penalised, "float32", threads=1)
    with Client(own_penalty.address) as client:
        assert client.describe().repetition_penalty == 1.25
        expected = reference.greedy(PROMPTS[0], NEW).ids
        assert expected == reference.generate(PROMPTS[0], NEW, SamplingParams(repetition_penalty=1.25)).ids
        for policy in ("plain", "single:self", "merge", "auto"):
            assert client.generate(PROMPTS[0], policy=policy, **TOLD).ids == expected, policy
        without = reference.generate(PROMPTS[0], NEW, SamplingParams(repetition_penalty=1.0)).ids
        assert client.generate(PROMPTS[0], repetition_penalty=1.0, **TOLD).ids == without != expected
        sampled = client.generate(PROMPTS[0], temperature=0.8, seed=3, policy="merge", **TOLD)
        verdict = reference.judge(PROMPTS[0], sampled.ids, SamplingParams(temperature=0.8, seed=3))
        assert verdict == "identical"
