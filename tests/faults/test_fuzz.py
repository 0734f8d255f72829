"""Whatever is sent to a service, it answers in time with a documented status, forgets it and serves the next caller."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest
from google.protobuf.descriptor import MethodDescriptor
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coppice.adaptation.weights import Weights
from coppice.client.adapter import AdapterClient
from coppice.client.client import Client
from coppice.config.sections import SERVICES
from coppice.heads.checkpoints import load_head, public_weights
from coppice.rpc.channels import Dialer
from coppice.speculation.sampling import SamplingParams
from coppice.stack.launch import Stack
from coppice.stack.process import Ready
from coppice.stack.spec import HeadSpec
from coppice.v1 import drafter_pb2, generation_pb2, verifier_pb2
from coppice.wire.verifier import verify_request_to_wire
from services.adapter.loop import DrafterLink
from tests import fake_service
from tests.faults import talks
from tests.faults.campaign.rig import Held, held
from tests.faults.fuzzing import HANG_S, Outcome, converse
from tests.faults.talks import HELD, VOCAB, Says
from tests.nightly.__main__ import ROOT
from tests.pushes import Push, altered
from tests.signals import holds
from tests.stacks import serving
from tests.tiny import make_target
from tests.unit.test_feature_heads import save_random

pytestmark = pytest.mark.timeout(60, func_only=True)
AT_ONCE = 8
ALONE = {"SyncWeights": 2, "Rollback": 2}  # methods that do one thing at a time: more callers would only be refused
MEMORY = 24 << 20
"""Bytes by which a process may grow while it takes the second half of the messages.

In the first half the allocator's arenas come to hold eight of the largest messages at once, and caches fill: that may
be 40 MiB, and ends. A session that is never let go takes over 3 KiB: 50,000 of them would be six times the bound. Links
have four times as much: eight of them hold what many sessions sent, and 5,000 frames move it by 90 MiB both ways.
"""
PROMPT = tuple(range(7, 30))
Answers = tuple[tuple[int, ...], ...]
DESCRIPTORS = {
    (service.full_name, method.name): method for service in fake_service.SERVICES.values() for method in service.methods
}


def documented() -> dict[str, set[str]]:
    """What docs/protocol.md says that a method may end with."""
    page = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
    (anywhere,) = re.findall(r"Beside ([A-Z_,\sand]+), a call ends", page)
    rows = re.findall(r"^\| (`\w+`.*) \| (none|[A-Z_, ]+) \|$", page, re.MULTILINE)
    statuses = {method: found for methods, found in rows for method in re.findall(r"`([A-Z]\w+)`", methods)}
    return {method: {*re.findall("[A-Z_]{2,}", f"{anywhere} {found}")} for method, found in statuses.items()}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Every service there is, with room for a few sessions; the adapter does nothing unasked."""
    folder = tmp_path_factory.mktemp("fuzz")
    target = make_target(folder / "target", VOCAB, layers=8, hidden=talks.HIDDEN)
    block = save_random(folder / "block", "specblock", vocab_size=VOCAB)
    heads = HeadSpec("lm", "lm", target), HeadSpec("lookup", "lookup"), HeadSpec("block", "specblock", block)
    options = {"policy": "single:lookup", "adapt": True, "extra": {"orchestrator": {"limits.max_new_tokens": 16}}}
    with serving(folder, target, *heads, draft_deadline_ms=500, **options) as running:
        yield running


@pytest.fixture(scope="module")
def pushes(stack: Stack) -> list[Push]:
    """Weights for the block head, each over the checkpoint's; the fuzzing does not push the last."""
    _, _, block = stack.spec.heads
    assert block.path is not None
    loaded = load_head("specblock", str(block.path), str(stack.spec.target))
    first = Weights.of(public_weights(loaded.model, loaded.config))
    return [Push.of(block.name, first, altered(first, seed)) for seed in range(5)]


@pytest.fixture
def messages() -> int:
    """To each method of each service; tests/nightly sends 100,000."""
    return 400


@pytest.fixture(scope="module")
def right(stack: Stack) -> Answers:
    """What the stack answers before anything is done to it."""
    return answers(stack)


