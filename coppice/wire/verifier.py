"""VerifierService: plain values to messages and back."""

from __future__ import annotations

from typing import Any

import numpy as np

from coppice import limits
from coppice.errors import InvalidField
from coppice.messages.steps import (
    FeatureRef,
    Features,
    NextRoot,
    OpenSession,
    Row,
    SessionOpened,
    TargetDescription,
    Verdict,
    VerifyStep,
    VerifyTimings,
)
from coppice.v1 import common_pb2 as common
from coppice.v1 import verifier_pb2 as verifier
from coppice.wire.common import (
    features_to_wire,
    fence_to_wire,
    q_rows_to_wire,
    read_features,
    read_fence,
    read_ids,
    read_q_rows,
    read_ref,
    read_rejection,
    read_sampling,
    read_tree,
    ref_to_wire,
    rejection_to_wire,
    sampling_to_wire,
    tree_to_wire,
)


def _next_to_wire(root: NextRoot | None) -> verifier.NextRoot | None:
    if root is None:
        return None
    if root.row is None:
        return verifier.NextRoot(drawn_id=root.drawn_id, drawn_log_prob=root.drawn_log_prob)
    row, raw = root.row, root.row.raw_log_probs
    return verifier.NextRoot(
        row=common.Row(
            ids=row.ids.tolist(),
            log_probs=row.log_probs.tolist(),
            raw_log_probs=None if raw is None else raw.tolist(),
        )
    )


def _read_next(owner: Any) -> NextRoot | None:
    if not owner.HasField("next"):
        return None
    message = owner.next
    if message.WhichOneof("source") == "drawn_id":
        return NextRoot(None, message.drawn_id, message.drawn_log_prob)
    row = message.row
    limits.check_count("next.row.ids", len(row.ids), 1, limits.MAX_ROW_SUPPORT)
    limits.check_count("next.row.log_probs", len(row.log_probs), len(row.ids), len(row.ids))
    raw = None
    if row.raw_log_probs:
        limits.check_count("next.row.raw_log_probs", len(row.raw_log_probs), len(row.ids), len(row.ids))
        raw = np.array(row.raw_log_probs, dtype=np.float32)
    return NextRoot(Row(np.array(row.ids, dtype=np.int64), np.array(row.log_probs, dtype=np.float64), raw))


def open_session_to_wire(request: OpenSession) -> verifier.VerifyRequest:
    """OpenSession to the stream's first message."""
    return verifier.VerifyRequest(
        open=verifier.OpenSession(
            session=request.session,
            ids=request.ids,
            sampling=sampling_to_wire(request.sampling),
            stop_ids=sorted(request.stop_ids),
            max_len=request.max_len,
            feature_layers=request.feature_layers,
            rejection_top_n=request.rejection_top_n,
            want_log_probs=request.want_log_probs,
        )
    )


def read_verify_request(message: verifier.VerifyRequest, vocab_size: int, max_len: int) -> OpenSession | VerifyStep:
    """Message to OpenSession or VerifyStep, bounded by the target's width and context."""
    kind = message.WhichOneof("kind")
    if kind == "open":
        return _read_open_session(message.open, vocab_size, max_len)
    if kind == "step":
        return _read_verify_step(message.step, vocab_size)
    raise InvalidField("kind", "neither open nor step is set")


def _read_open_session(message: verifier.OpenSession, vocab_size: int, max_len: int) -> OpenSession:
    limits.check_session("open.session", message.session)
    ids = read_ids("open.ids", message.ids, vocab_size)
    if len(ids) >= max_len:
        raise InvalidField("open.ids", f"{len(ids)} ids leave no room in the target's context of {max_len}")
    limits.check_count("open.stop_ids", len(message.stop_ids), 0, limits.MAX_STOP_IDS)
    limits.check_range("open.max_len", message.max_len, len(ids) + 1, max_len)
    limits.check_count("open.feature_layers", len(message.feature_layers), 0, limits.MAX_FEATURE_LAYERS)
    limits.check_range("open.rejection_top_n", message.rejection_top_n, 0, limits.MAX_TOP_N)
    return OpenSession(
        message.session,
        ids,
        read_sampling(message.sampling),
        frozenset(message.stop_ids),
        message.max_len,
        tuple(message.feature_layers),
        message.rejection_top_n,
        message.want_log_probs,
    )


def _read_verify_step(message: verifier.VerifyStep, vocab_size: int) -> VerifyStep:
    limits.check_range("step.root", message.root, 0, vocab_size - 1)
    tree = read_tree("step.tree", message.tree, limits.MAX_TREE_NODES)
    q_rows = read_q_rows("step.q_rows", message, len(tree))
    return VerifyStep(read_fence(message.fence), message.root, tree, q_rows, message.whole_tree)


def verify_step_to_wire(step: VerifyStep) -> verifier.VerifyRequest:
    """VerifyStep to its message."""
    return verifier.VerifyRequest(
        step=verifier.VerifyStep(
            fence=fence_to_wire(step.fence),
            root=step.root,
            tree=tree_to_wire(step.tree),
            q_rows=q_rows_to_wire(step.q_rows),
            whole_tree=step.whole_tree,
        )
    )


def _timings_to_wire(timings: VerifyTimings) -> verifier.VerifyTimings:
    return verifier.VerifyTimings(
        queue_ns=timings.queue_ns,
        forward_ns=timings.forward_ns,
        accept_ns=timings.accept_ns,
        total_ns=timings.total_ns,
        rows=timings.rows,
        sessions=timings.sessions,
        plain_ns=timings.plain_ns,
    )


