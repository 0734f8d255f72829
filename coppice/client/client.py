"""The SDK: `Client` and `AsyncClient` of a GenerationService."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import operator
import os
import random
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypedDict, Unpack, cast

import grpc
import grpc.aio
from pydantic import ValidationError

from coppice import limits
from coppice.client.completion import Accumulator, Completion, StreamEvent
from coppice.client.resume import TIMEOUT_S, Attempts, watch, watch_async
from coppice.errors import Cancelled, InvalidField, from_rpc_error
from coppice.messages.generation import ChatMessage, GenerationRequest, ModelDescription
from coppice.rpc import tracing
from coppice.rpc.channels import Dialer
from coppice.speculation.sampling import SamplingParams
from coppice.v1 import generation_pb2 as generation
from coppice.v1.generation_pb2_grpc import GenerationServiceStub
from coppice.wire.generation import read_model, read_response, request_to_wire

__all__ = ["AsyncClient", "Client", "Completion", "Options", "Prompt", "StreamEvent", "default_address"]

Metadata = Sequence[tuple[str, str]] | None
Prompt = str | Sequence[int] | Sequence[ChatMessage] | Sequence[Mapping[str, str]]

_MAX_UINT32 = 2**32 - 1


class Draws(TypedDict, total=False):
    """The fields of SamplingParams as options."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float | None
    frequency_penalty: float
    presence_penalty: float
    logit_bias: dict[int, float]
    seed: int


class Options(Draws, total=False):
    """How to answer a prompt; whatever is left out is the server's default, greedy decoding and no stop strings."""

    sampling: SamplingParams | None
    """instead of temperature to seed"""
    max_new_tokens: int
    """limit on new tokens, `resume_ids` included"""
    stop: str | Sequence[str]
    """strings that end the text, excluded from it"""
    policy: str
    budget: int | None
    """draft nodes verified a step"""
    ignore_eos: bool
    log_probs: bool
    """also return the target's raw log-probabilities"""
    resume_ids: Sequence[int]
    """new tokens held from an earlier stream of the same request; the answer goes on behind them"""
    trees: bool
    """also return the tree each step verified"""
    pq: bool
    """classic p/q rejection of a sampled chain instead of keyed noise"""
    coupled: bool
    """let drafters use the keyed noise at temperature > 0 (the default)"""
    timeout: float
    """deadline of the whole call, seconds"""


def default_address() -> str:
    """COPPICE_ADDRESS, else the address `coppice up` takes."""
    return os.environ.get("COPPICE_ADDRESS") or "127.0.0.1:50051"


def _addresses(address: str | Sequence[str] | None) -> tuple[str, ...]:
    """Each HOST:PORT. Raises InvalidField when there is none."""
    address = address or default_address()
    given = address.split(",") if isinstance(address, str) else address
    addresses = tuple(one.strip() for one in given if one.strip())
    if not addresses:
        raise InvalidField("address", "names no HOST:PORT")
    return addresses


def build_request(prompt: Prompt, **options: Unpack[Options]) -> GenerationRequest:
    """The request of a prompt and Options, of which `timeout` is not a part.

    Raises InvalidField naming what is unusable, TypeError for other options.
    """
    if unknown := options.keys() - Options.__annotations__.keys():
        raise TypeError(f"unknown options: {', '.join(sorted(unknown))}")
    given: dict[str, Any] = {name: value for name, value in options.items() if name != "timeout"}
    draws = {name: given.pop(name) for name in SamplingParams.model_fields if name in given}
    sampling = given.pop("sampling", None)
    if sampling is None:
        try:
            sampling = SamplingParams(**draws)
        except ValidationError as error:
            first = error.errors()[0]
            raise InvalidField(str(first["loc"][0]), first["msg"]) from None
    elif draws:
        raise InvalidField("sampling", f"give it or {', '.join(draws)}, not both")
    limits.check_range("max_new_tokens", given.get("max_new_tokens", 0), 0, _MAX_UINT32)
    if given.get("budget") is not None:
        limits.check_range("budget", given["budget"], 0, limits.MAX_TREE_NODES)
    text, ids, chat = _read_prompt(prompt)
    stop = given.pop("stop", ())
    return GenerationRequest(
        text=text,
        ids=ids,
        chat=chat,
        resume_ids=_read_ids("resume_ids", given.pop("resume_ids", ())),
        sampling=sampling,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        want_log_probs=given.pop("log_probs", False),
        want_trees=given.pop("trees", False),
        **given,
    )


def _read_prompt(prompt: Prompt) -> tuple[str | None, tuple[int, ...] | None, tuple[ChatMessage, ...] | None]:
    """Text, ids and messages of a prompt; two of them are None."""
    if len(prompt) == 0:
        raise InvalidField("prompt", "is empty")
    if isinstance(prompt, str):
        return prompt, None, None
    if not isinstance(prompt[0], ChatMessage | Mapping):
        return None, _read_ids("prompt", cast(Sequence[int], prompt)), None
    messages = []
    for part in cast(Sequence[ChatMessage | Mapping[str, str]], prompt):
        if isinstance(part, Mapping):
            if part.keys() != {"role", "content"}:
                raise InvalidField("prompt", "a message has the keys role and content, no others")
            part = ChatMessage(part["role"], part["content"])
        messages.append(part)
    return None, None, tuple(messages)


