"""`bench synthetic` and `bench gpu`: random weights of any shape, and what is said of them."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from coppice.cli import main
from lab import synthetic
from lab.measuring import running
from lab.synthetic import NOTE
from tests.pretend import pretending

ENDS = """import pytest
@pytest.mark.gpu
@pytest.mark.parametrize("number", [0, 1])
def test_ends(number): assert not number"""
METHODS = ["plain", "single:eagle3", "single:specblock"]


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but a tiny configuration."""
    folder = tmp_path_factory.mktemp("shape")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=200, num_hidden_layers=4, max_position_embeddings=512, eos_token_id=0, **sizes)
    config.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("command", ["synthetic", "gpu"])
def test_a_shape_is_measured_bare_and_in_services(
    command: str, shape: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On a GPU, which is pretended, but for the services, behind two tests one of which fails."""
    small: dict[str, Any] = {"ROWS": (1, 4), "CONTEXT": 24, "NEW_TOKENS": 12, "ANSWERS": 1, "REPEATS": 1}
    small |= {"CELLS": dict.fromkeys(("cpu", "cuda"), ((1, 1, 16), (2, 5, 40))), "COPIED": {"cpu": 1 << 20}}
    small |= {"TESTS": tmp_path, "WORKERS": "0", "running": lambda spec, to: running(replace(spec, device="cpu"), to)}
    for name, value in small.items():
        monkeypatch.setattr(synthetic, name, value)
    (tmp_path / "test_ends.py").write_text(ENDS)
    file, on_gpu = tmp_path / "s.json", command == "gpu"
    options = ["--shape", str(shape), "--dtype", "float32", "--sessions", "1,2", "--budget", "6"]
    monkeypatch.setattr(sys, "argv", ["coppice", "bench", command, *options, "--json", str(file)])
    with pretending() if on_gpu else nullcontext(), pytest.raises(SystemExit) as ended:
        main()
    report = json.loads(file.read_text())
    assert [check["name"] for check in report["checks"] if not check["ok"]] == ["tests that failed"] * on_gpu
    assert ended.value.code == int(on_gpu)
    figures = report["figures"]
    assert figures["synthetic"] == NOTE
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
    token = 4 * 2 * 2 * 8 * 4  # 4 layers, keys and values, 2 heads of 8 numbers, 4 bytes
    assert round((two["GB read"] - one["GB read"]) * 1e9) == (2 * 45 - 17) * token
    if on_gpu:
        assert report["machine"].endswith(", pretended")
        assert figures["tests"] == [{"passed": 1, "failed": 1}]
        assert {test[-3:]: end for test, end in figures["outcomes"].items()} == {"[0]": "passed", "[1]": "failed"}
        assert min(one["eager ms"], two["eager ms"]) > 0
