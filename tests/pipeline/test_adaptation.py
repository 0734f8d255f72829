"""A whole stack with an adapter: whatever happens to the weights, to Redis and to the adapter, the text is plain's.

tests/pipeline/test_one_process.py has a head of another kind that is adapted in its verifiers' processes.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from redis import Redis

from coppice.adaptation.signals import NUMBER, QueryRecord, Sample, redis_key
from coppice.client.adapter import AdapterClient
from coppice.client.client import Client
from coppice.errors import InvalidField, NotFound
from coppice.speculation.sampling import SamplingParams
from coppice.stack.launch import Stack
from coppice.stack.process import ProcessFailed
from coppice.stack.spec import HeadSpec
from coppice.v1 import adapter_pb2 as pb
from tests.faults.campaign.scenarios import QUICK
from tests.pipeline.test_feature_heads import PROMPTS, heads, target
from tests.signals import counts, eventually, queries, samples
from tests.stacks import serving
from tests.unit.test_cli import Run, run
from tests.unit.test_feature_heads import HIDDEN

__all__ = ["heads", "run", "target"]  # fixtures

POLICIES = ("single:eagle", "merge", "route")
SAMPLINGS = (SamplingParams(), SamplingParams(temperature=0.7, seed=3))
PLAIN = {"policy": "plain", "max_new_tokens": 24, "ignore_eos": True}
Texts = dict[tuple[tuple[int, ...], SamplingParams], tuple[int, ...]]  # the ids of answers, by prompt and sampling


@pytest.fixture(scope="module")
def stack(target: Path, heads: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("adapter")
    both = HeadSpec("eagle", "eagle3", heads["eagle"]), HeadSpec("lookup", "lookup")
    options = {"adapt": True, "http_port": 0, "extra": {"adapter": {**QUICK, "adapter.folder": folder}}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEST_CONSTANTS", "services.adapter.service.LEASE_S=1")
        with serving(tmp_path_factory.mktemp("logs"), target, *both, draft_deadline_ms=20_000, **options) as running:
            yield running


@pytest.fixture(scope="module")
def plain(stack: Stack) -> Texts:
    with Client(stack.address) as client:
        return {
            (prompt, sampling): client.generate(prompt, sampling=sampling, **PLAIN).ids  # type: ignore[arg-type]
            for prompt, sampling in itertools.product(PROMPTS[:2], SAMPLINGS)
        }


def answers_are_plains(client: Client, plain: Texts, policy: str) -> None:
    for (prompt, sampling), ids in plain.items():
        answer = client.generate(prompt, sampling=sampling, **PLAIN | {"policy": policy})  # type: ignore[arg-type]
        assert answer.ids == ids


def status(stack: Stack) -> list[pb.HeadStatus]:
    with AdapterClient(stack.services["adapter"].address) as adapter:
        return adapter.status(history=100)


def asked(stack: Stack) -> int:
    """How many queries of the head there were: each record has the next number."""
    assert stack.redis
    (entry,) = Redis.from_url(stack.redis.url).xrevrange(redis_key("eagle", "queries"), count=1)  # type: ignore[misc]
    return int(entry[1][NUMBER])


def all_current(stack: Stack) -> bool:
    return all(replica.current for head in status(stack) for replica in head.replicas)


def test_texts_are_plains_while_a_head_is_adapted(stack: Stack, plain: Texts) -> None:
    with Client(stack.address) as client:
        until = time.monotonic() + 300  # a full machine trains slowly
        for number, policy in enumerate(itertools.cycle(POLICIES), 1):
            answers_are_plains(client, plain, policy)
            if number >= len(POLICIES) and status(stack)[0].events:
                break
            assert time.monotonic() < until, status(stack)
    assert [head.head for head in status(stack)] == ["eagle"]
    assert eventually(lambda: all_current(stack), 120)


def test_a_query_is_told_and_its_text_sampled(stack: Stack) -> None:
    """Also by a head that is asked for drafts beside others."""
    assert stack.redis
    store = Redis.from_url(stack.redis.url)
    for policy in POLICIES[:2]:
        known = {record.session for record in queries(store, "eagle")}
        told = {"policy": policy, "max_new_tokens": 40, "ignore_eos": True}
        with Client(stack.address) as client:
            answer = client.generate(PROMPTS[2], **told)  # type: ignore[arg-type]

        def new() -> list[QueryRecord]:
            """The query's record; those of shorter answers before it may come late."""
            records = queries(store, "eagle")
            return [each for each in records if each.session not in known and each.new_tokens == 40]  # noqa: B023

        assert eventually(new)
        (record,), steps = new(), answer.steps
        assert record.steps == steps
        assert record.tau == pytest.approx(39 / steps)  # the first token came with the prompt
        assert record.tokens_per_s > 0
        assert 0 < record.s <= steps
        text, end = [*PROMPTS[2], *answer.ids], 0

        def taken(session: str = record.session) -> list[Sample]:
            return [each for each in samples(store, "eagle") if each.session == session]

        assert eventually(taken)
        for each in taken():  # windows of the text, none of a position twice
            tokens = each.tokens.tolist()
            starts = range(max(end + 1, len(tokens)), len(text) + 1)
            end = next(at for at in starts if text[at - len(tokens) : at] == tokens)
            assert each.feature_rows().shape == (len(tokens) - 1, 3 * HIDDEN)
    assert eventually(lambda: counts(stack.services["drafter-eagle"].metrics).settled)
    assert not counts(stack.services["drafter-eagle"].metrics).dropped


