"""The report of a feature head's training: how often its drafts are right, by place, as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from coppice.training.losses.acceptance import Acceptance

REPORT = "report.json"


def to_json(acceptance: Acceptance, log: list[dict[str, Any]]) -> dict[str, Any]:
    """Return alpha by block and slot, the accepted length, the rank head's table and the run's log."""
    return {
        "accepted_length": acceptance.length,
        "alpha": list(acceptance.alphas.values()),
        "alpha_by_block_and_slot": [
            {"block": block + 1, "slot": slot + 1, "alpha": alpha, "rows": acceptance.rows[block, slot]}
            for (block, slot), alpha in acceptance.alphas.items()
        ],
        "rank_head": acceptance.ranks() if int(acceptance.confusion.sum()) else [],
        "log": log,
    }


def write_report(folder: Path, acceptance: Acceptance, log: list[dict[str, Any]]) -> None:
    """Write report.json."""
    (folder / REPORT).write_text(json.dumps(to_json(acceptance, log), indent=1) + "\n", encoding="utf-8")
