"""VerifierService: plain values to messages and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from coppice import limits
from coppice.errors import InvalidField
from coppice.messages.steps import (
    Commit,
    FeatureRef,
    Features,
    NextRoot,
    OpenSession,
    Row,
    SessionOpened,
    TargetDescription,
    TopLogProbs,
    Verdict,
    VerifyStep,
    VerifyTimings,
    committed_hash,
)
from coppice.v1 import common_pb2 as common
from coppice.v1 import verifier_pb2 as verifier
from coppice.wire.bounds import DRAWN
from coppice.wire.common import FEATURE_REF, FEATURES, PENALTY, SAMPLING, TREE, check_bias, q_rows
from coppice.wire.shapes import OneOf, Part, Shape

_ROW = Shape(Row, common.Row, parallel=("ids", "log_probs", "raw_log_probs"))


def _next_fields(root: NextRoot) -> dict[str, Any]:
    if root.row is None:
        return {"drawn_id": root.drawn_id, "drawn_log_prob": root.drawn_log_prob}
    return {"row": _ROW.fields(root.row)}


def _read_next(owner: Any, name: str, path: str) -> NextRoot | None:
    if not owner.HasField(name):
        return None
    message = owner.next
    if message.WhichOneof("source") == "drawn_id":
        for field, (low, high) in DRAWN.items():
            limits.check_range(f"next.{field}", getattr(message, field), low, high)
        return NextRoot(None, message.drawn_id, message.drawn_log_prob)
    return NextRoot(_ROW.read(message.row, "next.row."))


_NEXT = Part(_next_fields, _read_next)
_TIMINGS = Shape(VerifyTimings, verifier.VerifyTimings)
_OPEN = Shape(OpenSession, verifier.OpenSession, sampling=SAMPLING)
_STEP = Shape(VerifyStep, verifier.VerifyStep, tree=TREE, q_rows=q_rows("tree"))
_REQUEST: OneOf[OpenSession | VerifyStep, verifier.VerifyRequest] = OneOf(
    verifier.VerifyRequest, open=_OPEN, step=_STEP
)
_OPENED = Shape(SessionOpened, verifier.SessionOpened, next=_NEXT)
_VERDICT = Shape(Verdict, verifier.Verdict, next=_NEXT)
_RESPONSE: OneOf[SessionOpened | Verdict, verifier.VerifyResponse] = OneOf(
    verifier.VerifyResponse, opened=_OPENED, verdict=_VERDICT
)
_COMMIT = Shape(Commit, verifier.Commit)
_TARGET = Shape(TargetDescription, verifier.DescribeTargetResponse, repetition_penalty=PENALTY)

verify_request_to_wire = _REQUEST.to_wire
verify_response_to_wire = _RESPONSE.to_wire
target_to_wire, read_target = _TARGET.to_wire, _TARGET.read


def read_verify_request(message: verifier.VerifyRequest, vocab_size: int, max_len: int) -> OpenSession | VerifyStep:
    """Message to OpenSession or VerifyStep, bounded by the target's width and context."""
    request = _REQUEST.read(message)
    if isinstance(request, VerifyStep):
        limits.check_range("step.root", request.root, 0, vocab_size - 1)
        return request
    limits.check_ids("open.ids", request.ids, vocab_size)
    check_bias(request.sampling, vocab_size)
    if len(request.ids) >= max_len:
        raise InvalidField("open.ids", f"{len(request.ids)} ids leave no room in the target's context of {max_len}")
    limits.check_range("open.prompt_tokens", request.prompt_tokens, 0, len(request.ids))
    limits.check_range("open.max_len", request.max_len, len(request.ids) + 1, max_len)
    limits.check_range("open.min_len", request.min_len, 0, request.max_len)
    return request


def read_verify_response(message: verifier.VerifyResponse) -> SessionOpened | Verdict:
    """Message to SessionOpened or Verdict."""
    if message.WhichOneof("kind") == "opened" and not message.opened.HasField("next"):
        raise InvalidField("opened.next", "is not set")
    return _RESPONSE.read(message)


def check_answer(
    answer: SessionOpened | Verdict, question: OpenSession | VerifyStep, opening: OpenSession, vocab_size: int
) -> None:
    """Raise InvalidField unless a target of this width may answer a question of the session `opening` so."""
    if isinstance(answer, SessionOpened) and isinstance(question, OpenSession):
        _check_opened(answer, opening, vocab_size)
    elif isinstance(answer, Verdict) and isinstance(question, VerifyStep):
        _check_verdict(answer, question, opening, vocab_size)
    else:
        raise InvalidField("kind", "does not fit the question")


