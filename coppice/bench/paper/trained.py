"""Tables of heads that are trained alike: what each part of SpecBlock is worth, and the heads it is compared with."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from coppice.bench.options import Options
from coppice.bench.paper.rank import accepted_along, add_alphas, add_trees, tree_gains
from coppice.bench.paper.replay import Replay
from coppice.bench.progress import Progress
from coppice.bench.report import Check, Report
from coppice.config.sections import ADAPTED_KINDS, FEATURE_KINDS
from coppice.errors import InvalidField
from coppice.heads.checkpoints import WEIGHTS
from coppice.machine import usable_cores
from coppice.training import feature_heads
from coppice.training.data.target_answers import (
    ANSWERS_SHARE,
    AnswerPlan,
    TargetAnswers,
    record_answers,
    recorded_lines,
)
from coppice.training.dtype import fast_dtype, usable_device
from coppice.training.losses.acceptance import Acceptance
from coppice.training.report import REPORT
from coppice.training.run_folder import read_run, work_folder, write_run
from coppice.training.trainer import RunOptions

FULL, NO_SHIFT = "full", "no-layer-shift"
UNMASKED, UNMASKED_NO_SHIFT = "no-valid-prefix", "no-valid-prefix-no-layer-shift"
VARIANTS: dict[str, dict[str, Any]] = {
    FULL: {},
    NO_SHIFT: {"shape": {"layer_shift": False}},
    "no-prefix-broadcast": {"shape": {"prefix_broadcast": False}},
    UNMASKED: {"learning": {"valid_prefix": False}},
    UNMASKED_NO_SHIFT: {"learning": {"valid_prefix": False}, "shape": {"layer_shift": False}},
    "no-cross-block": {"learning": {"blocks": 1}},
    "no-rope-advance": {"shape": {"block_rope_advance": False}},
}
"""The arguments of train_feature_head for a head that lacks a part."""
GUIDED, UNIFORM = "rank-guided 2,4,6,4 (released)", "uniform 4"
"""trees of coppice.bench.paper.rank, of equally many nodes"""
ARCHITECTURE = (
    ("SpecBlock", FULL, GUIDED),
    ("- prefix broadcast", "no-prefix-broadcast", GUIDED),
    ("- layer-wise shift", NO_SHIFT, GUIDED),
    ("- valid-prefix curriculum", UNMASKED, GUIDED),
    ("- rank-guided branching", FULL, UNIFORM),
)
BASELINES = tuple(kind for kind in FEATURE_KINDS if kind not in ADAPTED_KINDS)
"""the kinds that no trained head is shipped of"""


@dataclass(frozen=True)
class HeadCache:
    """Heads trained alike into a folder: the same answers in the same order, and none trained twice."""

    lines: list[str]
    target: Path
    folder: Path
    tokens: int
    answers: TargetAnswers
    device: str

    @classmethod
    def of(cls, target: Path, options: Options) -> HeadCache:
        """The cache of the options; records the target's answers unless they are there."""
        assert options.cache is not None
        folder = options.cache / "lessons"
        lines = options.data or recorded_lines(folder) or ["code=python:stdlib"]
        plan = AnswerPlan(int(options.tokens * ANSWERS_SHARE), seed=0)
        dtype = str(fast_dtype(usable_device(options.device))).removeprefix("torch.")
        with Progress("tokens") as progress:
            progress.say("recording the target's answers")
            answers = record_answers(
                lines, target, folder, plan, device=options.device, dtype=dtype, progress=progress.reach
            )
        return cls(lines, target, options.cache, options.tokens, answers, options.device)

    def head(self, name: str, kind: str, flags: Mapping[str, str], **arguments: Any) -> Path:
        """The folder of a head, trained unless it is there; a run that was stopped goes on.

        arguments: more of train_feature_head's; flags: the same as a command would say it, for the head's card.
        """
        out = self.folder / f"{name}-{self.tokens}"
        if (out / "config.json").exists():
            return out
        work = work_folder(out)
        own = {"kind": kind, "target": self.target.name, "out": out.name, "tokens": str(self.tokens)}
        write_run(work, "head", self.lines, own | dict(flags))
        self.answers.describe(work / "data")
        done = feature_heads.train_feature_head(
            kind,
            self.answers,
            self.target,
            work,
            feature_heads.head_schedule(self.tokens),
            options=RunOptions(True, self.device, usable_cores() if self.device == "cpu" else 1),
            **arguments,
        )
        if not done:
            raise KeyboardInterrupt
        feature_heads.export_feature_head(work, out, self.answers, self.target, self.device)
        return out


