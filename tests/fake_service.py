"""A service without a model, run as a process (`-m tests.fake_service`) or inside a test: for launcher and client."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from prometheus_client import CollectorRegistry

from coppice.config.settings import Settings, load_settings
from coppice.errors import CoppiceError, InvalidField, NotFound, Overloaded, Unavailable
from coppice.limits import Limits
from coppice.rpc.server import Serving
from coppice.v1 import adapter_pb2, drafter_pb2, generation_pb2, verifier_pb2
from coppice.v1.generation_pb2_grpc import add_GenerationServiceServicer_to_server
from coppice.wire import generation
from coppice.wire.generation import Chunk, Finished, GenerationRequest, ModelDescription, Origin, Started, Timings

SERVICES = {
    "verifier": verifier_pb2.DESCRIPTOR.services_by_name["VerifierService"],
    "drafter": drafter_pb2.DESCRIPTOR.services_by_name["DrafterService"],
    "orchestrator": generation_pb2.DESCRIPTOR.services_by_name["GenerationService"],
    "adapter": adapter_pb2.DESCRIPTOR.services_by_name["AdapterService"],
}
MAX_LEN = 512
ERRORS = {"busy": Overloaded, "lost": NotFound, "gone": Unavailable}


class Echo:
    """A GenerationService that answers a prompt with itself, two ids a step, an accepted draft before a root.

    Prompts with a meaning: "busy", "lost" and "gone" fail at once; "break" fails after the first chunk unless
    it is resumed; "mute" makes the server say nothing any more, to nobody, unless it is resumed; "wait" goes on
    until the call is cancelled. `refusals` is how many calls are UNAVAILABLE before one is answered.
    """

    def __init__(self, refusals: int = 0) -> None:
        self.refusals = refusals
        self.calls = 0
        self.mute = False
        self.arrived, self.cancelled = threading.Event(), threading.Event()
        self.requests: list[GenerationRequest] = []

    def Generate(self, message: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        """One answer."""
        self.calls += 1
        try:
            if self.calls <= self.refusals:
                raise Unavailable("try again")
            request = generation.read_request(message, 1000, Limits())
            self.requests.append(request)
            yield from self._answer(request, context)
        except CoppiceError as error:
            context.abort(grpc.StatusCode[error.status], str(error))

    def _answer(self, request: GenerationRequest, context: grpc.ServicerContext) -> Iterator[Any]:
        text = request.text or "".join(part.content for part in request.chat or ())
        if text in ERRORS:
            raise ERRORS[text](text)
        if text in ("mute", "wait") and not request.resume_ids:  # before the first event, or the call could end unheard
            context.add_callback(self.cancelled.set)
        if len(request.ids or text.encode()) >= MAX_LEN:
            raise InvalidField("prompt", f"{len(request.ids or text)} tokens leave no room in a context of {MAX_LEN}")
        ids = (request.ids or tuple(text.encode()))[len(request.resume_ids) :]
        seed = request.sampling.with_seed().seed
        yield generation.response_to_wire(Started(len(ids), request.policy or "route", ("a", "b"), 31, seed))
        yield _chunk(ids[:1], request.want_log_probs)
        if text == "break" and not request.resume_ids:
            raise Unavailable("broke")
        if text == "mute" and not request.resume_ids:
            self.mute = True
        if self.mute or text == "wait":
            self.arrived.set()
            self.cancelled.wait(60)
        steps = [slice(at, at + 2) for at in range(1, len(ids), 2)]
        for step in steps:
            yield _chunk(ids[step], request.want_log_probs)
        lengths, count = [len(ids[step]) for step in steps], len(steps)
        timings = Timings(decode_ns=10**9, draft_ns=2 * 10**8, verify_ns=7, step_ns=[10**9 // max(1, count)] * count)
        finished = Finished("eos", len(ids), len(ids), lengths, [0] * count, [5] * count, 1, 2, timings)
        yield generation.response_to_wire(finished)

    def DescribeModel(self, message: Any, context: grpc.ServicerContext) -> Any:
        """What is served."""
        if self.mute:
            self.cancelled.wait(60)
        return generation.model_to_wire(
            ModelDescription("echo", 1000, MAX_LEN, ("a", "b"), ("plain", "route"), "route", 31, True, True)
        )


def _chunk(ids: tuple[int, ...], log_probs: bool) -> Any:
    pieces = tuple(chr(token) for token in ids)
    origins = (*(Origin.DRAFT for _ in ids[1:]), Origin.ROOT)
    return generation.response_to_wire(
        Chunk("".join(pieces), ids, origins, pieces, (-0.5,) * len(ids) if log_probs else ())
    )


@contextlib.contextmanager
def echo_server(refusals: int = 0) -> Iterator[tuple[str, Echo]]:
    """Serve an Echo in this process; gives its address and itself."""
    echo = Echo(refusals)
    server = grpc.server(ThreadPoolExecutor(4))
    add_GenerationServiceServicer_to_server(echo, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}", echo
    finally:
        server.stop(0).wait()


class Anything:
    """A servicer of any service that is never called."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def _role(settings: Settings) -> str:
    if settings.orchestrator.verifiers:
        return "orchestrator"
    if settings.adapter.heads:
        return "adapter"
    return "drafter" if settings.drafter.name else "verifier"


async def _serve(settings: Settings, role: str) -> None:
    serving = Serving(settings, role)
    await serving.start({SERVICES[role]: Anything()}, CollectorRegistry() if role == "orchestrator" else None)
    if settings.verifier.name == "stubborn":
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: None)
        await asyncio.sleep(600)
    await serving.until_stopped()


def main() -> None:
    """Be the service that the settings describe; `verifier.name` may be dies, hangs or stubborn."""
    settings = load_settings()
    print(f"arguments: {' '.join(sys.argv[1:])}", flush=True)
    if settings.verifier.name == "dies":
        raise InvalidField("verifier.target", "no such model")
    if settings.verifier.name == "hangs":
        asyncio.run(asyncio.sleep(600))
    asyncio.run(_serve(settings, _role(settings)))


if __name__ == "__main__":
    main()
