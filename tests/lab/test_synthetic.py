"""`bench synthetic`: random weights of any shape, and what is said of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from coppice.cli import main
from lab import synthetic
from lab.synthetic import NOTE

METHODS = ["plain", "single:eagle3", "single:specblock"]


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but a tiny configuration."""
    folder = tmp_path_factory.mktemp("shape")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=200, num_hidden_layers=8, max_position_embeddings=512, eos_token_id=0, **sizes)
    config.save_pretrained(folder)
    return folder


def test_a_shape_is_measured_bare_and_in_services(shape: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    small: dict[str, Any] = {"ROWS": (1, 4), "CONTEXT": 24, "NEW_TOKENS": 12, "ANSWERS": 1, "REPEATS": 3}
    small |= {"CELLS": {"cpu": ((1, 1, 16), (2, 5, 40))}, "COPIED": {"cpu": 1 << 20}, "GENERATED": 12}
    for name, value in small.items():
        monkeypatch.setattr(synthetic, name, value)
    file = tmp_path / "s.json"
    options = ["--shape", str(shape), "--dtype", "float32", "--sessions", "1,2", "--budget", "6"]
    arguments = ["coppice", "bench", "synthetic", *options, "--json", str(file)]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    report = json.loads(file.read_text())
    figures = report["figures"]
    assert (figures["synthetic"], report["ok"]) == (NOTE, True)
    assert [list(line) for line in figures["forward_ms"]] == [["sessions", "1", "4", "7"]] * 2
    assert [(row["method"], row["sessions"]) for row in report["rows"]] == [(m, n) for n in (1, 2) for m in METHODS]
    for row in report["rows"]:
        head = row["method"] != "plain"
        assert (row["t_d_ms"] > 0) == (row["draft_share"] > 0) == head
    assert [step["method"] for step in figures["pipeline"]] == METHODS
    for step in figures["pipeline"]:
        assert 1 <= step["tau"] < 2  # random heads
        assert step["efficiency"] > 0
        parts = sum(took for name, took in step.items() if name not in ("method", "step_ms", "efficiency", "tau"))
        assert parts == pytest.approx(step["step_ms"], rel=0.1)
    one, two = figures["roofline"]
    assert one["roofline ms"] * one["over roofline"] == pytest.approx(one["ms"])
    token = 8 * 2 * 2 * 8 * 4  # 8 layers, keys and values, 2 heads of 8 numbers, 4 bytes
    assert round((two["GB read"] - one["GB read"]) * 1e9) == (2 * 45 - 17) * token
    assert figures["generate"][0]["tokens/s"] > 0
