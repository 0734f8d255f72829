"""What is admitted of each field that is bounded by itself, by message and field; what depends on others is beside it.

The bounds of a number are on the number, those of a text, bytes or a repeated field on its length, and ELEMENTS has
those of the numbers in a repeated field. NaN is within no bounds. A function raises InvalidField. Sampling and trees,
which are classes of other folders, are bounded where they are read (common.py).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

from coppice import limits
from coppice.errors import InvalidField

Bound = tuple[float, float] | Callable[[str, Any], None]


def _check_dtype(field: str, dtype: str) -> None:
    if dtype not in ("", "float32", "bfloat16"):
        raise InvalidField(field, f"{dtype[:32]!r} is not float32 or bfloat16")


def _check_origins(field: str, origins: Any) -> None:
    for origin in origins:
        limits.check_range(field, origin, 1, 2)


_ANYWHERE = (0, limits.MAX_CONTEXT)
_NODES = (0, limits.MAX_TREE_NODES)
_ONE_MORE = (0, limits.MAX_TREE_NODES + 1)
_COUNT = (0, limits.MAX_COUNT)
_TIME = (0, limits.MAX_DEADLINE_NS)
_VERSION = (0, limits.MAX_VERSION)
_ID = (0, limits.MAX_TOKEN_ID)
_FINITE = (-sys.float_info.max, sys.float_info.max)
_LOG_PROB = (-math.inf, limits.LOG_PROB_TOLERANCE)

DRAWN = {"drawn_id": _ID, "drawn_log_prob": _LOG_PROB}
"""of NextRoot"""
BOUNDS: dict[str, dict[str, Bound]] = {
    "Fence": {"step": _COUNT, "committed_len": _ANYWHERE, "weights_version": _VERSION, "deadline_ns": _TIME},
    "Row": {"ids": (1, limits.MAX_ROW_SUPPORT)},
    "Features": {"start": _ANYWHERE, "count": _ANYWHERE, "dtype": _check_dtype},
    "FeatureRef": {
        "session": limits.check_session,
        "verifier": (0, limits.MAX_ADDRESS_CHARS),
        "start": _ANYWHERE,
        "count": _ANYWHERE,
        "layers": (0, limits.MAX_FEATURE_LAYERS),
    },
    "Commit": {"ids": (1, limits.MAX_TREE_DEPTH + 1), "root": _ID},
    "Rejection": {
        "position": _ANYWHERE,
        "parent": _NODES,
        "target_id": _ID,
        "top_ids": (0, limits.MAX_TOP_N),
        "tail": (0, 1 + limits.LOG_PROB_TOLERANCE),
    },
    "OpenSession": {
        "session": limits.check_session,
        "ids": (1, limits.MAX_CONTEXT),
        "stop_ids": (0, limits.MAX_STOP_IDS),
        "feature_layers": (0, limits.MAX_FEATURE_LAYERS),
        "rejection_top_n": (0, limits.MAX_TOP_N),
        "top_log_probs": (0, limits.MAX_TOP_LOG_PROBS),
        "salt": (0, limits.MAX_SALT_CHARS),
    },
    "TopLogProbs": {"ids": (0, limits.MAX_TOP_LOG_PROBS)},
    "SessionOpened": {
        "top": (0, 1),
        **dict.fromkeys(("prompt_log_probs", "prompt_top", "cached_tokens"), _ANYWHERE),
    },
    "Verdict": {"accepted": _NODES, "verified": _NODES, "log_probs": _NODES, "budget_hint": _NODES, "top": _ONE_MORE},
    "NextRoot": {**DRAWN},
    "VerifyTimings": {
        **dict.fromkeys(("queue_ns", "forward_ns", "accept_ns", "total_ns", "plain_ns"), _TIME),
        **dict.fromkeys(("rows", "sessions"), _COUNT),
    },
    "DescribeTargetResponse": {
        **dict.fromkeys(("name", "dtype"), (0, limits.MAX_NAME_CHARS)),
        **dict.fromkeys(("weights_hash", "bits_hash"), (0, limits.HASH_BYTES)),
        "vocab_size": (1, limits.MAX_TOKEN_ID + 1),
        "max_len": (1, limits.MAX_CONTEXT),
        "layers": (1, limits.MAX_LAYERS),
        "hidden_size": (1, limits.MAX_HIDDEN),
        "eos_ids": (0, limits.MAX_STOP_IDS),
        "repetition_penalty": (0, limits.MAX_REPETITION_PENALTY),
        **dict.fromkeys(("kv_tokens", "kv_tokens_used", "prefix_cache_tokens"), _COUNT),
        **dict.fromkeys(("sessions", "sessions_opened", "sessions_closed"), _COUNT),
    },
    "OpenDraft": {
        "session": limits.check_session,
        "ids": (1, limits.MAX_CONTEXT),
        "prediction": _ANYWHERE,
        "salt": (0, limits.MAX_SALT_CHARS),
    },
    "DraftStep": {"budget": (0, limits.MAX_HEAD_NODES)},
    "Advance": {"ids": _ANYWHERE},
    "DraftOpened": {
        "weights_version": _VERSION,
        "variant": (0, limits.MAX_VARIANTS),
        "kind": (0, limits.MAX_KINDS),
        "sketch": (0, limits.SKETCH),
    },
    "TreeDelta": {"miss": (0, 1), "forward_ns": _TIME, "total_ns": _TIME, "predicted": _NODES, "made": _NODES},
    "DescribeHeadResponse": {
        **dict.fromkeys(("name", "kind"), (0, limits.MAX_NAME_CHARS)),
        **dict.fromkeys(("weights_hash", "tokenizer_hash"), (0, limits.HASH_BYTES)),
        "vocab_size": (0, limits.MAX_TOKEN_ID + 1),
        "weights_version": _VERSION,
        "feature_layers": (0, limits.MAX_FEATURE_LAYERS),
        "expected_acceptance": (0, limits.MAX_TREE_DEPTH),
        **dict.fromkeys(("sessions", "sessions_opened", "sessions_closed"), _COUNT),
    },
    "WeightsHeader": {
        "version": _VERSION,
        "parent": _VERSION,
        "head": limits.check_session,
        **dict.fromkeys(("parent_hash", "weights_hash", "sha256"), limits.check_hash),
    },
    "WeightsPart": {"data": (1, limits.CHUNK_BYTES)},
    "SyncWeightsResponse": {"version": _VERSION, "weights_hash": limits.check_hash, "swap_ns": _TIME},
    "HeadStatus": {
        **dict.fromkeys(("version", "good_version"), _VERSION),
        **dict.fromkeys(("queries", "events", "reverts"), _COUNT),
    },
    "ActionStatus": {
        **dict.fromkeys(("value", "error"), _FINITE),
        **dict.fromkeys(("updates", "samples", "capacity"), _COUNT),
    },
    "KindStatus": {
        "kind": (0, limits.MAX_KINDS),
        **dict.fromkeys(("variant", "other"), (0, limits.MAX_VARIANTS)),
        **dict.fromkeys(("queries", "measured", "texts", "updates"), _COUNT),
        **dict.fromkeys(("tau", "share", "gain", "error", "saves_s", "costs_s"), _FINITE),
    },
    "ReplicaStatus": {"version": _VERSION},
    "VersionStatus": {"version": _VERSION, "queries": _COUNT, "tau": _FINITE},
    "QueryPoint": {
        "query": _COUNT,
        "version": _VERSION,
        **dict.fromkeys(("tau", "tokens_per_s", "s"), _FINITE),
    },
    "RollbackResponse": {"version": _VERSION},
    "Change": {"query": _COUNT, "version": _VERSION, "train_s": _FINITE, "sync_s": _FINITE},
    "GenerateRequest": {
        "resume_ids": _ANYWHERE,
        "stop": (0, limits.MAX_STOP_STRINGS),
        "policy": (0, limits.MAX_POLICY_CHARS),
        "budget": _NODES,
        "top_log_probs": (0, limits.MAX_TOP_LOG_PROBS),
        "min_tokens": _ANYWHERE,
    },
    "StepTree": {"tokens": _NODES},
    "Chunk": {"origins": _check_origins},
}

ELEMENTS: dict[str, dict[str, tuple[float, float]]] = {
    "Row": {"ids": _ID, "log_probs": _LOG_PROB, "raw_log_probs": _LOG_PROB},
    "TopLogProbs": {"ids": _ID, "log_probs": _LOG_PROB},
    "SessionOpened": {"prompt_log_probs": _LOG_PROB},
    "FeatureRef": {"layers": (0, limits.MAX_LAYERS)},
    "Rejection": {"top_ids": _ID, "top_log_probs": _LOG_PROB},
    "Verdict": {"accepted": _NODES, "verified": _NODES, "log_probs": _LOG_PROB},
    "DescribeTargetResponse": {"eos_ids": _ID},
    "DraftOpened": {"sketch": (-1.001, 1.001)},
    "TreeDelta": {"predicted": _ANYWHERE, "made": _NODES},
    "DescribeHeadResponse": {"feature_layers": (0, limits.MAX_LAYERS), "expected_acceptance": (0, 1)},
}