def answers(stack: Stack) -> Answers:
    drawn = (("plain", SamplingParams()), ("merge", SamplingParams()), ("route", SamplingParams(temperature=1, seed=3)))
    with Client(stack.address) as client:
        return tuple(
            client.generate(PROMPT, policy=policy, sampling=sampling, max_new_tokens=12, ignore_eos=True).ids
            for policy, sampling in drawn
        )


@dataclass(frozen=True)
class State:
    """What a process holds."""

    memory: int
    files: int
    threads: int

    @classmethod
    def of(cls, ready: Ready) -> State:
        process = psutil.Process(ready.pid)
        return cls(process.memory_info().rss, process.num_fds(), process.num_threads())

    def has_not_grown(self, before: State, memory: int) -> bool:
        """Whether it holds what it held, up to `memory` bytes and what one connection takes."""
        files, threads = self.files - before.files, self.threads - before.threads
        return self.memory - before.memory < memory and files <= 4 and threads <= 4


@contextlib.asynccontextmanager
async def session_beside(stack: Stack) -> AsyncIterator[None]:
    """A session with features beside whatever is done meanwhile."""
    async with Dialer().open(stack.services["verifier"].address) as channel:
        call = channel.stream_stream("/coppice.v1.VerifierService/Verify")()
        await call.write(verify_request_to_wire(HELD).SerializeToString())
        assert await call.read() is not grpc.aio.EOF
        yield
        call.cancel()


async def lets_go(ready: Ready) -> None:
    """Wait until a service holds nothing for its clients."""
    async with asyncio.timeout(30):
        while await held(ready, Dialer()) != Held(0):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def wrong(one: Outcome, allowed: set[str]) -> bool:
    """Whether a call ended late, with a status that is not documented, or with words that are not ours."""
    if one.unseen:
        return False
    leaks = re.search(r"Traceback|Error parsing|DecodeError|\.py", one.details)
    return one.slowest_s > HANG_S or one.code is None or one.code.name not in allowed or leaks is not None


async def fuzz(address: str, method: MethodDescriptor, says: Says, first: int, messages: int) -> Counter[str]:
    """How often each status was seen in so many messages, in conversations numbered from `first`; names what fails."""
    allowed, ended, bad, sent = documented()[method.name], Counter[str](), list[Outcome](), 0
    numbers = iter(range(first, first + 2 * messages))  # of some nothing is sent

    async def caller(channel: grpc.aio.Channel) -> None:
        nonlocal sent
        while sent < messages and (number := next(numbers, None)) is not None:
            outcome = await converse(channel, method, number, says)
            sent += len(outcome.sent)
            ended["unseen" if outcome.unseen or outcome.code is None else outcome.code.name] += 1
            if wrong(outcome, allowed):
                bad.append(outcome)

    async with Dialer().open(address) as channel, asyncio.TaskGroup() as group:
        for _ in range(ALONE.get(method.name, AT_ONCE)):
            group.create_task(caller(channel))
    assert bad == [], "\n".join(map(str, bad[:5]))
    return ended


def case(service: str, method: str, says: Callable[[Stack, list[Push]], Says], *expected: str) -> Any:
    return pytest.param(service, method, says, set(expected), id=f"{method}-{service.removeprefix('drafter-')}")


def drafting_by_block(stack: Stack, _: list[Push]) -> Says:
    return talks.drafting(stack.services["verifier"].address, features=True)


