"""AdapterService: its messages as plain values; `coppice adapter status` prints and draws them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Annotated, Any

from coppice import limits
from coppice.v1 import adapter_pb2 as adapter
from coppice.wire.codec import Within, carried_by, codec
from coppice.wire.common import Count, Finite, Version

STANDING_BY = "standing by"


@carried_by(adapter.ActionStatus)
class ActionStatus:
    """One arm of the decision rule."""

    action: str
    value: Finite | None
    """expected gain for each unit of the signal, by policy in tokens/s or share of them; None: not measured yet"""
    updates: Count


@carried_by(adapter.KindStatus)
class KindStatus:
    """One kind of text, and the variant of the head that is for it."""

    kind: Annotated[int, Within(0, limits.MAX_KINDS)]
    queries: Count
    tau: Finite
    """mean with the deployed weights"""
    variant: Annotated[int, Within(0, limits.MAX_VARIANTS)]
    """drafts for `share` of the texts; 0: the deployed weights"""
    other: Annotated[int, Within(0, limits.MAX_VARIANTS)]
    """drafts for the others"""
    share: Finite
    gain: Finite
    """share of tokens/s that `variant` gains over `other`"""
    error: Finite
    """its standard error"""
    measured: Count
    """queries that `variant` drafted for since it was compared with `other`"""
    texts: Count
    """to learn from"""
    updates: Count
    saves_s: Finite
    """seconds of serving that the next update is expected to save"""
    costs_s: Finite
    """seconds of serving that it would cost"""


@carried_by(adapter.ReplicaStatus)
class ReplicaStatus:
    """One drafter."""

    address: str
    reachable: bool
    version: Version
    current: bool
    """whether its live hash is that of the weights it is to use"""


@carried_by(adapter.VersionStatus)
class VersionStatus:
    """How long the drafts of one version lasted."""

    version: Version
    queries: Count
    """that lived wholly on it"""
    tau: Finite
    """mean of theirs"""


@carried_by(adapter.QueryPoint)
class QueryPoint:
    """One query."""

    query: Count
    tau: Finite
    tokens_per_s: Finite
    s: Finite
    version: Version | None
    """None: the weights changed meanwhile"""
    action: str


@carried_by(adapter.Change)
class Change:
    """One change of the weights."""

    query: Count
    """the one it came after"""
    what: str
    """head, full, pays, loses, revert or rollback"""
    version: Version
    """the one it made"""
    train_s: Finite = 0.0
    sync_s: Finite = 0.0
    why: str = ""


@carried_by(adapter.HeadStatus)
class HeadStatus:
    """One head."""

    head: str
    policy: str
    paused: bool
    doing: str
    """idle, training or syncing; STANDING_BY where another adapter is the active one, or redis is away"""
    version: Version
    """that is to be in use"""
    weights_hash: bytes
    good_version: Version
    queries: Count
    events: Count
    reverts: Count
    actions: list[ActionStatus] = field(default_factory=list)
    replicas: list[ReplicaStatus] = field(default_factory=list)
    versions: list[VersionStatus] = field(default_factory=list)
    kinds: list[KindStatus] = field(default_factory=list)
    history: list[QueryPoint] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)


status_request, rollback_request = adapter.GetStatusRequest, adapter.RollbackRequest
pause_request, resume_request = adapter.PauseRequest, adapter.ResumeRequest
rollback_to_wire = adapter.RollbackResponse


def status_to_wire(heads: Sequence[HeadStatus]) -> adapter.GetStatusResponse:
    """The status of heads to its message."""
    return adapter.GetStatusResponse(heads=map(codec(HeadStatus).fields, heads))


def read_status(message: adapter.GetStatusResponse) -> list[HeadStatus]:
    """Message to the status of heads."""
    return [codec(HeadStatus).read(head) for head in message.heads]


def read_rollback(message: adapter.RollbackResponse) -> int:
    """The version that a rollback made."""
    limits.check_range("version", message.version, 0, limits.MAX_VERSION)
    return message.version


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
