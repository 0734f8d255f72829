"""`coppice bench paper`: the closed list of tables, the options each takes, and the table of drafting times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from coppice.bench.cli import app
from coppice.bench.paper.tables import TABLES, compute_of, heads_of, read_options
from coppice.errors import InvalidField
from coppice.stack.spec import COUNTED_HEADS, HeadSpec
from tests.tiny import make_target
from tests.unit.test_feature_heads import HIDDEN, VOCAB, save_random


@pytest.mark.parametrize("name", TABLES)
def test_every_table_has_something_that_computes_it(name: str) -> None:
    assert callable(compute_of(name))


def test_options_are_a_tables_defaults_unless_they_are_given() -> None:
    options = read_options("rank", {"n": 3})
    assert (options.n, options.max_new_tokens, options.budget, options.dtype) == (3, 96, 31, "float32")
    assert read_options("coupling", {}).heads == ["specblock-code", "eagle3-code", "lm"]
    assert read_options("coupling", {"target": Path("x")}).heads is None  # shipped heads are of the demo's target


@pytest.mark.parametrize(
    ("name", "given", "why"),
    [
        ("drafts", {}, "'drafts' is not one of coupling, chains"),
        ("rank", {"data": ["x"]}, "the table rank takes --target, --heads, --prompts"),
        ("ablate", {"data": ["x"]}, "the table ablate needs it"),
    ],
)
def test_what_a_table_cannot_use_is_a_usage_error(name: str, given: dict[str, Any], why: str) -> None:
    with pytest.raises(typer.BadParameter, match=why):
        read_options(name, given)


def test_a_table_needs_heads_that_it_can_measure() -> None:
    heads = (HeadSpec("s", "lm"), *COUNTED_HEADS)
    assert heads_of(heads, ("lm", "eagle3")) == heads[:1]
    with pytest.raises(InvalidField, match="none is of kind specblock"):
        heads_of(heads, ("specblock",))


def test_drafting_has_a_check_for_each_head_budget_and_temperature(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target", VOCAB, layers=8, hidden=HIDDEN, tokenizer=False)
    file, folder = tmp_path / "out.json", save_random(tmp_path / "head", "eagle3")
    asked = ["paper", "drafting", "--target", str(target), "--heads", "look=lookup", "--dtype", "float32", "--n", "5"]
    told = CliRunner().invoke(app, [*asked, "--heads", f"eagle=eagle3:{folder}", "--json", str(file)])
    assert told.exit_code in (0, 1), told.output
    written = json.loads(file.read_text())
    names = [f"eagle, budget {budget}, T {hot}: draft over its forwards" for budget in (8, 31) for hot in (0, 1)]
    assert [check["name"] for check in written["checks"]] == names
    assert written["ok"] == (told.exit_code == 0) == all(check["value"] <= 1.15 for check in written["checks"])
    for line in written["figures"]["drafting"]:
        assert line["draft_ms"] > line["forwards_ms"] > 0
