"""The shipped trained heads in real processes: the target's own text, whatever is drafted or lost."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from coppice.client.client import AsyncClient, Client
from coppice.prompts.files import demo_prompts
from coppice.speculation.sampling import SamplingParams
from coppice.stack.launch import Stack
from coppice.stack.spec import HeadSpec, StackSpec
from coppice.testing.reference import Reference
from coppice.wire.generation import Chunk

NAMES = ("dspark-code", "specblock-code", "eagle3-code")
POLICIES = ("single:dspark-code", "single:specblock-code", "single:eagle3-code", "route", "merge", "merge-full")
PROMPTS = [prompt.prompt for prompt in demo_prompts() if prompt.category in ("code", "maths")][::13]
NEW = 24


def started(deadline_ms: float, window: int = 4096) -> Stack:
    """The demo's target with its trained heads; `window`: positions whose features the verifier keeps."""
    extra = {
        "orchestrator": {"orchestrator.draft_deadline_ms": deadline_ms, "orchestrator.budget": 8},
        "verifier": {"verifier.feature_window": window},
    }
    heads = tuple(map(HeadSpec.shipped, NAMES))
    return Stack(StackSpec.demo(heads=heads, dtype="float32", verifier_threads=1, drafter_threads=1, extra=extra))


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with started(deadline_ms=3000) as running:
        yield running
    assert not running.unclean


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


async def test_sessions_of_all_policies_at_once_change_nothing(stack: Stack, reference: Reference) -> None:
    told = {"max_new_tokens": NEW, "ignore_eos": True}
    expected = [reference.greedy(reference.text.encode(str(prompt)), NEW).ids for prompt in PROMPTS]
    async with AsyncClient(stack.address) as client:
        answers = await asyncio.gather(
            *(client.generate(PROMPTS[n % len(PROMPTS)], policy=POLICIES[n % len(POLICIES)], **told) for n in range(8))
        )
    assert [answer.ids for answer in answers] == [expected[n % len(PROMPTS)] for n in range(8)]


@pytest.fixture(scope="module")
def losing() -> Iterator[Stack]:
    """Its window is shorter than the prompt: the first positions have no features any more."""
    with started(deadline_ms=0, window=16) as running:
        yield running


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
def test_a_lost_drafter_changes_nothing_and_one_that_comes_back_drafts_again(
    losing: Stack, number: signal.Signals
) -> None:
    """The last test of this stack kills one."""
    sampling = SamplingParams(temperature=1.0, seed=11)
    told = {"max_new_tokens": 64, "ignore_eos": True, "sampling": sampling}
    with Client(losing.address) as client:
        pid = losing.services["drafter-dspark-code"].pid
        plain = client.generate(PROMPTS[0], policy="plain", **told)
        ids: list[int] = []
        for event in client.stream(PROMPTS[0], policy="route", **told):
            if isinstance(event, Chunk):
                if len(ids) < 12 <= len(ids) + len(event.ids):
                    os.kill(pid, number)
                elif number == signal.SIGSTOP and len(ids) < 36 <= len(ids) + len(event.ids):
                    os.kill(pid, signal.SIGCONT)
                ids += event.ids
        assert tuple(ids) == plain.ids
        if number == signal.SIGSTOP:
            taus = [
                client.generate(PROMPTS[0], policy="single:dspark-code", max_new_tokens=64, ignore_eos=True).tau
                for _ in range(4)  # the head may still be benched at first
            ]
            assert max(taus) > 1.3