def _read_timings(message: verifier.VerifyTimings) -> VerifyTimings:
    return VerifyTimings(
        message.queue_ns,
        message.forward_ns,
        message.accept_ns,
        message.total_ns,
        message.rows,
        message.sessions,
        message.plain_ns,
    )


def opened_to_wire(opened: SessionOpened) -> verifier.VerifyResponse:
    """SessionOpened to its message."""
    return verifier.VerifyResponse(
        opened=verifier.SessionOpened(
            fence=fence_to_wire(opened.fence),
            next=_next_to_wire(opened.next),
            features=features_to_wire(opened.features),
            timings=_timings_to_wire(opened.timings),
        )
    )


def verdict_to_wire(verdict: Verdict) -> verifier.VerifyResponse:
    """Verdict to its message."""
    return verifier.VerifyResponse(
        verdict=verifier.Verdict(
            fence=fence_to_wire(verdict.fence),
            accepted=verdict.accepted,
            next=_next_to_wire(verdict.next),
            verified=verdict.verified,
            features=features_to_wire(verdict.features),
            rejection=rejection_to_wire(verdict.rejection),
            log_probs=verdict.log_probs,
            timings=_timings_to_wire(verdict.timings),
            pruned=verdict.pruned,
            budget_hint=verdict.budget_hint,
        )
    )


def read_verify_response(message: verifier.VerifyResponse) -> SessionOpened | Verdict:
    """Message to SessionOpened or Verdict."""
    kind = message.WhichOneof("kind")
    if kind == "opened":
        opened, root = message.opened, _read_next(message.opened)
        if root is None:
            raise InvalidField("opened.next", "is not set")
        features = read_features("opened.features", opened)
        return SessionOpened(read_fence(opened.fence), root, features, _read_timings(opened.timings))
    if kind != "verdict":
        raise InvalidField("kind", "neither opened nor verdict is set")
    verdict = message.verdict
    limits.check_count("verdict.accepted", len(verdict.accepted), 0, limits.MAX_TREE_NODES)
    limits.check_count("verdict.verified", len(verdict.verified), 0, limits.MAX_TREE_NODES)
    limits.check_count("verdict.log_probs", len(verdict.log_probs), 0, limits.MAX_TREE_NODES)
    limits.check_range("verdict.budget_hint", verdict.budget_hint, 0, limits.MAX_TREE_NODES)
    return Verdict(
        fence=read_fence(verdict.fence),
        accepted=tuple(verdict.accepted),
        next=_read_next(verdict),
        timings=_read_timings(verdict.timings),
        verified=tuple(verdict.verified),
        features=read_features("verdict.features", verdict),
        rejection=read_rejection("verdict.rejection", verdict),
        log_probs=tuple(verdict.log_probs),
        pruned=verdict.pruned,
        budget_hint=verdict.budget_hint if verdict.HasField("budget_hint") else None,
    )


def fetch_to_wire(ref: FeatureRef) -> verifier.FetchFeaturesRequest:
    """A window to fetch to its message."""
    return verifier.FetchFeaturesRequest(ref=ref_to_wire(ref))


def read_fetch(message: verifier.FetchFeaturesRequest) -> FeatureRef:
    """Message to the window to fetch."""
    return read_ref("ref", message.ref)


def feature_part_to_wire(part: Features) -> verifier.FetchFeaturesResponse:
    """Inline rows of a window to their message."""
    return verifier.FetchFeaturesResponse(features=features_to_wire(part))


def read_feature_part(message: verifier.FetchFeaturesResponse) -> Features:
    """Message to inline rows."""
    part = read_features("features", message)
    if part is None or part.inline is None:
        raise InvalidField("features", "holds no inline rows")
    limits.check_range("features.inline", len(part.inline), 1, limits.CHUNK_BYTES)
    return part


def target_to_wire(target: TargetDescription) -> verifier.DescribeTargetResponse:
    """TargetDescription to its message."""
    return verifier.DescribeTargetResponse(
        name=target.name,
        vocab_size=target.vocab_size,
        max_len=target.max_len,
        layers=target.layers,
        hidden_size=target.hidden_size,
        eos_ids=target.eos_ids,
        dtype=target.dtype,
        kv_tokens=target.kv_tokens,
        kv_tokens_used=target.kv_tokens_used,
        sessions=target.sessions,
        sessions_opened=target.sessions_opened,
        sessions_closed=target.sessions_closed,
        weights_hash=target.weights_hash,
    )


def read_target(message: verifier.DescribeTargetResponse) -> TargetDescription:
    """Message to TargetDescription."""
    limits.check_count("eos_ids", len(message.eos_ids), 0, limits.MAX_STOP_IDS)
    return TargetDescription(
        name=message.name,
        vocab_size=message.vocab_size,
        max_len=message.max_len,
        layers=message.layers,
        hidden_size=message.hidden_size,
        eos_ids=tuple(message.eos_ids),
        dtype=message.dtype,
        kv_tokens=message.kv_tokens,
        kv_tokens_used=message.kv_tokens_used,
        sessions=message.sessions,
        sessions_opened=message.sessions_opened,
        sessions_closed=message.sessions_closed,
        weights_hash=message.weights_hash,
    )
