"""Parts of messages that more than one service speaks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from coppice import limits
from coppice.errors import InvalidField
from coppice.messages.steps import FeatureRef, Features, Fence, Rejection
from coppice.speculation.sampling import SamplingParams
from coppice.speculation.tree import DraftTree
from coppice.v1 import common_pb2 as common


def fence_to_wire(fence: Fence) -> common.Fence:
    """Fence to its message."""
    return common.Fence(
        step=fence.step,
        committed_len=fence.committed_len,
        committed_hash=fence.committed_hash,
        weights_version=fence.weights_version,
        deadline_ns=fence.deadline_ns,
    )


def read_fence(message: common.Fence) -> Fence:
    """Message to Fence."""
    limits.check_range("fence.committed_len", message.committed_len, 0, limits.MAX_CONTEXT)
    limits.check_range("fence.deadline_ns", message.deadline_ns, 0, limits.MAX_DEADLINE_NS)
    return Fence(
        message.step, message.committed_len, message.committed_hash, message.weights_version, message.deadline_ns
    )


def sampling_to_wire(params: SamplingParams) -> common.Sampling:
    """SamplingParams to its message."""
    return common.Sampling(**dict(params))


def read_sampling(message: common.Sampling, vocab_size: int) -> SamplingParams:
    """Message to SamplingParams; an unset message is greedy. vocab_size 0 admits any id."""
    limits.check_range("sampling.temperature", message.temperature, 0, limits.MAX_TEMPERATURE)
    limits.check_count("sampling.logit_bias", len(message.logit_bias), 0, limits.MAX_BIASES)
    limits.check_ids("sampling.logit_bias", list(message.logit_bias), vocab_size)
    try:
        return SamplingParams(
            temperature=message.temperature,
            top_p=message.top_p if message.HasField("top_p") else 1.0,
            top_k=message.top_k,
            min_p=message.min_p,
            repetition_penalty=message.repetition_penalty if message.HasField("repetition_penalty") else None,
            frequency_penalty=message.frequency_penalty,
            presence_penalty=message.presence_penalty,
            logit_bias=dict(message.logit_bias),
            seed=message.seed,
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidField(f"sampling.{first['loc'][0]}", first["msg"]) from None


def tree_to_wire(tree: DraftTree) -> common.Tree:
    """DraftTree to its message."""
    return common.Tree(tokens=tree.tokens.tolist(), parents=tree.parents.tolist(), log_probs=tree.log_probs.tolist())


def read_tree(field: str, message: common.Tree, most: int) -> DraftTree:
    """Message to an unjudged DraftTree of at most `most` nodes whose three lists are equally long."""
    count = len(message.tokens)
    limits.check_count(f"{field}.tokens", count, 0, most)
    if len(message.parents) != count or len(message.log_probs) != count:
        raise InvalidField(field, "tokens, parents and log_probs differ in length")
    return DraftTree(
        np.array(message.tokens, dtype=np.int64),
        np.array(message.parents, dtype=np.int64),
        np.array(message.log_probs, dtype=np.float32),
    )


def features_to_wire(features: Features | None) -> common.Features | None:
    """Features to their message, None to None."""
    if features is None:
        return None
    message = common.Features(dtype=features.dtype, start=features.start, count=features.count)
    if features.inline is not None:
        message.inline = features.inline
    elif features.ref is not None:
        message.ref.CopyFrom(ref_to_wire(features.ref))
    return message


def ref_to_wire(ref: FeatureRef) -> common.FeatureRef:
    """FeatureRef to its message."""
    return common.FeatureRef(verifier=ref.verifier, session=ref.session, start=ref.start, count=ref.count)


def read_ref(field: str, message: common.FeatureRef) -> FeatureRef:
    """Message to FeatureRef."""
    limits.check_session(f"{field}.session", message.session)
    limits.check_count(f"{field}.verifier", len(message.verifier), 0, limits.MAX_ADDRESS_CHARS)
    limits.check_range(f"{field}.start", message.start, 0, limits.MAX_CONTEXT)
    limits.check_range(f"{field}.count", message.count, 1, limits.MAX_CONTEXT)
    return FeatureRef(message.verifier, message.session, message.start, message.count)


def read_features(field: str, owner: Any, name: str = "features") -> Features | None:
    """The Features of `owner`, None when unset."""
    if not owner.HasField(name):
        return None
    message = getattr(owner, name)
    limits.check_range(f"{field}.start", message.start, 0, limits.MAX_CONTEXT)
    limits.check_range(f"{field}.count", message.count, 0, limits.MAX_CONTEXT)
    if message.dtype not in ("", "float32", "bfloat16"):
        raise InvalidField(f"{field}.dtype", f"{message.dtype[:32]!r} is not float32 or bfloat16")
    source = message.WhichOneof("source")
    ref = read_ref(f"{field}.ref", message.ref) if source == "ref" else None
    inline = message.inline if source == "inline" else None
    return Features(message.start, message.count, message.dtype, inline, ref)


def rejection_to_wire(rejection: Rejection | None) -> common.Rejection | None:
    """Rejection to its message, None to None."""
    if rejection is None:
        return None
    return common.Rejection(
        position=rejection.position,
        parent=rejection.parent,
        target_id=rejection.target_id,
        top_ids=rejection.top_ids.tolist(),
        top_log_probs=rejection.top_log_probs.tolist(),
        tail=rejection.tail,
    )


def read_rejection(field: str, owner: Any) -> Rejection | None:
    """The Rejection of `owner`, None when unset."""
    if not owner.HasField("rejection"):
        return None
    message = owner.rejection
    limits.check_range(f"{field}.position", message.position, 0, limits.MAX_CONTEXT)
    limits.check_range(f"{field}.parent", message.parent, 0, limits.MAX_TREE_NODES)
    limits.check_count(f"{field}.top_ids", len(message.top_ids), 0, limits.MAX_TOP_N)
    limits.check_count(f"{field}.top_log_probs", len(message.top_log_probs), len(message.top_ids), len(message.top_ids))
    return Rejection(
        message.position,
        message.parent,
        message.target_id,
        np.array(message.top_ids, dtype=np.int64),
        np.array(message.top_log_probs, dtype=np.float32),
        message.tail,
    )


def q_rows_to_wire(rows: NDArray[np.float32] | None) -> bytes | None:
    """Float32 rows (n, vocab) to little-endian bytes, None to None."""
    return None if rows is None else rows.astype("<f4").tobytes()


def read_q_rows(field: str, owner: Any, nodes: int) -> NDArray[np.float32] | None:
    """The q rows (nodes, vocab) of `owner`, None when unset."""
    if not owner.HasField("q_rows"):
        return None
    flat = np.frombuffer(owner.q_rows[: len(owner.q_rows) // 4 * 4], dtype="<f4")
    if nodes == 0 or len(owner.q_rows) % (4 * nodes):
        raise InvalidField(field, f"{len(owner.q_rows)} bytes are not {nodes} equal float32 rows")
    return flat.reshape(nodes, -1)


def read_ids(field: str, ids: Sequence[int], vocab_size: int, low: int = 1) -> list[int]:
    """A bounded list of ids below the vocabulary width (0: any)."""
    limits.check_count(field, len(ids), low, limits.MAX_CONTEXT)
    plain = list(ids)
    limits.check_ids(field, plain, vocab_size)
    return plain
