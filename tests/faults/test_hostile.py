"""A drafter that lies: extremes in every number of every message cost drafts, never a request and never a token."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from coppice.client.client import AsyncClient
from coppice.v1 import drafter_pb2
from tests.processes import Service
from tests.recorder import server_of
from tests.services.test_features import IDS, model, start_verifier, target, truth, verifier

__all__ = ["model", "start_verifier", "target", "truth", "verifier"]  # fixtures

NEW = 12
SERVICE = drafter_pb2.DESCRIPTOR.services_by_name["DrafterService"]
EXTREMES = {
    FieldDescriptor.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(1 << 63), -(1 << 62), 1 << 62, (1 << 63) - 1),
    FieldDescriptor.CPPTYPE_UINT32: (1 << 31, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_UINT64: (1 << 53, 1 << 62, (1 << 64) - 1),
    FieldDescriptor.CPPTYPE_FLOAT: (float("nan"), float("inf"), float("-inf"), 3e38),
    FieldDescriptor.CPPTYPE_DOUBLE: (float("nan"), float("inf"), float("-inf"), 1e308),
}
Path = tuple[str, ...]
Lie = tuple[str, Path, Any]
"""the kind of message, the path to the number in it, and its value"""


def numbers_in(message: Message, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every number of a message and of the messages in it, with each of its extremes."""
    for field in message.DESCRIPTOR.fields:
        if field.message_type is not None and message.HasField(field.name):
            yield from numbers_in(getattr(message, field.name), (*path, field.name))
        for extreme in EXTREMES.get(field.cpp_type, ()):
            yield (*path, field.name), extreme


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

    async def SyncWeights(self, requests: AsyncIterator[Any], context: Any) -> Any:
        raise NotImplementedError


def lies(kind: str) -> list[Lie]:
    (delta, *_) = Liar([1, 2, 3]).deltas(drafter_pb2.TreeDelta(fence={"committed_len": 1}).fence)
    messages = {
        "opened": drafter_pb2.DraftResponse(opened=drafter_pb2.DraftOpened(weights_version=1)),
        "delta": drafter_pb2.DraftResponse(delta=delta),
        "head": Liar.head(),
    }
    return [(kind, *each) for each in numbers_in(messages[kind])]


@pytest.mark.parametrize("kind", ["opened", "delta", "head"])
async def test_extremes_in_every_number_fail_no_request(
    start_service: Callable[..., Service], verifier: Service, truth: list[int], kind: str
) -> None:
    liars = [Liar(truth), *(Liar(truth, lie) for lie in lies(kind))]
    async with contextlib.AsyncExitStack() as servers:
        flags = ["--orchestrator.verifiers", verifier.address, "--orchestrator.draft_deadline_ms", "2000"]
        for number, liar in enumerate(liars):
            server = await servers.enter_async_context(server_of(SERVICE, liar))
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
