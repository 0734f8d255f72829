"""What a folder must hold to be served, and what tells two loads apart."""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BloomConfig,
    Gemma3Config,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
)

from coppice.engine.attention import UnsupportedModel, read_layout
from coppice.engine.engine import Engine, default_feature_layers, fingerprint
from coppice.engine.loading import UnusableFolder, load_engine
from coppice.engine.rows import Piece, pack
from coppice.testing.tiny_models import save_tiny
from tests.layout.test_layout import ROOT
from tests.tiny import make_target

WEIGHTS = "model.safetensors"
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"), 96)


@pytest.fixture
def folder(target: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(target, tmp_path / "copy"))


def without_two(tensors: Tensors) -> Tensors:
    lost = ("model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.weight")
    return {name: tensor for name, tensor in tensors.items() if name not in lost}


def renamed(tensors: Tensors) -> Tensors:
    return {name.replace("model.", "transformer."): tensor for name, tensor in tensors.items()}


def one_more(tensors: Tensors) -> Tensors:
    return {**tensors, "model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}


def narrower(tensors: Tensors) -> Tensors:
    return {**tensors, "lm_head.weight": tensors["lm_head.weight"][:, :16].contiguous()}


def in_integers(tensors: Tensors) -> Tensors:
    return {**tensors, "lm_head.weight": (100 * tensors["lm_head.weight"]).to(torch.int8)}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without_two, "lacks model.layers.0.self_attn.q_proj.weight, model.layers.1.mlp.up_proj.weight"),
        (renamed, "lacks .* and 17 more"),
        (one_more, "has no place for, model.layers.0.self_attn.q_proj.bias"),
        (narrower, "in another shape lm_head.weight"),
        (in_integers, "not quantised, but holds no floating numbers in lm_head.weight"),
    ],
)
def test_a_checkpoint_that_is_not_the_whole_model_is_refused(
    change: Callable[[Tensors], Tensors], said: str, folder: Path
) -> None:
    save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS, {"format": "pt"})
    with pytest.raises(UnusableFolder, match=said) as refused:
        load_engine(folder, kv_tokens=256)
    assert "\n" not in str(refused.value)


def test_tied_and_ignorable_keys_may_be_absent(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    assert "lm_head.weight" not in tensors
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)  # of old checkpoints
    save_file(tensors, tmp_path / WEIGHTS, {"format": "pt"})
    assert load_engine(tmp_path, kv_tokens=256).info.vocab_size == 96


def test_two_loads_of_one_folder_have_one_fingerprint(folder: Path) -> None:
    first, second = (load_engine(folder, kv_tokens=256).info.weights_hash for _ in range(2))
    assert first == second
    assert len(first) == 32
    assert load_engine(folder, kv_tokens=256, dtype="bfloat16").info.weights_hash != first
    tensors = load_file(folder / WEIGHTS)
    tensors["lm_head.weight"][3, 5] += 1e-6
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    assert load_engine(folder, kv_tokens=256).info.weights_hash != first


