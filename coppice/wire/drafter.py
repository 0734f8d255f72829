"""DrafterService: plain values to messages and back."""

from __future__ import annotations

from coppice import limits
from coppice.messages.steps import Advance, DraftOpened, DraftStep, HeadDescription, OpenDraft, TreeDelta
from coppice.messages.weights import WeightsHeader, WeightsPart, WeightsSynced
from coppice.v1 import drafter_pb2 as drafter
from coppice.wire.common import SAMPLING, TREE, check_bias, q_rows
from coppice.wire.shapes import OneOf, Shape

_OPEN = Shape(OpenDraft, drafter.OpenDraft, sampling=SAMPLING)
_ADVANCE = Shape(Advance, drafter.Advance)
_STEP = Shape(DraftStep, drafter.DraftStep)
_REQUEST: OneOf[OpenDraft | DraftStep, drafter.DraftRequest] = OneOf(drafter.DraftRequest, open=_OPEN, step=_STEP)
_OPENED = Shape(DraftOpened, drafter.DraftOpened)
_DELTA = Shape(TreeDelta, drafter.TreeDelta, nodes=TREE, q_rows=q_rows("nodes"))
_RESPONSE: OneOf[DraftOpened | TreeDelta, drafter.DraftResponse] = OneOf(
    drafter.DraftResponse, opened=_OPENED, delta=_DELTA
)
_HEAD = Shape(HeadDescription, drafter.DescribeHeadResponse)
_HEADER = Shape(WeightsHeader, drafter.WeightsHeader)
_PART = Shape(WeightsPart, drafter.WeightsPart)
_WEIGHTS: OneOf[WeightsHeader | WeightsPart, drafter.SyncWeightsRequest] = OneOf(
    drafter.SyncWeightsRequest, header=_HEADER, part=_PART
)
_SYNCED = Shape(WeightsSynced, drafter.SyncWeightsResponse)

draft_request_to_wire = _REQUEST.to_wire
draft_response_to_wire = _RESPONSE.to_wire
head_to_wire, read_head = _HEAD.to_wire, _HEAD.read
weights_to_wire = _WEIGHTS.to_wire
synced_to_wire, read_synced = _SYNCED.to_wire, _SYNCED.read


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
        check_bias(request.sampling, vocab_size)
    else:
        limits.check_ids("step.root", [request.root], vocab_size)
        limits.check_ids("step.advance.ids", request.advance.ids, vocab_size)
    return request


def read_weights(message: drafter.SyncWeightsRequest, most_bytes: int) -> WeightsHeader | WeightsPart:
    """Message to a header or a part; `most_bytes` bounds the file."""
    piece = _WEIGHTS.read(message)
    if isinstance(piece, WeightsHeader):
        limits.check_range("header.size", piece.size, 1, most_bytes)
        limits.check_range("header.parts", piece.parts, 1, piece.size)
    return piece
