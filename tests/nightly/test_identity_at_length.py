"""`bench identity` as a user runs it: two of everything, kills, an adapter."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab import identity
from lab.identity import MEANWHILE
from tests.lab.test_identity import rows_of


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_way_to_decode_has_one_hash(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head alone, beside kills, beside weight syncs of an adapter, and beside both."""
    monkeypatch.setattr(identity, "KILL_EVERY_S", 0.2)
    rows = rows_of(tmp_path, monkeypatch, dtype, ids=150, new_tokens=48)
    assert len({row["ids"] for row in rows}) == 1
    beside = {row["way"]: row["happened"] for row in rows if row["way"].endswith(MEANWHILE)}
    assert len(beside) == 3
    assert min(beside.values()) >= 3
