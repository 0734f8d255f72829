"""Services that lie, in every number of every message: a drafter costs drafts and a verifier is left for another one,
never a request and never a token.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from copy import deepcopy
from functools import partial
from typing import Any

import grpc.aio
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from coppice.client.client import AsyncClient
from coppice.config.settings import Settings
from coppice.errors import InvalidField
from coppice.rpc.channels import Dialer, Stub
from coppice.speculation.sampling import SamplingParams
from coppice.v1 import drafter_pb2, verifier_pb2
from coppice.wire.generation import Chunk, GenerationRequest, request_to_wire
from orchestrator.heads import HeadPool
from orchestrator.metrics import OrchestratorMetrics
from orchestrator.service import GenerationServicer
from orchestrator.targets import TargetPool
from tests.fake_service import SERVICES
from tests.processes import Service, StartService
from tests.recorder import IDS, TINY_TARGET, server_of, start_verifier, truth, verifier

__all__ = ["TINY_TARGET", "start_verifier", "truth", "verifier"]  # fixtures, and the target's options

NEW = 12
EXTREMES = {
    FieldDescriptor.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(1 << 63), -(1 << 62), 1 << 62, (1 << 63) - 1),
    FieldDescriptor.CPPTYPE_UINT32: (1 << 31, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_UINT64: (1 << 53, 1 << 62, (1 << 64) - 1),
    FieldDescriptor.CPPTYPE_FLOAT: (float("nan"), float("inf"), float("-inf"), 3e38),
    FieldDescriptor.CPPTYPE_DOUBLE: (float("nan"), float("inf"), float("-inf"), 1e308),
}
TURNS = itertools.count()
Path = tuple[str, ...]
Lie = tuple[str, Path, Any]  # the kind of message, the path to the number in it, and its value


def numbers_in(message: Message, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every number of a message and of the messages in it, with one of its extremes, of a type in turns."""
    for field in message.DESCRIPTOR.fields:
        if field.message_type is not None and not field.is_repeated and message.HasField(field.name):
            yield from numbers_in(getattr(message, field.name), (*path, field.name))
        if extremes := EXTREMES.get(field.cpp_type):
            yield (*path, field.name), extremes[next(TURNS) % len(extremes)]


def with_extreme(message: Message, path: Path, extreme: Any) -> None:
    """Set one number of a message; of a list every entry."""
    for name in path[:-1]:
        message = getattr(message, name)
    if message.DESCRIPTOR.fields_by_name[path[-1]].is_repeated:
        count = max(1, len(getattr(message, path[-1])))
        message.ClearField(path[-1])
        getattr(message, path[-1]).extend([extreme] * count)
    else:
        setattr(message, path[-1], extreme)


