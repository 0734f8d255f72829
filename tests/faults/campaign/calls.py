"""What the campaign asks of single processes, past the SDK: what they hold, and a request without a second try."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from coppice.client.client import AsyncClient
from coppice.client.completion import StreamEvent
from coppice.errors import from_rpc_error
from coppice.rpc.channels import Dialer
from coppice.stack.process import Ready
from coppice.v1 import verifier_pb2
from coppice.v1.generation_pb2_grpc import GenerationServiceStub
from coppice.v1.verifier_pb2_grpc import VerifierServiceStub
from coppice.wire.generation import Chunk, read_response
from coppice.wire.verifier import read_target
from services.adapter.push import DrafterLink

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


async def held(ready: Ready, dialer: Dialer) -> Held:
    """What a verifier, drafter or orchestrator holds now; the dialer's certificate is an orchestrator's.

    Raises CoppiceError when it does not answer.
    """
    if ready.role == "drafter":
        async with DrafterLink(ready.address, dialer) as link:
            head = await link.describe()
        return Held(head.sessions, 0, head.sessions_opened, head.sessions_closed)
    if ready.role == "orchestrator":
        async with AsyncClient(ready.address) as client:
            return Held((await client.describe(CALL_S)).running)
    async with dialer.open(ready.address) as channel:
        request = verifier_pb2.DescribeTargetRequest()
        try:
            target = read_target(await VerifierServiceStub(channel).DescribeTarget(request, timeout=CALL_S))
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
    return Held(target.sessions, target.kv_tokens_used, target.sessions_opened, target.sessions_closed)


class Direct:
    """Requests to one orchestrator that are never tried again."""

    def __init__(self, address: str) -> None:
        self._channel = Dialer.from_environment().open(address)
        self._stub = GenerationServiceStub(self._channel)

    async def ask(
        self, message: Any, deadline_s: float, hear: Callable[[StreamEvent], None] = lambda event: None
    ) -> list[int]:
        """The ids that a GenerateRequest is answered with; `hear` takes every event. Raises CoppiceError."""
        ids: list[int] = []
        call = self._stub.Generate(message, timeout=deadline_s)
        try:
            async for response in call:
                event = read_response(response)
                hear(event)
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
