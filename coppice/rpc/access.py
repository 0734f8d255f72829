"""Who may call what: services by the names in their certificates, clients of generation by bearer tokens."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from hashlib import sha256

import grpc.aio
import structlog
from google.protobuf.descriptor import MethodDescriptor

from coppice.config.sections import TlsSettings
from coppice.errors import PermissionDenied, Unauthenticated
from coppice.rpc.tokens import Tokens

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ServiceAccess:
    """Whose certificate serves a service, and whose may call each method."""

    server: str
    """empty: the certificate must name the host that was dialed"""
    callers: Mapping[str, frozenset[str]]
    """by method; empty: no certificate is needed"""


ACCESS = {
    "coppice.v1.VerifierService": ServiceAccess(
        "verifier",
        {
            "Verify": frozenset({"orchestrator"}),
            "FetchFeatures": frozenset({"drafter"}),
            "DescribeTarget": frozenset({"orchestrator"}),
        },
    ),
    "coppice.v1.DrafterService": ServiceAccess(
        "drafter",
        {
            "Draft": frozenset({"orchestrator"}),
            "DescribeHead": frozenset({"orchestrator", "adapter"}),
            "SyncWeights": frozenset({"adapter"}),
        },
    ),
    "coppice.v1.AdapterService": ServiceAccess(
        "adapter",
        {
            "GetStatus": frozenset({"operator", "orchestrator"}),
            **dict.fromkeys(("Pause", "Resume", "Rollback"), frozenset({"operator"})),
        },
    ),
    "coppice.v1.GenerationService": ServiceAccess("", {"Generate": frozenset(), "DescribeModel": frozenset()}),
}
"""Every method of every service; what is not here may not be served."""
_OPERATED = "coppice.v1.AdapterService"
_WRONG_TOKEN_S = 0.5  # before a wrong token is refused
_MOST_SLOWED = 64
_CLIENT: ContextVar[bytes] = ContextVar("client", default=b"")


def needs_certificates(service: str) -> bool:
    """Whether only other services and operators may call a service."""
    return any(ACCESS[service].callers.values())


def client_salt() -> str:
    """A hash that tells the clients of generation apart: of the name of the token that the call in hand came with, and
    of the hashes of all tokens of that name, so that nobody can make it who knows the name alone.

    All tokens of a name make the same, and all calls do where none is needed.
    """
    return sha256(_CLIENT.get()).hexdigest()


class Access:
    """Lets a call of one server in, or refuses it."""

    def __init__(self, tls: TlsSettings, tokens: Tokens | None = None) -> None:
        """Without TLS everybody may call everything but what `tokens` are for: generation."""
        self._tls, self._tokens = tls, tokens
        self._slowed = 0

    @contextlib.asynccontextmanager
    async def admit(self, method: MethodDescriptor, context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
        """Hold the call's place inside the block. Raises Unauthenticated, PermissionDenied, Overloaded."""
        service = method.containing_service.full_name
        callers = ACCESS[service].callers[method.name]
        if callers:
            if self._tls.on:
                self._check_name(method, callers | set(self._tls.operators if service == _OPERATED else ()), context)
            yield
        else:
            async with self.client(context.invocation_metadata() or (), counted=method.server_streaming):
                yield

    @contextlib.asynccontextmanager
    async def client(self, metadata: Iterable[tuple[str, str | bytes]], counted: bool) -> AsyncIterator[None]:
        """Hold the place of a client of generation; `counted` calls count towards the limit of its name.

        Raises Unauthenticated, Overloaded.
        """
        with contextlib.ExitStack() as place:
            if self._tokens is not None:
                try:
                    _CLIENT.set(place.enter_context(self._tokens.admit(metadata, counted)))
                except Unauthenticated:
                    await self._slow_down()
                    raise
            yield

    async def _slow_down(self) -> None:
        """Let one who tries tokens wait; a few at once, so that those who wait fill no server."""
        if self._slowed >= _MOST_SLOWED:
            return
        self._slowed += 1
        try:
            await asyncio.sleep(_WRONG_TOKEN_S)
        finally:
            self._slowed -= 1

    @staticmethod
    def _check_name(method: MethodDescriptor, callers: frozenset[str], context: grpc.aio.ServicerContext) -> None:
        names = [name.decode("utf-8", "replace") for name in context.peer_identities() or ()]
        if not names:
            raise Unauthenticated("a certificate is needed")
        if callers.isdisjoint(names):
            log.warning("refused", method=method.full_name, caller=names)
            raise PermissionDenied(f"{method.full_name} is for {' and '.join(sorted(callers))}")
