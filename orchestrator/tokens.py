"""Bearer tokens of clients: a file of hashes, the requests each name has running, and the salt of each name."""

import contextlib
import hmac
import os
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import prometheus_client
import structlog

from coppice.errors import InvalidField, Overloaded, Unauthenticated

log = structlog.get_logger()

_TOKEN_LINE = re.compile(
    r"(?P<name>[A-Za-z0-9_.-]{1,64})\s+(?P<digest>[0-9a-fA-F]{64})(?:\s+(?P<sessions>[1-9][0-9]{0,8}))?"
)
_SETTING = "orchestrator.tokens"
_CLIENT: ContextVar[bytes] = ContextVar("client", default=b"")


def client_salt() -> str:
    """A hash that tells clients apart: of the name of the token that the call in hand came with, and of the hashes of
    all tokens of that name, so that the name is not enough to compute it. Where no token is needed all make the same.
    """
    return sha256(_CLIENT.get()).hexdigest()


@dataclass(frozen=True, slots=True)
class BearerToken:
    """One token: who bears it, its SHA-256, and how many requests may run under the name at once (None: any)."""

    name: str
    digest: bytes
    sessions: int | None


def read_tokens(file: str) -> tuple[BearerToken, ...]:
    """The entries of a file, `NAME SHA256HEX [SESSIONS]` a line; empty lines and those that begin with # are skipped.
    Several may bear one name, as while its token is replaced. Raises InvalidField naming the line.
    """
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidField(_SETTING, f"{file} cannot be read: {getattr(error, 'strerror', 'it is no text')}") from None
    entries: list[BearerToken] = []
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        match = _TOKEN_LINE.fullmatch(line)
        if match is None:
            raise InvalidField(_SETTING, f"{file}, line {number}: is not NAME SHA256HEX [SESSIONS]")
        digest, sessions = bytes.fromhex(match["digest"]), match["sessions"]
        if digest == sha256(b"").digest():
            raise InvalidField(_SETTING, f"{file}, line {number}: is the hash of no token at all")
        entries.append(BearerToken(match["name"], digest, int(sessions) if sessions else None))
    return tuple(entries)


class Tokens:
    """Lets the bearers of tokens in, and counts the requests that each has running."""

    def __init__(self, file: str, requests: prometheus_client.Counter) -> None:
        """`requests` are counted by client and verdict. Raises InvalidField when the file is unusable."""
        self._file, self._requests = file, requests
        self._state = _state(file)
        self._entries = read_tokens(file)
        self._running: Counter[str] = Counter()

    @contextlib.asynccontextmanager
    async def __call__(self, metadata: Iterable[tuple[str, str | bytes]], counted: bool) -> AsyncIterator[None]:
        """Let a call in for the length of the block. Raises Unauthenticated, the same for any wrong token and for none,
        and Overloaded beyond the limit of its name, towards which `counted` ones count.
        """
        self._reread()
        entry = self._find(metadata)
        if entry is None:
            self._requests.labels("", "unauthenticated").inc()
            raise Unauthenticated("a valid bearer token is needed")
        name = entry.name
        if counted and entry.sessions is not None and self._running[name] >= entry.sessions:
            self._requests.labels(name, "limited").inc()
            raise Overloaded(f"{name} has {entry.sessions} requests running, which is its limit")
        self._requests.labels(name, "admitted").inc()
        _CLIENT.set(name.encode() + b"".join(sorted(each.digest for each in self._entries if each.name == name)))
        self._running[name] += counted
        try:
            yield
        finally:
            self._running[name] -= counted

    def _find(self, metadata: Iterable[tuple[str, str | bytes]]) -> BearerToken | None:
        """Whose token a call has; None when it has none, or more than one. The time does not tell which one it was."""
        values = [value for key, value in metadata if key == "authorization"]
        scheme, _, token = str(values[0]).partition(" ") if len(values) == 1 else ("", "", "")
        digest, bearer = sha256(token.encode()).digest(), None
        for entry in self._entries:
            if hmac.compare_digest(entry.digest, digest):
                bearer = entry
        return bearer if scheme.lower() == "bearer" else None

    def _reread(self) -> None:
        """Take the file's entries if it changed; while it is unusable those read before hold."""
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
