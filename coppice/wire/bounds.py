"""What is admitted of each field that is bounded by itself, by message and field; what depends on others is beside it.

The bounds of a number are on the number, those of a text, bytes or a repeated field on its length. A function raises
InvalidField. Sampling and trees, which are classes of other folders, are bounded where they are read (common.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from coppice import limits
from coppice.errors import InvalidField

Bound = tuple[int, int] | Callable[[str, Any], None]


def _check_dtype(field: str, dtype: str) -> None:
    if dtype not in ("", "float32", "bfloat16"):
        raise InvalidField(field, f"{dtype[:32]!r} is not float32 or bfloat16")


def _check_origins(field: str, origins: Any) -> None:
    for origin in origins:
        limits.check_range(field, origin, 1, 2)


_ANYWHERE = (0, limits.MAX_CONTEXT)
_NODES = (0, limits.MAX_TREE_NODES)

BOUNDS: dict[str, dict[str, Bound]] = {
    "Fence": {"committed_len": _ANYWHERE, "deadline_ns": (0, limits.MAX_DEADLINE_NS)},
    "Row": {"ids": (1, limits.MAX_ROW_SUPPORT)},
    "Features": {"start": _ANYWHERE, "count": _ANYWHERE, "dtype": _check_dtype},
    "FeatureRef": {
        "session": limits.check_session,
        "verifier": (0, limits.MAX_ADDRESS_CHARS),
        "start": _ANYWHERE,
        "count": (1, limits.MAX_CONTEXT),
    },
    "Rejection": {"position": _ANYWHERE, "parent": _NODES, "top_ids": (0, limits.MAX_TOP_N)},
    "OpenSession": {
        "session": limits.check_session,
        "ids": (1, limits.MAX_CONTEXT),
        "stop_ids": (0, limits.MAX_STOP_IDS),
        "feature_layers": (0, limits.MAX_FEATURE_LAYERS),
        "rejection_top_n": (0, limits.MAX_TOP_N),
    },
    "Verdict": {"accepted": _NODES, "verified": _NODES, "log_probs": _NODES, "budget_hint": _NODES},
    "DescribeTargetResponse": {"eos_ids": (0, limits.MAX_STOP_IDS)},
    "OpenDraft": {"session": limits.check_session, "ids": (1, limits.MAX_CONTEXT)},
    "DraftStep": {"budget": (0, limits.MAX_HEAD_NODES)},
    "Advance": {"ids": _ANYWHERE},
    "TreeDelta": {"miss": (0, 1)},
    "DescribeHeadResponse": {"feature_layers": (0, limits.MAX_FEATURE_LAYERS)},
    "WeightsHeader": {
        "head": limits.check_session,
        **dict.fromkeys(("parent_hash", "weights_hash", "sha256"), limits.check_hash),
    },
    "WeightsPart": {"data": (1, limits.CHUNK_BYTES)},
    "SyncWeightsResponse": {"weights_hash": limits.check_hash},
    "GenerateRequest": {
        "resume_ids": _ANYWHERE,
        "stop": (0, limits.MAX_STOP_STRINGS),
        "policy": (0, limits.MAX_POLICY_CHARS),
        "budget": _NODES,
    },
    "StepTree": {"tokens": _NODES},
    "Chunk": {"origins": _check_origins},
}
