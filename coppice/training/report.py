"""The report of a feature head's training: how often its drafts are right, by place, as JSON and as a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from coppice.training.losses.acceptance import Acceptance

REPORT, PICTURE = "report.json", "report.png"


def to_json(found: Acceptance, log: list[dict[str, Any]]) -> dict[str, Any]:
    """alpha along a greedy chain, alpha by block and slot, accepted length, the rank head's table, the run's log."""
    return {
        "accepted_length": found.length,
        "alpha": list(found.alphas.values()),
        "alpha_by_block_and_slot": [
            {"block": block + 1, "slot": slot + 1, "alpha": alpha, "rows": found.rows[block, slot]}
            for (block, slot), alpha in found.alphas.items()
        ],
        "rank_head": found.ranks() if int(found.confusion.sum()) else [],
        "log": log,
    }


def write_report(folder: Path, found: Acceptance, log: list[dict[str, Any]]) -> None:
    """report.json and report.png: alpha along the chain, alpha by block, held-out figures over the run."""
    told = to_json(found, log)
    (folder / REPORT).write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    draw(told, folder / PICTURE)


def draw(told: dict[str, Any], file: Path) -> None:
    """Three panels, as in figure 5 of SpecBlock."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    chain, blocks, run = figure.subplots(1, 3)
    chain.plot(range(1, len(told["alpha"]) + 1), told["alpha"], marker="o")
    chain.set(
        title=f"along a chain (accepted length {told['accepted_length']:.2f})", xlabel="k", ylabel="alpha", ylim=(0, 1)
    )
    for block in sorted({place["block"] for place in told["alpha_by_block_and_slot"]}):
        places = [place for place in told["alpha_by_block_and_slot"] if place["block"] == block]
        blocks.plot([p["slot"] for p in places], [p["alpha"] for p in places], marker="o", label=f"block {block}")
    blocks.set(title="by block", xlabel="slot", ylabel="alpha", ylim=(0, 1))
    blocks.legend()
    seen = [row["tokens"] for row in told["log"]]
    run.plot(seen, [row["accepted length"] for row in told["log"]], marker=".")
    run.set(title="accepted length on held-out text", xlabel="tokens", ylabel="tokens a step")
    figure.savefig(file, dpi=120)
