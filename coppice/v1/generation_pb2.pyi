from coppice.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AcceptRule(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ACCEPT_RULE_UNSPECIFIED: _ClassVar[AcceptRule]
    ACCEPT_RULE_KEYED: _ClassVar[AcceptRule]
    ACCEPT_RULE_PQ: _ClassVar[AcceptRule]

class TokenOrigin(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TOKEN_ORIGIN_UNSPECIFIED: _ClassVar[TokenOrigin]
    TOKEN_ORIGIN_ROOT: _ClassVar[TokenOrigin]
    TOKEN_ORIGIN_DRAFT: _ClassVar[TokenOrigin]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_EOS: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
ACCEPT_RULE_UNSPECIFIED: AcceptRule
ACCEPT_RULE_KEYED: AcceptRule
ACCEPT_RULE_PQ: AcceptRule
TOKEN_ORIGIN_UNSPECIFIED: TokenOrigin
TOKEN_ORIGIN_ROOT: TokenOrigin
TOKEN_ORIGIN_DRAFT: TokenOrigin
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_EOS: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason

class GenerateRequest(_message.Message):
    __slots__ = ("text", "ids", "chat", "resume_ids", "sampling", "max_new_tokens", "stop", "policy", "budget", "ignore_eos", "want_log_probs", "accept_rule", "uncoupled", "want_trees", "top_log_probs", "want_prompt_log_probs", "min_tokens", "prediction_text", "prediction_ids", "grammar", "template_arguments", "stop_token_ids", "include_stop", "keep_special_tokens", "want_prompt_ids")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    RESUME_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    WANT_LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_RULE_FIELD_NUMBER: _ClassVar[int]
    UNCOUPLED_FIELD_NUMBER: _ClassVar[int]
    WANT_TREES_FIELD_NUMBER: _ClassVar[int]
    TOP_LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    WANT_PROMPT_LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_TEXT_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_IDS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_FIELD_NUMBER: _ClassVar[int]
    KEEP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WANT_PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    text: str
    ids: TokenIds
    chat: Chat
    resume_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _common_pb2.Sampling
    max_new_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    policy: str
    budget: int
    ignore_eos: bool
    want_log_probs: bool
    accept_rule: AcceptRule
    uncoupled: bool
    want_trees: bool
    top_log_probs: int
    want_prompt_log_probs: bool
    min_tokens: int
    prediction_text: str
    prediction_ids: TokenIds
    grammar: _common_pb2.Grammar
    template_arguments: str
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    include_stop: bool
    keep_special_tokens: bool
    want_prompt_ids: bool
    def __init__(self, text: _Optional[str] = ..., ids: _Optional[_Union[TokenIds, _Mapping]] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., resume_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_common_pb2.Sampling, _Mapping]] = ..., max_new_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., policy: _Optional[str] = ..., budget: _Optional[int] = ..., ignore_eos: bool = ..., want_log_probs: bool = ..., accept_rule: _Optional[_Union[AcceptRule, str]] = ..., uncoupled: bool = ..., want_trees: bool = ..., top_log_probs: _Optional[int] = ..., want_prompt_log_probs: bool = ..., min_tokens: _Optional[int] = ..., prediction_text: _Optional[str] = ..., prediction_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., grammar: _Optional[_Union[_common_pb2.Grammar, _Mapping]] = ..., template_arguments: _Optional[str] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., include_stop: bool = ..., keep_special_tokens: bool = ..., want_prompt_ids: bool = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Chat(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "reasoning_content", "name", "tool_calls", "tool_call_id")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    REASONING_CONTENT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    reasoning_content: str
    name: str
    tool_calls: str
    tool_call_id: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., reasoning_content: _Optional[str] = ..., name: _Optional[str] = ..., tool_calls: _Optional[str] = ..., tool_call_id: _Optional[str] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("started", "chunk", "finished")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    started: Started
    chunk: Chunk
    finished: Finished
    def __init__(self, started: _Optional[_Union[Started, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("prompt_tokens", "policy", "heads", "budget", "seed", "prompt_ids", "prompt_log_probs", "prompt_top")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOP_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    policy: str
    heads: _containers.RepeatedScalarFieldContainer[str]
    budget: int
    seed: int
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_log_probs: _containers.RepeatedScalarFieldContainer[float]
    prompt_top: _containers.RepeatedCompositeFieldContainer[_common_pb2.TopLogProbs]
    def __init__(self, prompt_tokens: _Optional[int] = ..., policy: _Optional[str] = ..., heads: _Optional[_Iterable[str]] = ..., budget: _Optional[int] = ..., seed: _Optional[int] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., prompt_log_probs: _Optional[_Iterable[float]] = ..., prompt_top: _Optional[_Iterable[_Union[_common_pb2.TopLogProbs, _Mapping]]] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("text", "ids", "origins", "log_probs", "pieces", "tree", "top", "others")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    ORIGINS_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    TREE_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    text: str
    ids: _containers.RepeatedScalarFieldContainer[int]
    origins: _containers.RepeatedScalarFieldContainer[TokenOrigin]
    log_probs: _containers.RepeatedScalarFieldContainer[float]
    pieces: _containers.RepeatedScalarFieldContainer[str]
    tree: StepTree
    top: _containers.RepeatedCompositeFieldContainer[_common_pb2.TopLogProbs]
    others: _containers.RepeatedCompositeFieldContainer[StepTree]
    def __init__(self, text: _Optional[str] = ..., ids: _Optional[_Iterable[int]] = ..., origins: _Optional[_Iterable[_Union[TokenOrigin, str]]] = ..., log_probs: _Optional[_Iterable[float]] = ..., pieces: _Optional[_Iterable[str]] = ..., tree: _Optional[_Union[StepTree, _Mapping]] = ..., top: _Optional[_Iterable[_Union[_common_pb2.TopLogProbs, _Mapping]]] = ..., others: _Optional[_Iterable[_Union[StepTree, _Mapping]]] = ...) -> None: ...

class StepTree(_message.Message):
    __slots__ = ("tokens", "parents", "log_probs", "forwards", "pieces", "accepted", "root", "root_piece", "owners", "cut", "routed", "draft_ns", "verify_ns")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    FORWARDS_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    ROOT_PIECE_FIELD_NUMBER: _ClassVar[int]
    OWNERS_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    ROUTED_FIELD_NUMBER: _ClassVar[int]
    DRAFT_NS_FIELD_NUMBER: _ClassVar[int]
    VERIFY_NS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    parents: _containers.RepeatedScalarFieldContainer[int]
    log_probs: _containers.RepeatedScalarFieldContainer[float]
    forwards: _containers.RepeatedScalarFieldContainer[int]
    pieces: _containers.RepeatedScalarFieldContainer[str]
    accepted: _containers.RepeatedScalarFieldContainer[int]
    root: int
    root_piece: str
    owners: _containers.RepeatedScalarFieldContainer[int]
    cut: _containers.RepeatedScalarFieldContainer[int]
    routed: int
    draft_ns: int
    verify_ns: int
    def __init__(self, tokens: _Optional[_Iterable[int]] = ..., parents: _Optional[_Iterable[int]] = ..., log_probs: _Optional[_Iterable[float]] = ..., forwards: _Optional[_Iterable[int]] = ..., pieces: _Optional[_Iterable[str]] = ..., accepted: _Optional[_Iterable[int]] = ..., root: _Optional[int] = ..., root_piece: _Optional[str] = ..., owners: _Optional[_Iterable[int]] = ..., cut: _Optional[_Iterable[int]] = ..., routed: _Optional[int] = ..., draft_ns: _Optional[int] = ..., verify_ns: _Optional[int] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("finish_reason", "prompt_tokens", "new_tokens", "steps", "accept_lengths", "routed", "verified_nodes", "late_drafts", "bad_drafts", "timings", "accepted_prediction_tokens", "rejected_prediction_tokens", "cached_tokens")
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    ROUTED_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_NODES_FIELD_NUMBER: _ClassVar[int]
    LATE_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    BAD_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_PREDICTION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REJECTED_PREDICTION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    finish_reason: FinishReason
    prompt_tokens: int
    new_tokens: int
    steps: int
    accept_lengths: _containers.RepeatedScalarFieldContainer[int]
    routed: _containers.RepeatedScalarFieldContainer[int]
    verified_nodes: _containers.RepeatedScalarFieldContainer[int]
    late_drafts: int
    bad_drafts: int
    timings: GenerateTimings
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    cached_tokens: int
    def __init__(self, finish_reason: _Optional[_Union[FinishReason, str]] = ..., prompt_tokens: _Optional[int] = ..., new_tokens: _Optional[int] = ..., steps: _Optional[int] = ..., accept_lengths: _Optional[_Iterable[int]] = ..., routed: _Optional[_Iterable[int]] = ..., verified_nodes: _Optional[_Iterable[int]] = ..., late_drafts: _Optional[int] = ..., bad_drafts: _Optional[int] = ..., timings: _Optional[_Union[GenerateTimings, _Mapping]] = ..., accepted_prediction_tokens: _Optional[int] = ..., rejected_prediction_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class GenerateTimings(_message.Message):
    __slots__ = ("queue_ns", "prefill_ns", "draft_ns", "transport_ns", "verify_ns", "accept_ns", "commit_ns", "target_forward_ns", "head_forward_ns", "decode_ns", "step_ns", "split_ns")
    QUEUE_NS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_NS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_NS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_NS_FIELD_NUMBER: _ClassVar[int]
    VERIFY_NS_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_NS_FIELD_NUMBER: _ClassVar[int]
    COMMIT_NS_FIELD_NUMBER: _ClassVar[int]
    TARGET_FORWARD_NS_FIELD_NUMBER: _ClassVar[int]
    HEAD_FORWARD_NS_FIELD_NUMBER: _ClassVar[int]
    DECODE_NS_FIELD_NUMBER: _ClassVar[int]
    STEP_NS_FIELD_NUMBER: _ClassVar[int]
    SPLIT_NS_FIELD_NUMBER: _ClassVar[int]
    queue_ns: int
    prefill_ns: int
    draft_ns: int
    transport_ns: int
    verify_ns: int
    accept_ns: int
    commit_ns: int
    target_forward_ns: int
    head_forward_ns: int
    decode_ns: int
    step_ns: _containers.RepeatedScalarFieldContainer[int]
    split_ns: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, queue_ns: _Optional[int] = ..., prefill_ns: _Optional[int] = ..., draft_ns: _Optional[int] = ..., transport_ns: _Optional[int] = ..., verify_ns: _Optional[int] = ..., accept_ns: _Optional[int] = ..., commit_ns: _Optional[int] = ..., target_forward_ns: _Optional[int] = ..., head_forward_ns: _Optional[int] = ..., decode_ns: _Optional[int] = ..., step_ns: _Optional[_Iterable[int]] = ..., split_ns: _Optional[_Iterable[int]] = ...) -> None: ...

class DescribeModelRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeModelResponse(_message.Message):
    __slots__ = ("name", "vocab_size", "max_len", "heads", "policies", "default_policy", "default_budget", "has_tokenizer", "has_chat_template", "running", "version", "repetition_penalty")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_LEN_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    POLICIES_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_POLICY_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_BUDGET_FIELD_NUMBER: _ClassVar[int]
    HAS_TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    HAS_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    name: str
    vocab_size: int
    max_len: int
    heads: _containers.RepeatedScalarFieldContainer[str]
    policies: _containers.RepeatedScalarFieldContainer[str]
    default_policy: str
    default_budget: int
    has_tokenizer: bool
    has_chat_template: bool
    running: int
    version: str
    repetition_penalty: float
    def __init__(self, name: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_len: _Optional[int] = ..., heads: _Optional[_Iterable[str]] = ..., policies: _Optional[_Iterable[str]] = ..., default_policy: _Optional[str] = ..., default_budget: _Optional[int] = ..., has_tokenizer: bool = ..., has_chat_template: bool = ..., running: _Optional[int] = ..., version: _Optional[str] = ..., repetition_penalty: _Optional[float] = ...) -> None: ...
