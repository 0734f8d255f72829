"""The verifier as a process: one session is one stream, and what it says is what the target says."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coppice.errors import InvalidField, Overloaded, StaleFence, Unavailable
from coppice.rpc.channels import Dialer, Stub
from coppice.speculation.sampling import SamplingParams
from coppice.speculation.tree import DraftTree
from coppice.v1 import verifier_pb2
from coppice.wire.common import Fence, committed_hash
from coppice.wire.verifier import verify_request_to_wire
from tests.processes import Service, StartService, free_port
from tests.sessions import (
    IDS,
    VOCAB,
    VerifierClient,
    continuation,
    fetch,
    junk_tree,
    target_of,
    until_idle,
    verifying,
)

LAYERS, MAX_LEN = 6, 1024
SERVICE = "coppice.v1.VerifierService"
TINY_TARGET = {"vocab": VOCAB, "layers": LAYERS, "hidden": 64, "max_len": MAX_LEN, "tokenizer": False}
SMALL = ("--verifier.kv_tokens", "520", "--limits.queue_s", "0.4", "--verifier.prune", "false")
WINDOW = {"TEST_CONSTANTS": "services.verifier.features.FEATURE_WINDOW=16"}


@pytest.fixture(scope="module")
def small(start_service: StartService, target: Path) -> Service:
    """520 KV tokens are 16 blocks of 32 and a rest: room for two sessions of up to 128 tokens and their trees."""
    flags = ("--verifier.target", str(target), "--verifier.threads", "1", *SMALL)
    return start_service("services.verifier", *flags, variables=WINDOW)


SAMPLINGS = {
    "greedy": None,
    "full rows": SamplingParams(temperature=1.0, seed=3),  # wider than a row may be: the verifier draws
    "top k": SamplingParams(temperature=1.3, top_k=20, seed=4),
}


@pytest.mark.parametrize(
    ("name", "whole_tree"), [("greedy", True), ("greedy", False), ("full rows", False), ("top k", True)]
)
async def test_texts_of_packed_sessions_are_plain_decodings_whatever_trees_are_sent_whole_or_pruned(
    verifier: Service, model: Any, name: str, whole_tree: bool
) -> None:
    sampling = SAMPLINGS[name]
    texts = [IDS[: 3 + 2 * number] for number in range(4)]
    expected = [continuation(model, text, 24, sampling) for text in texts]

    async def decode(stub: Any, number: int) -> tuple[list[int], int]:
        rng, pruned, accepted = random.Random(number), 0, 0
        client = VerifierClient(stub, f"pruned-{number}", texts[number], sampling=sampling or SamplingParams())
        await client.open()
        assert (client.opened.next.row is None) == (name == "full rows")
        while len(client.committed) < len(texts[number]) + 16:
            made = len(client.committed) - len(texts[number])
            drafted = junk_tree(rng, expected[number][made + 1 :], rng.choice([0, 5, 40]))
            unlikely = replace(drafted, log_probs=8 * drafted.log_probs)
            verdict = await client.verify(unlikely, whole_tree=whole_tree)
            pruned += verdict.pruned
            left = verdict.verified if verdict.pruned else range(1, len(drafted) + 1)
            assert verdict.pruned == (len(left) < len(drafted))
            assert set(verdict.accepted) <= set(left)
            assert verdict.timings.total_ns >= verdict.timings.forward_ns > 0
            accepted += len(verdict.accepted)
        assert accepted > 0 or not whole_tree
        return client.committed[len(texts[number]) :], pruned

    async with verifying(verifier) as stub:
        made = await asyncio.gather(*(decode(stub, number) for number in range(4)))
    assert [ids for ids, _ in made] == [text[: len(ids)] for (ids, _), text in zip(made, expected, strict=True)]
    assert (sum(pruned for _, pruned in made) == 0) == whole_tree


def hopeless(good: Sequence[int]) -> DraftTree:
    """The true continuation, by a head that expects none of it to be accepted: exp(-800) is 0."""
    return DraftTree.chain(good, [-800.0] * len(good))


async def test_nodes_of_no_promise_are_not_verified(start_service: StartService, target: Path, model: Any) -> None:
    service = start_service("services.verifier", "--verifier.target", str(target), "--verifier.threads", "1")
    good = continuation(model, IDS, 20)
    async with verifying(service) as stub:
        client = await VerifierClient(stub, "hopeless").open()
        assert (await client.verify()).budget_hint is None  # nobody drafted yet
        for made in range(1, 4):
            verdict = await client.verify(hopeless(good[made + 1 : made + 9]), whole_tree=False)
            assert (verdict.pruned, verdict.verified, verdict.accepted) == (True, (), ())
            assert verdict.timings.rows == 1
            assert verdict.timings.plain_ns == verdict.timings.forward_ns
            assert verdict.budget_hint == 0
        wholes = [(await client.verify(DraftTree.chain([5] * 60, [-1.0] * 60))).timings for _ in range(5)]
        assert [whole.rows for whole in wholes] == [61] * 5
        assert all(0 < whole.plain_ns <= whole.forward_ns for whole in wholes)


# Fences and the order of messages.


async def test_steps_out_of_order_are_refused(verifier: Service) -> None:
    """The KV has room for the longest text and a tree: a hundred steps behind the end would find none."""
    expected = f"expected step 1 on {len(IDS)} tokens with hash {committed_hash(IDS):016x}"
    async with verifying(verifier) as stub:
        for changes in ({"step": 2}, {"step": 0}, {"committed_len": 20}, {"committed_hash": 7}):
            stale = await VerifierClient(stub).open()
            with pytest.raises(StaleFence, match=expected):
                await stale.verify(fence=replace(stale.fence(1), **changes))
            assert await stale.call.code() is grpc.StatusCode.FAILED_PRECONDITION
        ended = await VerifierClient(stub, max_len=len(IDS) + 1).open()
        assert (await ended.verify()).next is None
        with pytest.raises(StaleFence, match=f"step 2 comes behind the end of the text at {len(IDS) + 1} tokens"):
            await ended.verify(root=1)
        unopened = VerifierClient(stub)
        with pytest.raises(InvalidField, match="kind: the first message of a session is open"):
            await unopened.verify(root=1)
        twice = await VerifierClient(stub).open()
        with pytest.raises(InvalidField, match="kind: the session is open already"):
            await twice.ask(twice.opening)
        with pytest.raises(InvalidField, match="kind: neither open nor step"):
            await VerifierClient(stub).say(verifier_pb2.VerifyRequest())


async def test_a_name_that_is_taken_is_refused_and_its_owner_goes_on(verifier: Service, model: Any) -> None:
    async with verifying(verifier) as stub:
        owner = await VerifierClient(stub, "taken", feature_layers=(2,)).open()
        with pytest.raises(InvalidField, match=r"open\.session: is already open"):
            await VerifierClient(stub, "taken").open()
        await owner.verify()
        await owner.verify()
        assert owner.committed[len(IDS) :] == continuation(model, IDS, 2)
        assert await fetch(stub, owner.opened.features.ref)  # still the owner's
        await owner.call.done_writing()
        await until_idle(stub)
        await VerifierClient(stub, "taken").open()


# Features.


# Bad input.


def tree(tokens: Sequence[int], parents: Sequence[int], log_probs: Sequence[float]) -> DraftTree:
    return DraftTree(np.array(tokens), np.array(parents), np.array(log_probs, np.float32))


# KV.


async def test_a_session_that_finds_no_kv_waits_its_turn_and_is_refused_after_a_while(small: Service) -> None:
    async with verifying(small) as stub:
        holders = [VerifierClient(stub, f"holder-{number}", max_len=128) for number in range(2)]
        for holder in holders:
            await holder.open()
        with pytest.raises(Overloaded, match=r"KV tokens became free within 0\.4 s"):
            await VerifierClient(stub, "late").open()
        waiting = asyncio.create_task(VerifierClient(stub, "patient").open())
        await asyncio.sleep(0.05)
        holders[0].call.cancel()
        await waiting
        await holders[1].verify()


async def test_a_request_larger_than_the_pool_is_refused_at_once_and_one_as_large_is_served(small: Service) -> None:
    async with verifying(small) as stub:
        assert (await until_idle(stub)).max_len == 512
        with pytest.raises(InvalidField, match=r"open\.max_len: 513"):
            await VerifierClient(stub, "larger", max_len=513).open()
        client = await VerifierClient(stub, "as-large", [5] * 510, max_len=512).open()
        verdict = await client.verify(DraftTree.chain([5] * 4, [-1.0] * 4))
        assert verdict.verified == (1,)  # there is room for the root and one node


async def test_a_tree_that_does_not_fit_is_cut_to_its_best_nodes(small: Service, model: Any) -> None:
    good = continuation(model, IDS, 5)
    async with verifying(small) as stub:
        await until_idle(stub)
        client = await VerifierClient(stub, "cut", max_len=len(IDS) + 6).open()
        junk, spine = 240, [241, 242, 243]
        tokens = [(good[1] + 1) % VOCAB] * junk + good[1:4]
        log_probs = np.concatenate([-5 - np.arange(junk) / 100, [-1.0, -2.0, -3.0]])
        verdict = await client.verify(tree(tokens, [0] * junk + [0, 241, 242], log_probs.tolist()))
        kept = len(verdict.verified)
        assert 64 < kept < 243
        assert verdict.verified == (*range(1, kept - 2), *spine)
        assert verdict.accepted == tuple(spine)
        assert client.committed == [*IDS, *good[:4]]
        assert client.root == good[4]


async def test_kv_is_free_again_however_a_session_ends(verifier: Service) -> None:
    async with verifying(verifier) as stub:
        before = await until_idle(stub)

        async def live(number: int) -> None:
            async with verifying(verifier) as own:
                client = VerifierClient(own, f"live-{number}")
                if number % 5 == 4:  # leaves before the prefill is done
                    await client.call.write(verify_request_to_wire(client.opening))
                    client.call.cancel()
                    return
                await client.open()
                if number % 5 == 0:
                    await client.call.done_writing()
                    assert await client.call.read() is grpc.aio.EOF
                elif number % 5 == 1:
                    client.call.cancel()
                elif number % 5 == 2:
                    with pytest.raises(StaleFence):
                        await client.verify(fence=Fence(9, 9, 9))
                # else the connection goes away

        await asyncio.gather(*map(live, range(40)))
        after = await until_idle(stub)
    assert (after.sessions, after.kv_tokens_used) == (0, 0)
    assert after.sessions_closed == after.sessions_opened >= before.sessions_opened + 32


# The process.


async def test_health_follows_readiness_and_sigterm_ends_sessions(start_service: StartService, target: Path) -> None:
    """One process from its start to its end."""
    port, health = free_port(), free_port()
    flags = ["--server.port", str(port), "--server.health_port", str(health), "--verifier.threads", "1"]
    starting = asyncio.create_task(
        asyncio.to_thread(start_service, "services.verifier", "--verifier.target", str(target), *flags)
    )
    async with Dialer().open(f"127.0.0.1:{health}") as channel:
        stub, asked = health_pb2_grpc.HealthStub(channel), health_pb2.HealthCheckRequest(service=SERVICE)
        answer = await stub.Check(asked, wait_for_ready=True)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        watch = stub.Watch(asked)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        async with Dialer().open(f"127.0.0.1:{port}") as called:  # it listens by then
            told = await target_of(Stub(called, verifier_pb2))
            assert (told.name, told.vocab_size, told.max_len, told.layers) == (target.name, VOCAB, MAX_LEN, LAYERS)
            assert (told.hidden_size, told.eos_ids, told.dtype, told.kv_tokens) == (64, (0,), "float32", 65_536)
        service = await starting
        async with verifying(service) as sessions, Dialer().open(service.address) as called:
            there = health_pb2_grpc.HealthStub(called).Watch(asked)
            assert (await there.read()).status == health_pb2.HealthCheckResponse.SERVING
            clients = [VerifierClient(sessions, f"drained-{number}") for number in range(3)]
            for client in clients:
                await client.open()
            await clients[0].verify()
            stopped = asyncio.create_task(asyncio.to_thread(service.stop))
            for client in clients:
                with pytest.raises(Unavailable, match="draining"):
                    await client.read()
            for each in (watch, there):
                assert (await each.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            assert await there.read() is grpc.aio.EOF
            assert await stopped == 0
    assert "Traceback" not in service.log
