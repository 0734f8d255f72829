from coppice.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DraftRequest(_message.Message):
    __slots__ = ("open", "step")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    open: OpenDraft
    step: DraftStep
    def __init__(self, open: _Optional[_Union[OpenDraft, _Mapping]] = ..., step: _Optional[_Union[DraftStep, _Mapping]] = ...) -> None: ...

class DraftResponse(_message.Message):
    __slots__ = ("opened", "delta")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    opened: DraftOpened
    delta: TreeDelta
    def __init__(self, opened: _Optional[_Union[DraftOpened, _Mapping]] = ..., delta: _Optional[_Union[TreeDelta, _Mapping]] = ...) -> None: ...

class OpenDraft(_message.Message):
    __slots__ = ("session", "ids", "sampling", "coupled", "features", "want_q_rows", "want_misses", "prediction", "salt")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    COUPLED_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    WANT_Q_ROWS_FIELD_NUMBER: _ClassVar[int]
    WANT_MISSES_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    session: str
    ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _common_pb2.Sampling
    coupled: bool
    features: _common_pb2.Features
    want_q_rows: bool
    want_misses: bool
    prediction: _containers.RepeatedScalarFieldContainer[int]
    salt: str
    def __init__(self, session: _Optional[str] = ..., ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_common_pb2.Sampling, _Mapping]] = ..., coupled: bool = ..., features: _Optional[_Union[_common_pb2.Features, _Mapping]] = ..., want_q_rows: bool = ..., want_misses: bool = ..., prediction: _Optional[_Iterable[int]] = ..., salt: _Optional[str] = ...) -> None: ...

class DraftOpened(_message.Message):
    __slots__ = ("weights_version", "variant", "kind", "sketch")
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    VARIANT_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SKETCH_FIELD_NUMBER: _ClassVar[int]
    weights_version: int
    variant: int
    kind: int
    sketch: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, weights_version: _Optional[int] = ..., variant: _Optional[int] = ..., kind: _Optional[int] = ..., sketch: _Optional[_Iterable[float]] = ...) -> None: ...

class DraftStep(_message.Message):
    __slots__ = ("fence", "root", "budget", "advance")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    ADVANCE_FIELD_NUMBER: _ClassVar[int]
    fence: _common_pb2.Fence
    root: int
    budget: int
    advance: Advance
    def __init__(self, fence: _Optional[_Union[_common_pb2.Fence, _Mapping]] = ..., root: _Optional[int] = ..., budget: _Optional[int] = ..., advance: _Optional[_Union[Advance, _Mapping]] = ...) -> None: ...

class Advance(_message.Message):
    __slots__ = ("ids", "features", "rejection")
    IDS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    REJECTION_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    features: _common_pb2.Features
    rejection: _common_pb2.Rejection
    def __init__(self, ids: _Optional[_Iterable[int]] = ..., features: _Optional[_Union[_common_pb2.Features, _Mapping]] = ..., rejection: _Optional[_Union[_common_pb2.Rejection, _Mapping]] = ...) -> None: ...

class TreeDelta(_message.Message):
    __slots__ = ("fence", "nodes", "last", "forward_ns", "total_ns", "q_rows", "miss", "predicted", "made")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    FORWARD_NS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_NS_FIELD_NUMBER: _ClassVar[int]
    Q_ROWS_FIELD_NUMBER: _ClassVar[int]
    MISS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_FIELD_NUMBER: _ClassVar[int]
    MADE_FIELD_NUMBER: _ClassVar[int]
    fence: _common_pb2.Fence
    nodes: _common_pb2.Tree
    last: bool
    forward_ns: int
    total_ns: int
    q_rows: bytes
    miss: float
    predicted: _containers.RepeatedScalarFieldContainer[int]
    made: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, fence: _Optional[_Union[_common_pb2.Fence, _Mapping]] = ..., nodes: _Optional[_Union[_common_pb2.Tree, _Mapping]] = ..., last: bool = ..., forward_ns: _Optional[int] = ..., total_ns: _Optional[int] = ..., q_rows: _Optional[bytes] = ..., miss: _Optional[float] = ..., predicted: _Optional[_Iterable[int]] = ..., made: _Optional[_Iterable[int]] = ...) -> None: ...

class DescribeHeadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeHeadResponse(_message.Message):
    __slots__ = ("name", "kind", "vocab_size", "weights_version", "feature_layers", "sessions", "sessions_opened", "sessions_closed", "weights_hash", "expected_acceptance", "tokenizer_hash")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    FEATURE_LAYERS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_OPENED_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_CLOSED_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_HASH_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_HASH_FIELD_NUMBER: _ClassVar[int]
    name: str
    kind: str
    vocab_size: int
    weights_version: int
    feature_layers: _containers.RepeatedScalarFieldContainer[int]
    sessions: int
    sessions_opened: int
    sessions_closed: int
    weights_hash: bytes
    expected_acceptance: _containers.RepeatedScalarFieldContainer[float]
    tokenizer_hash: bytes
    def __init__(self, name: _Optional[str] = ..., kind: _Optional[str] = ..., vocab_size: _Optional[int] = ..., weights_version: _Optional[int] = ..., feature_layers: _Optional[_Iterable[int]] = ..., sessions: _Optional[int] = ..., sessions_opened: _Optional[int] = ..., sessions_closed: _Optional[int] = ..., weights_hash: _Optional[bytes] = ..., expected_acceptance: _Optional[_Iterable[float]] = ..., tokenizer_hash: _Optional[bytes] = ...) -> None: ...

class SyncWeightsRequest(_message.Message):
    __slots__ = ("header", "part")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    header: WeightsHeader
    part: WeightsPart
    def __init__(self, header: _Optional[_Union[WeightsHeader, _Mapping]] = ..., part: _Optional[_Union[WeightsPart, _Mapping]] = ...) -> None: ...

class WeightsHeader(_message.Message):
    __slots__ = ("head", "version", "parent", "parent_hash", "weights_hash", "sha256", "size", "parts")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    PARENT_HASH_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_HASH_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    head: str
    version: int
    parent: int
    parent_hash: bytes
    weights_hash: bytes
    sha256: bytes
    size: int
    parts: int
    def __init__(self, head: _Optional[str] = ..., version: _Optional[int] = ..., parent: _Optional[int] = ..., parent_hash: _Optional[bytes] = ..., weights_hash: _Optional[bytes] = ..., sha256: _Optional[bytes] = ..., size: _Optional[int] = ..., parts: _Optional[int] = ...) -> None: ...

class WeightsPart(_message.Message):
    __slots__ = ("number", "data")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    number: int
    data: bytes
    def __init__(self, number: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class SyncWeightsResponse(_message.Message):
    __slots__ = ("version", "weights_hash", "swap_ns")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_HASH_FIELD_NUMBER: _ClassVar[int]
    SWAP_NS_FIELD_NUMBER: _ClassVar[int]
    version: int
    weights_hash: bytes
    swap_ns: int
    def __init__(self, version: _Optional[int] = ..., weights_hash: _Optional[bytes] = ..., swap_ns: _Optional[int] = ...) -> None: ...
