"""VerifierService: its messages as plain values, and what is right of an answer."""

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from coppice import limits
from coppice.errors import InvalidField
from coppice.v1 import verifier_pb2 as verifier
from coppice.wire import common
from coppice.wire.codec import Length, OneOf, Within, carried_by, codec, varint

Forced = Annotated[tuple[common.TokenId, ...], Length(0, limits.MAX_TREE_DEPTH)]


@carried_by(verifier.NextRoot)
class NextRoot:
    """Where the next root comes from: a row to draw from, else the id the verifier drew with the same function."""

    row: common.Row | None = None
    drawn_id: common.TokenId | None = None
    drawn_log_prob: common.LogProb = 0.0


@carried_by(verifier.VerifyTimings)
class VerifyTimings:
    """Times of one request inside the verifier, nanoseconds; rows and sessions of its packed forward.

    `plain_ns` is what that forward would have taken without a draft node; 0 when the verifier does not know.
    """

    queue_ns: common.Nanoseconds = 0
    forward_ns: common.Nanoseconds = 0
    accept_ns: common.Nanoseconds = 0
    total_ns: common.Nanoseconds = 0
    rows: common.Count = 0
    sessions: common.Count = 0
    plain_ns: common.Nanoseconds = 0


@carried_by(verifier.OpenSession)
class OpenSession:
    """Opens a verifier session on prompt + committed ids; the first `prompt_tokens` are the prompt, 0: all of them.

    Below `min_len` tokens in all no id of `stop_ids` is drawn.
    """

    session: common.PlainName
    ids: Annotated[list[int], Length(1, limits.MAX_CONTEXT)]
    sampling: common.Sampling
    stop_ids: Annotated[frozenset[int], Length(0, limits.MAX_STOP_IDS)]
    max_len: int
    feature_layers: Annotated[tuple[int, ...], Length(0, limits.MAX_FEATURE_LAYERS)] = ()
    want_log_probs: bool = False
    prompt_tokens: int = 0
    top_log_probs: Annotated[int, Within(0, limits.MAX_TOP_LOG_PROBS)] = 0
    want_prompt_log_probs: bool = False
    min_len: int = 0
    salt: common.Salt = ""
    """whose session it is: it begins with cached blocks of sessions of the same"""
    grammar: common.Grammar | None = None
    """what the answer behind the prompt must be"""


@carried_by(verifier.SessionOpened)
class SessionOpened:
    """The prefill is done. `top` has an entry for the next root, `prompt_top` one for each of `prompt_log_probs`."""

    fence: common.Fence
    next: NextRoot
    features: common.Features | None
    timings: VerifyTimings
    top: Annotated[tuple[common.TopLogProbs, ...], Length(0, 1)] = ()
    prompt_log_probs: Annotated[tuple[common.LogProb, ...], common.ANYWHERE] = ()
    prompt_top: Annotated[tuple[common.TopLogProbs, ...], common.ANYWHERE] = ()
    cached_tokens: common.Position = 0
    """that were not prefilled again"""
    forced: Forced = ()


@carried_by(verifier.VerifyStep)
class VerifyStep:
    """Verify root + tree. `q_rows` (n, vocab) float32 asks for p/q rejection of a chain.

    The tree's log-scores are calibrated, and the verifier may leave out nodes that do not pay, unless `whole_tree`.
    """

    fence: common.Fence
    root: int
    tree: common.Tree
    q_rows: Annotated[NDArray[np.float32] | None, common.rows_of("tree")] = None
    whole_tree: bool = False


@carried_by(verifier.Verdict)
class Verdict:
    """What the target said about one tree; `next` is None when the text ended inside the path.

    `verified`: the nodes that were, when `pruned` says that others were left out. `budget_hint`: how many nodes to
    draft for the next step at the present load; None: any number.
    """

    fence: common.Fence
    accepted: Annotated[tuple[common.Node, ...], common.NODES]
    next: NextRoot | None
    timings: VerifyTimings
    verified: Annotated[tuple[common.Node, ...], common.NODES] = ()
    log_probs: Annotated[tuple[common.LogProb, ...], common.NODES] = ()
    pruned: bool = False
    budget_hint: common.Node | None = None
    top: Annotated[tuple[common.TopLogProbs, ...], Length(0, limits.MAX_TREE_NODES + 1)] = ()
    """of the accepted tokens and of the next root"""
    forced: Forced = ()
    """ids that a grammar forces behind the next root, but for how the text is cut into ids: drafts of the next step"""


@carried_by(verifier.Commit)
class Commit:
    """What a step committed, sent to the followers of its session; `root` is None when the text has ended."""

    fence: common.Fence
    ids: Annotated[tuple[int, ...], Length(1, limits.MAX_TREE_DEPTH + 1)]
    root: common.TokenId | None = None
    features: common.Features | None = None

    @property
    def start(self) -> int:
        """Position of the first id."""
        return self.fence.committed_len - len(self.ids)


