"""AdapterService: plain values to messages and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from coppice import limits
from coppice.messages.adapter import ActionStatus, Change, HeadStatus, QueryPoint, ReplicaStatus, VersionStatus
from coppice.v1 import adapter_pb2 as adapter


def status_to_wire(heads: Sequence[HeadStatus]) -> adapter.GetStatusResponse:
    """The status of heads to its message."""
    return adapter.GetStatusResponse(heads=[adapter.HeadStatus(**asdict(head)) for head in heads])


def read_status(message: adapter.GetStatusResponse) -> list[HeadStatus]:
    """Message to the status of heads."""
    return [
        HeadStatus(
            head=head.head,
            policy=head.policy,
            paused=head.paused,
            doing=head.doing,
            version=head.version,
            weights_hash=head.weights_hash,
            good_version=head.good_version,
            queries=head.queries,
            events=head.events,
            reverts=head.reverts,
            actions=[ActionStatus(**_values(one, "value")) for one in head.actions],
            replicas=[ReplicaStatus(**_values(one)) for one in head.replicas],
            versions=[VersionStatus(**_values(one)) for one in head.versions],
            history=[QueryPoint(**_values(one, "version")) for one in head.history],
            changes=[Change(**_values(one)) for one in head.changes],
        )
        for head in message.heads
    ]


def _values(message: Any, optional: str = "") -> dict[str, Any]:
    """Every field by name; None for an optional one that is not set."""
    found = {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}
    if optional and not message.HasField(optional):
        found[optional] = None
    return found


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
