"""VerifierService over gRPC: sessions live on links."""

import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import grpc

from coppice import failpoints
from coppice.config.settings import Settings
from coppice.errors import InvalidField, StaleFence
from coppice.limits import MAX_TREE_DEPTH, MAX_TREE_NODES
from coppice.rpc import tracing
from coppice.rpc.admission import Admission
from coppice.rpc.link import Context, Inbox
from coppice.speculation.tree import TreeError, validate
from coppice.v1 import verifier_pb2
from coppice.wire import verifier
from coppice.wire.verifier import Commit, OpenSession, TargetDescription, Verdict, VerifyStep, VerifyTimings

from .worker import Worker, reserved_tokens

MOST_WAITING = 8 << 20  # bytes that a link has still to write, beyond which it loses its feeds: they cost time alone


class VerifierServicer:
    """Checks what comes in, hands it to the worker, sends what comes back."""

    def __init__(self, settings: Settings, worker: Worker) -> None:
        self.settings, self.worker, self.info = settings, worker, worker.engine.info
        self.max_len = self.info.context.served(settings.verifier.kv_tokens).tokens
        bounds = settings.limits
        self._seats = Admission("sessions", bounds.sessions, bounds.queued, bounds.queue_s)
        self._kv = Admission("KV tokens", settings.verifier.kv_tokens, bounds.queued, bounds.queue_s)
        self._opened = self._closed = 0

    async def Verify(self, requests: Inbox, context: Context) -> AsyncIterator[Any]:
        message = await anext(requests, None)
        if message is None:
            return
        arrived, first = time.perf_counter_ns(), self._read(message)
        if not isinstance(first, OpenSession):
            raise InvalidField("kind", "the first message of a session is open")
        async with self._seats.admit(), self._kv.admit(reserved_tokens(first, self.settings.verifier)):
            self._opened += 1
            key = self._opened
            trace = tracing.current()
            try:
                opened = await self.worker.open(key, first, arrived)
                if trace is not None:
                    now = time.perf_counter_ns()
                    _add(trace, "prefill", arrived, opened.timings, now, now, tokens=len(first.ids))
                yield verifier.verify_response_to_wire(opened)

                def take(message: Any) -> None:
                    arrived, step = time.perf_counter_ns(), self._read(message)
                    if not isinstance(step, VerifyStep):
                        raise InvalidField("kind", "the session is open already")
                    if requests.is_busy:
                        raise StaleFence("the step before is not answered yet")
                    requests.is_busy = True
                    self.worker.verify(key, step, arrived, partial(answer, arrived, step.fence.step))

                def answer(arrived: int, number: int, verdict: Verdict | Exception) -> None:
                    if isinstance(verdict, Exception):
                        return requests.end(verdict)
                    woken = time.perf_counter_ns()
                    failpoints.hit("verifier.verdict")
                    message = verifier.verify_response_to_wire(verdict).SerializeToString()
                    encoded = time.perf_counter_ns()
                    context.send(message)
                    requests.answered()
                    if trace is not None and trace.samples(number):
                        facts = {"step": number, "accepted": len(verdict.accepted)}
                        _add(trace, "step", arrived, verdict.timings, woken, encoded, **facts)

                await requests.listen(take)
            finally:
                self._closed += 1
                self.worker.close(key)

    def _read(self, message: verifier_pb2.VerifyRequest) -> OpenSession | VerifyStep:
        request = verifier.read_verify_request(message, self.info.vocab_size, self.max_len)
        if isinstance(request, VerifyStep):
            try:
                validate(request.tree, self.info.vocab_size, MAX_TREE_NODES, MAX_TREE_DEPTH)
            except TreeError as error:
                raise InvalidField(f"step.tree.{error.field}", str(error)) from None
        return request

    async def FetchFeatures(self, request: verifier_pb2.FetchFeaturesRequest, context: Context) -> AsyncIterator[bytes]:
        """Feature rows of a session, in chunks of at most 1 MiB, then what each of its steps commits."""
        feed = self.worker.follow(verifier.read_fetch(request))

        def send(commit: Commit) -> None:
            context.send(*verifier.fed_to_wire(commit))
            if context.waiting > MOST_WAITING:
                feed.cancel()

        try:
            async for features in feed.rows():
                yield b"".join(verifier.fed_to_wire(features))
            await feed.pass_on(send)
        finally:
            feed.cancel()

    async def DescribeTarget(
        self, request: verifier_pb2.DescribeTargetRequest, context: grpc.aio.ServicerContext
    ) -> verifier_pb2.DescribeTargetResponse:
        info, settings, worker = self.info, self.settings.verifier, self.worker
        names = ("vocab_size", "layers", "hidden_size", "eos_ids", "dtype", "weights_hash")
        description = TargetDescription(
            **{name: getattr(info, name) for name in names},
            name=settings.name,
            max_len=self.max_len,
            kv_tokens=settings.kv_tokens,
            kv_tokens_used=worker.kv_tokens_used,
            prefix_cache_tokens=settings.prefix_cache_tokens,
            sessions=self._opened - self._closed,
            sessions_opened=self._opened,
            sessions_closed=self._closed,
            repetition_penalty=worker.repetition_penalty,
            bits_hash=worker.engine.bits_hash,
        )
        return verifier.target_to_wire(description)


def _add(
    trace: tracing.Trace, name: str, arrived: int, timings: VerifyTimings, woken: int, encoded: int, **facts: int
) -> None:
    """Add what was done for a message from its arrival on: in the queue, before the forward, in the target, and in the
    walk over the tree; then the event loop was woken, at `woken`, to encode the answer.
    """
    parts = {"queue": timings.queue_ns, "pack": 0, "forward": timings.forward_ns, "accept": timings.accept_ns}
    parts["pack"] = timings.total_ns - sum(parts.values())
    parts |= {"wake": woken - arrived - timings.total_ns, "encode": encoded - woken}
    trace.add(name, arrived, encoded, parts, rows=timings.rows, sessions=timings.sessions, **facts)
