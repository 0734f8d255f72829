from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetStatusRequest(_message.Message):
    __slots__ = ("head", "history")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    head: str
    history: int
    def __init__(self, head: _Optional[str] = ..., history: _Optional[int] = ...) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("heads",)
    HEADS_FIELD_NUMBER: _ClassVar[int]
    heads: _containers.RepeatedCompositeFieldContainer[HeadStatus]
    def __init__(self, heads: _Optional[_Iterable[_Union[HeadStatus, _Mapping]]] = ...) -> None: ...

class HeadStatus(_message.Message):
    __slots__ = ("head", "policy", "paused", "doing", "version", "weights_hash", "good_version", "queries", "events", "reverts", "actions", "replicas", "versions", "history", "changes", "kinds")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    DOING_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_HASH_FIELD_NUMBER: _ClassVar[int]
    GOOD_VERSION_FIELD_NUMBER: _ClassVar[int]
    QUERIES_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    REVERTS_FIELD_NUMBER: _ClassVar[int]
    ACTIONS_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    KINDS_FIELD_NUMBER: _ClassVar[int]
    head: str
    policy: str
    paused: bool
    doing: str
    version: int
    weights_hash: bytes
    good_version: int
    queries: int
    events: int
    reverts: int
    actions: _containers.RepeatedCompositeFieldContainer[ActionStatus]
    replicas: _containers.RepeatedCompositeFieldContainer[ReplicaStatus]
    versions: _containers.RepeatedCompositeFieldContainer[VersionStatus]
    history: _containers.RepeatedCompositeFieldContainer[QueryPoint]
    changes: _containers.RepeatedCompositeFieldContainer[Change]
    kinds: _containers.RepeatedCompositeFieldContainer[KindStatus]
    def __init__(self, head: _Optional[str] = ..., policy: _Optional[str] = ..., paused: bool = ..., doing: _Optional[str] = ..., version: _Optional[int] = ..., weights_hash: _Optional[bytes] = ..., good_version: _Optional[int] = ..., queries: _Optional[int] = ..., events: _Optional[int] = ..., reverts: _Optional[int] = ..., actions: _Optional[_Iterable[_Union[ActionStatus, _Mapping]]] = ..., replicas: _Optional[_Iterable[_Union[ReplicaStatus, _Mapping]]] = ..., versions: _Optional[_Iterable[_Union[VersionStatus, _Mapping]]] = ..., history: _Optional[_Iterable[_Union[QueryPoint, _Mapping]]] = ..., changes: _Optional[_Iterable[_Union[Change, _Mapping]]] = ..., kinds: _Optional[_Iterable[_Union[KindStatus, _Mapping]]] = ...) -> None: ...

class KindStatus(_message.Message):
    __slots__ = ("kind", "queries", "tau", "variant", "other", "share", "gain", "error", "measured", "texts", "updates", "saves_s", "costs_s")
    KIND_FIELD_NUMBER: _ClassVar[int]
    QUERIES_FIELD_NUMBER: _ClassVar[int]
    TAU_FIELD_NUMBER: _ClassVar[int]
    VARIANT_FIELD_NUMBER: _ClassVar[int]
    OTHER_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    GAIN_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    MEASURED_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    SAVES_S_FIELD_NUMBER: _ClassVar[int]
    COSTS_S_FIELD_NUMBER: _ClassVar[int]
    kind: int
    queries: int
    tau: float
    variant: int
    other: int
    share: float
    gain: float
    error: float
    measured: int
    texts: int
    updates: int
    saves_s: float
    costs_s: float
    def __init__(self, kind: _Optional[int] = ..., queries: _Optional[int] = ..., tau: _Optional[float] = ..., variant: _Optional[int] = ..., other: _Optional[int] = ..., share: _Optional[float] = ..., gain: _Optional[float] = ..., error: _Optional[float] = ..., measured: _Optional[int] = ..., texts: _Optional[int] = ..., updates: _Optional[int] = ..., saves_s: _Optional[float] = ..., costs_s: _Optional[float] = ...) -> None: ...

class ActionStatus(_message.Message):
    __slots__ = ("action", "value", "error", "updates", "samples", "capacity")
    ACTION_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    action: str
    value: float
    error: float
    updates: int
    samples: int
    capacity: int
    def __init__(self, action: _Optional[str] = ..., value: _Optional[float] = ..., error: _Optional[float] = ..., updates: _Optional[int] = ..., samples: _Optional[int] = ..., capacity: _Optional[int] = ...) -> None: ...

class ReplicaStatus(_message.Message):
    __slots__ = ("address", "reachable", "version", "current")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    REACHABLE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CURRENT_FIELD_NUMBER: _ClassVar[int]
    address: str
    reachable: bool
    version: int
    current: bool
    def __init__(self, address: _Optional[str] = ..., reachable: bool = ..., version: _Optional[int] = ..., current: bool = ...) -> None: ...

class VersionStatus(_message.Message):
    __slots__ = ("version", "queries", "tau")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    QUERIES_FIELD_NUMBER: _ClassVar[int]
    TAU_FIELD_NUMBER: _ClassVar[int]
    version: int
    queries: int
    tau: float
    def __init__(self, version: _Optional[int] = ..., queries: _Optional[int] = ..., tau: _Optional[float] = ...) -> None: ...

class QueryPoint(_message.Message):
    __slots__ = ("query", "tau", "tokens_per_s", "s", "version", "action")
    QUERY_FIELD_NUMBER: _ClassVar[int]
    TAU_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    S_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    query: int
    tau: float
    tokens_per_s: float
    s: float
    version: int
    action: str
    def __init__(self, query: _Optional[int] = ..., tau: _Optional[float] = ..., tokens_per_s: _Optional[float] = ..., s: _Optional[float] = ..., version: _Optional[int] = ..., action: _Optional[str] = ...) -> None: ...

class Change(_message.Message):
    __slots__ = ("query", "what", "version", "train_s", "sync_s", "why")
    QUERY_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TRAIN_S_FIELD_NUMBER: _ClassVar[int]
    SYNC_S_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    query: int
    what: str
    version: int
    train_s: float
    sync_s: float
    why: str
    def __init__(self, query: _Optional[int] = ..., what: _Optional[str] = ..., version: _Optional[int] = ..., train_s: _Optional[float] = ..., sync_s: _Optional[float] = ..., why: _Optional[str] = ...) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ("head",)
    HEAD_FIELD_NUMBER: _ClassVar[int]
    head: str
    def __init__(self, head: _Optional[str] = ...) -> None: ...

class PauseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ("head",)
    HEAD_FIELD_NUMBER: _ClassVar[int]
    head: str
    def __init__(self, head: _Optional[str] = ...) -> None: ...

class ResumeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RollbackRequest(_message.Message):
    __slots__ = ("head", "version")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    head: str
    version: int
    def __init__(self, head: _Optional[str] = ..., version: _Optional[int] = ...) -> None: ...

class RollbackResponse(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...
