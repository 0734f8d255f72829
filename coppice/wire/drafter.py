"""DrafterService: plain values to messages and back."""

from __future__ import annotations

from coppice import limits
from coppice.errors import InvalidField
from coppice.messages.steps import (
    Advance,
    DraftStep,
    HeadDescription,
    OpenDraft,
    TreeDelta,
    WeightsHeader,
    WeightsPart,
    WeightsSynced,
)
from coppice.v1 import drafter_pb2 as drafter
from coppice.wire.common import (
    features_to_wire,
    fence_to_wire,
    q_rows_to_wire,
    read_features,
    read_fence,
    read_ids,
    read_q_rows,
    read_rejection,
    read_sampling,
    read_tree,
    rejection_to_wire,
    sampling_to_wire,
    tree_to_wire,
)


def open_draft_to_wire(request: OpenDraft) -> drafter.DraftRequest:
    """OpenDraft to the stream's first message."""
    return drafter.DraftRequest(
        open=drafter.OpenDraft(
            session=request.session,
            ids=request.ids,
            sampling=sampling_to_wire(request.sampling),
            coupled=request.coupled,
            features=features_to_wire(request.features),
            want_q_rows=request.want_q_rows,
            want_misses=request.want_misses,
        )
    )


def draft_step_to_wire(step: DraftStep) -> drafter.DraftRequest:
    """DraftStep to its message."""
    return drafter.DraftRequest(
        step=drafter.DraftStep(
            fence=fence_to_wire(step.fence),
            root=step.root,
            budget=step.budget,
            advance=drafter.Advance(
                ids=step.advance.ids,
                features=features_to_wire(step.advance.features),
                rejection=rejection_to_wire(step.advance.rejection),
            ),
        )
    )


def read_draft_request(message: drafter.DraftRequest, vocab_size: int) -> OpenDraft | DraftStep:
    """Message to OpenDraft or DraftStep; vocab_size 0 admits any id."""
    kind = message.WhichOneof("kind")
    if kind == "open":
        opening = message.open
        limits.check_session("open.session", opening.session)
        return OpenDraft(
            opening.session,
            read_ids("open.ids", opening.ids, vocab_size),
            read_sampling(opening.sampling, vocab_size),
            opening.coupled,
            read_features("open.features", opening),
            opening.want_q_rows,
            opening.want_misses,
        )
    if kind != "step":
        raise InvalidField("kind", "neither open nor step is set")
    step = message.step
    limits.check_range("step.budget", step.budget, 0, limits.MAX_HEAD_NODES)
    limits.check_ids("step.root", [step.root], vocab_size)
    advance = Advance(
        read_ids("step.advance.ids", step.advance.ids, vocab_size, low=0),
        read_features("step.advance.features", step.advance),
        read_rejection("step.advance.rejection", step.advance),
    )
    return DraftStep(read_fence(step.fence), step.root, step.budget, advance)


def draft_opened_to_wire(weights_version: int) -> drafter.DraftResponse:
    """The answer to OpenDraft."""
    return drafter.DraftResponse(opened=drafter.DraftOpened(weights_version=weights_version))


def delta_to_wire(delta: TreeDelta) -> drafter.DraftResponse:
    """TreeDelta to its message."""
    return drafter.DraftResponse(
        delta=drafter.TreeDelta(
            fence=fence_to_wire(delta.fence),
            nodes=tree_to_wire(delta.nodes),
            last=delta.last,
            forward_ns=delta.forward_ns,
            total_ns=delta.total_ns,
            q_rows=q_rows_to_wire(delta.q_rows),
            miss=delta.miss,
        )
    )


def read_draft_response(message: drafter.DraftResponse) -> TreeDelta | int:
    """Message to TreeDelta, or the weights version for `opened`."""
    kind = message.WhichOneof("kind")
    if kind == "opened":
        return int(message.opened.weights_version)
    if kind != "delta":
        raise InvalidField("kind", "neither opened nor delta is set")
    delta = message.delta
    nodes = read_tree("delta.nodes", delta.nodes, limits.MAX_TREE_NODES)
    q_rows = read_q_rows("delta.q_rows", delta, len(nodes))
    miss = delta.miss if delta.HasField("miss") else None
    if miss is not None:
        limits.check_range("delta.miss", miss, 0, 1)
    return TreeDelta(read_fence(delta.fence), nodes, delta.last, delta.forward_ns, delta.total_ns, q_rows, miss)


def head_to_wire(head: HeadDescription) -> drafter.DescribeHeadResponse:
    """HeadDescription to its message."""
    return drafter.DescribeHeadResponse(
        name=head.name,
        kind=head.kind,
        vocab_size=head.vocab_size,
        weights_version=head.weights_version,
        feature_layers=head.feature_layers,
        sessions=head.sessions,
        sessions_opened=head.sessions_opened,
        sessions_closed=head.sessions_closed,
        weights_hash=head.weights_hash,
    )


def read_head(message: drafter.DescribeHeadResponse) -> HeadDescription:
    """Message to HeadDescription."""
    limits.check_count("feature_layers", len(message.feature_layers), 0, limits.MAX_FEATURE_LAYERS)
    return HeadDescription(
        message.name,
        message.kind,
        message.vocab_size,
        message.weights_version,
        tuple(message.feature_layers),
        message.sessions,
        message.sessions_opened,
        message.sessions_closed,
        message.weights_hash,
    )


def weights_to_wire(piece: WeightsHeader | WeightsPart) -> drafter.SyncWeightsRequest:
    """A weight sync's header or part to its message."""
    if isinstance(piece, WeightsPart):
        return drafter.SyncWeightsRequest(part=drafter.WeightsPart(number=piece.number, data=piece.data))
    return drafter.SyncWeightsRequest(
        header=drafter.WeightsHeader(
            head=piece.head,
            version=piece.version,
            parent=piece.parent,
            parent_hash=piece.parent_hash,
            weights_hash=piece.weights_hash,
            sha256=piece.sha256,
            size=piece.size,
            parts=piece.parts,
        )
    )


def read_weights(message: drafter.SyncWeightsRequest, most_bytes: int) -> WeightsHeader | WeightsPart:
    """Message to a header or a part; `most_bytes` bounds the file."""
    kind = message.WhichOneof("kind")
    if kind == "part":
        limits.check_count("part.data", len(message.part.data), 1, limits.CHUNK_BYTES)
        return WeightsPart(message.part.number, message.part.data)
    if kind != "header":
        raise InvalidField("kind", "neither header nor part is set")
    header = message.header
    limits.check_session("header.head", header.head)
    limits.check_range("header.size", header.size, 1, most_bytes)
    limits.check_range("header.parts", header.parts, 1, header.size)
    for name in ("parent_hash", "weights_hash", "sha256"):
        limits.check_hash(f"header.{name}", getattr(header, name))
    return WeightsHeader(
        header.head,
        header.version,
        header.parent,
        header.parent_hash,
        header.weights_hash,
        header.sha256,
        header.size,
        header.parts,
    )


def synced_to_wire(synced: WeightsSynced) -> drafter.SyncWeightsResponse:
    """WeightsSynced to its message."""
    return drafter.SyncWeightsResponse(version=synced.version, weights_hash=synced.weights_hash, swap_ns=synced.swap_ns)


def read_synced(message: drafter.SyncWeightsResponse) -> WeightsSynced:
    """Message to WeightsSynced."""
    limits.check_hash("weights_hash", message.weights_hash)
    return WeightsSynced(message.version, message.weights_hash, message.swap_ns)
