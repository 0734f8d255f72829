"""`bench identity` as a user runs it: two of everything, kills, an adapter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lab import identity
from lab.cli import app as bench
from lab.identity import MEANWHILE
from tests.tiny_stack import ONE_THREAD_EACH, tiny_stack

IDS = 150


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_way_to_decode_has_one_hash(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head alone, beside kills, beside weight syncs of an adapter, and beside both."""
    target, (_, block) = tiny_stack(tmp_path)
    for name, value in ONE_THREAD_EACH.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(identity, "KILL_EVERY_S", 0.2)
    file = tmp_path / "identity.json"
    told = ["--target", str(target), "--head", block, "--ids", str(IDS), "--max-new-tokens", "48", "--json", str(file)]
    told += ["--dtype", dtype]
    done = CliRunner().invoke(bench, ["identity", *told, "--methods", "block"])
    assert done.exit_code == 0, (done.output, done.exception)
    rows = json.loads(file.read_text())["rows"]
    assert len({row["sha256"] for row in rows}) == 1
    assert len({row["ids"] for row in rows}) == 1
    assert rows[0]["ids"] >= IDS
    beside = {row["way"]: row["happened"] for row in rows if row["way"].endswith(MEANWHILE)}
    assert len(beside) == 3
    assert min(beside.values()) >= 3
    assert done.output.count(rows[0]["sha256"]) == len(rows)
