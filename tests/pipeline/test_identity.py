"""`bench identity` as a user runs it: two of everything, kills, an adapter."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from coppice.bench.identity import MEANWHILE
from tests.proof import ROOT, TINY

IDS = 1000


@pytest.mark.timeout(1200)
def test_every_way_to_decode_has_one_hash(tmp_path: Path) -> None:
    """A head alone, beside kills, beside weight syncs of an adapter, and beside both."""
    told = ["--ids", str(IDS), "--max-new-tokens", "96", "--methods", "block"]
    file = tmp_path / "identity.json"
    command = [*TINY, "bench", "identity", *told, "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(file.read_text())["rows"]
    assert len({row["sha256"] for row in rows}) == 1
    assert len({row["ids"] for row in rows}) == 1
    assert rows[0]["ids"] >= IDS
    beside = {row["way"]: row["happened"] for row in rows if row["way"].endswith(MEANWHILE)}
    assert len(beside) == 3
    assert min(beside.values()) >= 3
    assert done.stdout.count(rows[0]["sha256"]) == len(rows)
