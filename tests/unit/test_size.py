"""`coppice doctor --size`: what it adds up is what the services allocate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from coppice.cli import main
from coppice.commands.size import SHAPES, sizes
from coppice.engine.loading import load_engine
from coppice.limits import TREE_ROOM
from coppice.stack.spec import checkout
from tests.tiny import make_target

DEMO = checkout() / "models" / "demo"
CONTEXT = 96


def stored(folder: Path) -> int:
    """Weights in a folder's file, the vocabulary's mapping left out."""
    tensors = load_file(folder / "model.safetensors")
    return sum(tensor.numel() for tensor in tensors.values() if tensor.is_floating_point())


def test_a_targets_bytes_are_those_of_its_engine(tmp_path: Path) -> None:
    folder = make_target(tmp_path / "target", 300, layers=6)
    engine = load_engine(folder, kv_tokens=CONTEXT + TREE_ROOM)
    size, *heads = sizes("tiny", AutoConfig.from_pretrained(folder), CONTEXT, "float32")
    assert size.weights == 4 * size.parameters == 4 * AutoModelForCausalLM.from_pretrained(folder).num_parameters()
    assert size.kv_session == engine.pool.data.nbytes
    assert size.features == 4 * 3 * CONTEXT * engine.info.hidden_size
    assert [head.model for head in heads] == ["tiny eagle3", "tiny specblock"]
    assert size.sessions(size.weights) == 0
    assert size.sessions(int((size.weights + 3 * size.kv_session) / 0.9) + 1) == 3


@pytest.mark.parametrize(("shape", "billions", "kib"), [("8B", 8.03, 128), ("70B", 70.55, 320)])
def test_published_shapes_have_their_published_sizes(shape: str, billions: float, kib: int) -> None:
    target, eagle3, specblock = sizes(shape, SHAPES[shape], 8192, "bfloat16")
    assert target.parameters / 1e9 == pytest.approx(billions, abs=0.01)
    assert target.kv_token == kib * 1024
    assert target.weights == 2 * target.parameters
    hidden = SHAPES[shape].hidden_size
    assert eagle3.weights - 2 * eagle3.parameters == 2 * 128_256 * hidden  # the target's embedding
    assert eagle3.kv_token == 2 * 8 * 128 * 2
    assert specblock.kv_token == 8 * eagle3.kv_token  # two layers, four slots


@pytest.mark.parametrize("kind", ["eagle3", "specblock"])
def test_a_heads_parameters_are_those_of_a_file_of_that_shape(kind: str) -> None:
    folder = DEMO / f"{kind}-code"
    told = json.loads((folder / "config.json").read_text())
    target = AutoConfig.from_pretrained(DEMO / "target")
    for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size"):
        assert told[name] == getattr(target, name)  # so that the head is of its target's shape
    rows = {row.model: row for row in sizes("demo", target, 1, "float32")}
    spared = (told["vocab_size"] - told["draft_vocab_size"]) * told["hidden_size"]
    assert rows[f"demo {kind}"].parameters - spared == stored(folder)


def test_the_command_prints_a_row_for_each_model(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "sys.argv", ["coppice", "doctor", "--size", "--target", str(DEMO / "target"), "--dtype", "float32"]
    )
    with pytest.raises(SystemExit, match="0"):
        main()
    said = capsys.readouterr().out
    assert "specblock" in said
    assert "too large" not in said


@pytest.mark.parametrize(
    ("flag", "value"), [("--target", "nowhere"), ("--dtype", "int3"), ("--context", "0"), ("--memory", "-1")]
)
def test_what_is_of_no_use_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, flag: str, value: str
) -> None:
    monkeypatch.setattr("sys.argv", ["coppice", "doctor", "--size", flag, value])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert flag.removeprefix("--") in capsys.readouterr().err
