"""The SDK: `Client` and `AsyncClient` of a GenerationService."""

import asyncio
import contextlib
import itertools
import os
import random
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Unpack

import grpc
import grpc.aio

from coppice import limits
from coppice.client.completion import Accumulator, Completion, StreamEvent
from coppice.client.request import Options, Prompt, build_request, lists_options
from coppice.errors import (
    Cancelled,
    CoppiceError,
    DeadlineExceeded,
    InvalidField,
    Overloaded,
    Unavailable,
    from_rpc_error,
)
from coppice.rpc.channels import Dialer, Stub
from coppice.v1 import generation_pb2 as generation
from coppice.wire.generation import Chunk, ModelDescription, Started, read_model, read_response, request_to_wire

TIMEOUT_S = limits.MAX_DEADLINE_NS / 1e9
# How long a request that has begun looks for somebody who goes on with it; how long one that has not begun looks for
# anybody among several servers, which may be restarted one after another, and how long at one address: longer than a
# channel's own longest back-off. PAUSE_S is between two rounds of attempts.
BEGUN_S, SEVERAL_S, ALONE_S, PAUSE_S = 60.0, 15.0, 0.75, 0.5
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
        self.silent = threading.Event()  # the server that is asked was found dead
        self._addresses, self._tried = addresses, 0
        self._full: Overloaded | None = None
        self._allowed_s, self._deadline = timeout, time.monotonic() + timeout
        self._started = False
        self._brought = len(getattr(message, "resume_ids", ()))  # tokens that the caller held before the call
        self._held: list[int] = []
        self._resumed = 0
        self._progress_at = self.heard_at = time.monotonic()

    @property
    def timeout(self) -> float:
        """Seconds left."""
        return max(0.0, self._deadline - time.monotonic())

    @property
    def quiet(self) -> bool:
        """Whether the server has sent nothing for SILENCE_S."""
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
        """Seconds to wait before the next attempt, elsewhere if there is elsewhere; raises the failure if it is `final`
        or no attempt may mend it. An answer that has begun goes on from what is held; one that has not is refused when
        all were asked and one of them was full.
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
        patience_s = BEGUN_S if self._started else SEVERAL_S if self._addresses > 1 else ALONE_S
        delay = PAUSE_S if all_asked else 0.0
        if delay >= self.timeout or (all_asked and time.monotonic() - self._progress_at >= patience_s):
            raise failure from None
        if self._held:
            del self.message.resume_ids[self._brought :]
            self.message.resume_ids.extend(self._held)
            self._resumed += 1
        self.heard_at = time.monotonic() + delay
        return delay


def watch(stub: Stub, call: Attempts, responses: Any, ended: threading.Event) -> None:
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


async def watch_async(stub: Stub, call: Attempts, responses: Any) -> None:
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


def default_address() -> str:
    """COPPICE_ADDRESS, else the address `coppice up` takes."""
    return os.environ.get("COPPICE_ADDRESS") or "127.0.0.1:50051"


class _Endpoint:
    """The servers that a client asks: an address, a channel and a stub of each, and whose turn it is."""

    _blocking: ClassVar[bool]

    def __init__(self, address: str | Sequence[str] | None = None, *, dialer: Dialer | None = None) -> None:
        """Connect lazily to HOST:PORT or several, a list or with commas between; default COPPICE_ADDRESS, else
        127.0.0.1:50051. dialer: certificates and the bearer token, else the environment's. Raises InvalidField.
        """
        address, dialer = address or default_address(), dialer or Dialer.from_environment()
        names = address.split(",") if isinstance(address, str) else address
        self.addresses = tuple(name.strip() for name in names if name.strip())
        if not self.addresses:
            raise InvalidField("address", "names no HOST:PORT")
        connect: Callable[[str], Any] = dialer.open_blocking if self._blocking else dialer.open
        self._channels = [connect(address) for address in self.addresses]
        self._stubs = [Stub(channel, generation) for channel in self._channels]
        # Clients begin anywhere, so that no server gets all first requests.
        self._turns = itertools.count(random.randrange(len(self._stubs)))  # noqa: S311 - it is no secret
        self._closed = False

    def _call(self, caller: str, prompt: Prompt, options: Options) -> Attempts:
        """The call of a prompt. Raises InvalidField, TypeError for an unknown option."""
        message, count = request_to_wire(build_request(prompt, caller, **options)), len(self._stubs)
        return Attempts(options.get("timeout", TIMEOUT_S), message, count, next(self._turns) % count)

    def _stub(self, call: Attempts) -> Stub:
        """Whom the next attempt of a call asks. Raises Cancelled when the client is closed."""
        if self._closed:
            raise Cancelled("the client is closed")
        return self._stubs[call.at]


class Client(_Endpoint, contextlib.AbstractContextManager["Client"]):
    """Asks a server, blocking. A context manager; calls may be made from several threads.

    With several addresses a request goes to the next one when a server is full or lost, and an answer that has begun
    goes on there from the tokens held: none comes twice, none is lost, and the text is the same.
    """

    _blocking = True

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connections and every running call."""
        self._closed = True
        for channel in self._channels:
            channel.close()

    def describe(self, timeout: float = 10.0) -> ModelDescription:
        """What is served. Raises Unavailable when no server answers."""
        call = Attempts(timeout, generation.DescribeModelRequest(), len(self._stubs))
        while True:
            try:
                return read_model(self._stub(call).DescribeModel(call.message, timeout=call.timeout))
            except grpc.RpcError as error:
                delay = call.delay_after(from_rpc_error(error), self._closed)
            time.sleep(delay)

    @lists_options
    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """The whole answer to text, token ids or messages. Raises the errors of coppice.errors."""
        call, answer = self._call("generate", prompt, options), Accumulator()
        for event in self._events(call):
            answer.add(event)
        return answer.completion()

    @lists_options
    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Iterator[StreamEvent]:
        """Started, then Chunks, then Finished. Leaving the loop early cancels the call.

        `coppice.client.completion.Accumulator` folds the events into a Completion, a partial one if need be.
        """
        return self._events(self._call("stream", prompt, options))

    def _events(self, call: Attempts) -> Iterator[StreamEvent]:
        while True:
            stub, ended = self._stub(call), threading.Event()
            responses = stub.Generate(call.message, timeout=call.timeout)
            if len(self._stubs) > 1:
                threading.Thread(target=watch, args=(stub, call, responses, ended), daemon=True).start()
            try:
                for response in responses:
                    if (event := call.hear(read_response(response))) is not None:
                        yield event
                return
            except grpc.RpcError as error:
                delay = call.delay_after(from_rpc_error(error), self._closed)
            finally:
                ended.set()
                responses.cancel()
            time.sleep(delay)


