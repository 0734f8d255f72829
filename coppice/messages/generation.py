"""What a client asks for and what it gets, as plain values; shared by the SDK and the orchestrator."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import IntEnum
from typing import Literal

from coppice.messages.steps import TopLogProbs
from coppice.speculation.sampling import SamplingParams

FinishReason = Literal["eos", "stop", "length", "cancelled"]


class Origin(IntEnum):
    """Where a token came from."""

    ROOT = 1  # sampled from the target
    DRAFT = 2  # drafted and accepted


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation; role is system, user or assistant. What is empty is not there."""

    role: str
    content: str
    reasoning_content: str = ""
    """what an assistant thought before it answered"""
    name: str = ""
    """of who speaks"""

    @property
    def fields(self) -> dict[str, str]:
        """The message as chat templates know it."""
        return {key: text for key, text in asdict(self).items() if text or key in ("role", "content")}


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One request. Exactly one of text, ids and chat is set; budget None and policy "" mean the server's defaults."""

    text: str | None = None
    ids: tuple[int, ...] | None = None
    chat: tuple[ChatMessage, ...] | None = None
    resume_ids: tuple[int, ...] = ()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    policy: str = ""
    budget: int | None = None
    ignore_eos: bool = False
    want_log_probs: bool = False
    want_trees: bool = False
    top_log_probs: int = 0
    want_prompt_log_probs: bool = False
    min_tokens: int = 0
    prediction_text: str | None = None
    prediction_ids: tuple[int, ...] | None = None
    """what the answer is expected to be, as text or as ids; not both"""
    pq: bool = False
    coupled: bool = True


@dataclass(frozen=True, slots=True)
class Started:
    """The request was admitted."""

    prompt_tokens: int
    policy: str
    heads: tuple[str, ...]
    budget: int
    seed: int = 0
    """of the draws: the request's own, or the one that was drawn for it"""
    prompt_ids: tuple[int, ...] = ()
    """of a request that wants the prompt's log-probabilities, which are those of the ids behind the first one"""
    prompt_log_probs: tuple[float, ...] = ()
    prompt_top: tuple[TopLogProbs, ...] = ()


@dataclass(frozen=True, slots=True)
class StepTree:
    """The tree a step chose, by node: ids, parents (0: the root), cumulative log-scores, the drafter's forward that
    made it (from 1) and its text; the numbers of the accepted nodes from the root down; the root's text."""

    root: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    log_probs: tuple[float, ...]
    forwards: tuple[int, ...]
    pieces: tuple[str, ...]
    accepted: tuple[int, ...]
    root_piece: str = ""
    owners: tuple[int, ...] = ()
    """by node, the heads that drafted it: bit h is number h of `Started.heads`"""
    cut: tuple[int, ...] = ()
    """numbers of the nodes that the verifier left out"""
    routed: int = -1
    """the head whose tree it is; -1: nobody's, -2: a union"""
    draft_ns: int = 0
    """of waiting for drafts"""
    verify_ns: int = 0
    """from the verifier's question to its answer"""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of one commit. `pieces` are the text of each id's contribution; joined they are `text`."""

    text: str
    ids: tuple[int, ...]
    origins: tuple[Origin, ...]
    pieces: tuple[str, ...]
    log_probs: tuple[float, ...] = ()
    tree: StepTree | None = None
    top: tuple[TopLogProbs, ...] = ()
    others: tuple[StepTree, ...] = ()
    """of the heads that lost the routing; accepted are the nodes that the target said too"""


@dataclass(slots=True)
class Timings:
    """Sums over a request, nanoseconds (protos/coppice/v1/generation.proto says what each covers)."""

    queue_ns: int = 0
    prefill_ns: int = 0
    draft_ns: int = 0
    transport_ns: int = 0
    verify_ns: int = 0
    accept_ns: int = 0
    commit_ns: int = 0
    target_forward_ns: int = 0
    head_forward_ns: int = 0
    decode_ns: int = 0
    step_ns: list[int] = field(default_factory=list)
    split_ns: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Finished:
    """The answer is complete. Lists have one entry a step; `routed` is a head's index, -1 none, -2 a union.

    `resumed`: how often the client went on with another server; lists and timings are then of the last one alone.
    """

    finish_reason: FinishReason
    prompt_tokens: int
    new_tokens: int
    accept_lengths: list[int]
    routed: list[int]
    verified_nodes: list[int]
    late_drafts: int = 0
    bad_drafts: int = 0
    timings: Timings = field(default_factory=Timings)
    accepted_prediction_tokens: int = 0
    """tokens of the prediction that were accepted as drafts, each counted once"""
    rejected_prediction_tokens: int = 0
    """those that were verified and never accepted"""
    cached_tokens: int = 0
    """of the prompt, that were not prefilled again"""
    resumed: int = 0

    @property
    def steps(self) -> int:
        """Target forwards after the prefill."""
        return len(self.accept_lengths)

    @property
    def tau(self) -> float:
        """Committed tokens per target forward, root included; the first token costs no step. 1 without a step."""
        return sum(self.accept_lengths) / self.steps if self.steps else 1.0


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What a deployment serves; `repetition_penalty` is that of requests that set none."""

    name: str
    vocab_size: int
    max_len: int
    heads: tuple[str, ...]
    policies: tuple[str, ...]
    default_policy: str
    default_budget: int
    has_tokenizer: bool
    has_chat_template: bool
    running: int = 0
    version: str = ""
    repetition_penalty: float = 1.0
