"""`bench synthetic`: random weights of any shape, and what is said of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from coppice.cli import main
from coppice.stack.spec import StackSpec
from lab import synthetic
from lab.options import Options
from lab.report import Report
from lab.synthetic import NOTE, Plan, read_shape, step_line

METHODS = ["plain", "single:eagle3", "single:specblock"]


@pytest.mark.parametrize(("name", "billions"), [("0.5b", 0.494), ("llama-3.1-8b", 8.03), ("qwen3-8b", 8.19)])
def test_presets_have_as_many_parameters_as_the_models_they_are_named_for(name: str, billions: float) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(read_shape(name))
    assert model.num_parameters() / 1e9 == pytest.approx(billions, rel=0.01)


def test_a_head_pays_from_the_tau_that_makes_up_for_its_longer_step() -> None:
    forwards = {(1, 1): 10.0, (1, 9): 12.0, (4, 1): 14.0, (4, 9): 40.0}
    drafts = {(sessions, "eagle3"): (8.0, 9.0) for sessions in (1, 4)}
    plan = Plan(Options(budget=8), StackSpec.demo(), Report("x", "float32", 1), (1, 4), 200, forwards, drafts)
    plain, alone, four = (step_line(plan, *line) for line in ((1, ""), (1, "eagle3"), (4, "eagle3")))
    assert [plain[key] for key in ("t_d_ms", "pays_from", "draft_share")] == [0.0, 1.0, 0.0]
    assert [alone[key] for key in ("t_d_total_ms", "pays_from", "draft_share")] == [9.0, 2.0, 0.4]
    assert four["pays_from"] == pytest.approx(48 / 14)  # plain decoding shares its forward too
    assert plan.forward_ms(5) == pytest.approx(11.0)


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but a tiny configuration."""
    folder = tmp_path_factory.mktemp("shape")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=200, num_hidden_layers=8, max_position_embeddings=512, eos_token_id=0, **sizes)
    config.save_pretrained(folder)
    return folder


def test_a_tiny_shape_is_measured_bare_and_through_the_services(
    shape: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
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
