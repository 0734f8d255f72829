"""One stream to one drafter: messages go out in order, answers are handed on as they come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import grpc
import structlog

from coppice.errors import CoppiceError, InternalError, Unavailable, from_rpc_error
from coppice.messages.steps import DraftOpened, TreeDelta
from coppice.rpc.tracing import metadata
from coppice.v1 import drafter_pb2
from coppice.wire import drafter

from .drafters import DrafterReplica

log = structlog.get_logger()


class DraftStream:
    """A stream from its opening to its end. Nothing here raises: a stream that fails ends."""

    def __init__(
        self,
        head: str,
        replica: DrafterReplica,
        heard: Callable[[TreeDelta | DraftOpened], None],
        lost: Callable[[CoppiceError], None],
    ) -> None:
        """head: its name in logs. `heard` takes every answer, `lost` what ended the stream unless `close` did."""
        self.replica = replica
        self._head, self._heard, self._lost = head, heard, lost
        self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._writing: asyncio.Task[None] | None = None
        replica.taken()
        self._call: grpc.aio.StreamStreamCall = replica.stub.Draft(metadata=metadata())
        self._spawn(self._listen())

    @property
    def idle(self) -> bool:
        """Whether all that was written has gone out."""
        return self._writing is None or self._writing.done()

    def write(self, message: drafter_pb2.DraftRequest) -> None:
        """Send a message behind the earlier ones."""
        self._writing = self._spawn(self._send(self._writing, message))

    def close(self) -> None:
        """End the stream; the drafter frees the session."""
        self._closed = True
        self._call.cancel()
        for task in self._tasks - {asyncio.current_task()}:
            task.cancel()
        self.replica.released()

    async def _send(self, earlier: asyncio.Task[None] | None, message: drafter_pb2.DraftRequest) -> None:
        if earlier is not None and not earlier.done():
            await asyncio.wait([earlier])
        if not self._closed:
            try:
                await self._call.write(message)
            except (grpc.RpcError, asyncio.InvalidStateError):
                return  # the listener hears of it too and deals with it

    async def _listen(self) -> None:
        end: CoppiceError = Unavailable("the drafter ended the session")
        try:
            async for message in self._call:
                self._heard(drafter.read_draft_response(message))
        except grpc.RpcError as error:
            end = from_rpc_error(error)
        except CoppiceError as error:  # of an answer: no refusal of a text
            end = InternalError(f"the drafter answered wrongly: {error}")
        if not self._closed:
            log.warning("head lost", head=self._head, why=str(end)[:200])
            self._lost(end)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
