"""Heads in the verifiers' processes: texts are the target's, a drafter's verbs work at a verifier's address, and when
replicas come, drain, fail, are killed and learn, texts never notice.

All of it with certificates, and with a registry in which replicas find each other.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from redis import Redis

from coppice.client.adapter import AdapterClient
from coppice.client.client import Client
from coppice.config.sections import SERVICES
from coppice.errors import InvalidField, Unavailable
from coppice.rpc.channels import Dialer
from coppice.speculation.sampling import SamplingParams
from coppice.stack.launch import Stack
from coppice.stack.process import LocalRedis
from coppice.stack.spec import HeadSpec
from coppice.telemetry import metric, scrape
from coppice.testing.reference import Reference
from coppice.wire.drafter import HeadDescription
from services.adapter.loop import DrafterLink
from tests.certificates import Authority
from tests.faults.campaign.scenarios import QUICK
from tests.mortal_head import DIES, FAILS
from tests.pipeline.test_extend import install
from tests.pipeline.test_feature_heads import PROMPTS, heads, target
from tests.signals import eventually
from tests.stacks import interrupted, serving

__all__ = ["heads", "target"]  # fixtures

NEW, LONG = 32, 60
VERIFIERS = ("verifier-0", "verifier-1")
HEADS = ("block", "mortal")
POOLS = ("verifier", *HEADS)
SAMPLED = SamplingParams(temperature=1.0, seed=4)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Its certificate for verifiers names drafters, too."""
    return Authority(tmp_path_factory.mktemp("authority"), 'issue verifier ",DNS:drafter"\n')


@pytest.fixture(scope="module")
def stack(
    authority: Authority,
    shared_redis: LocalRedis,
    target: Path,
    heads: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Stack]:
    """Two verifiers with two heads each, an orchestrator and an adapter."""
    packages = tmp_path_factory.mktemp("packages")
    install(packages, "mortal", {"coppice.heads": {"mortal": "tests.mortal_head:MortalHead"}})
    at = {"directory.redis": shared_redis.url, "adaptation.redis": shared_redis.url}
    found = {
        "verifier": {},
        "orchestrator": {"orchestrator.verifiers": "redis", "orchestrator.heads": ["block=redis", "mortal=redis"]},
        "adapter": {**QUICK, "adapter.drafters": "block=redis"},
    }
    both = HeadSpec("block", "specblock", heads["block"]), HeadSpec("mortal", "mortal")
    extra = {role: {**at, **authority.flags(role), **more} for role, more in found.items()}
    extra["drafter"] = {"drafter.verifiers": "redis"}
    options = {"one_process": True, "verifiers": 2, "adapt": True, "extra": extra, "draft_deadline_ms": 20_000}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(packages)
        patch.setenv("TEST_CONSTANTS", "coppice.rpc.directory.LEASE_S=20")
        patch.setenv("PYTHONPATH", str(packages), prepend=os.pathsep)
        with serving(tmp_path_factory.mktemp("logs"), target, *both, **options) as running:
            yield running


@pytest.fixture(scope="module")
def client(stack: Stack, authority: Authority) -> Iterator[Client]:
    with Client(stack.address, dialer=authority.dialer()) as connected:
        yield connected


def fit(stack: Stack) -> dict[str, int]:
    """Replicas of each pool that the orchestrator would use."""
    samples = scrape(stack.orchestrator.metrics)
    return {each.labels["pool"]: int(each.value) for each in samples if each.name == "coppice_replicas_fit"}


def drafted(stack: Stack) -> float:
    """How many batches the heads of all verifiers have drafted."""
    running = [name for name in VERIFIERS if stack.processes[name].exit_code is None]
    return sum(metric(stack.services[name].metrics, "coppice_drafter_forwards_total") for name in running)


async def described(stack: Stack, authority: Authority, verifier: str, head: str) -> HeadDescription:
    """What the adapter would hear of a head."""
    tls = authority.tls("adapter")
    async with DrafterLink(stack.services[verifier].address, Dialer(tls=tls, head=head)) as link:
        return await link.describe()


async def is_dead(stack: Stack, authority: Authority, verifier: str) -> bool:
    """Whether the code of a verifier's head called mortal has ended."""
    try:
        await described(stack, authority, verifier, "mortal")
    except Unavailable as failure:
        return "the head mortal has failed" in str(failure)
    return False


def texts_are_plains(client: Client, reference: Reference, policy: str, prompts: list[tuple[int, ...]]) -> None:
    """Greedy ones the reference's, sampled ones plain decoding's."""
    for prompt in prompts:
        told = {"max_new_tokens": NEW, "ignore_eos": True}
        assert client.generate(prompt, policy=policy, **told).ids == reference.greedy(prompt, NEW).ids
        plain = client.generate(prompt, policy="plain", sampling=SAMPLED, **told).ids
        assert client.generate(prompt, policy=policy, sampling=SAMPLED, **told).ids == plain


def answer(client: Client, blow: Callable[[], object], **options: Any) -> tuple[int, ...]:
    """A drafted answer in whose middle something happens."""
    return interrupted(client, PROMPTS[1], blow, max_new_tokens=LONG, policy="single:block", **options)


