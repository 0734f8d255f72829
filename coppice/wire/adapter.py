"""AdapterService: plain values to messages and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coppice import limits
from coppice.messages.adapter import (
    ActionStatus,
    Change,
    HeadStatus,
    KindStatus,
    QueryPoint,
    ReplicaStatus,
    VersionStatus,
)
from coppice.v1 import adapter_pb2 as adapter
from coppice.wire.shapes import Shape

for _value, _message in (
    (ActionStatus, adapter.ActionStatus),
    (KindStatus, adapter.KindStatus),
    (ReplicaStatus, adapter.ReplicaStatus),
    (VersionStatus, adapter.VersionStatus),
    (QueryPoint, adapter.QueryPoint),
    (Change, adapter.Change),
):
    Shape(_value, _message)
_HEAD = Shape(HeadStatus, adapter.HeadStatus)

status_request, rollback_request = adapter.GetStatusRequest, adapter.RollbackRequest
pause_request, resume_request = adapter.PauseRequest, adapter.ResumeRequest
rollback_to_wire = adapter.RollbackResponse


def status_to_wire(heads: Sequence[HeadStatus]) -> adapter.GetStatusResponse:
    """The status of heads to its message."""
    return adapter.GetStatusResponse(heads=map(_HEAD.fields, heads))


def read_status(message: adapter.GetStatusResponse) -> list[HeadStatus]:
    """Message to the status of heads."""
    return [_HEAD.read(head) for head in message.heads]


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
