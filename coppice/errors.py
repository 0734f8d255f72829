"""Every error Coppice raises on purpose, and the gRPC status each one travels as."""

import re
from typing import TYPE_CHECKING
from urllib.parse import unquote

if TYPE_CHECKING:
    import grpc


class CoppiceError(Exception):
    """Base of all deliberate errors. `status` is how it crosses the wire, by its name in `grpc.StatusCode`."""

    status = "INTERNAL"
    retry_after_s = 0.0
    """when to come back; 0 where nobody knows"""


class InvalidField(CoppiceError):
    """A value the caller sent is unusable. Names the field."""

    status = "INVALID_ARGUMENT"

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field


class StaleFence(CoppiceError):
    """A message is about another state of a session or of weights than the server's. Says what was expected."""

    status = "FAILED_PRECONDITION"


class NotFound(CoppiceError):
    """A named thing (session, head) does not exist here."""

    status = "NOT_FOUND"


class Overloaded(CoppiceError):
    """The server is full; retry after `retry_after_s` seconds."""

    status = "RESOURCE_EXHAUSTED"

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(CoppiceError):
    """The server cannot be reached, drains, or lost the session; an idempotent call may be retried."""

    status = "UNAVAILABLE"


class DeadlineExceeded(CoppiceError):
    """The caller's deadline passed."""

    status = "DEADLINE_EXCEEDED"


class Cancelled(CoppiceError):
    """The caller cancelled."""

    status = "CANCELLED"


class Unauthenticated(CoppiceError):
    """The caller did not say who it is: no certificate, no token, or an unknown one."""

    status = "UNAUTHENTICATED"


class PermissionDenied(CoppiceError):
    """The caller is known and may not do this."""

    status = "PERMISSION_DENIED"


class Unimplemented(CoppiceError):
    """The server does not serve this method so."""

    status = "UNIMPLEMENTED"


class InternalError(CoppiceError):
    """Something unexpected happened in a server; its log has the details under the id in the message."""


_BY_STATUS = {error.status: error for error in CoppiceError.__subclasses__()}
RETRY_HINT = "grpc-retry-pushback-ms"
"""the trailing metadata, gRPC's own, that says when to come back"""
CALL_ENDED = "Internal error from Core"
"""what grpc.aio says, with INTERNAL, when a write finds the call ended: the status it ended with is lost then"""
NOBODY = "no server answers at"
_NOBODY = re.compile(r"(?:ipv[46]:|errors resolving )(.+?): (?:.*Connection refused|\[)")
_BROKEN = (CALL_ENDED, "RST_STREAM", "Stream removed", "GOAWAY")  # in the details of a connection that broke


def from_rpc_error(error: "grpc.RpcError") -> CoppiceError:
    """The typed error for what a call ended with; a connection that broke is Unavailable whatever gRPC calls it."""
    status, details = error.code(), error.details() or ""
    if nobody := _NOBODY.search(details):
        return Unavailable(f"{NOBODY} {unquote(nobody[1])}")
    if status.name in ("INTERNAL", "UNKNOWN") and any(sign in details for sign in _BROKEN):
        return Unavailable(details)
    if status.name == InvalidField.status:
        field, _, reason = details.partition(": ")
        return InvalidField(field, reason)
    typed = _BY_STATUS.get(status.name, InternalError)(details or str(status))
    hint = dict(error.trailing_metadata() or ()).get(RETRY_HINT, "")
    typed.retry_after_s = int(hint) / 1e3 if hint.isdecimal() else typed.retry_after_s
    return typed


class Backoff:
    """Pauses that double with every failure, from `first_s` up to `longest_s`, until something succeeds."""

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._first_s, self._longest_s = first_s, longest_s
        self._next_s = first_s

    @property
    def fresh(self) -> bool:
        """Whether nothing has failed since the last success."""
        return self._next_s == self._first_s

    def fail(self) -> float:
        """Note a failure. Return the pause that it calls for, in seconds."""
        pause_s = self._next_s
        self._next_s = min(2 * pause_s, self._longest_s)
        return pause_s

    def succeed(self) -> None:
        """Note a success: the next pause is the first one again."""
        self._next_s = self._first_s
