"""AdapterService: plain values to messages and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coppice import limits
from coppice.messages.adapter import ActionStatus, Change, HeadStatus, QueryPoint, ReplicaStatus, VersionStatus
from coppice.v1 import adapter_pb2 as adapter
from coppice.wire.shapes import Shape

for _value, _message in (
    (ActionStatus, adapter.ActionStatus),
    (ReplicaStatus, adapter.ReplicaStatus),
    (VersionStatus, adapter.VersionStatus),
    (QueryPoint, adapter.QueryPoint),
    (Change, adapter.Change),
):
    Shape(_value, _message)
_HEAD = Shape(HeadStatus, adapter.HeadStatus)


def status_to_wire(heads: Sequence[HeadStatus]) -> adapter.GetStatusResponse:
    """The status of heads to its message."""
    return adapter.GetStatusResponse(heads=map(_HEAD.fields, heads))


def read_status(message: adapter.GetStatusResponse) -> list[HeadStatus]:
    """Message to the status of heads."""
    return [_HEAD.read(head) for head in message.heads]


def status_request(head: str, history: int) -> adapter.GetStatusRequest:
    """Asks for one head's status, or for all."""
    return adapter.GetStatusRequest(head=head, history=history)


def pause_request(head: str) -> adapter.PauseRequest:
    """Asks for a pause."""
    return adapter.PauseRequest(head=head)


def resume_request(head: str) -> adapter.ResumeRequest:
    """Asks for a pause's end."""
    return adapter.ResumeRequest(head=head)


def rollback_request(head: str, version: int | None) -> adapter.RollbackRequest:
    """Asks for earlier weights; None: the last good ones."""
    return adapter.RollbackRequest(head=head, version=version)


def read_head_name(message: Any) -> str:
    """The head that a request names; empty: none."""
    if message.head:
        limits.check_session("head", message.head)
    return str(message.head)


def read_status_request(message: adapter.GetStatusRequest) -> tuple[str, int]:
    """The head, and the number of queries wanted."""
    limits.check_range("history", message.history, 0, limits.MAX_HISTORY)
    return read_head_name(message), message.history


def read_rollback_request(message: adapter.RollbackRequest) -> tuple[str, int | None]:
    """The head, and the version to go back to."""
    return read_head_name(message), message.version if message.HasField("version") else None


def rollback_to_wire(version: int) -> adapter.RollbackResponse:
    """The version that a rollback made."""
    return adapter.RollbackResponse(version=version)