def _check_opened(opened: SessionOpened, opening: OpenSession, vocab_size: int) -> None:
    length, features = len(opening.ids), opened.features
    scored = (length - 1) * opening.want_prompt_log_probs
    _require(
        fence=opened.fence.committed_len == length,
        next=_is_next(opened.next, opening, vocab_size),
        features=features is None or features.start + features.count == length,
        top=_is_top(opened.top, 1, opening, vocab_size),
        prompt_log_probs=len(opened.prompt_log_probs) == scored,
        prompt_top=_is_top(opened.prompt_top, scored, opening, vocab_size),
    )


def _check_verdict(verdict: Verdict, step: VerifyStep, opening: OpenSession, vocab_size: int) -> None:
    """It accepts a path of the step's tree, and fence and next root are those behind that path."""
    accepted, root, before, fence = verdict.accepted, verdict.next, step.fence, verdict.fence
    parents = [-1, *step.tree.parents.tolist()]
    nodes = range(1, len(parents))
    is_path = all(node in nodes and parents[node] == at for at, node in zip((0, *accepted), accepted, strict=False))
    ids = [step.root, *step.tree.tokens[np.array(accepted if is_path else (), np.int64) - 1].tolist()]
    committed = before.step, before.committed_len + len(ids), committed_hash(ids, before.committed_hash)
    ended = committed[1] >= opening.max_len or (len(ids) > 1 and ids[-1] in opening.stop_ids)
    _require(
        accepted=is_path,
        verified=not verdict.pruned or {*accepted} <= {*verdict.verified} <= {*nodes},
        fence=(fence.step, fence.committed_len, fence.committed_hash) == committed,
        next=_is_next(root, opening, vocab_size) if root else ended,
        log_probs=len(verdict.log_probs) == len(accepted) * opening.want_log_probs,
        top=_is_top(verdict.top, len(accepted) + (root is not None), opening, vocab_size),
    )


def _is_next(root: NextRoot, opening: OpenSession, vocab_size: int) -> bool:
    row = root.row
    if row is None:
        return root.drawn_id < vocab_size
    scored = row.raw_log_probs is not None or not opening.want_log_probs
    return scored and bool(row.ids[-1] < vocab_size) and bool((np.diff(row.ids) > 0).all())


def _is_top(top: Sequence[TopLogProbs], count: int, opening: OpenSession, vocab_size: int) -> bool:
    most = opening.top_log_probs
    of_width = all(0 < len(best.ids) <= most and best.ids.max() < vocab_size for best in top)
    return of_width and len(top) == (count if most else 0)


def _require(**fields: bool) -> None:
    """Raise InvalidField naming the first field that is not as it must be."""
    for name, is_right in fields.items():
        if not is_right:
            raise InvalidField(name, "does not fit the question")


def fetch_to_wire(ref: FeatureRef, follow: bool = False) -> verifier.FetchFeaturesRequest:
    """A window to fetch to its message. follow: whether the session's commits are wanted, too."""
    return verifier.FetchFeaturesRequest(ref=FEATURE_REF.to_wire(ref), follow=follow)


def read_fetch(message: verifier.FetchFeaturesRequest) -> FeatureRef:
    """Message to the window to fetch. Raises InvalidField."""
    limits.check_range("ref.count", message.ref.count, not message.follow, limits.MAX_CONTEXT)
    return FEATURE_REF.read(message.ref, "ref.")


def feature_part_to_wire(part: Features) -> verifier.FetchFeaturesResponse:
    """Inline rows of a window to their message."""
    return verifier.FetchFeaturesResponse(features=FEATURES.to_wire(part))


def commit_to_wire(commit: Commit) -> verifier.FetchFeaturesResponse:
    """A commit, with its features, to its message."""
    features = FEATURES.fields(commit.features) if commit.features else None
    return verifier.FetchFeaturesResponse(commit=_COMMIT.fields(commit), features=features)


def read_feature_part(message: verifier.FetchFeaturesResponse) -> Features:
    """Message to inline rows. Raises InvalidField."""
    part = FEATURES.read(message.features, "features.")
    if part.inline is None:
        raise InvalidField("features", "holds no inline rows")
    limits.check_range("features.inline", len(part.inline), 1, limits.CHUNK_BYTES)
    return part


def read_commit(message: verifier.FetchFeaturesResponse, vocab_size: int) -> Commit:
    """Message to a commit, with the features of its positions if it has any. Raises InvalidField."""
    commit = _COMMIT.read(message.commit, "commit.")
    limits.check_ids("commit.ids", commit.ids, vocab_size)
    if commit.root is not None:
        limits.check_ids("commit.root", [commit.root], vocab_size)
    limits.check_range("commit.fence.committed_len", commit.fence.committed_len, len(commit.ids), limits.MAX_CONTEXT)
    if not message.HasField("features"):
        return commit
    features = FEATURES.read(message.features, "features.")
    if features.inline is None or (features.start, features.count) != (commit.start, len(commit.ids)):
        raise InvalidField("features", f"are not those of the {len(commit.ids)} positions from {commit.start}")
    return replace(commit, features=features)