@carried_by(verifier.DescribeTargetResponse)
class TargetDescription:
    """What a verifier serves; `repetition_penalty` is that of sessions that set none."""

    name: common.Name
    """what clients may call it, with commas between; the first is shown"""
    vocab_size: Annotated[int, Within(1, limits.MAX_TOKEN_ID + 1)]
    max_len: Annotated[int, Within(1, limits.MAX_CONTEXT)]
    layers: Annotated[int, Within(1, limits.MAX_LAYERS)]
    hidden_size: Annotated[int, Within(1, limits.MAX_HIDDEN)]
    eos_ids: Annotated[tuple[common.TokenId, ...], Length(0, limits.MAX_STOP_IDS)]
    dtype: common.Name
    kv_tokens: common.Count
    kv_tokens_used: common.Count = 0
    sessions: common.Count = 0
    sessions_opened: common.Count = 0
    sessions_closed: common.Count = 0
    repetition_penalty: common.DefaultPenalty = 1.0
    weights_hash: common.HashOrNone = b""
    """of what was loaded"""
    prefix_cache_tokens: common.Count = 0
    """whose KV is kept for later sessions at most"""
    bits_hash: common.HashOrNone = b""
    """of what some rows say, where bits are promised"""

    @property
    def names(self) -> list[str]:
        """What clients may call the target; the first is shown."""
        return self.name.split(",")


_REQUEST: OneOf[OpenSession | VerifyStep, verifier.VerifyRequest] = OneOf(verifier.VerifyRequest)
_RESPONSE: OneOf[SessionOpened | Verdict, verifier.VerifyResponse] = OneOf(verifier.VerifyResponse)
_COMMIT, _FEATURES, _REF = codec(Commit), codec(common.Features), codec(common.FeatureRef)

verify_request_to_wire = _REQUEST.to_wire
verify_response_to_wire = _RESPONSE.to_wire
target_to_wire: Callable[[TargetDescription], verifier.DescribeTargetResponse] = codec(TargetDescription).to_wire
read_target = codec(TargetDescription).read


def read_verify_request(message: verifier.VerifyRequest, vocab_size: int, max_len: int) -> OpenSession | VerifyStep:
    """Message to OpenSession or VerifyStep, bounded by the target's width and context."""
    request = _REQUEST.read(message)
    if isinstance(request, VerifyStep):
        limits.check_range("step.root", request.root, 0, vocab_size - 1)
        return request
    limits.check_ids("open.ids", request.ids, vocab_size)
    common.check_bias(request.sampling, vocab_size)
    if len(request.ids) >= max_len:
        raise InvalidField("open.ids", f"{len(request.ids)} ids leave no room in the target's context of {max_len}")
    limits.check_range("open.prompt_tokens", request.prompt_tokens, 0, len(request.ids))
    limits.check_range("open.max_len", request.max_len, len(request.ids) + 1, max_len)
    limits.check_range("open.min_len", request.min_len, 0, request.max_len)
    return request


def read_verify_response(message: verifier.VerifyResponse) -> SessionOpened | Verdict:
    """Message to SessionOpened or Verdict."""
    answer = _RESPONSE.read(message)
    root = answer.next
    if root is not None and root.row is None and root.drawn_id is None:
        raise InvalidField("next", "is neither a row nor a drawn id")
    return answer


def fetch_to_wire(ref: common.FeatureRef) -> verifier.FetchFeaturesRequest:
    """The session to follow, to its message."""
    return verifier.FetchFeaturesRequest(ref=_REF.to_wire(ref))


def read_fetch(message: verifier.FetchFeaturesRequest) -> common.FeatureRef:
    """Message to the session to follow. Raises InvalidField."""
    return _REF.read(message.ref, "ref.")


def fed_to_wire(item: common.Features | Commit) -> tuple[bytes, ...]:
    """Feature rows, or a commit with its own, to the parts of a FetchFeaturesResponse: rows are not copied."""
    features, commit = (item.features, _COMMIT.fields(item)) if isinstance(item, Commit) else (item, None)
    head = verifier.FetchFeaturesResponse(commit=commit).SerializeToString()
    if features is None:
        return (head,)
    rows = features.inline or b""
    fields = _FEATURES.to_wire(replace(features, inline=None)).SerializeToString()
    prefix = b"\x0a" + varint(len(rows))  # Features.inline, which goes last, as FetchFeaturesResponse.features does
    size = len(fields) + len(prefix) + len(rows)
    return head + b"\x0a" + varint(size) + fields + prefix, rows


def read_fed(message: verifier.FetchFeaturesResponse, vocab_size: int) -> common.Features | Commit:
    """Message to feature rows, or to a commit with the features of its positions if it has any. Raises InvalidField."""
    features = _FEATURES.read(message.features, "features.") if message.HasField("features") else None
    if not message.HasField("commit"):
        if features is None or not features.inline:
            raise InvalidField("features", "holds no inline rows")
        limits.check_range("features.inline", len(features.inline), 1, limits.CHUNK_BYTES)
        return features
    commit = _COMMIT.read(message.commit, "commit.")
    limits.check_ids("commit.ids", commit.ids, vocab_size)
    if commit.root is not None:
        limits.check_ids("commit.root", [commit.root], vocab_size)
    limits.check_range("commit.fence.committed_len", commit.fence.committed_len, len(commit.ids), limits.MAX_CONTEXT)
    if features and (not features.inline or (features.start, features.count) != (commit.start, len(commit.ids))):
        raise InvalidField("features", f"are not those of the {len(commit.ids)} positions from {commit.start}")
    return replace(commit, features=features)
