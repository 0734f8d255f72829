"""`coppice bench runahead`: what is an outcome, how often prepared ones hold the real one, and what that is worth."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coppice.bench.bare import settings_of
from coppice.bench.cli import app
from coppice.bench.paper.rank import answers
from coppice.bench.paper.runahead import PREPARED, SEED, Outcomes, outcomes_along, outcomes_of, speedup
from coppice.config.sections import DrafterSettings
from coppice.heads.registry import build_head
from coppice.speculation.tree import DraftTree
from coppice.stack.spec import HeadSpec
from tests.tiny import make_target
from tests.unit.test_feature_heads import HIDDEN, VOCAB, save_random, target

__all__ = ["target"]  # the fixture

PROMPTS, NEW_TOKENS, DEPTH = [[5, 80, 33], [7, 2], [9, 9, 41, 3]], 40, 6


def along(target: Path, temperature: float, budget: int, model: Path | None = None, **flags: object) -> Outcomes:
    """The outcomes of a head that is a model, by default the target itself."""
    head = HeadSpec("model", "lm", model or target, tuple((f"drafter.{name}", value) for name, value in flags.items()))
    texts = answers(target, PROMPTS, NEW_TOKENS, (), temperature, SEED)
    return outcomes_along(build_head(settings_of(head, DrafterSettings())), texts, temperature, budget)


def test_outcomes_leave_the_verified_tree_and_the_likeliest_comes_first() -> None:
    verified = DraftTree([7, 8, 5], [0, 0, 1], [-0.5, -1.0, -0.6])  # type: ignore[arg-type]
    wide = DraftTree(
        [7, 5, 8, 6, 4, 3, 9, 2],  # type: ignore[arg-type]
        [0, 1, 0, 2, 3, 0, 6, 4],  # type: ignore[arg-type]
        [-0.5, -0.6, -1.0, -0.9, -1.5, -1.2, -1.3, -1.0],  # type: ignore[arg-type]
    )
    assert outcomes_of(verified, wide) == [(7, 5, 6), (3,), (8, 4)]
    assert outcomes_of(DraftTree.empty(), wide) == [(7,), (8,), (3,)]
    assert outcomes_of(wide, wide) == []


@pytest.mark.parametrize("temperature", [0, 1])
def test_one_outcome_holds_where_a_head_is_always_right(target: Path, temperature: float) -> None:
    found = along(target, temperature, 3, chain=True)
    assert set(found.tokens) == {4}
    assert found.held(1) == 1.0
    deepest = along(target, temperature, DEPTH, chain=True)
    assert set(deepest.tokens) == {DEPTH + 1}
    assert all(deepest.unpredicted)
    assert deepest.held(DEPTH) == 0.0


@pytest.mark.parametrize("temperature", [0, 1])
def test_more_outcomes_hold_more_but_none_behind_a_leaf_that_was_not_expanded(
    target: Path, tmp_path: Path, temperature: float
) -> None:
    stranger = make_target(tmp_path / "stranger", VOCAB, seed=1, layers=8, hidden=HIDDEN, tokenizer=False)
    found = along(target, temperature, 1, stranger, top_k=64, depth=1)
    assert found.unpredicted == [tokens == 2 for tokens in found.tokens]
    assert {rank for rank, tokens in zip(found.ranks, found.tokens, strict=True) if tokens == 2} <= {0}
    assert found.held(1) < found.held(8) < found.held(63)


def test_a_step_is_a_forward_where_its_draft_is_prepared_and_a_draft_more_where_it_is_not() -> None:
    assert speedup(0.0, 6, 2) == 1
    assert speedup(1.0, 6, 2) == pytest.approx(8 / 6)
    assert speedup(0.5, 6, 2) == pytest.approx(8 / 7)
    assert speedup(1.0, 2, 6) == pytest.approx(8 / 6)  # the batch of drafts is the longer of the two


def test_the_table_says_how_often_outcomes_hold_and_what_that_is_worth(target: Path, tmp_path: Path) -> None:
    folder, file = save_random(tmp_path / "head", "eagle3"), tmp_path / "out.json"
    heads = f"same=lm:{target},eagle=eagle3:{folder},look=lookup"
    asked = ["runahead", "--target", str(target), "--head", heads, "--n", "2", "--max-new-tokens", "20"]
    ended = CliRunner().invoke(app, [*asked, "--budgets", "4,12", "--t-m", "5", "--t-d", "3", "--json", str(file)])
    assert ended.exit_code == 0, ended.output
    written = json.loads(file.read_text())
    lines = written["figures"]["outcomes"]
    cells = [(head, hot, budget) for head in ("same", "eagle", "look") for hot in (0, 1) for budget in (4, 12)]
    assert [(line["head"], line["temperature"], line["budget"]) for line in lines] == cells
    for line, goal in zip(lines, written["goals"], strict=True):
        held = [line[f"held_{prepared}"] for prepared in PREPARED]
        assert held == sorted(held)
        assert held[-1] <= 1 - line["unpredicted"]
        assert (goal["value"], goal["ok"]) == (round(line["held_4"], 3), line["held_4"] >= 0.6)
        assert [line[f"x_{prepared}"] for prepared in PREPARED] == [speedup(share, 5, 3) for share in held]
    assert any(0 < line["held_1"] < line["held_8"] < 1 for line in lines)
