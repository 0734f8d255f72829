"""The orchestrator's view of the verifiers: what they serve, and one request's stream to one of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc

from coppice.errors import DeadlineExceeded, InternalError, Unavailable, from_rpc_error
from coppice.messages import OpenSession, SessionOpened, TargetDescription, Verdict, VerifyStep
from coppice.rpc.channels import Dialer
from coppice.v1 import verifier_pb2
from coppice.v1.verifier_pb2_grpc import VerifierServiceStub
from coppice.wire import verifier

_LEAST_DEADLINE_S = 1.0
_LAST_RESORT_S = 60.0


class VerifierReplica:
    """One verifier process."""

    def __init__(self, address: str, dialer: Dialer, alone: bool) -> None:
        """`alone`: no other replica serves the target."""
        self.address, self.alone = address, alone
        self.stub = VerifierServiceStub(dialer.open(address))
        self.sessions = 0
        self.verify_s = 0.0  # moving average of a verify round trip

    @property
    def deadline_s(self) -> float:
        """How long a verify may take before the verifier counts as lost: max(1 s, 10 x the moving average).

        The only replica is waited for longer: giving it up would gain nothing.
        """
        return _LAST_RESORT_S if self.alone else max(_LEAST_DEADLINE_S, 10 * self.verify_s)


class TargetPool:
    """The replicas that serve one target."""

    def __init__(self, addresses: Sequence[str], dialer: Dialer) -> None:
        self.replicas = [VerifierReplica(address, dialer, len(addresses) == 1) for address in addresses]

    async def describe(self, timeout_s: float = 30.0) -> TargetDescription:
        """What the first replica that answers serves. Raises Unavailable."""
        for replica in self.replicas:
            try:
                request = verifier_pb2.DescribeTargetRequest()
                return verifier.read_target(
                    await replica.stub.DescribeTarget(request, timeout=timeout_s, wait_for_ready=True)
                )
            except grpc.RpcError:
                continue
        raise Unavailable(f"no verifier answers at {', '.join(replica.address for replica in self.replicas)}")

    def session(self) -> VerifierSession:
        """A stream to the least loaded replica."""
        return VerifierSession(min(self.replicas, key=lambda replica: replica.sessions))


class VerifierSession:
    """One stream to one verifier. Opened once, then one verdict for each step."""

    def __init__(self, replica: VerifierReplica) -> None:
        self.replica = replica
        replica.sessions += 1
        self._call = replica.stub.Verify()

    async def open(self, request: OpenSession, timeout_s: float) -> SessionOpened:
        """Prefill. Raises what the verifier refused it with."""
        answer = await self._exchange(verifier.open_session_to_wire(request), timeout_s)
        if not isinstance(answer, SessionOpened):
            raise InternalError("the verifier answered open with a verdict")
        return answer

    async def verify(self, step: VerifyStep) -> Verdict:
        """One tree."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        answer = await self._exchange(verifier.verify_step_to_wire(step), self.replica.deadline_s)
        if not isinstance(answer, Verdict) or answer.fence.step != step.fence.step:
            raise InternalError("the verifier answered another step")
        took = loop.time() - began
        self.replica.verify_s = 0.9 * (self.replica.verify_s or took) + 0.1 * took
        return answer

    async def _exchange(self, message: verifier_pb2.VerifyRequest, timeout_s: float) -> SessionOpened | Verdict:
        try:
            async with asyncio.timeout(timeout_s):
                await self._call.write(message)
                answer = await self._call.read()
        except TimeoutError:
            raise DeadlineExceeded(
                f"the verifier at {self.replica.address} did not answer in {timeout_s:.1f} s"
            ) from None
        except asyncio.InvalidStateError:  # written to a stream that has ended: its status says why
            raise await self._ending() from None
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        if answer is grpc.aio.EOF:
            raise await self._ending()
        return verifier.read_verify_response(answer)

    async def _ending(self) -> Exception:
        code, details = await self._call.code(), await self._call.details()
        if code is grpc.StatusCode.OK:
            return Unavailable("the verifier ended the session")
        return from_rpc_error(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details))

    def close(self) -> None:
        """End the stream; the verifier frees the session."""
        self._call.cancel()
        self.replica.sessions -= 1
