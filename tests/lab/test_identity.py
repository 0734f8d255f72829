"""`bench identity` as a user runs it, in a few ways: two of everything, and a kill. tests/nightly has all of them, in
float32 too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lab import identity
from lab.cli import app as bench
from lab.identity import KILLS, SYNCS, Way, ways_of
from tests.tiny_stack import ONE_THREAD_EACH, tiny_stack


def rows_of(folder: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, ids: int, new_tokens: int) -> list[Any]:
    """The rows of a run on a tiny stack, of one hash, which it prints with each of them, and of at least `ids` ids."""
    target, (_, block) = tiny_stack(folder)
    for name, value in ONE_THREAD_EACH.items():
        monkeypatch.setenv(name, value)
    file = folder / "identity.json"
    options = ["--target", str(target), "--head", block, "--methods", "block", "--dtype", dtype, "--ids", str(ids)]
    options += ["--max-new-tokens", str(new_tokens), "--json", str(file)]
    ended = CliRunner().invoke(bench, ["identity", *options])
    assert ended.exit_code == 0, (ended.output, ended.exception)
    rows: list[Any] = json.loads(file.read_text())["rows"]
    assert {row["sha256"] for row in rows} == {rows[0]["sha256"]}
    assert rows[0]["ids"] >= ids
    assert ended.output.count(rows[0]["sha256"]) == len(rows)
    return rows


@pytest.mark.timeout(600)
def test_some_ways_to_decode_have_one_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [SYNCS in way.during for way in ways_of(["single:lookup", "auto"], "float32", ["auto"])[1]] == [False, True]
    monkeypatch.setattr(identity, "KILL_EVERY_S", 0.1)
    monkeypatch.setattr(identity, "LEAST_HAPPENED", 1)
    ways, rough = [Way("plain"), Way("single:block", 8)], [Way("single:block", during=f"{KILLS} and {SYNCS}")]
    monkeypatch.setattr(identity, "ways_of", lambda *of: (ways, rough))
    rows = rows_of(tmp_path, monkeypatch, "bfloat16", ids=60, new_tokens=20)
    assert len(rows) == 1 + len(ways) + len(rough)
    assert rows[-1]["happened"] >= 1