def variants_of(names: Sequence[str] | None) -> list[str]:
    """The variants of the names, all of them without any. Raises InvalidField."""
    variants = list(names or VARIANTS)
    if FULL not in variants or not set(variants) <= set(VARIANTS):
        raise InvalidField("only", f"{FULL} and any of {', '.join(VARIANTS)}")
    return variants


def run_ablate(cache: HeadCache, report: Report, variants: Sequence[str], count: int, budget: int) -> None:
    """Train the variants, and let each draft along held-out greedy answers of the target."""
    folders, accepted, gains = {}, {}, {}
    with Progress("heads", 2 * len(variants)) as progress:
        for name in variants:
            progress.say(f"training {name}")
            folders[name] = cache.head(name, "specblock", {} if name == FULL else {name: ""}, **VARIANTS[name])
            progress.add()
        texts = cache.answers.greedy_texts(count)
        halves = [(text, len(text.ids) // 4) for text in texts]
        for name, folder in folders.items():
            progress.say(f"{name} drafts along the answers")
            accepted[name] = accepted_along(folder, cache.target, texts)
            gains[name] = tree_gains(folder, cache.target, halves, budget)
            progress.add()
    add_alphas(report, f"alpha by block and slot after {cache.tokens:,} tokens, held-out greedy answers", accepted)
    add_trees(report, f"trees of at most {budget} nodes along the same answers", gains)
    report.add_figures("table_2", f"one part less each: trees of {budget} nodes", table_2(gains))
    report.goals += effect_goals(accepted)


def table_2(gains: Mapping[str, Mapping[str, Replay]]) -> list[dict[str, Any]]:
    """The upper half of SpecBlock's table 2: tau of the trained variants, and over the row that lacks nothing.

    Its lower half, policies of adaptation, is the table of `coppice bench adapt`.
    """
    taus = [(name, gains[variant][tree].tau) for name, variant, tree in ARCHITECTURE if variant in gains]
    return [{"variant": name, "tau": tau, "over_whole": tau / taus[0][1]} for name, tau in taus]


def effect_goals(accepted: Mapping[str, Acceptance]) -> Iterator[Check]:
    """What the paper reports of the layer-wise shift and of the second block (SpecBlock, figure 5, table 2)."""
    full = accepted[FULL].alphas
    pairs = {"alpha of block 2, slot 1, over block 1, slot 4": (full[1, 0], full[0, 3])}
    for shifted, plain in ((FULL, NO_SHIFT), (UNMASKED, UNMASKED_NO_SHIFT)):
        if shifted in accepted and plain in accepted:
            for slot in (2, 3):
                both = (accepted[shifted].alphas[0, slot], accepted[plain].alphas[0, slot])
                pairs[f"alpha_{slot + 1} of {shifted} over {plain}"] = both
    for name, (one, other) in pairs.items():
        yield Check.at_least(name, one / max(other, 1e-9), 1.0, f"{one:.3f} against {other:.3f}")


def run_baselines(cache: HeadCache, report: Report, kinds: Sequence[str]) -> None:
    """Train a head of each kind; those that are there stay."""
    trained = []
    with Progress("heads", len(kinds)) as progress:
        for kind in kinds:
            progress.say(f"training {kind}")
            trained.append(baseline(kind, cache.head(kind, kind, {})))
            progress.add()
    report.add_figures("baselines", f"heads after {cache.tokens:,} tokens, on held-out text", trained)
    report.notes += (f"--head {each['kind']}={each['kind']}:{each['folder']}" for each in trained)


def baseline(kind: str, folder: Path) -> dict[str, Any]:
    """What is known of a trained head without drafting in a pipeline.

    `alpha k` is how often, on held-out text, the k-th greedy draft token is right when those before it were; `length`
    is the tokens a step of a greedy chain; `loss` is the held-out loss of the best weights, whose terms differ between
    kinds; `minutes` were spent in training steps.
    """
    report = json.loads((folder / REPORT).read_text(encoding="utf-8"))
    state = read_run(work_folder(folder)).state
    with safe_open(folder / WEIGHTS, "pt") as file:
        tensors = [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118
    return {
        "kind": kind,
        "parameters": sum(tensor.numel() for tensor in tensors if tensor.is_floating_point()),
        **{f"alpha_{place}": alpha for place, alpha in enumerate(report["alpha"][:4], 1)},
        "length": report["accepted_length"],
        "loss": state["best_loss"],
        "minutes": state["seconds"] / 60,
        "folder": str(folder),
    }
