from coppice.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class VerifyRequest(_message.Message):
    __slots__ = ("open", "step")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    open: OpenSession
    step: VerifyStep
    def __init__(self, open: _Optional[_Union[OpenSession, _Mapping]] = ..., step: _Optional[_Union[VerifyStep, _Mapping]] = ...) -> None: ...

class VerifyResponse(_message.Message):
    __slots__ = ("opened", "verdict")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    opened: SessionOpened
    verdict: Verdict
    def __init__(self, opened: _Optional[_Union[SessionOpened, _Mapping]] = ..., verdict: _Optional[_Union[Verdict, _Mapping]] = ...) -> None: ...

class OpenSession(_message.Message):
    __slots__ = ("session", "ids", "sampling", "stop_ids", "max_len", "feature_layers", "rejection_top_n", "want_log_probs", "prompt_tokens", "top_log_probs", "want_prompt_log_probs", "min_len", "salt", "grammar")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_LEN_FIELD_NUMBER: _ClassVar[int]
    FEATURE_LAYERS_FIELD_NUMBER: _ClassVar[int]
    REJECTION_TOP_N_FIELD_NUMBER: _ClassVar[int]
    WANT_LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    WANT_PROMPT_LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    MIN_LEN_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    session: str
    ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _common_pb2.Sampling
    stop_ids: _containers.RepeatedScalarFieldContainer[int]
    max_len: int
    feature_layers: _containers.RepeatedScalarFieldContainer[int]
    rejection_top_n: int
    want_log_probs: bool
    prompt_tokens: int
    top_log_probs: int
    want_prompt_log_probs: bool
    min_len: int
    salt: str
    grammar: _common_pb2.Grammar
    def __init__(self, session: _Optional[str] = ..., ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_common_pb2.Sampling, _Mapping]] = ..., stop_ids: _Optional[_Iterable[int]] = ..., max_len: _Optional[int] = ..., feature_layers: _Optional[_Iterable[int]] = ..., rejection_top_n: _Optional[int] = ..., want_log_probs: bool = ..., prompt_tokens: _Optional[int] = ..., top_log_probs: _Optional[int] = ..., want_prompt_log_probs: bool = ..., min_len: _Optional[int] = ..., salt: _Optional[str] = ..., grammar: _Optional[_Union[_common_pb2.Grammar, _Mapping]] = ...) -> None: ...

class SessionOpened(_message.Message):
    __slots__ = ("fence", "next", "features", "timings", "top", "prompt_log_probs", "prompt_top", "cached_tokens", "forced")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOP_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FORCED_FIELD_NUMBER: _ClassVar[int]
    fence: _common_pb2.Fence
    next: NextRoot
    features: _common_pb2.Features
    timings: VerifyTimings
    top: _containers.RepeatedCompositeFieldContainer[_common_pb2.TopLogProbs]
    prompt_log_probs: _containers.RepeatedScalarFieldContainer[float]
    prompt_top: _containers.RepeatedCompositeFieldContainer[_common_pb2.TopLogProbs]
    cached_tokens: int
    forced: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, fence: _Optional[_Union[_common_pb2.Fence, _Mapping]] = ..., next: _Optional[_Union[NextRoot, _Mapping]] = ..., features: _Optional[_Union[_common_pb2.Features, _Mapping]] = ..., timings: _Optional[_Union[VerifyTimings, _Mapping]] = ..., top: _Optional[_Iterable[_Union[_common_pb2.TopLogProbs, _Mapping]]] = ..., prompt_log_probs: _Optional[_Iterable[float]] = ..., prompt_top: _Optional[_Iterable[_Union[_common_pb2.TopLogProbs, _Mapping]]] = ..., cached_tokens: _Optional[int] = ..., forced: _Optional[_Iterable[int]] = ...) -> None: ...

class VerifyStep(_message.Message):
    __slots__ = ("fence", "root", "tree", "q_rows", "whole_tree")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    TREE_FIELD_NUMBER: _ClassVar[int]
    Q_ROWS_FIELD_NUMBER: _ClassVar[int]
    WHOLE_TREE_FIELD_NUMBER: _ClassVar[int]
    fence: _common_pb2.Fence
    root: int
    tree: _common_pb2.Tree
    q_rows: bytes
    whole_tree: bool
    def __init__(self, fence: _Optional[_Union[_common_pb2.Fence, _Mapping]] = ..., root: _Optional[int] = ..., tree: _Optional[_Union[_common_pb2.Tree, _Mapping]] = ..., q_rows: _Optional[bytes] = ..., whole_tree: bool = ...) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("fence", "accepted", "next", "verified", "features", "rejection", "log_probs", "timings", "pruned", "budget_hint", "top", "forced")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    REJECTION_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    PRUNED_FIELD_NUMBER: _ClassVar[int]
    BUDGET_HINT_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    FORCED_FIELD_NUMBER: _ClassVar[int]
    fence: _common_pb2.Fence
    accepted: _containers.RepeatedScalarFieldContainer[int]
    next: NextRoot
    verified: _containers.RepeatedScalarFieldContainer[int]
    features: _common_pb2.Features
    rejection: _common_pb2.Rejection
    log_probs: _containers.RepeatedScalarFieldContainer[float]
    timings: VerifyTimings
    pruned: bool
    budget_hint: int
    top: _containers.RepeatedCompositeFieldContainer[_common_pb2.TopLogProbs]
    forced: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, fence: _Optional[_Union[_common_pb2.Fence, _Mapping]] = ..., accepted: _Optional[_Iterable[int]] = ..., next: _Optional[_Union[NextRoot, _Mapping]] = ..., verified: _Optional[_Iterable[int]] = ..., features: _Optional[_Union[_common_pb2.Features, _Mapping]] = ..., rejection: _Optional[_Union[_common_pb2.Rejection, _Mapping]] = ..., log_probs: _Optional[_Iterable[float]] = ..., timings: _Optional[_Union[VerifyTimings, _Mapping]] = ..., pruned: bool = ..., budget_hint: _Optional[int] = ..., top: _Optional[_Iterable[_Union[_common_pb2.TopLogProbs, _Mapping]]] = ..., forced: _Optional[_Iterable[int]] = ...) -> None: ...

