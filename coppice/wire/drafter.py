"""DrafterService: its messages as plain values."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from coppice import limits
from coppice.errors import InvalidField
from coppice.v1 import drafter_pb2 as drafter
from coppice.wire import common
from coppice.wire.codec import Length, OneOf, Within, carried_by, codec


@carried_by(drafter.OpenDraft)
class OpenDraft:
    """Opens a drafting session on prompt + committed ids."""

    session: common.PlainName
    ids: Annotated[list[int], Length(1, limits.MAX_CONTEXT)]
    sampling: common.Sampling
    coupled: bool = True
    features: common.Features | None = None
    want_q_rows: bool = False
    want_misses: bool = False
    prediction: Annotated[tuple[int, ...], common.ANYWHERE] = ()
    """what the answer is expected to be"""
    salt: common.Salt = ""
    """whose session it is: look-up with a memory drafts from ended sessions of the same; empty: from none"""


@carried_by(drafter.DraftOpened)
class DraftOpened:
    """The head holds the prompt."""

    weights_version: common.Version
    variant: Annotated[int, Within(0, limits.MAX_VARIANTS)] = 0
    """of the weights, which drafts"""
    kind: Annotated[int, Within(0, limits.MAX_KINDS)] = 0
    """of text that the prompt was taken for; 0: none that is known"""
    sketch: Annotated[tuple[float, ...], Length(0, limits.SKETCH), Within(-1.001, 1.001)] = ()
    """what the prompt is like, to a head that reads features"""


@carried_by(drafter.Advance)
class Advance:
    """Committed ids the drafter has not seen, the earlier root first."""

    ids: Annotated[list[int], common.ANYWHERE] = field(default_factory=list)
    features: common.Features | None = None
    rejection: common.Rejection | None = None


@carried_by(drafter.DraftStep)
class DraftStep:
    """Asks for a tree of at most `budget` nodes below `root`."""

    fence: common.Fence
    root: int
    budget: Annotated[int, Within(0, limits.MAX_HEAD_NODES)]
    advance: Advance


@carried_by(drafter.TreeDelta)
class TreeDelta:
    """Nodes to append to a step's tree; parents may lie in earlier deltas. `miss` is 1 - r of the step's rejection."""

    fence: common.Fence
    nodes: common.Tree
    last: bool
    forward_ns: common.Nanoseconds = 0
    total_ns: common.Nanoseconds = 0
    q_rows: Annotated[NDArray[np.float32] | None, common.rows_of("nodes")] = None
    miss: Annotated[float | None, Within(0, 1)] = None
    predicted: Annotated[tuple[common.Position, ...], common.NODES] = ()
    """of each node its place in the prediction, from 1; 0 for none"""
    made: Annotated[tuple[common.Node, ...], common.NODES] = ()
    """how many of the nodes each forward of the head made; empty when one made all"""


@carried_by(drafter.DescribeHeadResponse)
class HeadDescription:
    """What a drafter serves."""

    name: common.Name
    kind: common.Name
    vocab_size: Annotated[int, Within(0, limits.MAX_TOKEN_ID + 1)]
    weights_version: common.Version = 0
    feature_layers: common.Layers = ()
    sessions: common.Count = 0
    sessions_opened: common.Count = 0
    sessions_closed: common.Count = 0
    weights_hash: common.HashOrNone = b""
    expected_acceptance: Annotated[tuple[float, ...], Length(0, limits.MAX_TREE_DEPTH), Within(0, 1)] = ()
    tokenizer_hash: common.HashOrNone = b""
    """`vocabulary_hash` of the head's own tokenizer; empty when it has none"""


@carried_by(drafter.WeightsHeader)
class WeightsHeader:
    """Announces a safetensors file: new values of some of `parent`'s tensors. Hashes are SHA-256 of all weights."""

    head: common.PlainName
    version: common.Version
    parent: common.Version
    parent_hash: common.Hash
    weights_hash: common.Hash


@carried_by(drafter.WeightsPart)
class WeightsPart:
    """The next piece of the file."""

    data: Annotated[bytes, Length(1, limits.CHUNK_BYTES)]


@carried_by(drafter.SyncWeightsResponse)
class WeightsSynced:
    """The weights in use now, and how long drafting stood still."""

    version: common.Version
    weights_hash: common.Hash
    swap_ns: common.Nanoseconds = 0


_REQUEST: OneOf[OpenDraft | DraftStep, drafter.DraftRequest] = OneOf(drafter.DraftRequest)
_RESPONSE: OneOf[DraftOpened | TreeDelta, drafter.DraftResponse] = OneOf(drafter.DraftResponse)
_WEIGHTS: OneOf[WeightsHeader | WeightsPart, drafter.SyncWeightsRequest] = OneOf(drafter.SyncWeightsRequest)

draft_request_to_wire = _REQUEST.to_wire
draft_response_to_wire = _RESPONSE.to_wire
head_to_wire: Callable[[HeadDescription], drafter.DescribeHeadResponse] = codec(HeadDescription).to_wire
read_head = codec(HeadDescription).read
weights_to_wire = _WEIGHTS.to_wire
read_weights = _WEIGHTS.read
synced_to_wire: Callable[[WeightsSynced], drafter.SyncWeightsResponse] = codec(WeightsSynced).to_wire
read_synced = codec(WeightsSynced).read


def read_draft_response(message: drafter.DraftResponse) -> DraftOpened | TreeDelta:
    """Message to DraftOpened or TreeDelta."""
    answer = _RESPONSE.read(message)
    if isinstance(answer, TreeDelta) and answer.predicted:
        limits.check_count("delta.predicted", len(answer.predicted), len(answer.nodes), len(answer.nodes))
    if isinstance(answer, TreeDelta) and answer.made:
        limits.check_count("delta.made", sum(answer.made), len(answer.nodes), len(answer.nodes))
    return answer


def read_draft_request(message: drafter.DraftRequest, vocab_size: int) -> OpenDraft | DraftStep:
    """Message to OpenDraft or DraftStep; vocab_size 0 admits any id."""
    request = _REQUEST.read(message)
    if isinstance(request, OpenDraft):
        limits.check_ids("open.ids", request.ids, vocab_size)
        limits.check_ids("open.prediction", request.prediction, vocab_size)
        common.check_bias(request.sampling, vocab_size)
        field, features = "open.features", request.features
    else:
        limits.check_ids("step.root", [request.root], vocab_size)
        limits.check_ids("step.advance.ids", request.advance.ids, vocab_size)
        field, features = "step.advance.features", request.advance.features
    if features is not None and features.inline is not None:  # they come from the verifier that the session follows
        raise InvalidField(field, "holds rows; name the session of a verifier to follow")
    return request


def vocabulary_hash(vocabulary: Mapping[str, int]) -> bytes:
    """SHA-256 of a tokenizer's tokens in the order of their ids: equal where ids mean the same."""
    digest = hashlib.sha256()
    for token, number in sorted(vocabulary.items(), key=lambda item: (item[1], item[0])):
        digest.update(f"{number} {token}\n".encode())
    return digest.digest()
