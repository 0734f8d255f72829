"""Heads trained alike into a folder: the same lessons in the same order, and none trained twice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coppice.training import feature_heads
from coppice.training.cli import work_folder
from coppice.training.data.target_answers import Lessons
from coppice.training.export import write_run


@dataclass(frozen=True)
class HeadCache:
    """What all heads of a folder have in common."""

    lines: list[str]
    target: Path
    folder: Path
    tokens: int
    num_workers: int = 1
    seed: int = 0
    device: str = "cpu"

    def head(self, name: str, kind: str, lessons: Lessons, flags: Mapping[str, str], **told: Any) -> Path:
        """The folder of a head, trained unless it is there; a run that was stopped goes on.

        told: what train_feature_head is told; flags: the same as a command would say it, for the head's card.
        """
        out = self.folder / f"{name}-{self.tokens}"
        if (out / "config.json").exists():
            return out
        work = work_folder(out)
        own = {"kind": kind, "target": self.target.name, "out": out.name, "tokens": str(self.tokens)}
        write_run(work, "head", self.lines, own | dict(flags))
        lessons.describe(work / "data")
        done = feature_heads.train_feature_head(
            kind,
            lessons,
            self.target,
            work,
            feature_heads.head_schedule(self.tokens),
            resume=True,
            num_workers=self.num_workers,
            seed=self.seed,
            device=self.device,
            **told,
        )
        if not done:
            raise KeyboardInterrupt
        feature_heads.export_feature_head(work, out, lessons, self.target, self.device)
        return out