class NextRoot(_message.Message):
    __slots__ = ("row", "drawn_id", "drawn_log_prob")
    ROW_FIELD_NUMBER: _ClassVar[int]
    DRAWN_ID_FIELD_NUMBER: _ClassVar[int]
    DRAWN_LOG_PROB_FIELD_NUMBER: _ClassVar[int]
    row: _common_pb2.Row
    drawn_id: int
    drawn_log_prob: float
    def __init__(self, row: _Optional[_Union[_common_pb2.Row, _Mapping]] = ..., drawn_id: _Optional[int] = ..., drawn_log_prob: _Optional[float] = ...) -> None: ...

class VerifyTimings(_message.Message):
    __slots__ = ("queue_ns", "forward_ns", "accept_ns", "total_ns", "rows", "sessions", "plain_ns")
    QUEUE_NS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_NS_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_NS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_NS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    PLAIN_NS_FIELD_NUMBER: _ClassVar[int]
    queue_ns: int
    forward_ns: int
    accept_ns: int
    total_ns: int
    rows: int
    sessions: int
    plain_ns: int
    def __init__(self, queue_ns: _Optional[int] = ..., forward_ns: _Optional[int] = ..., accept_ns: _Optional[int] = ..., total_ns: _Optional[int] = ..., rows: _Optional[int] = ..., sessions: _Optional[int] = ..., plain_ns: _Optional[int] = ...) -> None: ...

class FetchFeaturesRequest(_message.Message):
    __slots__ = ("ref", "follow")
    REF_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    ref: _common_pb2.FeatureRef
    follow: bool
    def __init__(self, ref: _Optional[_Union[_common_pb2.FeatureRef, _Mapping]] = ..., follow: bool = ...) -> None: ...

class FetchFeaturesResponse(_message.Message):
    __slots__ = ("features", "commit")
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    features: _common_pb2.Features
    commit: Commit
    def __init__(self, features: _Optional[_Union[_common_pb2.Features, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("fence", "ids", "root")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    fence: _common_pb2.Fence
    ids: _containers.RepeatedScalarFieldContainer[int]
    root: int
    def __init__(self, fence: _Optional[_Union[_common_pb2.Fence, _Mapping]] = ..., ids: _Optional[_Iterable[int]] = ..., root: _Optional[int] = ...) -> None: ...

class DescribeTargetRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeTargetResponse(_message.Message):
    __slots__ = ("name", "vocab_size", "max_len", "layers", "hidden_size", "eos_ids", "dtype", "kv_tokens", "kv_tokens_used", "sessions", "sessions_opened", "sessions_closed", "repetition_penalty", "weights_hash", "prefix_cache_tokens", "bits_hash")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_LEN_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    EOS_IDS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_USED_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_OPENED_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_CLOSED_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_HASH_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BITS_HASH_FIELD_NUMBER: _ClassVar[int]
    name: str
    vocab_size: int
    max_len: int
    layers: int
    hidden_size: int
    eos_ids: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    kv_tokens: int
    kv_tokens_used: int
    sessions: int
    sessions_opened: int
    sessions_closed: int
    repetition_penalty: float
    weights_hash: bytes
    prefix_cache_tokens: int
    bits_hash: bytes
    def __init__(self, name: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_len: _Optional[int] = ..., layers: _Optional[int] = ..., hidden_size: _Optional[int] = ..., eos_ids: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., kv_tokens: _Optional[int] = ..., kv_tokens_used: _Optional[int] = ..., sessions: _Optional[int] = ..., sessions_opened: _Optional[int] = ..., sessions_closed: _Optional[int] = ..., repetition_penalty: _Optional[float] = ..., weights_hash: _Optional[bytes] = ..., prefix_cache_tokens: _Optional[int] = ..., bits_hash: _Optional[bytes] = ...) -> None: ...
