"""The report of a feature head's training: how often its drafts are right, by place, as JSON and as a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from coppice.training.losses.acceptance import Acceptance

REPORT, PICTURE = "report.json", "report.png"


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
    """Write report.json and report.png."""
    report = to_json(acceptance, log)
    (folder / REPORT).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    draw(report, folder / PICTURE)


def draw(report: dict[str, Any], file: Path) -> None:
    """Draw alpha along the chain, alpha by block and the accepted length over the run (SpecBlock, figure 5)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    chain, blocks, run = figure.subplots(1, 3)
    chain.plot(range(1, len(report["alpha"]) + 1), report["alpha"], marker="o")
    chain.set(
        title=f"along a chain (accepted length {report['accepted_length']:.2f})",
        xlabel="k",
        ylabel="alpha",
        ylim=(0, 1),
    )
    for block in sorted({place["block"] for place in report["alpha_by_block_and_slot"]}):
        places = [place for place in report["alpha_by_block_and_slot"] if place["block"] == block]
        blocks.plot([p["slot"] for p in places], [p["alpha"] for p in places], marker="o", label=f"block {block}")
    blocks.set(title="by block", xlabel="slot", ylabel="alpha", ylim=(0, 1))
    blocks.legend()
    seen = [row["tokens"] for row in report["log"]]
    run.plot(seen, [row["accepted length"] for row in report["log"]], marker=".")
    run.set(title="accepted length on held-out text", xlabel="tokens", ylabel="tokens a step")
    figure.savefig(file, dpi=120)
