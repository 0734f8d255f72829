"""`coppice bench ablate`: SpecBlock heads that lack one part each, trained alike, and what each part is worth."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from coppice.bench.paper.head_cache import HeadCache
from coppice.bench.paper.replay import Replay
from coppice.bench.report import Check
from coppice.errors import InvalidField
from coppice.training.data.target_answers import Lessons
from coppice.training.losses.acceptance import Acceptance

FULL, NO_SHIFT = "full", "no-layer-shift"
UNMASKED, UNMASKED_NO_SHIFT = "no-valid-prefix", "no-valid-prefix-no-layer-shift"
VARIANTS: dict[str, dict[str, Any]] = {
    FULL: {},
    NO_SHIFT: {"switches": {"layer_shift": False}},
    "no-prefix-broadcast": {"switches": {"prefix_broadcast": False}},
    UNMASKED: {"valid_prefix": False},
    UNMASKED_NO_SHIFT: {"valid_prefix": False, "switches": {"layer_shift": False}},
    "no-cross-block": {"cross_block": False},
    "no-rope-advance": {"switches": {"block_rope_advance": False}},
}
"""what train_feature_head is told"""


GUIDED, UNIFORM = "rank-guided 2,4,6,4 (released)", "uniform 4"
"""trees of coppice.bench.paper.rank, of equally many nodes"""
ARCHITECTURE = (
    ("SpecBlock", FULL, GUIDED),
    ("- prefix broadcast", "no-prefix-broadcast", GUIDED),
    ("- layer-wise shift", NO_SHIFT, GUIDED),
    ("- valid-prefix curriculum", UNMASKED, GUIDED),
    ("- rank-guided branching", FULL, UNIFORM),
)
ADAPTATION = (
    ("SpecBlock+adapt", "bandit"),
    ("- cost-aware bandit", "always"),
    ("- head-only action", "full-only"),
    ("head-only action alone", "head-only"),
    ("SpecBlock", "never"),
)


@dataclass(frozen=True, slots=True)
class Ablation:
    """A row of SpecBlock's table 2: tau, and over the row that lacks nothing; an adapted head's speed over never's."""

    variant: str
    tau: float
    over_whole: float
    speedup: float | None = None


def ablations(gains: Mapping[str, Mapping[str, Replay]], adapted: Path | None) -> list[Ablation]:
    """The rows of the variants that were trained, and of the policies in what `bench adapt --json` wrote.

    Raises InvalidField for a file that it did not write, or without the bandit.
    """
    found = [(name, gains[variant][tree].tau) for name, variant, tree in ARCHITECTURE if variant in gains]
    rows = [Ablation(name, tau, tau / found[0][1]) for name, tau in found]
    told = read_adapted(adapted) if adapted else {}
    for name, policy in ADAPTATION:
        if row := told.get(policy):
            rows.append(Ablation(name, row["tau"], row["tau"] / told["bandit"]["tau"], row["speedup"]))
    return rows


def read_adapted(file: Path) -> dict[str, dict[str, Any]]:
    """The rows of a `bench adapt --json` by policy. Raises InvalidField."""
    try:
        told = json.loads(file.read_text(encoding="utf-8"))
        rows = {row["method"]: row for row in told["rows"] if str(told["command"]).startswith("bench adapt")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidField("adaptation", f"{file}: {error}") from None
    if "bandit" not in rows:
        raise InvalidField("adaptation", f"{file} holds no bandit of `coppice bench adapt`")
    return rows


def ablation_table(rows: Iterable[Ablation], title: str) -> Table:
    """Table 2 of SpecBlock at this scale."""
    table = Table("variant", title=title, title_justify="left", box=SIMPLE_HEAD)
    for heading in ("tau", "over whole", "tokens/s x never"):
        table.add_column(heading, justify="right")
    for row in rows:
        speedup = "-" if row.speedup is None else f"{row.speedup:.2f}"
        table.add_row(row.variant, f"{row.tau:.2f}", f"{row.over_whole:.2f}", speedup)
    return table


def trained(cache: HeadCache, variants: Sequence[str], lessons: Lessons) -> dict[str, Path]:
    """A head's folder for every variant."""
    return {
        name: cache.head(name, "specblock", lessons, {} if name == FULL else {name: ""}, **VARIANTS[name])
        for name in variants
    }


def effect_checks(found: dict[str, Acceptance]) -> list[Check]:
    """What the paper reports of the layer-wise shift and of the second block (SpecBlock, figure 5, table 2)."""
    full = found[FULL].alphas
    checks = [at_least("alpha of block 2, slot 1, over block 1, slot 4", full[1, 0], full[0, 3])]
    for shifted, plain in ((FULL, NO_SHIFT), (UNMASKED, UNMASKED_NO_SHIFT)):
        if shifted in found and plain in found:
            checks += [
                at_least(
                    f"alpha_{slot + 1} of {shifted} over {plain}",
                    found[shifted].alphas[0, slot],
                    found[plain].alphas[0, slot],
                )
                for slot in (2, 3)
            ]
    return checks


def at_least(name: str, one: float, other: float) -> Check:
    """That `one` is larger than `other`."""
    ratio = round(one / max(other, 1e-9), 3)
    return Check(name, ratio, "> 1", ratio > 1, f"{one:.3f} against {other:.3f}")
