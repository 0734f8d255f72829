"""Heads in the verifiers' processes: texts are the target's, a drafter's verbs work at a verifier's address, and when
replicas come, drain, fail, are killed and learn, texts never notice.

All of it with certificates, which are replaced in the end, with tokens of clients over gRPC and HTTPS, and with a
registry in which replicas find each other.
"""

from __future__ import annotations

import json
import os
import signal
import ssl
from collections.abc import Iterator
from functools import partial
from hashlib import sha256
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from playwright.sync_api import expect
from redis import Redis

from coppice.client.adapter import AdapterClient
from coppice.client.client import Client
from coppice.config.sections import SERVICES
from coppice.errors import InvalidField, Unauthenticated, Unavailable
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
from tests.pipeline.test_page import CHROMIUM, chromium
from tests.signals import eventually
from tests.stacks import interrupted, serving, serving_now

__all__ = ["heads", "target"]  # fixtures

NEW, LONG = 32, 60
VERIFIERS = ("verifier-0", "verifier-1")
HEADS = ("block", "mortal")
POOLS = ("verifier", *HEADS)
SAMPLED = SamplingParams(temperature=1.0, seed=4)
TOKEN = "a token"
DRAFTERS_TOO = 'issue verifier ",DNS:drafter"\n'
"""a certificate for verifiers that names drafters, too"""


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"), DRAFTERS_TOO)


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
    tokens = authority.folder / "tokens"
    tokens.write_text(f"tests {sha256(TOKEN.encode()).hexdigest()} 2\n")
    at = {"directory.redis": shared_redis.url, "adaptation.redis": shared_redis.url}
    found = {
        "verifier": {},
        "orchestrator": {
            **{"orchestrator.verifiers": "redis", "orchestrator.heads": ["block=redis", "mortal=redis"]},
            "orchestrator.tokens": tokens,
        },
        "adapter": {**QUICK, "adapter.drafters": "block=redis"},
    }
    both = HeadSpec("block", "specblock", heads["block"]), HeadSpec("mortal", "mortal")
    extra = {role: {**at, **authority.flags(role), **more} for role, more in found.items()}
    extra["drafter"] = {"drafter.verifiers": "redis"}
    options = {"one_process": True, "verifiers": 2, "adapt": True, "extra": extra, "draft_deadline_ms": 20_000}
    options["http_port"] = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(packages)
        patch.setenv("TEST_CONSTANTS", "coppice.rpc.directory.LEASE_S=20")
        patch.setenv("PYTHONPATH", str(packages), prepend=os.pathsep)
        with serving(tmp_path_factory.mktemp("logs"), target, *both, **options) as running:
            yield running


@pytest.fixture(scope="module")
def client(stack: Stack, authority: Authority) -> Iterator[Client]:
    with Client(stack.address, dialer=authority.dialer(token=TOKEN)) as connected:
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
    for policy in ("single:mortal", "merge"):
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


def struck(stack: Stack, client: Client, blow: signal.Signals, **options: Any) -> tuple[str, tuple[int, ...]]:
    """The verifier that got a signal in the middle of its session, and the answer of that."""
    assert eventually(lambda: fit(stack) == dict.fromkeys(POOLS, 2) and not serving_now(stack), 15)
    names = list[str]()

    def strike() -> None:
        names.extend(serving_now(stack))
        os.kill(stack.services[names[0]].pid, blow)

    told = {"max_new_tokens": LONG, "policy": "single:block", **options}
    ids = interrupted(client, PROMPTS[1], strike, **told)
    assert len(names) == 1
    return names[0], ids


def test_a_verifier_that_drains_takes_its_heads_from_the_registry_and_ends_well(
    stack: Stack, shared_redis: LocalRedis, client: Client
) -> None:
    def listed(address: str) -> list[bool]:
        keys = ["coppice:directory:verifier:", *(f"coppice:directory:drafter:{head}" for head in HEADS)]
        return [redis.zscore(key, address) is not None for key in keys]

    with Redis.from_url(shared_redis.url) as redis:
        name, drained = struck(stack, client, signal.SIGTERM, sampling=SAMPLED)
        address = stack.services[name].address
        assert eventually(lambda: listed(address) == [False] * 3, 3), "it left; its leases would run for longer"
        (other,) = set(VERIFIERS) - {name}
        assert listed(stack.services[other].address) == [True] * 3
    assert eventually(lambda: fit(stack) == dict.fromkeys(POOLS, 1), 10)
    assert stack.restart(name), "it ended by itself, with exit code 0"
    told = {"policy": "plain", "sampling": SAMPLED, "max_new_tokens": LONG, "ignore_eos": True}
    assert drained == client.generate(PROMPTS[1], **told).ids


def test_a_request_outlives_a_verifier_with_its_heads(stack: Stack, client: Client, reference: Reference) -> None:
    name, ids = struck(stack, client, signal.SIGKILL)
    assert ids == reference.greedy(PROMPTS[1], LONG).ids
    before = drafted(stack)
    texts_are_plains(client, reference, "single:block", PROMPTS[2:])
    assert drafted(stack) > before, "the other verifier's heads draft"
    stack.restart(name)