def _read_ids(field: str, ids: Sequence[int]) -> tuple[int, ...]:
    """Token ids as plain ints (numpy's are taken too)."""
    try:
        read = tuple(operator.index(token) for token in ids)
    except TypeError:
        raise InvalidField(field, "is neither text, nor token ids, nor messages") from None
    for token in read:
        limits.check_range(field, token, 0, _MAX_UINT32)
    return read


class _Endpoint:
    """The servers that a client asks: an address, a channel and a stub of each, and whose turn it is."""

    _blocking: ClassVar[bool]

    def __init__(self, address: str | Sequence[str] | None = None, *, dialer: Dialer | None = None) -> None:
        """Connect lazily to HOST:PORT or several, a list or with commas between; default COPPICE_ADDRESS, else
        127.0.0.1:50051.

        `dialer` holds certificates and the bearer token, by default those the environment names. Raises InvalidField.
        """
        self.addresses, dialer = _addresses(address), dialer or Dialer.from_environment()
        connect: Callable[[str], Any] = dialer.open_blocking if self._blocking else dialer.open
        self._channels = [connect(one) for one in self.addresses]
        self._stubs = [GenerationServiceStub(channel) for channel in self._channels]
        # Clients begin anywhere, so that no server gets all first requests.
        self._turns = itertools.count(random.randrange(len(self._stubs)))  # noqa: S311 - it is no secret
        self._closed = False

    def _call(self, prompt: Prompt, options: Options) -> tuple[Attempts, Accumulator]:
        """The call of a prompt and what folds its events. Raises InvalidField, TypeError for an unknown option."""
        request, count = build_request(prompt, **options), len(self._stubs)
        timeout = options.get("timeout", TIMEOUT_S)
        call = Attempts(timeout, request_to_wire(request), count, next(self._turns) % count)
        return call, Accumulator(request.sampling.seed)


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
        """What is served. Raises Unavailable when nobody answers."""
        call = Attempts(timeout, generation.DescribeModelRequest(), len(self._stubs))
        while True:
            try:
                return read_model(self._stubs[call.at].DescribeModel(call.message, timeout=call.timeout))
            except grpc.RpcError as error:
                delay = call.delay_after(from_rpc_error(error), self._closed)
            time.sleep(delay)

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """The whole answer to text, token ids or messages. Raises the errors of coppice.errors."""
        call, answer = self._call(prompt, options)
        for event in self._events(call):
            answer.add(event)
        return answer.completion()

    def prompt_tokens(self, prompt: Prompt) -> int:
        """How many tokens the server makes of a prompt, at no forward. Raises InvalidField where they leave no room."""
        # Who holds all that was asked for is only told so.
        return self.generate(prompt, policy="plain", max_new_tokens=1, resume_ids=(0,)).prompt_tokens

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Iterator[StreamEvent]:
        """Started, then Chunks, then Finished. Leaving the loop early cancels the call.

        `coppice.client.completion.Accumulator` folds the events into a Completion, a partial one if need be.
        """
        return self._events(self._call(prompt, options)[0])

    def _events(self, call: Attempts) -> Iterator[StreamEvent]:
        with tracing.calling("generate") as metadata:
            yield from self._attempts(call, metadata)

    def _attempts(self, call: Attempts, metadata: Metadata) -> Iterator[StreamEvent]:
        while True:
            stub = self._stubs[call.at]
            responses = stub.Generate(call.message, timeout=call.timeout, metadata=metadata)
            ended = threading.Event()
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
    """Asks a server from asyncio, as `Client` does. Make it inside the running loop; an async context manager."""

    _blocking = False

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the connections and every running call."""
        self._closed = True
        await asyncio.gather(*(channel.close() for channel in self._channels))

    async def describe(self, timeout: float = 10.0) -> ModelDescription:  # noqa: ASYNC109 - it is gRPC's deadline
        """What is served. Raises Unavailable when nobody answers."""
        call = Attempts(timeout, generation.DescribeModelRequest(), len(self._stubs))
        while True:
            try:
                return read_model(await self._stubs[call.at].DescribeModel(call.message, timeout=call.timeout))
            except grpc.RpcError as error:
                delay = call.delay_after(from_rpc_error(error), self._closed)
            await asyncio.sleep(delay)

    async def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """The whole answer to text, token ids or messages. Raises the errors of coppice.errors."""
        call, answer = self._call(prompt, options)
        async with contextlib.aclosing(self._events(call)) as events:
            async for event in events:
                answer.add(event)
        return answer.completion()

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> AsyncIterator[StreamEvent]:
        """Started, then Chunks, then Finished. Wrap it in `contextlib.aclosing` to cancel at once on leaving early."""
        return self._events(self._call(prompt, options)[0])

    async def _events(self, call: Attempts) -> AsyncGenerator[StreamEvent, None]:
        with tracing.calling("generate") as metadata:
            async with contextlib.aclosing(self._attempts(call, metadata)) as events:
                async for event in events:
                    yield event

    async def _attempts(self, call: Attempts, metadata: Metadata) -> AsyncGenerator[StreamEvent, None]:
        while True:
            stub = self._stubs[call.at]
            responses = stub.Generate(call.message, timeout=call.timeout, metadata=metadata)
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