class AsyncClient(_Endpoint, contextlib.AbstractAsyncContextManager["AsyncClient"]):
    """Asks a server from asyncio, as `Client` does; an async context manager, of the event loop of its first call."""

    _blocking = False

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the connections and every running call."""
        self._closed = True
        await asyncio.gather(*(channel.close() for channel in self._channels))

    async def describe(self, timeout: float = 10.0) -> ModelDescription:  # noqa: ASYNC109 - it is gRPC's deadline
        """What is served. Raises Unavailable when no server answers."""
        call = Attempts(timeout, generation.DescribeModelRequest(), len(self._stubs))
        while True:
            try:
                return read_model(await self._stub(call).DescribeModel(call.message, timeout=call.timeout))
            except grpc.RpcError as error:
                delay = call.delay_after(from_rpc_error(error), self._closed)
            await asyncio.sleep(delay)

    @lists_options
    async def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """The whole answer to text, token ids or messages. Raises the errors of coppice.errors."""
        call, answer = self._call("generate", prompt, options), Accumulator()
        async with contextlib.aclosing(self._events(call)) as events:
            async for event in events:
                answer.add(event)
        return answer.completion()

    @lists_options
    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> AsyncIterator[StreamEvent]:
        """Started, then Chunks, then Finished. Wrap it in `contextlib.aclosing` to cancel at once on leaving early."""
        return self._events(self._call("stream", prompt, options))

    async def _events(self, call: Attempts) -> AsyncGenerator[StreamEvent, None]:
        while True:
            stub = self._stub(call)
            responses = stub.Generate(call.message, timeout=call.timeout)
            watching = asyncio.create_task(watch_async(stub, call, responses)) if len(self._stubs) > 1 else None
            try:
                async for response in responses:
                    if (event := call.hear(read_response(response))) is not None:
                        yield event
                return
            except grpc.RpcError as error:
                delay = call.delay_after(from_rpc_error(error), self._closed)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if not call.silent.is_set() or (task and task.cancelling()):  # the caller's own
                    raise
                delay = call.delay_after(Cancelled("the server stopped answering"))
            finally:
                if watching is not None:
                    watching.cancel()
                responses.cancel()
            await asyncio.sleep(delay)
