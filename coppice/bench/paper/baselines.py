"""`coppice bench baselines`: the heads that SpecBlock is compared with, trained on the same data and steps."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from safetensors import safe_open

from coppice.bench.paper.head_cache import HeadCache
from coppice.config.sections import ADAPTED_KINDS, FEATURE_KINDS
from coppice.heads.checkpoints import WEIGHTS
from coppice.training.cli import work_folder
from coppice.training.data.target_answers import Lessons
from coppice.training.export import read_run
from coppice.training.report import REPORT

BASELINES = tuple(kind for kind in FEATURE_KINDS if kind not in ADAPTED_KINDS)
"""the kinds that no trained head is shipped of"""


@dataclass(frozen=True)
class Baseline:
    """A trained head and what is known of it without drafting in a pipeline."""

    kind: str
    folder: str
    parameters: int
    alpha: list[float]
    """on held-out text, how often the k-th greedy draft token is right when those before it were"""
    accepted_length: float
    loss: float
    """held out, of the best weights; what it sums over differs between kinds"""
    minutes: float
    """spent in training steps"""

    @classmethod
    def read(cls, kind: str, folder: Path) -> Baseline:
        """What a folder and the run beside it tell."""
        report = json.loads((folder / REPORT).read_text(encoding="utf-8"))
        state = read_run(work_folder(folder)).state
        with safe_open(folder / WEIGHTS, "pt") as file:
            sizes = [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118
        return cls(
            kind,
            str(folder),
            sum(tensor.numel() for tensor in sizes if tensor.is_floating_point()),
            report["alpha"],
            report["accepted_length"],
            state["best_loss"],
            state["seconds"] / 60,
        )

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return asdict(self)


def trained(cache: HeadCache, kinds: Sequence[str], lessons: Lessons) -> Iterator[Baseline]:
    """A head of each kind, one by one as they are ready."""
    for kind in kinds:
        yield Baseline.read(kind, cache.head(kind, kind, lessons, {}))


def baselines_table(found: Sequence[Baseline], title: str) -> Table:
    """A row for each head. `length`: tokens a step of a greedy chain; losses compare within a kind only."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 0), collapse_padding=True)
    for heading in ("kind", "params", "alpha 1", "2", "3", "4", "length", "loss", "minutes"):
        table.add_column(heading, no_wrap=True)
    for one in found:
        alphas = [f"{alpha:.2f}" for alpha in one.alpha[:4]]
        figures = (f"{one.accepted_length:.2f}", f"{one.loss:.3f}", f"{one.minutes:.1f}")
        table.add_row(one.kind, f"{one.parameters / 1e6:.2f}M", *alphas, *figures)
    return table
