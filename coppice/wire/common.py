"""Parts of messages that more than one service speaks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from coppice import limits
from coppice.errors import InvalidField
from coppice.messages.steps import FeatureRef, Features, Fence, Rejection, TopLogProbs
from coppice.speculation.sampling import SamplingParams
from coppice.speculation.tree import DraftTree
from coppice.v1 import common_pb2 as common
from coppice.wire.shapes import Part, Shape, array


def _sampling_fields(params: SamplingParams) -> dict[str, Any]:
    fields = dict(params)
    if "seed" not in params.model_fields_set:
        del fields["seed"]
    return fields


def _read_sampling(owner: Any, name: str, path: str) -> SamplingParams:
    """The SamplingParams of a message; unset they are greedy."""
    message = getattr(owner, name)
    limits.check_range("sampling.temperature", message.temperature, 0, limits.MAX_TEMPERATURE)
    limits.check_count("sampling.logit_bias", len(message.logit_bias), 0, limits.MAX_BIASES)
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
            **({"seed": message.seed} if message.HasField("seed") else {}),
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidField(f"sampling.{first['loc'][0]}", first["msg"]) from None


def check_bias(params: SamplingParams, vocab_size: int) -> None:
    """Raise InvalidField on a biased id at or above the logits width; 0 means that any id will do."""
    if params.logit_bias:
        limits.check_ids("sampling.logit_bias", list(params.logit_bias), vocab_size)


def _tree_fields(tree: DraftTree) -> dict[str, Any]:
    return {
        "tokens": tree.tokens.tolist(),
        "parents": tree.parents.tolist(),
        "log_probs": tree.log_probs.tolist(),
    }


def _read_tree(owner: Any, name: str, path: str) -> DraftTree:
    """An unjudged DraftTree whose three lists are equally long."""
    message = getattr(owner, name)
    count = len(message.tokens)
    limits.check_count(f"{path}{name}.tokens", count, 0, limits.MAX_TREE_NODES)
    if len(message.parents) != count or len(message.log_probs) != count:
        raise InvalidField(path + name, "tokens, parents and log_probs differ in length")
    return DraftTree(
        array(message.tokens, np.int64), array(message.parents, np.int64), array(message.log_probs, np.float32)
    )


def q_rows(tree: str) -> Part:
    """Float32 rows (n, vocab) as little-endian bytes, one row for each node of the field `tree`."""

    def write(rows: NDArray[np.float32]) -> bytes:
        return rows.astype("<f4").tobytes()

    def read(owner: Any, name: str, path: str) -> NDArray[np.float32] | None:
        if not owner.HasField(name):
            return None
        data, nodes = getattr(owner, name), len(getattr(owner, tree).tokens)
        if nodes == 0 or len(data) % (4 * nodes):
            raise InvalidField(path + name, f"{len(data)} bytes are not {nodes} equal float32 rows")
        return np.frombuffer(data, dtype="<f4").reshape(nodes, -1)

    return Part(write, read)


def _read_penalty(owner: Any, name: str, path: str) -> float:
    return getattr(owner, name) or 1.0


PENALTY = Part(None, _read_penalty)
"""The default repetition penalty that a server describes; one that knows of none has none."""
SAMPLING = Part(_sampling_fields, _read_sampling)
TREE = Part(_tree_fields, _read_tree)
FENCE = Shape(Fence, common.Fence)
FEATURE_REF = Shape(FeatureRef, common.FeatureRef)
FEATURES = Shape(Features, common.Features)
TOP = Shape(TopLogProbs, common.TopLogProbs, parallel=("ids", "log_probs"))
REJECTION = Shape(Rejection, common.Rejection, parallel=("top_ids", "top_log_probs"))
