"""Drafting along a recorded text, as the tables of SpecBlock's rank head do it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from coppice.errors import InvalidField
from coppice.heads.base import DraftJob, Growth
from coppice.speculation.tree import DraftTree
from coppice.training.answers import Answer
from coppice.wire.drafter import Advance, OpenDraft
from lab.cli import app as bench
from lab.paper.rank import replay
from tests.unit.test_head_commands import head, place

__all__ = ["place"]

DEMO = Path(__file__).parents[2] / "models" / "demo"


class Knowing:
    """Drafts the next `right` tokens of a text, and beside each a wrong one."""

    def __init__(self, ids: list[int], right: int) -> None:
        self.ids, self.right, self.known = ids, right, 0

    def open(self, key: int, opening: OpenDraft) -> Iterator[None]:
        self.known = len(opening.ids)
        return iter(())

    def close(self, key: int) -> None: ...

    def advance(self, key: int, advance: Advance) -> None:
        assert advance.ids == self.ids[self.known : self.known + len(advance.ids)]
        assert advance.features is not None
        assert (advance.features.start, advance.features.count) == (self.known, len(advance.ids))
        self.known += len(advance.ids)

    def draft(self, jobs: Sequence[DraftJob]) -> Iterator[list[Growth]]:
        (job,) = jobs
        assert (job.root, job.committed_len) == (self.ids[self.known], self.known)
        after = self.ids[self.known + 1 : self.known + 1 + self.right]
        tokens = [token for right in after for token in (right, 999)]
        parents = [max(0, 2 * (at // 2) - 1) for at in range(len(tokens))]
        scores = [-0.1 * (at // 2 + 1) for at in range(len(tokens))]
        yield [Growth(0, DraftTree(tokens, parents, scores), last=True)]  # type: ignore[arg-type]


@pytest.mark.parametrize(("right", "budget", "steps"), [(0, 8, 20), (3, 8, 5), (3, 4, 7)])
def test_a_replay_commits_what_the_text_follows(right: int, budget: int, steps: int) -> None:
    text = Answer(torch.arange(100, 125), torch.zeros(25, 6), torch.zeros(25, 2))
    tau, _, count = replay(Knowing(text.ids.tolist(), right), [(text, 4)], budget)  # type: ignore[arg-type]
    assert (tau, count) == (20 / steps, steps)


def test_rank_reports_the_rank_head_and_the_trees(place: Path, tmp_path: Path) -> None:
    folder = head(place, "specblock")
    flags = ["paper", "rank", "--target", str(place / "target"), "--head", f"sb=specblock:{folder}", "--n", "2"]
    told = CliRunner().invoke(bench, [*flags, "--max-new-tokens", "16", "--json", str(tmp_path / "rank.json")])
    assert told.exit_code == 0, told.output
    figures = json.loads((tmp_path / "rank.json").read_text())["figures"]
    assert sum(line["frequency"] for line in figures["rank_head"]) == pytest.approx(1)
    assert len(figures["trees"]) == 5
    assert all(line["tau"] >= 1 for line in figures["trees"])
    none = CliRunner().invoke(bench, ["paper", "rank", "--target", str(place / "target"), "--head", "l=lookup"])
    assert isinstance(none.exception, InvalidField)
