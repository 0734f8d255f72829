"""Signals of a stack of real processes over a real Redis: what arrives adds up, and the text never depends on it.

The heads are random; a vocabulary of 32 makes them right now and then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from coppice.adaptation.signals import Demand, Sample, redis_key
from coppice.client.client import Client
from coppice.speculation.sampling import SamplingParams
from coppice.stack.launch import Stack
from coppice.stack.process import LocalRedis
from coppice.stack.spec import HeadSpec
from coppice.testing.reference import Reference
from coppice.wire.generation import Chunk
from tests.pipeline.test_feature_heads import GREEDY, KINDS, POLICIES, PROMPTS, SAMPLED, heads, target
from tests.signals import counts, eventually, queries, samples
from tests.stacks import serving
from tests.unit.test_feature_heads import HIDDEN

__all__ = ["heads", "target"]  # fixtures

NEW = 40


@pytest.fixture(scope="module")
def stack(
    target: Path, heads: dict[str, Path], shared_redis: LocalRedis, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    """Both heads; drafts are waited for, so that none is superseded."""
    extra = {role: {"adaptation.redis": shared_redis.url} for role in ("orchestrator", "drafter")}
    both = (HeadSpec(name, kind, heads[name]) for name, kind in KINDS.items())
    with serving(tmp_path_factory.mktemp("logs"), target, *both, draft_deadline_ms=20_000, extra=extra) as running:
        yield running


@pytest.fixture
def store(shared_redis: LocalRedis) -> Redis:
    """An empty Redis."""
    client = Redis.from_url(shared_redis.url)
    client.flushall()
    return client


def metrics(stack: Stack) -> dict[str, str]:
    """Where each process that tells something counts."""
    return {name: stack.services[name].metrics for name in ("orchestrator", "drafter-block", "drafter-eagle")}


def demand(store: Redis, stack: Stack, client: Client, wanted: Demand) -> None:
    """Ask both heads for samples, and wait until they send them."""
    before, asked = {head: len(queries(store, head)) for head in KINDS}, Counter[str]()
    for head in KINDS:
        store.set(redis_key(head, "demand"), wanted)

    def heard(head: str) -> bool:
        asked[head] += 1
        client.generate(PROMPTS[1], policy=f"single:{head}", max_new_tokens=NEW, ignore_eos=True)
        return eventually(lambda: bool(samples(store, head)), 0.5)

    assert all(eventually(lambda head=head: heard(head)) for head in KINDS)  # type: ignore[misc]
    # A query is told behind its samples: one that comes later would be counted with the next.
    assert eventually(lambda: all(len(queries(store, head)) >= before[head] + asked[head] for head in KINDS))
    assert eventually(lambda: all(counts(address).settled for address in metrics(stack).values()))
    for head in KINDS:
        store.delete(f"coppice:{head}:queries", f"coppice:{head}:samples")


def generated(client: Client, policy: str, sampling: SamplingParams) -> tuple[list[int], int, int]:
    """Ids, steps, and the steps whose verified tree had children where the walk left it."""
    ids: list[int] = []
    steps = left = 0
    told: dict[str, Any] = {"policy": policy, "sampling": sampling, "max_new_tokens": NEW, "ignore_eos": True}
    told |= {"trees": True, "budget": 31}  # verified whole: of a cut tree nodes that were left out count as left, too
    for event in client.stream(PROMPTS[2], **told):
        if isinstance(event, Chunk):
            ids += event.ids
            if (tree := event.tree) is not None:
                steps += 1
                end = tree.accepted[-1] if tree.accepted else 0
                left += end in tree.parents and len(event.ids) > len(tree.accepted)
    return ids, steps, left


@pytest.mark.parametrize(
    ("sampling", "policies"), [(GREEDY, POLICIES), (SAMPLED, ("single:block", "merge"))], ids=["greedy", "sampled"]
)
def test_queries_and_samples_arrive_and_add_up(
    stack: Stack,
    client: Client,
    reference: Reference,
    store: Redis,
    sampling: SamplingParams,
    policies: tuple[str, ...],
) -> None:
    demand(store, stack, client, "misses")
    plain = client.generate(PROMPTS[2], policy="plain", sampling=sampling, max_new_tokens=NEW, ignore_eos=True).ids
    if not sampling.temperature:
        assert plain == reference.greedy(PROMPTS[2], NEW).ids
    text = [*PROMPTS[2], *plain]
    for policy in policies:
        store.delete(*(f"coppice:{head}:{stream}" for head in KINDS for stream in ("queries", "samples")))
        ids, steps, left = generated(client, policy, sampling)
        assert tuple(ids) == plain
        asked = [head for head in KINDS if policy in (f"single:{head}", "route", "merge")]
        assert eventually(lambda asked=asked: all(queries(store, head) for head in asked))  # type: ignore[misc]
        assert eventually(lambda: all(counts(address).settled for address in metrics(stack).values()))
        for head in asked:
            (record,) = queries(store, head)
            assert (record.steps, record.versions, record.new_tokens) == (steps, (0, 0), NEW)
            assert record.tau == pytest.approx((NEW - 1) / steps)  # the first token came with the prompt
            assert record.tokens_per_s > 0
            assert 0 < record.s <= steps
            assert policy == "merge" or len(asked) > 1 or record.s <= left
            check_samples([each for each in samples(store, head) if each.session == record.session], text)
        assert not any(queries(store, head) or samples(store, head) for head in set(KINDS) - set(asked))
    assert all(not counts(address).dropped for address in metrics(stack).values())


def check_samples(texts: list[Sample], text: list[int]) -> None:
    """They are windows of the text, none of a position twice, with a row of features for each token but the last."""
    assert texts
    end = 0
    for each in texts:
        tokens = each.tokens.tolist()
        end = next(
            at for at in range(max(end + 1, len(tokens)), len(text) + 1) if text[at - len(tokens) : at] == tokens
        )
        assert each.feature_rows().shape == (len(each.tokens) - 1, 3 * HIDDEN)


def test_where_texts_alone_are_wanted_no_head_says_what_it_misses(stack: Stack, client: Client, store: Redis) -> None:
    demand(store, stack, client, "texts")

    def silent() -> bool:
        generated(client, "single:block", GREEDY)
        return eventually(lambda: bool(queries(store, "block")), 1.0) and queries(store, "block")[-1].s == 0.0

    assert eventually(silent)
    assert eventually(lambda: bool(samples(store, "block")))
