"""The prefix cache and a look-up head's memory through a pipeline of processes: exact under load, evictions and kills,
and each client's own.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import openai
import pytest

from coppice.client.client import AsyncClient, Client
from coppice.client.completion import Completion
from coppice.rpc.channels import Dialer
from coppice.stack.launch import Stack
from coppice.stack.spec import HeadSpec
from coppice.telemetry import metric
from coppice.testing.reference import Reference
from coppice.wire.generation import Chunk
from tests.reference import EFFORT
from tests.sessions import described
from tests.signals import eventually
from tests.stacks import serving
from tests.tiny import make_target
from tests.unit.test_feature_heads import save_random

VOCAB, NEW, CHATS = 300, 24, 1_000 if EFFORT > 1 else 30
CLIENTS, SECOND = ("alice", "bob"), "another token of alice"
POLICIES = ("plain", "single:eagle", "single:lookup", "merge")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"), VOCAB, layers=6, max_len=2048)


@pytest.fixture(scope="module")
def stack(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two clients, two verifiers with room for some sessions and little else, and a look-up head that remembers."""
    tokens = tmp_path_factory.mktemp("tokens") / "tokens"
    bearers = {**{name: name for name in CLIENTS}, SECOND: "alice"}  # a token is its client's name, but for one
    tokens.write_text("".join(f"{name} {sha256(token.encode()).hexdigest()}\n" for token, name in bearers.items()))
    head = save_random(tmp_path_factory.mktemp("eagle"), "eagle3", vocab_size=VOCAB, draft_vocab_size=VOCAB // 2)
    extra = {
        "verifier": {"verifier.kv_tokens": 2048},
        "drafter": {"drafter.memory_tokens": 1_000_000},
        "orchestrator": {"orchestrator.tokens": tokens},
    }
    both = HeadSpec("eagle", "eagle3", head), HeadSpec("lookup", "lookup")
    logs = tmp_path_factory.mktemp("logs")
    with serving(logs, target, *both, verifiers=2, http_port=0, extra=extra) as running:
        yield running


def random_ids(choose: random.Random, length: int) -> tuple[int, ...]:
    return tuple(choose.randrange(1, VOCAB) for _ in range(length))


def asked(stack: Stack, name: str, prompt: tuple[int, ...], **told: Any) -> Completion:
    with Client(stack.address, dialer=Dialer(token=name)) as client:
        return client.generate(prompt, **{"max_new_tokens": NEW, "ignore_eos": True, **told})


def remembered(stack: Stack) -> float:
    """Tokens of ended sessions that the look-up head drafts from; the tests below begin with none."""
    return metric(stack.services["drafter-lookup"].metrics, "coppice_drafter_memory_tokens")


def test_a_client_drafts_from_its_own_earlier_texts_and_from_no_others(stack: Stack) -> None:
    told: dict[str, Any] = {"budget": 31, "temperature": 1.0, "seed": 5, "max_new_tokens": 64, "trees": True}

    def drafted(token: str, prompt: tuple[int, ...]) -> Completion:
        """An answer whose look-up session has ended for the drafter too."""
        before = remembered(stack)
        answer = asked(stack, token, prompt, policy="single:lookup", **told)
        assert eventually(lambda: remembered(stack) > before)
        return answer

    first, second = (random_ids(random.Random(seed), 12) for seed in (20, 21))
    plain = asked(stack, "alice", first, policy="plain", **told)
    cold, again, other_token, other = (drafted(token, first) for token in ("alice", "alice", SECOND, "bob"))
    assert {answer.ids for answer in (cold, again, other_token, other)} == {plain.ids}
    assert min(again.tau, other_token.tau) > 3 * cold.tau
    shapes = [[(tree.root, tree.tokens, tree.parents) for tree in answer.trees] for answer in (cold, other)]
    assert shapes[0] == shapes[1]

    before = remembered(stack)  # what comes over HTTP is remembered for the same client
    body: Any = {"policy": "single:lookup", "ignore_eos": True}
    with openai.OpenAI(base_url=f"http://{stack.orchestrator.http}/v1", api_key="bob", max_retries=0) as asking:
        asking.completions.create(
            prompt=list(second), model="", max_tokens=64, temperature=1.0, seed=5, extra_body=body
        )
    assert eventually(lambda: remembered(stack) > before)
    assert drafted("bob", second).tau > 3 * drafted("alice", second).tau


async def chat(client: AsyncClient, choose: random.Random, texts: list[tuple[int, ...]]) -> Completion | None:
    """A prompt that goes on from an earlier text, or leaves it somewhere; None when it is given up in its middle."""
    before = choose.choice(texts)
    prompt = (*before[: choose.choice((len(before), choose.randrange(1, 300)))][:300], *random_ids(choose, 9))
    told: dict[str, Any] = {"policy": choose.choice(POLICIES), "max_new_tokens": NEW, "ignore_eos": True}
    if choose.random() < 0.15:
        async for event in client.stream(prompt, **told):
            if isinstance(event, Chunk) and choose.random() < 0.5:
                return None
        return None
    answer = await client.generate(prompt, **told)
    texts.append((*prompt, *answer.ids))
    return answer


@pytest.mark.timeout(600 * EFFORT)
def test_chats_that_fork_say_what_chats_that_share_nothing_do(stack: Stack, reference: Reference) -> None:
    """Verifiers are killed meanwhile; KV in use is 0 in the end."""
    texts = {name: [random_ids(random.Random(name), 200)] for name in CLIENTS}
    answers: list[Completion] = []

    async def ask(number: int, name: str) -> None:
        choose = random.Random(number)
        async with AsyncClient(stack.address, dialer=Dialer(token=name)) as client:
            for turn in range(CHATS // 6):
                answer = await chat(client, choose, texts[name])
                answers.extend([answer] if answer else [])
                if number == 0 and turn % 5 == 4:
                    killed = f"verifier-{turn % 2}"
                    os.kill(stack.services[killed].pid, signal.SIGKILL)
                    await asyncio.to_thread(stack.restart, killed)

    async def load() -> None:
        await asyncio.gather(*(ask(number, CLIENTS[number % 2]) for number in range(6)))

    asyncio.run(load())
    for text in [text for name in CLIENTS for text in texts[name][1:]]:
        assert text[-NEW:] == reference.greedy(text[:-NEW], NEW).ids
    assert sum(answer.cached_tokens > 0 for answer in answers) > len(answers) / 3
    for name in ("verifier-0", "verifier-1"):
        now = asyncio.run(described(stack.services[name], idle=True))
        assert (now.sessions, now.kv_tokens_used) == (0, 0)
        assert metric(stack.services[name].metrics, "coppice_verifier_prefix_cache_tokens") <= 2048


def test_a_client_is_served_its_own_texts_alone_and_it_is_counted(stack: Stack) -> None:
    prompt = random_ids(random.Random(7), 100)
    names = ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total")
    before = [metric(stack.orchestrator.metrics, name) for name in names]
    answers = [asked(stack, name, prompt, policy="plain") for name in ("alice", "bob", "alice", "bob")]
    assert [answer.cached_tokens for answer in answers] == [0, 0, 96, 96]
    assert len({answer.ids for answer in answers}) == 1
    after = [metric(stack.orchestrator.metrics, name) for name in names]
    assert [new - old for new, old in zip(after, before, strict=True)] == [400, 192]
    assert metric(stack.orchestrator.metrics, "coppice_prefix_routed_total") > 0


def test_heads_open_warm_and_draft_what_they_would_have_drafted(stack: Stack) -> None:
    prompt = random_ids(random.Random(8), 130)
    told: dict[str, Any] = {"policy": "single:eagle", "budget": 8, "trees": True, "temperature": 1.0, "seed": 4}
    cold, warm = (asked(stack, "alice", prompt, **told) for _ in range(2))
    assert (cold.cached_tokens, warm.cached_tokens) == (0, 128)
    assert warm.ids == cold.ids
    drafted = [[(tree.tokens, tree.parents) for tree in answer.trees] for answer in (cold, warm)]
    assert drafted[0] == drafted[1]
    assert sum(len(tokens) for tokens, _ in drafted[0]) > 8


def test_openais_usage_says_what_was_cached(stack: Stack) -> None:
    client: Any = openai.OpenAI(base_url=f"http://{stack.orchestrator.http}/v1", api_key="alice")
    said = [{"role": "user", "content": "a question that is longer than a block of the cache"}]
    whole = [client.chat.completions.create(messages=said, model="", max_tokens=NEW) for _ in range(2)]
    assert [answer.usage.prompt_tokens_details.cached_tokens for answer in whole] == [0, 64]
