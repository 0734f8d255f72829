"""A look-up head with a memory through a pipeline of processes: exact, and each client's own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import openai
import pytest

from coppice.client.client import Client
from coppice.client.completion import Completion
from coppice.rpc.channels import Dialer
from coppice.stack.launch import Stack
from coppice.stack.spec import HeadSpec, StackSpec
from coppice.telemetry import metric
from coppice.wire.generation import StepTree
from tests.pipeline.conftest import VOCAB
from tests.signals import eventually

PROMPTS = [tuple(random.Random(n).randrange(1, VOCAB) for _ in range(12)) for n in range(3)]
NEW, SEED = 64, 5
CLIENTS = {"first token": "alice", "second token": "alice", "third token": "bob"}


@pytest.fixture(scope="module")
def stack(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two clients, one of whom has two tokens, and a look-up head that remembers."""
    tokens = tmp_path_factory.mktemp("tokens") / "tokens"
    tokens.write_text("".join(f"{name} {sha256(token.encode()).hexdigest()}\n" for token, name in CLIENTS.items()))
    told = {"orchestrator.draft_deadline_ms": 2000, "orchestrator.tokens": tokens, "orchestrator.http_port": 0}
    spec = StackSpec(
        target=target,
        heads=(HeadSpec("lookup", "lookup"),),
        dtype="float32",
        verifier_threads=1,
        drafter_threads=1,
        extra={"orchestrator": told, "drafter": {"drafter.memory_tokens": 10_000}},
    )
    with Stack(spec, log_dir=tmp_path_factory.mktemp("logs")) as running:
        yield running
    assert not running.unclean


def remembered(stack: Stack) -> float:
    (drafter,) = (ready for ready in stack.services.values() if ready.role == "drafter")
    return metric(drafter.metrics, "coppice_drafter_memory_tokens")


def asked(stack: Stack, token: str, prompt: int, policy: str = "single:lookup") -> Completion:
    """An answer whose look-up session, if it had one, has ended for the drafter too."""
    before = remembered(stack)
    with Client(stack.address, dialer=Dialer(token=token)) as client:
        answer = client.generate(
            PROMPTS[prompt],
            policy=policy,
            budget=31,
            temperature=1.0,
            seed=SEED,
            max_new_tokens=NEW,
            ignore_eos=True,
            trees=True,
        )
    assert policy == "plain" or eventually(lambda: remembered(stack) > before)
    return answer


def shapes(answer: Completion) -> list[tuple[Any, ...]]:
    def shape(tree: StepTree) -> tuple[Any, ...]:
        return tree.root, tree.tokens, tree.parents

    return [shape(tree) for tree in answer.trees]


def test_a_client_drafts_from_its_own_earlier_texts_and_from_no_others(stack: Stack) -> None:
    plain = asked(stack, "first token", 0, "plain")
    cold = asked(stack, "first token", 0)
    again = asked(stack, "first token", 0)
    other_token = asked(stack, "second token", 0)
    other = asked(stack, "third token", 0)
    for answer in (cold, again, other_token, other):
        assert answer.ids == plain.ids
    assert again.tau > 3 * cold.tau
    assert other_token.tau > 3 * cold.tau
    assert shapes(other) == shapes(cold)
    assert other.tau == cold.tau


def test_http_remembers_for_the_same_client(stack: Stack) -> None:
    told: Any = {"max_tokens": NEW, "temperature": 1.0, "seed": SEED, "model": "", "stream": True}
    said = asked(stack, "first token", 1, "plain").ids
    before = remembered(stack)
    with openai.OpenAI(base_url=f"http://{stack.orchestrator.http}/v1", api_key="third token", max_retries=0) as asking:
        body = {"policy": "single:lookup", "ignore_eos": True}
        for _ in asking.completions.create(prompt=list(PROMPTS[1]), extra_body=body, **told):
            pass
    assert eventually(lambda: remembered(stack) > before)
    cold = asked(stack, "first token", 1)
    warm = asked(stack, "third token", 1)
    assert cold.ids == warm.ids == said
    assert warm.tau > 3 * cold.tau