class Odd(nn.Module):
    """Tensors of every kind: rows of odd lengths, a scalar, nothing at all, views."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.matrix = nn.Parameter(torch.randn(4, 6))
        self.large = nn.Parameter(torch.randn(40, 256).bfloat16())
        self.odd = nn.Parameter(torch.randn(5, 3).bfloat16())
        self.cube = nn.Parameter(torch.randn(2, 3, 4)[:, :, 1:])
        self.register_buffer("scalar", torch.tensor(3))
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("nothing", torch.zeros(0, 4))
        self.register_buffer("view", torch.arange(9, dtype=torch.float32)[1:])


def changes() -> dict[str, Callable[[Any], None]]:
    def put(name: str, value: Tensor) -> Callable[[Any], None]:
        return lambda model: getattr(model, name).data.copy_(value)

    odd = Odd()
    return {
        "a value": lambda model: model.matrix.data[1, 1].add_(1e-6),
        "rows change places": put("matrix", odd.matrix.data.flip(0)),
        "a large one's rows change places": put("large", odd.large.data.flip(0)),
        "a large one's last bit": lambda model: model.large.data.view(torch.int16)[20, 100].bitwise_xor_(1),
        "columns change places": put("matrix", odd.matrix.data.roll(2, 1)),
        "odd columns change places": put("odd", odd.odd.data.roll(1, 1)),
        "a sign of zero": lambda model: model.view[0].copy_(torch.tensor(-1.0)),
        "a flag": lambda model: model.flags[1].fill_(True),
        "a shape": lambda model: setattr(model, "scalar", model.scalar[None]),
        "a dtype": lambda model: setattr(model, "scalar", model.scalar.int()),
    }


@pytest.mark.parametrize("change", changes())
def test_a_fingerprint_notices(change: str) -> None:
    model = Odd()
    before = fingerprint(model)
    assert fingerprint(copy.deepcopy(model)) == before
    changes()[change](model)
    assert fingerprint(model) != before


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("bloom", "does not attend exactly once"),
        ("falcon", "does not attend exactly once"),
        ("falcon_h1", "keeps a state"),
        ("qwen3_5_moe_text", "keeps a state"),
        ("deepseek_v4", "keeps a state"),
        ("deepseek_v32", "computes with its mask"),
        ("glm_moe_dsa", "computes with its mask"),
        ("llama4_text", "chunked attention"),
    ],
)
def test_a_class_is_refused_in_one_line_before_its_weights_are_read(kind: str, why: str, tmp_path: Path) -> None:
    name = save_tiny(kind, "", tmp_path)
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(UnsupportedModel, match=f"^{name}.* {why}") as refused:
        load_engine(tmp_path, kv_tokens=256)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_a_class_with_experts_is_looked_at_without_its_weights(kind: str, tmp_path: Path) -> None:
    save_tiny(kind, "", tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path), dtype=torch.bfloat16)
    assert len(read_layout(model.eval()).layers) == 4


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def another_task(folder: Path) -> None:
    T5Config(d_model=32, num_heads=4, vocab_size=96).save_pretrained(folder)


def unknown_type(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "of tomorrow"}')


def pickle_only(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")  # it is never opened


def cut_off(folder: Path) -> None:
    os.truncate(folder / WEIGHTS, 1000)


@pytest.mark.parametrize("spoil", [no_config, another_task, unknown_type, pickle_only, cut_off])
def test_an_unusable_folder_is_one_line(spoil: Callable[[Path], None], folder: Path) -> None:
    spoil(folder)
    with pytest.raises(UnusableFolder) as refused:
        load_engine(folder, kv_tokens=256)
    assert str(folder) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_up_says_in_one_line_why_its_verifier_does_not_start(tmp_path: Path) -> None:
    BloomConfig(vocab_size=96, hidden_size=32, n_layer=2, n_head=4).save_pretrained(tmp_path)
    program = "from coppice.cli import main; main()"
    command = [sys.executable, "-c", program, "up", "--target", str(tmp_path), "--port", "0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("coppice: verifier: BloomForCausalLM")
    assert len(done.stderr.splitlines()) == 1


def test_layers_are_the_text_models_beside_a_vision_tower_as_deep() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = Gemma3Config(
        text_config={**sizes, "vocab_size": 150, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0},
        vision_config={**sizes, "image_size": 16, "patch_size": 8},
        mm_tokens_per_image=4,
    )
    config.text_config.eos_token_id = None
    model = AutoModelForCausalLM.from_config(config).eval()
    engine = Engine(copy.deepcopy(model), kv_tokens=256)
    ids = [5, 6, 7, 8]
    with torch.inference_mode():
        hidden = model(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states
    output = engine.forward(pack([Piece.chain(engine.pool.allocate("a", 4), 0, ids)], (1, 2)))
    torch.testing.assert_close(output.features, torch.cat((hidden[1][0], hidden[2][0]), -1), atol=1e-4, rtol=1e-4)


def test_feature_layers_exist_at_every_depth() -> None:
    for count in range(1, 80):
        layers = default_feature_layers(count)
        assert list(layers) == sorted(layers)
        assert all(0 <= layer < count for layer in layers)
        assert len(set(layers)) == min(count, 3)
        if count >= 7:
            assert layers == (2, count // 2, count - 3)