def test_operators_pause_it_and_take_weights_back(stack: Stack, run: Run) -> None:
    address = stack.services["adapter"].address

    def command(*arguments: str) -> tuple[int, str, str]:
        return run("adapter", *arguments, "--address", address)

    assert command("pause")[0] == 0
    assert eventually(lambda: status(stack)[0].paused and status(stack)[0].doing == "idle")
    code, said, _ = command("rollback", "--version", "0")
    assert (code, "is in use" in said) == (0, True)
    (shown,) = json.loads(command("status", "--json")[1])["heads"]
    assert (shown["head"], shown["paused"], shown["changes"][-1]["what"]) == ("eagle", True, "rollback")
    assert "rollback" in command("status")[1]
    assert all_current(stack)
    code, _, error = command("rollback", "--version", "77777")
    assert (code, "77777 is not there" in error) == (2, True)
    assert command("resume")[0] == 0
    with AdapterClient(address) as adapter:
        for call, error in (
            (partial(adapter.status, "other"), NotFound),
            (partial(adapter.pause, "no name!"), InvalidField),
            (partial(adapter.status, history=10**6), InvalidField),
        ):
            with pytest.raises(error):
                call()


def test_an_adapter_that_is_killed_reads_every_query_once(stack: Stack, plain: Texts) -> None:
    with Client(stack.address) as client:
        sent = asked(stack)
        assert eventually(lambda: status(stack)[0].queries == sent)
        os.kill(stack.services["adapter"].pid, signal.SIGKILL)
        answers_are_plains(client, plain, "single:eagle")  # nobody reads of these now
        sent += len(plain)
        assert eventually(lambda: asked(stack) == sent)
    stack.restart("adapter")
    assert eventually(lambda: status(stack)[0].queries == sent and all_current(stack), 60)


def test_texts_are_plains_without_redis_and_without_the_adapter(stack: Stack, plain: Texts) -> None:
    """The last test of this stack: both are killed."""
    plain = {at: ids for at, ids in plain.items() if at[0] == PROMPTS[1]}
    with Client(stack.address) as client:
        assert stack.redis
        assert stack.redis.pid
        for pid in (stack.redis.pid, stack.services["adapter"].pid):
            os.kill(pid, signal.SIGSTOP)
            answers_are_plains(client, plain, "merge")
            os.kill(pid, signal.SIGCONT)
            answers_are_plains(client, plain, "single:eagle")
            os.kill(pid, signal.SIGKILL)
            answers_are_plains(client, plain, "merge")
            stack.check()  # neither is missed
    assert eventually(lambda: stack.processes["adapter"].exit_code is not None)
    with pytest.raises(ProcessFailed):
        stack.processes["adapter"].check()