REFUSED = "INVALID_ARGUMENT"
CASES = [  # those that take longest first: make nightly runs several at once
    case("orchestrator", "Generate", lambda *_: talks.generating, REFUSED),
    case("drafter-lm", "Draft", lambda *_: talks.drafting(samples=True), REFUSED, "FAILED_PRECONDITION"),
    case("verifier", "DescribeTarget", lambda *_: talks.saying(verifier_pb2.DescribeTargetRequest()), REFUSED),
    case("verifier", "FetchFeatures", lambda *_: talks.fetching, REFUSED, "NOT_FOUND"),
    case("verifier", "Verify", lambda *_: talks.verifying, REFUSED, "FAILED_PRECONDITION"),
    case("verifier", "Link", lambda *_: talks.linking(Verify=talks.verifying, FetchFeatures=talks.fetching), REFUSED),
    case("drafter-lookup", "DescribeHead", lambda *_: talks.saying(drafter_pb2.DescribeHeadRequest()), REFUSED),
    case("drafter-lookup", "Draft", lambda *_: talks.drafting(), REFUSED, "FAILED_PRECONDITION"),
    case("drafter-lookup", "Link", lambda *_: talks.linking(Draft=talks.drafting()), REFUSED),
    case("drafter-block", "Draft", drafting_by_block, REFUSED, "FAILED_PRECONDITION"),
    case("drafter-block", "Link", lambda *of: talks.linking(Draft=drafting_by_block(*of)), REFUSED),
    case(
        "drafter-block",
        "SyncWeights",
        lambda _, pushes: talks.syncing(pushes[:-1]),
        *(REFUSED, "FAILED_PRECONDITION", "RESOURCE_EXHAUSTED"),
    ),
    case("orchestrator", "DescribeModel", lambda *_: talks.saying(generation_pb2.DescribeModelRequest()), REFUSED),
    case("adapter", "GetStatus", lambda *_: talks.asking_status, REFUSED, "NOT_FOUND"),
    case("adapter", "Pause", lambda *_: talks.pausing, REFUSED, "NOT_FOUND"),
    case("adapter", "Resume", lambda *_: talks.resuming, REFUSED, "NOT_FOUND"),
    case("adapter", "Rollback", lambda *_: talks.rolling_back, REFUSED, "NOT_FOUND", "FAILED_PRECONDITION"),
]


@pytest.mark.parametrize(("service", "method", "says", "expected"), CASES)
async def test_a_method_survives_whatever_is_sent_to_it(
    stack: Stack,
    pushes: list[Push],
    right: Answers,
    messages: int,
    service: str,
    method: str,
    says: Callable[[Stack, list[Push]], Says],
    expected: set[str],
) -> None:
    """Afterwards the service holds what it held, and the stack answers as before."""
    say = says(stack, pushes)
    ready = stack.services[service]
    described = DESCRIPTORS[SERVICES[ready.role], method]
    async with session_beside(stack):
        ended = await fuzz(ready.address, described, say, 0, messages // 2)
        before = State.of(ready)
        ended += await fuzz(ready.address, described, say, messages, messages // 2)
    assert ended.keys() >= {"CANCELLED" if method == "FetchFeatures" else "OK", *expected}, ended
    assert ended["unseen"] < 0.2 * ended.total(), ended
    stack.check()
    await lets_go(ready)
    async with grpc.aio.insecure_channel(ready.health) as channel:
        request = health_pb2.HealthCheckRequest(service=SERVICES[ready.role])
        answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=5)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    memory = MEMORY * (4 if method == "Link" else 1)  # connections take a moment to end, a leak stays
    assert await holds(lambda: State.of(ready).has_not_grown(before, memory)), (before, State.of(ready))
    log = (Path(str(stack.log_dir)) / f"{service}.log").read_text()
    assert not re.search(r"unexpected error|Traceback|forward failed|drafting failed|goes on without", log), log[-3000:]
    assert await asyncio.to_thread(answers, stack) == right


def test_every_method_is_documented_and_fuzzed() -> None:
    fuzzed = {(SERVICES[str(each.values[0]).partition("-")[0]], str(each.values[1])) for each in CASES}
    assert fuzzed == DESCRIPTORS.keys()
    assert documented().keys() == {name for _, name in fuzzed}


async def test_a_good_push_and_a_rollback_still_work(stack: Stack, pushes: list[Push]) -> None:
    async with DrafterLink(stack.services["drafter-block"].address, Dialer()) as replica:
        push = pushes[-1].announcing(version=(await replica.describe()).weights_version + 10**6)
        assert (await replica.push(push.header, push.parts)).weights_hash == push.header.weights_hash

        def roll_back() -> int:
            with AdapterClient(stack.services["adapter"].address) as client:
                return client.rollback("block", 0)

        made = await asyncio.to_thread(roll_back)
        assert (await replica.describe()).weights_version >= made
