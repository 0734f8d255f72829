"""What an adapter tells of itself, as plain values: `coppice adapter status` prints and draws it."""

from __future__ import annotations

from dataclasses import dataclass, field

STANDING_BY = "standing by"


@dataclass(frozen=True, slots=True)
class ActionStatus:
    """One action of the bandit."""

    action: str
    value: float | None
    """tokens/s gained for each unit of s; None: not measured yet"""
    error: float
    """its standard error"""
    updates: int
    samples: int
    """waiting, of the `capacity` that an update takes"""
    capacity: int


@dataclass(frozen=True, slots=True)
class KindStatus:
    """One kind of text, and the variant of the head that is for it."""

    kind: int
    queries: int
    tau: float
    """mean with the deployed weights"""
    variant: int
    """drafts for `share` of the texts; 0: the deployed weights"""
    other: int
    """drafts for the others"""
    share: float
    gain: float
    """share of tau that `variant` gains over `other`"""
    error: float
    """its standard error"""
    measured: int
    """queries that `variant` drafted for since it was compared with `other`"""
    texts: int
    """to learn from"""
    updates: int
    saves_s: float
    """seconds of serving that the next update is expected to save"""
    costs_s: float
    """seconds of serving that it would cost"""


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """One drafter."""

    address: str
    reachable: bool
    version: int
    current: bool
    """whether its live hash is that of the weights it is to use"""


@dataclass(frozen=True, slots=True)
class VersionStatus:
    """How long the drafts of one version lasted."""

    version: int
    queries: int
    """that lived wholly on it"""
    tau: float
    """mean of theirs"""


@dataclass(frozen=True, slots=True)
class QueryPoint:
    """One query."""

    query: int
    tau: float
    tokens_per_s: float
    s: float
    version: int | None
    """None: the weights changed meanwhile"""
    action: str


@dataclass(frozen=True, slots=True)
class Change:
    """One change of the weights."""

    query: int
    """the one it came after"""
    what: str
    """head, full, variant, pays, loses, refused, revert or rollback"""
    version: int
    """the one it made"""
    train_s: float = 0.0
    sync_s: float = 0.0
    why: str = ""


@dataclass(frozen=True, slots=True)
class HeadStatus:
    """One head."""

    head: str
    policy: str
    paused: bool
    doing: str
    """idle, training, syncing or canary; STANDING_BY where another adapter is the active one, or redis is away"""
    version: int
    """that is to be in use"""
    weights_hash: bytes
    good_version: int
    queries: int
    events: int
    reverts: int
    actions: list[ActionStatus] = field(default_factory=list)
    replicas: list[ReplicaStatus] = field(default_factory=list)
    versions: list[VersionStatus] = field(default_factory=list)
    kinds: list[KindStatus] = field(default_factory=list)
    history: list[QueryPoint] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)


def standing_by(head: str, policy: str) -> HeadStatus:
    """The status of a head that another adapter looks after."""
    return HeadStatus(head, policy, False, STANDING_BY, 0, b"", 0, 0, 0, 0)
