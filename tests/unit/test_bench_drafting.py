"""`coppice bench drafting`: what it measures of a head, and what the command prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coppice.bench.cli import app
from coppice.bench.paper.drafting import CONTEXT, STRIDE, measure, read_text
from tests.tiny import make_target
from tests.unit.test_feature_heads import HIDDEN, VOCAB, build, save_random


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    return make_target(folder, VOCAB, layers=8, hidden=HIDDEN, tokenizer=False)


@pytest.mark.parametrize("kind", ["eagle3", "specblock"])
def test_a_draft_takes_longer_than_its_forwards_and_nothing_is_left(kind: str, target: Path, tmp_path: Path) -> None:
    head, _ = build(kind, save_random(tmp_path, kind), target)
    text = read_text(target, head.description.feature_layers, "float32", "cpu", drafts=6)
    assert (len(text.ids), tuple(text.rows.shape)) == (CONTEXT + 6 * STRIDE + 1, (CONTEXT + 6 * STRIDE + 1, 3 * HIDDEN))
    found = measure(head, text, budget=8, temperature=1.0, drafts=6)
    assert min(found.draft_ms, found.forwards_ms) > 0
    assert found.ratio > 0.5  # of a few drafts on a machine that may be busy
    assert head.pool.used_blocks == 0


def test_the_command_has_a_check_for_each_head_budget_and_temperature(target: Path, tmp_path: Path) -> None:
    file, folder = tmp_path / "out.json", save_random(tmp_path / "head", "eagle3")
    asked = ["drafting", "--target", str(target), "--heads", "look=lookup", "--dtype", "float32", "--drafts", "5"]
    told = CliRunner().invoke(app, [*asked, "--heads", f"eagle=eagle3:{folder}", "--json", str(file)])
    assert told.exit_code in (0, 1), told.output
    written = json.loads(file.read_text())
    names = [f"eagle, budget {budget}, T {hot}: draft over bare forwards" for budget in (8, 31) for hot in (0, 1)]
    assert [check["name"] for check in written["checks"]] == names
    assert written["ok"] == (told.exit_code == 0) == all(check["value"] <= 1.15 for check in written["checks"])
    assert CliRunner().invoke(app, asked).exit_code == 2