async def test_a_head_fails_alone(stack: Stack, client: Client, reference: Reference, authority: Authority) -> None:
    """Afterwards one of the heads called mortal is dead."""
    assert eventually(lambda: fit(stack) == dict.fromkeys(POOLS, 2), 15)
    texts_are_plains(client, reference, "single:mortal", [(FAILS, 1, 2)])
    for number in range(40):  # a head that has just failed is left alone for a moment
        texts_are_plains(client, reference, "single:mortal", [(DIES, 1, number)])
        if dead := [name for name in VERIFIERS if await is_dead(stack, authority, name)]:
            break
    assert dead
    for name in VERIFIERS:
        assert (await described(stack, authority, name, "block")).name == "block"
    before = drafted(stack)
    for policy in ("single:block", "single:mortal", "merge"):
        texts_are_plains(client, reference, policy, PROMPTS[2:])
    assert drafted(stack) > before
    assert [fit(stack)[pool] for pool in POOLS[:2]] == [2, 2]


# Clients: their tokens, HTTPS, the page, and other certificates.


def completed(stack: Stack, authority: Authority, token: str = TOKEN, n: int = 1) -> tuple[int, Any]:
    """Status and body of a completion over HTTPS, by who trusts an authority."""
    body = json.dumps({"prompt": list(PROMPTS[0]), "max_tokens": 4, "n": n, "ignore_eos": True}).encode()
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    context = ssl.create_default_context(cafile=str(authority.folder / "ca.pem"))
    asked = Request(f"https://{stack.orchestrator.http}/v1/completions", body, headers)
    try:
        with urlopen(asked, timeout=20, context=context) as response:
            return response.status, json.load(response)
    except HTTPError as error:
        return error.code, json.load(error)


def test_http_is_https_and_asks_for_the_same_tokens(stack: Stack, authority: Authority, tmp_path: Path) -> None:
    status, told = completed(stack, authority)
    assert (status, told["usage"]["completion_tokens"]) == (200, 4)
    with urlopen(f"http://{stack.orchestrator.metrics}/metrics", timeout=10) as metrics:
        page = metrics.read().decode()
    assert 'coppice_client_requests_total{client="tests",verdict="admitted"}' in page
    assert TOKEN not in page
    with Client(stack.address, dialer=authority.dialer()) as client, pytest.raises(Unauthenticated):
        client.generate(PROMPTS[1])
    assert completed(stack, authority, "another")[0] == 401
    assert completed(stack, authority, n=2)[0] == 200
    assert completed(stack, authority, n=3)[0] == 429  # its bearer may have two running
    with pytest.raises(URLError, match="certificate verify failed"):
        completed(stack, Authority(tmp_path / "other"))
    context = ssl.create_default_context(cafile=str(authority.folder / "ca.pem"))
    with urlopen(f"https://{stack.orchestrator.http}/openapi.json", timeout=10, context=context) as response:
        assert b"ChatBody" in response.read()
    with pytest.raises(HTTPError, match="401"):
        urlopen(f"https://{stack.orchestrator.http}/metrics", timeout=10, context=context)
    with pytest.raises((OSError, HTTPException)):
        urlopen(f"http://{stack.orchestrator.http}/health", timeout=10)
    probing = ssl.create_default_context()  # as Kubernetes probes: it has no certificate and checks none
    probing.check_hostname, probing.verify_mode = False, ssl.CERT_NONE
    with urlopen(f"https://{stack.orchestrator.http}/ready", timeout=10, context=probing) as response:
        assert response.status == 200


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_the_page_asks_for_a_token_wherever_it_is_opened(stack: Stack) -> None:
    with chromium() as browser, browser.new_context(ignore_https_errors=True) as context:  # it knows no authority
        page = context.new_page()  # whose console tells of refusals
        page.goto(f"https://{stack.orchestrator.http}/#compare")
        field, refused = page.get_by_label("This server asks for an access token"), page.locator("#served-error")
        expect(field).to_be_visible()
        expect(refused).to_have_text("a valid bearer token is needed")
        refused.evaluate("line => line.textContent = 'another'")
        field.fill("another")
        page.get_by_role("button", name="Use it").click()
        expect(refused).to_have_text("a valid bearer token is needed")
        expect(refused).to_be_visible()
        field.fill(TOKEN)
        field.press("Enter")
        expect(page.locator("#model")).to_contain_text("float32")
        expect(field).to_be_hidden()
        expect(refused).to_be_empty()
        page.reload()
        expect(field).to_be_visible()  # a token is kept by nobody


def test_all_goes_on_by_other_certificates(
    stack: Stack, authority: Authority, reference: Reference, tmp_path: Path
) -> None:
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new", DRAFTERS_TOO)
    old.replace_by(authority)
    authority.replace_by(new)
    with Client(stack.address, dialer=authority.dialer(token=TOKEN)) as client:
        before = drafted(stack)
        texts_are_plains(client, reference, "single:block", PROMPTS)
        assert drafted(stack) > before
    assert completed(stack, authority)[0] == 200
    with Client(stack.address, dialer=old.dialer(token=TOKEN)) as client, pytest.raises(Unavailable):
        client.describe(timeout=2)
    with pytest.raises(URLError, match="certificate verify failed"):
        completed(stack, old)
