"""Every error Coppice raises on purpose, and the gRPC status each one travels as."""

from __future__ import annotations

import grpc


class CoppiceError(Exception):
    """Base of all deliberate errors. `status` is how it crosses the wire."""

    status: grpc.StatusCode = grpc.StatusCode.INTERNAL


class InvalidField(CoppiceError):
    """A value the caller sent is unusable. Names the field."""

    status = grpc.StatusCode.INVALID_ARGUMENT

    def __init__(self, field: str, why: str) -> None:
        super().__init__(f"{field}: {why}")
        self.field = field


class StaleFence(CoppiceError):
    """A step message is about another state of the session than the server's. Says what was expected."""

    status = grpc.StatusCode.FAILED_PRECONDITION


class NotFound(CoppiceError):
    """A named thing (session, head) does not exist here."""

    status = grpc.StatusCode.NOT_FOUND


class Overloaded(CoppiceError):
    """The server is full; retry later."""

    status = grpc.StatusCode.RESOURCE_EXHAUSTED


class Unavailable(CoppiceError):
    """The server cannot be reached, drains, or lost the session; an idempotent call may be retried."""

    status = grpc.StatusCode.UNAVAILABLE


class DeadlineExceeded(CoppiceError):
    """The caller's deadline passed."""

    status = grpc.StatusCode.DEADLINE_EXCEEDED


class Cancelled(CoppiceError):
    """The caller cancelled."""

    status = grpc.StatusCode.CANCELLED


class InternalError(CoppiceError):
    """Something unexpected happened in a server; its log has the details under the id in the message."""


_BY_STATUS: dict[grpc.StatusCode, type[CoppiceError]] = {
    grpc.StatusCode.FAILED_PRECONDITION: StaleFence,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
}


def from_rpc_error(error: grpc.RpcError) -> CoppiceError:
    """The typed error for what a call ended with."""
    status, details = error.code(), error.details() or ""
    if status is grpc.StatusCode.INVALID_ARGUMENT:
        field, _, why = details.partition(": ")
        return InvalidField(field, why)
    return _BY_STATUS.get(status, InternalError)(details or str(status))