def sessions(stack: Stack, role: str, count: str) -> float:
    """How many were opened or closed by all verifiers."""
    pages = [stack.services[name].metrics for name in VERIFIERS]
    return sum(metric(page, f"coppice_{role}_sessions_{count}_total") for page in pages)


def all_closed(stack: Stack, role: str) -> bool:
    return sessions(stack, role, "opened") == sessions(stack, role, "closed")


def test_heads_register_with_their_verifiers_certificate(stack: Stack, client: Client, reference: Reference) -> None:
    assert {"verifier-0", "verifier-1"} < set(stack.processes)
    assert not {"drafter-block", "drafter-mortal"} & set(stack.processes)
    assert eventually(lambda: fit(stack) == dict.fromkeys(POOLS, 2), 10)
    for policy in ("single:block", "single:mortal", "merge"):
        before = drafted(stack)
        texts_are_plains(client, reference, policy, PROMPTS[2:])
        assert drafted(stack) > before
    for role in ("verifier", "drafter"):
        assert sessions(stack, role, "opened") > 0
        assert eventually(partial(all_closed, stack, role), 10)


async def test_a_call_names_a_head_and_health_is_told_of_both_services(stack: Stack, authority: Authority) -> None:
    for head in ("", "elsewhere"):
        with pytest.raises(InvalidField, match="block, mortal"):
            await described(stack, authority, VERIFIERS[0], head)
    async with grpc.aio.insecure_channel(stack.services[VERIFIERS[0]].health) as channel:
        for role in ("verifier", "drafter"):
            asked = health_pb2.HealthCheckRequest(service=SERVICES[role])
            answer = await health_pb2_grpc.HealthStub(channel).Check(asked, timeout=20)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_the_adapter_trains_the_heads_and_pushes_to_every_verifier(
    stack: Stack, client: Client, reference: Reference, authority: Authority
) -> None:
    def pushed() -> bool:
        texts_are_plains(client, reference, "single:block", PROMPTS[2:])
        (head,) = operator.status()
        return head.events > 0 and len(head.replicas) == 2 and all(replica.current for replica in head.replicas)

    with AdapterClient(stack.services["adapter"].address, dialer=authority.dialer("operator")) as operator:
        assert eventually(pushed, 60)


@pytest.mark.parametrize("name", VERIFIERS)
def test_a_verifier_that_drains_takes_its_heads_from_the_registry_and_ends_well(
    stack: Stack, shared_redis: LocalRedis, client: Client, name: str
) -> None:
    def listed() -> list[bool]:
        keys = ["coppice:directory:verifier:", *(f"coppice:directory:drafter:{head}" for head in HEADS)]
        return [redis.zscore(key, stack.services[name].address) is not None for key in keys]

    assert eventually(lambda: fit(stack) == dict.fromkeys(POOLS, 2), 10)
    terminate = partial(os.kill, stack.services[name].pid, signal.SIGTERM)
    with Redis.from_url(shared_redis.url) as redis:
        assert listed() == [True, True, True]
        drained = answer(client, terminate, sampling=SAMPLED)
        assert eventually(lambda: listed() == [False, False, False], 3), "it left; its leases would run for longer"
    assert eventually(lambda: fit(stack) == dict.fromkeys(POOLS, 1), 10)
    assert stack.restart(name), "it ended by itself, with exit code 0"
    told = {"policy": "plain", "sampling": SAMPLED, "max_new_tokens": LONG, "ignore_eos": True}
    assert drained == client.generate(PROMPTS[1], **told).ids


def test_a_request_outlives_a_verifier_with_its_heads(stack: Stack, client: Client, reference: Reference) -> None:
    for name in VERIFIERS:  # one of them has the session
        assert eventually(lambda: fit(stack) == dict.fromkeys(POOLS, 2), 15)
        kill = partial(os.kill, stack.services[name].pid, signal.SIGKILL)
        assert answer(client, kill) == reference.greedy(PROMPTS[1], LONG).ids
        before = drafted(stack)
        texts_are_plains(client, reference, "single:block", PROMPTS[2:])
        assert drafted(stack) > before, "the other verifier's heads draft"
        stack.restart(name)


async def test_a_head_fails_alone(stack: Stack, client: Client, reference: Reference, authority: Authority) -> None:
    """The last test: afterwards the heads called mortal are dead."""
    assert eventually(lambda: fit(stack) == dict.fromkeys(POOLS, 2), 15)
    texts_are_plains(client, reference, "single:mortal", [(FAILS, 1, 2)])
    for name in VERIFIERS:
        assert (await described(stack, authority, name, "mortal")).name == "mortal"
    for number in range(20):  # one of the two is asked, which is up to the orchestrator
        texts_are_plains(client, reference, "single:mortal", [(DIES, 1, number)])
        if all([await is_dead(stack, authority, name) for name in VERIFIERS]):
            break
    for name in VERIFIERS:
        assert await is_dead(stack, authority, name)
        assert (await described(stack, authority, name, "block")).name == "block"
    before = drafted(stack)
    for policy in ("single:block", "single:mortal", "merge"):
        texts_are_plains(client, reference, policy, PROMPTS[2:])
    assert drafted(stack) > before
    assert [fit(stack)[pool] for pool in POOLS[:2]] == [2, 2]
