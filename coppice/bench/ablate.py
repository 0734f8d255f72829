"""`coppice bench ablate`: SpecBlock heads that lack one part each, trained alike, and what each part is worth."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coppice.bench.report import Check
from coppice.training import feature_heads
from coppice.training.acceptance import Acceptance
from coppice.training.export import write_run
from coppice.training.lessons import Lessons

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


@dataclass(frozen=True)
class Plan:
    """Every variant sees the same lessons, in the same order, from the same start."""

    lines: list[str]
    target: Path
    cache: Path
    tokens: int
    variants: tuple[str, ...]
    num_workers: int = 1
    seed: int = 0


def trained(plan: Plan, lessons: Lessons) -> dict[str, Path]:
    """A head's folder for every variant; those that the cache holds already are not trained again."""
    folders = {}
    for name in plan.variants:
        out = plan.cache / f"{name}-{plan.tokens}"
        work = out.with_name(out.name + ".work")
        if not (out / "config.json").exists():
            flags = {"kind": "specblock", "target": plan.target.name, "out": out.name, "tokens": str(plan.tokens)}
            write_run(work, "head", plan.lines, flags | ({} if name == FULL else {name: ""}))
            lessons.describe(work / "data")
            done = feature_heads.train_feature_head(
                "specblock",
                lessons,
                plan.target,
                work,
                feature_heads.head_schedule(plan.tokens),
                resume=True,
                num_workers=plan.num_workers,
                seed=plan.seed,
                **VARIANTS[name],
            )
            if not done:
                raise KeyboardInterrupt
            feature_heads.export_feature_head(work, out, lessons, plan.target)
        folders[name] = out
    return folders


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
