"""What the campaign asks of single processes, past the SDK: what they hold, whether they are healthy, and a request
that is refused without a second try."""

from __future__ import annotations

import contextlib
import threading
import time
import urllib.request
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from coppice.errors import from_rpc_error
from coppice.generation import Chunk
from coppice.process import Ready
from coppice.rpc.channels import Dialer
from coppice.v1 import drafter_pb2, generation_pb2, verifier_pb2
from coppice.v1.drafter_pb2_grpc import DrafterServiceStub
from coppice.v1.generation_pb2_grpc import GenerationServiceStub
from coppice.v1.verifier_pb2_grpc import VerifierServiceStub
from coppice.wire.drafter import read_head
from coppice.wire.generation import read_model, read_response
from coppice.wire.verifier import read_target

CALL_S = 5.0


@dataclass(frozen=True, slots=True)
class Held:
    """What a process holds for its clients."""

    sessions: int
    kv_tokens: int = 0
    opened: int = 0
    closed: int = 0

    @property
    def nothing(self) -> bool:
        """Whether every session was closed and freed."""
        return self.sessions == 0 and self.kv_tokens == 0 and self.opened == self.closed


async def held(ready: Ready) -> Held:
    """What a verifier, drafter or orchestrator holds now. Raises CoppiceError when it does not answer."""
    channel = Dialer().open(ready.address)
    try:
        if ready.role == "verifier":
            request = verifier_pb2.DescribeTargetRequest()
            target = read_target(await VerifierServiceStub(channel).DescribeTarget(request, timeout=CALL_S))
            return Held(target.sessions, target.kv_tokens_used, target.sessions_opened, target.sessions_closed)
        if ready.role == "drafter":
            asked = drafter_pb2.DescribeHeadRequest()
            head = read_head(await DrafterServiceStub(channel).DescribeHead(asked, timeout=CALL_S))
            return Held(head.sessions, 0, head.sessions_opened, head.sessions_closed)
        about = generation_pb2.DescribeModelRequest()
        model = read_model(await GenerationServiceStub(channel).DescribeModel(about, timeout=CALL_S))
        return Held(model.running)
    except grpc.RpcError as error:
        raise from_rpc_error(error) from None
    finally:
        await channel.close()


class Direct:
    """Requests to one orchestrator that are never tried again."""

    def __init__(self, address: str) -> None:
        self._channel = Dialer().open(address)
        self._stub = GenerationServiceStub(self._channel)

    async def ask(self, message: Any, deadline_s: float) -> list[int]:
        """The ids that a GenerateRequest is answered with. Raises CoppiceError."""
        ids: list[int] = []
        call = self._stub.Generate(message, timeout=deadline_s)
        try:
            async for response in call:
                event = read_response(response)
                if isinstance(event, Chunk):
                    ids += event.ids
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        finally:
            call.cancel()
        return ids

    async def close(self) -> None:
        """End the connection."""
        await self._channel.close()


class HealthWatch:
    """Asks a process for its health again and again: `took` seconds each answer, `missed` were not given.

    It has a thread: an event loop that is busy with a load would add its own delay.
    """

    PERIOD_S = 0.1

    def __init__(self, ready: Ready) -> None:
        self.took: list[float] = []
        self.missed = 0
        self._ready, self._ended = ready, threading.Event()
        self._thread = threading.Thread(target=self._run, name="health-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        with grpc.insecure_channel(self._ready.health) as channel:
            stub, request = health_pb2_grpc.HealthStub(channel), health_pb2.HealthCheckRequest(service="")
            grpc.channel_ready_future(channel).result(CALL_S)
            while not self._ended.wait(self.PERIOD_S):
                began = time.monotonic()
                try:
                    stub.Check(request, timeout=CALL_S)
                    self.took.append(time.monotonic() - began)
                except grpc.RpcError:
                    self.missed += 1


@contextlib.contextmanager
def watching(watches: Iterable[HealthWatch]) -> Iterator[None]:
    """Ask all of them inside the block."""
    with contextlib.ExitStack() as stack:
        for watch in watches:
            stack.enter_context(watch)
        yield


def metric(ready: Ready, name: str) -> float:
    """The sum over all labels of one of a process's metrics; 0 when it has none of that name. Raises OSError."""
    with urllib.request.urlopen(f"http://{ready.metrics}/metrics", timeout=CALL_S) as page:
        text = page.read().decode()
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return sum(sample.value for sample in samples if sample.name == name)
