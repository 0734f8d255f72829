"""AdapterService for gRPC."""

from __future__ import annotations

from collections.abc import Sequence

import grpc.aio

from coppice.errors import InvalidField, NotFound, Unavailable
from coppice.messages.adapter import standing_by
from coppice.v1 import adapter_pb2
from coppice.wire.adapter import (
    read_head_name,
    read_rollback_request,
    read_status_request,
    rollback_to_wire,
    status_to_wire,
)

from .head_loop import HeadLoop


class AdapterServicer:
    """Hands operators' requests to the loops; until there are any it stands by."""

    def __init__(self, heads: Sequence[str], policy: str) -> None:
        self._heads, self._policy = heads, policy
        self._loops: dict[str, HeadLoop] = {}

    def adapt(self, loops: Sequence[HeadLoop]) -> None:
        """Stop standing by: the loops of all heads run."""
        self._loops = {loop.name: loop for loop in loops}

    def _named(self, head: str) -> Sequence[str]:
        """Return one name, or all. Raises NotFound."""
        if head and head not in self._heads:
            raise NotFound(f"head {head} is not adapted here; there are {', '.join(self._heads)}")
        return [head] if head else self._heads

    def _chosen(self, head: str) -> list[HeadLoop]:
        """Return one loop by its name, or all. Raises NotFound, Unavailable."""
        chosen = [self._loops.get(name) for name in self._named(head)]
        active = [loop for loop in chosen if loop is not None and loop.active()]
        if len(active) < len(chosen):
            raise Unavailable("this adapter stands by: ask the active one")
        return active

    async def GetStatus(
        self, request: adapter_pb2.GetStatusRequest, context: grpc.aio.ServicerContext
    ) -> adapter_pb2.GetStatusResponse:
        """Report what the loops did and know."""
        head, history = read_status_request(request)
        return status_to_wire(
            [
                self._loops[name].status(history) if name in self._loops else standing_by(name, self._policy)
                for name in self._named(head)
            ]
        )

    async def Pause(
        self, request: adapter_pb2.PauseRequest, context: grpc.aio.ServicerContext
    ) -> adapter_pb2.PauseResponse:
        """Stop training."""
        for loop in self._chosen(read_head_name(request)):
            loop.pause(True)
        return adapter_pb2.PauseResponse()

    async def Resume(
        self, request: adapter_pb2.ResumeRequest, context: grpc.aio.ServicerContext
    ) -> adapter_pb2.ResumeResponse:
        """Train again."""
        for loop in self._chosen(read_head_name(request)):
            loop.pause(False)
        return adapter_pb2.ResumeResponse()

    async def Rollback(
        self, request: adapter_pb2.RollbackRequest, context: grpc.aio.ServicerContext
    ) -> adapter_pb2.RollbackResponse:
        """Put earlier weights back on every replica."""
        head, version = read_rollback_request(request)
        chosen = self._chosen(head)
        if len(chosen) != 1:
            raise InvalidField("head", f"say which: {', '.join(self._heads)}")
        return rollback_to_wire(version=await chosen[0].rollback(version))