class Liar:
    """Drafts what the target will say, in two parts, and lies about one number in all messages of a kind."""

    def __init__(self, truth: list[int], lie: Lie = ("", (), None)) -> None:
        self.truth, self.lie, self.told = truth, lie, 0

    def _sent(self, kind: str, message: Message) -> Message:
        lies_about, path, extreme = self.lie
        if kind == lies_about:
            with_extreme(message, path, extreme)
            self.told += 1
        return message

    async def Draft(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async for request in requests:
            if request.WhichOneof("kind") == "open":
                opened = drafter_pb2.DraftOpened(weights_version=1)
                yield self._sent("opened", drafter_pb2.DraftResponse(opened=opened))
                continue
            for delta in self.deltas(request.step.fence):
                yield self._sent("delta", drafter_pb2.DraftResponse(delta=delta))

    def deltas(self, fence: Any) -> list[Any]:
        """The next two tokens, a part each."""
        at = fence.committed_len + 1
        return [
            drafter_pb2.TreeDelta(
                fence=fence,
                nodes={"tokens": [token], "parents": [number], "log_probs": [-0.1]},
                last=number == 1,
                forward_ns=1000,
                total_ns=2000,
                miss=0.5,
            )
            for number, token in enumerate(self.truth[at : at + 2])
        ]

    async def DescribeHead(self, request: Any, context: Any) -> Any:
        return self._sent("head", self.head())

    @staticmethod
    def head() -> Any:
        """What an honest head says of itself."""
        return drafter_pb2.DescribeHeadResponse(name="liar", kind="lookup", weights_version=1, sessions=1)

    SyncWeights = DescribeHead


def lies() -> list[Lie]:
    (delta, *_) = Liar([1, 2, 3]).deltas(drafter_pb2.TreeDelta(fence={"committed_len": 1}).fence)
    messages = {
        "opened": drafter_pb2.DraftResponse(opened=drafter_pb2.DraftOpened(weights_version=1)),
        "delta": drafter_pb2.DraftResponse(delta=delta),
        "head": Liar.head(),
    }
    return [(kind, *each) for kind, message in messages.items() for each in numbers_in(message)]


async def test_extremes_of_a_drafter_fail_no_request(
    start_service: StartService, verifier: Service, truth: list[int]
) -> None:
    liars = [Liar(truth), *(Liar(truth, lie) for lie in lies())]
    async with contextlib.AsyncExitStack() as servers:
        flags = ["--orchestrator.verifiers", verifier.address, "--orchestrator.draft_deadline_ms", "2000"]
        for number, liar in enumerate(liars):
            server = await servers.enter_async_context(server_of(SERVICES["drafter"], liar))
            flags += ["--orchestrator.heads", f"head{number}={server.address}"]
        service = await asyncio.to_thread(start_service, "orchestrator", *flags)
        async with AsyncClient(service.address) as client:
            for number, liar in enumerate(liars):
                answer = await client.generate(IDS, policy=f"single:head{number}", max_new_tokens=NEW, ignore_eos=True)
                assert list(answer.ids) == truth[len(IDS) :][:NEW], liar.lie
                assert (answer.tau > 1.2) or number, "the honest one is believed"
        assert all(liar.told for liar in liars[1:])
        assert "unexpected error" not in service.log
        await asyncio.to_thread(service.stop)


class LyingVerifier:
    """Passes everything on to an honest one, and lies in all answers of a kind."""

    def __init__(self, honest: Stub, kind: str, lie: Callable[[Any], object]) -> None:
        self.honest, self.kind, self.lie, self.told = honest, kind, lie, 0

    async def Verify(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        call = self.honest.Verify()
        async for request in requests:
            await call.write(request)
            answer = await call.read()
            if answer is grpc.aio.EOF:
                return
            if answer.WhichOneof("kind") == self.kind:
                self.lie(answer)
                self.told += 1
            yield answer
        await call.done_writing()
        await call.read()

    async def FetchFeatures(self, request: Any, context: Any) -> AsyncIterator[Any]:
        async for part in self.honest.FetchFeatures(request):
            yield part

    async def DescribeTarget(self, request: Any, context: Any) -> Any:
        answer = await self.honest.DescribeTarget(request)
        if self.kind == "target":
            self.lie(answer)
        return answer


def changed(**fields: Any) -> Callable[[Any], object]:
    """A lie that puts fields of a verdict, None: unset."""

    def lie(answer: Any) -> None:
        for name in fields:
            answer.verdict.ClearField(name)
        answer.verdict.MergeFrom(type(answer.verdict)(**fields))

    return lie


TABLE: dict[str, tuple[str, Callable[[Any], object]]] = {
    "nodes that are no path": ("verdict", changed(accepted=[2, 1])),
    "the wrong node": ("verdict", changed(accepted=[2])),
    "nothing verified": ("verdict", changed(pruned=True, verified=[77])),
    "an empty message": ("verdict", lambda answer: answer.Clear()),
    "another kind of message": ("verdict", lambda answer: answer.opened.next.MergeFrom(answer.verdict.next)),
    "a row beyond the width": ("verdict", changed(next={"row": {"ids": [5, 1 << 30], "log_probs": [-1, -1]}})),
    "a row out of order": ("verdict", changed(next={"row": {"ids": [7, 5], "log_probs": [-1, -1]}})),
    "an end in the middle": ("verdict", changed(next=None)),
    "log-probabilities of more tokens": ("verdict", changed(log_probs=[-1.0] * 9)),
    "no log-probabilities": ("verdict", changed(log_probs=[])),
    "best ids nobody asked for": ("verdict", changed(top=[{"ids": [1], "log_probs": [-1]}])),
    "an empty opening": ("opened", lambda answer: answer.Clear()),
    "an opening of another text": ("opened", lambda answer: answer.opened.fence.MergeFrom(_SHORTER)),
    "a verdict for an opening": ("opened", lambda answer: answer.verdict.SetInParent()),
    "features behind the text": ("opened", lambda answer: answer.opened.features.MergeFrom(_FEATURES)),
}
_SHORTER = verifier_pb2.SessionOpened(fence={"committed_len": 3}).fence
_FEATURES = verifier_pb2.SessionOpened(features={"start": 1000, "count": 4, "dtype": "float32"}).features


class Two:
    """An orchestrator in this process that has a lying verifier, which it prefers, and an honest one."""

    async def start(self, addresses: list[str], drafter: str) -> None:
        metrics, self.verifiers = OrchestratorMetrics(), TargetPool(addresses, Dialer(), failover_s=10)
        self.heads = {"head": HeadPool("head", [drafter], Dialer(), metrics, 6)}
        settings = Settings(orchestrator={"draft_deadline_ms": 2000.0})  # type: ignore[arg-type]
        target = await self.verifiers.first_target()
        await self.heads["head"].look_at_all()
        self.service = GenerationServicer(settings, target, self.verifiers, self.heads, None, metrics)

    async def generate(self, **more: Any) -> list[int]:
        """The ids of an answer."""
        sampling = SamplingParams(temperature=0)
        options = {"max_new_tokens": NEW, "sampling": sampling, "policy": "single:head", **more}
        request = request_to_wire(GenerationRequest(ids=tuple(IDS), **options))  # type: ignore[arg-type]
        events = [event async for _, event in self.service.answers([request], contextlib.nullcontext())]
        return [token for event in events if isinstance(event, Chunk) for token in event.ids]


@asynccontextmanager
async def lied_to(honest: str, truth: list[int], kind: str, lie: Callable[[Any], object]) -> AsyncIterator[Any]:
    async with Dialer().open(honest) as channel, server_of(SERVICES["drafter"], Liar(truth)) as drafter:
        liar = LyingVerifier(Stub(channel, verifier_pb2), kind, lie)
        async with server_of(SERVICES["verifier"], liar) as lying:
            two = Two()
            await two.start([lying.address, honest], drafter.address)
            yield liar, two
            for replica in (*two.verifiers.replicas, *two.heads["head"].replicas):
                await replica.channel.close()


@pytest.fixture(scope="module")
def honest(start_verifier: StartService) -> Service:
    """Without a prefix cache: the first address is preferred."""
    return start_verifier("--verifier.prefix_cache", "0")


@pytest.mark.parametrize("lie", TABLE)
async def test_a_verifier_that_answers_nonsense_is_left(honest: Service, truth: list[int], lie: str) -> None:
    expected = truth[len(IDS) :][:NEW]
    async with lied_to(honest.address, truth, *TABLE[lie]) as (liar, two):
        answers = await asyncio.gather(*(two.generate(want_log_probs=True) for _ in range(4)))
        assert answers == [expected] * 4
        assert liar.told
        first, second = two.verifiers.replicas
        assert (first.fit, second.fit) == (False, True)
        assert first.cooling_until


async def test_a_text_that_one_verifier_refuses_is_asked_of_another_one(honest: Service, truth: list[int]) -> None:
    def refuse(answer: Any) -> None:
        raise InvalidField("open.ids", "are not to my liking")

    async with lied_to(honest.address, truth, "opened", refuse) as (_, two):
        assert await two.generate() == truth[len(IDS) :][:NEW]


async def test_extremes_in_every_number_of_a_verifier_fail_no_request(honest: Service, truth: list[int]) -> None:
    """An answer may hold a number that says nothing of the text; all else costs a prefill."""
    heard: list[Message] = []
    async with lied_to(honest.address, truth, "opened", lambda answer: heard.append(deepcopy(answer))) as (liar, two):
        await two.generate()
        liar.kind = "verdict"
        await two.generate()
    lies = [(at > 0, *each) for at, message in enumerate(heard[:2]) for each in numbers_in(message)]
    assert len(lies) > 25
    for is_verdict, path, extreme in lies:
        lie = partial(with_extreme, path=path, extreme=extreme)
        async with lied_to(honest.address, truth, ("opened", "verdict")[is_verdict], lie) as (liar, two):
            assert await two.generate() == truth[len(IDS) :][:NEW], (path, extreme)
            assert liar.told
