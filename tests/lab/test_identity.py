"""`bench identity` as a user runs it, in a few ways: two of everything, and a kill. tests/nightly has all of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lab import identity
from lab.cli import app as bench
from lab.identity import KILLS, Way
from tests.tiny_stack import ONE_THREAD_EACH, tiny_stack

IDS = 60


@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_some_ways_to_decode_have_one_hash(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, (_, block) = tiny_stack(tmp_path)
    for name, value in ONE_THREAD_EACH.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(identity, "KILL_EVERY_S", 0.1)
    monkeypatch.setattr(identity, "LEAST_HAPPENED", 1)
    ways = [Way("plain"), Way("single:block", 8), Way("single:block", during=KILLS)]
    monkeypatch.setattr(identity, "ways_of", lambda methods, dtype: (ways, []))
    file = tmp_path / "identity.json"
    options = ["--head", block, "--ids", str(IDS), "--max-new-tokens", "20", "--json", str(file), "--dtype", dtype]
    ended = CliRunner().invoke(bench, ["identity", "--target", str(target), *options, "--methods", "block"])
    assert ended.exit_code == 0, (ended.output, ended.exception)
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 1 + len(ways)
    assert {row["sha256"] for row in rows} == {rows[0]["sha256"]}
    assert rows[0]["ids"] >= IDS
    assert rows[-1]["happened"] >= 1
    assert ended.output.count(rows[0]["sha256"]) == len(rows)
