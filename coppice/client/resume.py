"""How a request survives the loss of the server that answers it: tried again, elsewhere, from the tokens held."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc

from coppice import limits
from coppice.client.completion import StreamEvent
from coppice.errors import Cancelled, CoppiceError, DeadlineExceeded, Overloaded, Unavailable
from coppice.messages.generation import Chunk, Started
from coppice.v1 import generation_pb2 as generation

if TYPE_CHECKING:
    from coppice.v1.generation_pb2_grpc import GenerationServiceStub

TIMEOUT_S = limits.MAX_DEADLINE_NS / 1e9
# Waits before a call to the only address is sent again; longer than a channel's own longest back-off.
RETRY_DELAYS_S = (0.25, 0.5)
# How long a request that has begun looks for somebody who goes on with it, how often it tries, and how long one that
# has not begun looks for anybody among several servers: they may be restarted one after another.
PATIENCE_S, PATIENT_DELAY_S, RESTART_S = 60.0, 0.5, 15.0
# With several addresses: silence after which a server is asked whether it still lives, and how long it may take to say.
SILENCE_S, ALIVE_S = 1.0, 1.5
CLOCKS_S = 0.05  # by how much gRPC may see a deadline pass before this does


class Attempts:
    """One request on its way: its message, its deadline, what the client holds of its answer, and who is asked next."""

    def __init__(self, timeout: float, message: Any, addresses: int, first: int = 0) -> None:
        """`first`: the address to begin with, one of `addresses`."""
        limits.check_range("timeout", timeout, 0, TIMEOUT_S)
        self.message = message
        self.at = first
        self.silent = threading.Event()
        """the server that is asked was found dead"""
        self._addresses, self._tried = addresses, 0
        self._full: Overloaded | None = None
        self._allowed_s, self._deadline = timeout, time.monotonic() + timeout
        self._delays = iter(RETRY_DELAYS_S)
        self._started = False
        self._held: list[int] = []
        self._resumed = 0
        self._progress_at = self.heard_at = time.monotonic()

    @property
    def timeout(self) -> float:
        """Seconds left."""
        return max(0.0, self._deadline - time.monotonic())

    @property
    def quiet(self) -> bool:
        """Whether nothing was heard for a while."""
        return time.monotonic() - self.heard_at > SILENCE_S

    def hear(self, event: StreamEvent) -> StreamEvent | None:
        """What the caller is to see of an event: the second beginning of an answer is not news."""
        self.heard_at = time.monotonic()
        if isinstance(event, Started):
            again, self._started = self._started, True
            if not self.message.sampling.HasField("seed"):  # who goes on with it is to draw the same
                self.message.sampling.seed = event.seed
            return None if again else event
        if isinstance(event, Chunk):
            self._held += event.ids
            self._progress_at, self._tried = self.heard_at, 0
            return event
        if not self._resumed:
            return event
        return replace(event, new_tokens=len(self._held), resumed=self._resumed)

    def delay_after(self, failure: CoppiceError, final: bool = False) -> float:
        """Seconds to wait before the next attempt, elsewhere if there is elsewhere; raises the failure at last.

        Only what another attempt may mend is tried again: an answer that has begun goes on from what is held; one that
        has not is refused when all were asked and one of them was full. `final`: there is to be no other attempt.
        """
        if self.silent.is_set():
            failure = Unavailable("the server stopped answering")
            self.silent.clear()
        if isinstance(failure, DeadlineExceeded) and self.timeout < CLOCKS_S:  # else it was the server's own bound
            failure = DeadlineExceeded(f"the call was not done within {self._allowed_s:g} s")
        if isinstance(failure, Overloaded):
            self._full = failure
        if final or not isinstance(failure, Unavailable | Cancelled | Overloaded):
            raise failure from None
        self._tried += 1
        self.at = (self.at + 1) % self._addresses
        all_asked = self._tried % self._addresses == 0
        if all_asked and self._full and not self._held:
            raise self._full from None
        delay = self._pause() if all_asked else 0.0
        if delay is None or delay >= self.timeout:
            raise failure from None
        if self._held:
            del self.message.resume_ids[self._known :]
            self.message.resume_ids.extend(self._held)
            self._resumed += 1
        self.heard_at = time.monotonic() + delay
        return delay

    def _pause(self) -> float | None:
        if not self._started and self._addresses == 1:
            return next(self._delays, None)
        patience = PATIENCE_S if self._started else RESTART_S
        return PATIENT_DELAY_S if time.monotonic() - self._progress_at < patience else None

    @functools.cached_property
    def _known(self) -> int:
        """Tokens that the caller held before the call. Read before the first resumption."""
        return len(self.message.resume_ids)


def watch(stub: GenerationServiceStub, call: Attempts, responses: Any, ended: threading.Event) -> None:
    """Cancel a stream whose server says nothing any more, not even what it serves: it may have been stopped."""
    while not ended.wait(SILENCE_S / 2):
        if call.quiet:
            try:
                stub.DescribeModel(generation.DescribeModelRequest(), timeout=ALIVE_S)
            except grpc.RpcError:
                if call.quiet and not ended.is_set():
                    call.silent.set()
                    responses.cancel()
                return


async def watch_async(stub: GenerationServiceStub, call: Attempts, responses: Any) -> None:
    """As `watch`."""
    while True:
        await asyncio.sleep(SILENCE_S / 2)
        if call.quiet:
            try:
                await stub.DescribeModel(generation.DescribeModelRequest(), timeout=ALIVE_S)
            except grpc.RpcError:
                if call.quiet:
                    call.silent.set()
                    responses.cancel()
                return
