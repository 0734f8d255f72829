"""The shipped trained heads in real processes: the target's own text, whatever is drafted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from coppice.client.client import Client
from coppice.prompts import demo_prompts
from coppice.stack.launch import Stack
from coppice.stack.spec import HeadSpec
from coppice.testing.reference import Reference
from tests.tiny_stack import serving

NAMES = ("dspark-code", "specblock-code", "eagle3-code")
POLICIES = ("single:dspark-code", "single:specblock-code", "single:eagle3-code", "route", "merge")
PROMPTS = [prompt.prompt for prompt in demo_prompts() if prompt.category in ("code", "maths")][::13]
NEW = 24


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The demo's target with its trained heads."""
    heads, logs = map(HeadSpec.shipped, NAMES), tmp_path_factory.mktemp("logs")
    with serving(logs, None, *heads, draft_deadline_ms=3000, budget=8) as running:
        yield running


@pytest.fixture(scope="module")
def reference(stack: Stack) -> Reference:
    return Reference(stack.spec.target, "float32", threads=1)


@pytest.mark.parametrize("policy", POLICIES)
def test_greedy_text_is_generates(stack: Stack, reference: Reference, policy: str) -> None:
    with Client(stack.address) as client:
        for number, prompt in enumerate(PROMPTS):
            expected = reference.greedy(reference.text.encode(str(prompt)), NEW).ids
            for budget in (1, 8, 31) if number == 0 else (8,):
                answer = client.generate(prompt, policy=policy, budget=budget, max_new_tokens=NEW, ignore_eos=True)
                assert answer.ids == expected
                assert answer.late_drafts == 0
                if budget > 1:
                    assert answer.tau > 1.3  # they were trained on such text


def test_sampled_text_is_plains_and_coupling_guesses_it(stack: Stack) -> None:
    gained = {True: 0.0, False: 0.0}
    with Client(stack.address) as client:
        for seed in range(2):
            told = {"temperature": 1.0, "seed": seed, "max_new_tokens": NEW, "ignore_eos": True}
            plain = client.generate(PROMPTS[0], policy="plain", **told)
            for policy in ("merge", "route"):
                assert client.generate(PROMPTS[0], policy=policy, **told).ids == plain.ids
            for coupled in (True, False):
                answer = client.generate(PROMPTS[0], policy="single:dspark-code", coupled=coupled, **told)
                assert answer.ids == plain.ids
                gained[coupled] += answer.tau
    assert gained[True] > gained[False]
