"""`coppice bench paper`: a command for each table, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from coppice.errors import InvalidField
from coppice.stack.launch import Stack
from coppice.stack.spec import COUNTED_HEADS, DEMO_HEADS
from lab.cli import app, with_heads
from lab.options import Options


def told(*arguments: str) -> tuple[int, str]:
    """The exit code of a command and what it says."""
    ended = CliRunner().invoke(app, arguments)
    return ended.exit_code, " ".join(ended.output.replace("│", " ").split())


def test_a_table_needs_heads_that_it_can_measure(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    options = Options(target=tmp_path, heads=[f"s=lm:{tmp_path}", "bigram=bigram", "lookup=lookup"])
    assert [head.name for head in with_heads(options, ("lm", "eagle3")).heads] == ["s"]
    with pytest.raises(InvalidField, match="none is of kind specblock"):
        with_heads(options, ("specblock",))


def test_the_shipped_heads_are_of_the_demos_target(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert [head.name for head in Options().spec(["lookup"]).heads] == ["lookup"]
    assert [head.name for head in Options().spec().heads] == list(DEMO_HEADS)
    assert Options(methods=["route:eagle3-code/lookup", "plain"]).shipped_heads() == ["eagle3-code", "lookup"]
    assert Options(target=tmp_path).spec(["lookup"]).heads == COUNTED_HEADS


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("exact", "--methods", "plain,bad"), "methods: 'bad'"),
        (("steps", "--methods", "lookup", "--methods", "bad,plain"), "methods: 'bad'"),
        (("exact", "--budgets", "1,x"), "budgets: '1,x' is not a list of numbers"),
        (("run", "--sessions", "1,0"), "sessions: 0 is outside 1.."),
        (("adapt", "--methods", "never,bad"), "methods: 'bad'"),
    ],
)
def test_what_nobody_can_run_is_refused_before_a_start(
    arguments: tuple[str, ...], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stack, "start", lambda stack: pytest.fail("the stack was started"))
    ended = CliRunner().invoke(app, arguments)
    assert isinstance(ended.exception, InvalidField), ended.output
    assert why in str(ended.exception)


@pytest.mark.parametrize("arguments", [("steps", "--json", "FILE/x.json")])
def test_a_path_that_cannot_be_written_is_refused_before_a_start(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stack, "start", lambda stack: pytest.fail("the stack was started"))
    (tmp_path / "file").write_text("")
    code, said = told(*(argument.replace("FILE", str(tmp_path / "file")) for argument in arguments))
    assert (code, f"Invalid value for '{arguments[1]}'" in said) == (2, True), said
