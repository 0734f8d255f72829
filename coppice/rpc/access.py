"""Who may call what: services by the names in their certificates, clients of generation by bearer tokens."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import grpc.aio
import prometheus_client
import structlog
from google.protobuf.descriptor import MethodDescriptor

from coppice.config.sections import TlsSettings
from coppice.errors import InvalidField, Overloaded, PermissionDenied, Unauthenticated

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
    of the hashes of all tokens of that name. Knowing the name is not enough to compute it.

    All tokens of a name make the same, and all calls do where none is needed.
    """
    return sha256(_CLIENT.get()).hexdigest()


_TOKEN_LINE = re.compile(
    r"(?P<name>[A-Za-z0-9_.-]{1,64})\s+(?P<digest>[0-9a-fA-F]{64})(?:\s+(?P<sessions>[1-9][0-9]{0,8}))?"
)
_SETTING = "orchestrator.tokens"
_REFUSAL = "a valid bearer token is needed"


@dataclass(frozen=True, slots=True)
class Entry:
    """One token: who bears it, its SHA-256, and how many requests may run under the name at once (None: any)."""

    name: str
    digest: bytes
    sessions: int | None


def read_tokens(file: str) -> tuple[Entry, ...]:
    """The entries of a file, `NAME SHA256HEX [SESSIONS]` a line; empty lines and those that begin with # are skipped.

    Several entries may bear one name, as while its token is replaced. Raises InvalidField naming the line.
    """
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidField(_SETTING, f"{file} cannot be read: {getattr(error, 'strerror', 'it is no text')}") from None
    return tuple(
        _read_entry(file, number, line.strip())
        for number, line in enumerate(lines, 1)
        if line.strip() and not line.lstrip().startswith("#")
    )


def _read_entry(file: str, number: int, line: str) -> Entry:
    match = _TOKEN_LINE.fullmatch(line)
    if match is None:
        raise InvalidField(_SETTING, f"{file}, line {number}: is not NAME SHA256HEX [SESSIONS]")
    digest, sessions = bytes.fromhex(match["digest"]), match["sessions"]
    if digest == sha256(b"").digest():
        raise InvalidField(_SETTING, f"{file}, line {number}: is the hash of no token at all")
    return Entry(match["name"], digest, int(sessions) if sessions else None)


class Tokens:
    """Knows the bearers of tokens and how many requests each has running."""

    def __init__(self, file: str, requests: prometheus_client.Counter) -> None:
        """`requests` are counted by client and verdict. Raises InvalidField when the file is unusable."""
        self._file, self._requests = file, requests
        self._state = _state(file)
        self._entries = read_tokens(file)
        self._running: Counter[str] = Counter()

    @contextlib.contextmanager
    def admit(self, metadata: Iterable[tuple[str, str | bytes]], counted: bool) -> Iterator[bytes]:
        """Let a call in for the length of the block; `counted` ones count towards the limit of their name.

        Gives what tells that name apart from others: it, and the hashes of its tokens, which are in the file alone.
        Raises Unauthenticated, the same for every wrong token and for none, and Overloaded beyond the limit.
        """
        self._reread()
        entry = self._find(_bearer(metadata))
        if entry is None:
            self._requests.labels("", "unauthenticated").inc()
            raise Unauthenticated(_REFUSAL)
        if counted and entry.sessions is not None and self._running[entry.name] >= entry.sessions:
            self._requests.labels(entry.name, "limited").inc()
            raise Overloaded(f"{entry.name} has {entry.sessions} requests running, which is its limit")
        self._requests.labels(entry.name, "admitted").inc()
        self._running[entry.name] += counted
        try:
            yield entry.name.encode() + b"".join(
                sorted(each.digest for each in self._entries if each.name == entry.name)
            )
        finally:
            self._running[entry.name] -= counted

    def _find(self, token: str) -> Entry | None:
        """Compares with every entry, in a time that does not tell which one it was."""
        digest, bearer = sha256(token.encode()).digest(), None
        for entry in self._entries:
            if hmac.compare_digest(entry.digest, digest):
                bearer = entry
        return bearer

    def _reread(self) -> None:
        """Take the file's entries if it changed; while it is unusable those known before hold."""
        state = _state(self._file)
        if state == self._state:
            return
        self._state = state
        try:
            self._entries = read_tokens(self._file)
        except InvalidField as error:
            log.warning("tokens stay as they were", why=str(error))


def _state(file: str) -> tuple[int, int, int] | None:
    try:
        facts = os.stat(file)
    except OSError:
        return None
    return facts.st_ino, facts.st_mtime_ns, facts.st_size


def _bearer(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """The token of a call; empty when it has none, or more than one."""
    values = [value for key, value in metadata if key == "authorization"]
    scheme, _, token = str(values[0]).partition(" ") if len(values) == 1 else ("", "", "")
    return token if scheme.lower() == "bearer" else ""


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
