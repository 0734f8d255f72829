"""`bench synthetic` and `bench gpu`: profiles of acceptance, random weights of any shape, and what is said of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from coppice.cli import main
from coppice.errors import InvalidField
from coppice.stack.spec import StackSpec
from lab import synthetic
from lab.options import Options
from lab.report import Report
from lab.synthetic import NOTE, PROFILES, Plan, expected_line, expected_tau, read_profile, read_shape

KINDS = ("eagle3", "specblock")
METHODS = ["plain", "single:eagle3", "single:specblock"]
TAUS = {
    "llama-3.1-8b": {"specblock": 4.41, "eagle3": 5.89},
    "llama-3.1-8b-t1": {"specblock": 3.73, "eagle3": 4.67},
    "qwen3-8b": {"specblock": 3.47, "eagle3": 4.14},
    "qwen3-8b-t1": {"specblock": 3.37, "eagle3": 3.98},
}


@pytest.mark.parametrize("name", PROFILES)
def test_a_preset_has_the_published_tau_and_depth(name: str) -> None:
    for kind, alphas in read_profile(name, KINDS).items():
        assert len(alphas) == {"specblock": 8, "eagle3": 7}[kind]
        assert expected_tau(alphas) == pytest.approx(TAUS[name][kind], abs=2e-3)
        assert list(alphas) == sorted(alphas, reverse=True)


@pytest.mark.parametrize(
    ("text", "why"), [("best", "neither rates"), ("0.5,1.2", "not between 0 and 1"), ("qwen3-8b", "nothing of lm")]
)
def test_an_unusable_profile_says_why(text: str, why: str) -> None:
    with pytest.raises(InvalidField, match=why):
        read_profile(text, ["lm"])


@pytest.mark.parametrize(("name", "billions"), [("0.5b", 0.494), ("llama-3.1-8b", 8.03), ("qwen3-8b", 8.19)])
def test_presets_have_as_many_parameters_as_the_models_they_are_named_for(name: str, billions: float) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(read_shape(name))
    assert model.num_parameters() / 1e9 == pytest.approx(billions, rel=0.01)


def test_expected_figures_follow_from_times_and_profile() -> None:
    report, alphas = Report("bench synthetic", "float32", 1), {"eagle3": (1.0,) * 3, "specblock": (1.0,) * 2}
    forwards = {(1, 1): 10.0, (1, 9): 12.0, (4, 1): 14.0, (4, 9): 40.0}
    milliseconds = {"eagle3": (8.0, 9.0), "specblock": (3.0, 5.0)}
    drafts = {(count, kind): times for count in (1, 4) for kind, times in milliseconds.items()}
    plan = Plan(Options(budget=8), StackSpec.demo(), report, (1, 4), alphas, 200, forwards, drafts)
    plain, eagle, block = (expected_line(plan, 1, head) for head in ("", *KINDS))
    assert [plain[key] for key in ("tau", "tokens_per_s", "speedup", "draft_share")] == [1.0, 100.0, 1.0, 0.0]
    assert [eagle[key] for key in ("tau", "tokens_per_s", "speedup")] == pytest.approx([4.0, 200.0, 2.0])
    assert (eagle["draft_share"], eagle["t_d_total_ms"]) == (0.4, 9.0)
    assert (block["speedup"], block["draft_share"]) == (pytest.approx(2.0), 0.2)
    assert expected_line(plan, 4, "eagle3")["speedup"] == pytest.approx(
        4 / 48 * 14
    )  # four sessions: plain shares its forward too
    assert plan.forward_ms(5) == pytest.approx(11.0)


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but a tiny configuration."""
    folder = tmp_path_factory.mktemp("shape")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=200, num_hidden_layers=8, max_position_embeddings=512, eos_token_id=0, **sizes)
    config.save_pretrained(folder)
    return folder


def measured(command: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    file = tmp_path / "s.json"
    monkeypatch.setattr(sys, "argv", ["coppice", "bench", command, *arguments, "--json", str(file)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    report: dict[str, Any] = json.loads(file.read_text())
    return report


def test_a_tiny_shape_is_measured_bare_and_through_the_services(
    shape: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in {"ROWS": (1, 4), "CONTEXT": 24, "NEW_TOKENS": 12, "ANSWERS": 1}.items():
        monkeypatch.setattr(synthetic, name, value)
    sizes = ["--sessions", "1,2", "--budget", "6", "--profile", "0.9,0.5"]
    report = measured("synthetic", ["--shape", str(shape), "--dtype", "float32", *sizes], monkeypatch, tmp_path)
    assert (report["figures"]["synthetic"], report["ok"]) == (NOTE, True)
    assert [list(line) for line in report["figures"]["forward_ms"]] == [["sessions", "1", "4", "7"]] * 2
    assert [(row["method"], row["sessions"]) for row in report["rows"]] == [(m, n) for n in (1, 2) for m in METHODS]
    for row in report["rows"]:
        head = row["method"] != "plain"
        assert row["tau"] == pytest.approx(2.35 if head else 1.0)
        assert (row["t_d_ms"] > 0) == (row["draft_share"] > 0) == head
    assert [step["method"] for step in report["figures"]["pipeline"]] == METHODS
    for step in report["figures"]["pipeline"]:
        assert 1 <= step["tau"] < 2  # random heads
        assert step["efficiency"] > 0
        parts = sum(took for name, took in step.items() if name not in ("method", "step_ms", "efficiency", "tau"))
        assert parts == pytest.approx(step["step_ms"], rel=0.1)


def test_forwards_are_set_beside_what_memory_moves(
    shape: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    small = {"CONTEXT": 24, "NEW_TOKENS": 12, "CELLS": ((1, 1, 16), (2, 5, 40)), "COPIED": {"cpu": 1 << 20}}
    for name, value in (small | {"REPEATS": 3, "GENERATED": 12}).items():
        monkeypatch.setattr(synthetic, name, value)
    arguments = ["--shape", str(shape), "--dtype", "float32", "--device", "cpu", "--budget", "6", "--sessions", "2"]
    report = measured("gpu", [*arguments, "--profile", "0.9,0.5"], monkeypatch, tmp_path)
    one, two = report["figures"]["roofline"]
    assert one["roofline ms"] * one["over roofline"] == pytest.approx(one["ms"])
    token = 8 * 2 * 2 * 8 * 4  # 8 layers, keys and values, 2 heads of 8 numbers, 4 bytes
    assert round((two["GB read"] - one["GB read"]) * 1e9) == (2 * 45 - 17) * token
    assert [row["method"] for row in report["rows"]] == METHODS
    assert report["figures"]["generate"][0]["tokens/s"] > 0
