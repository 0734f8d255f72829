"""What a folder must hold to be served, what tells two loads apart, and what generation_config.json says."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3Config, LlamaConfig, LlamaForCausalLM, T5Config

from coppice.config.model import ModelSize
from coppice.engine.attention import UnsupportedModel
from coppice.engine.engine import Engine, default_feature_layers, fingerprint, read_layout
from coppice.engine.loading import UnusableFolder, load_engine
from coppice.engine.rows import Piece, pack
from coppice.errors import InvalidField
from coppice.testing.tiny_models import save_tiny
from services.verifier.worker import repetition_penalty
from tests.processes import StartService
from tests.sessions import described
from tests.tiny import make_target

WEIGHTS = "model.safetensors"
TINY_TARGET = {"vocab": 96}
Tensors = dict[str, Tensor]


@pytest.fixture
def folder(target: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(target, tmp_path / "copy"))


Q, HEAD = "model.layers.0.self_attn.q_proj", "lm_head.weight"
LOST = f"{Q}.weight", "model.layers.1.mlp.up_proj.weight"
CHECKPOINTS: dict[str, Callable[[Tensors], Tensors]] = {
    f"lacks {', '.join(LOST)}": lambda all_: {name: all_[name] for name in all_ if name not in LOST},
    "lacks .* and 17 more": lambda all_: {name.replace("model.", "transformer."): all_[name] for name in all_},
    f"has no place for, {Q}.bias": lambda all_: {**all_, f"{Q}.bias": torch.zeros(32)},
    f"in another shape {HEAD}": lambda all_: {**all_, HEAD: all_[HEAD][:, :16].contiguous()},
    f"no floating numbers in {HEAD}": lambda all_: {**all_, HEAD: all_[HEAD].to(torch.int8)},
}
FILES: dict[str, Callable[[Path], object]] = {
    "config.json": lambda folder: (folder / "config.json").unlink(),
    "T5Config": lambda folder: T5Config(d_model=32, num_heads=4, vocab_size=96).save_pretrained(folder),
    "of tomorrow": lambda folder: (folder / "config.json").write_text('{"model_type": "of tomorrow"}'),
    "cannot be loaded": lambda folder: (folder / WEIGHTS).rename(folder / "pytorch_model.bin"),  # it is never opened
    "invalid header length": lambda folder: os.truncate(folder / WEIGHTS, 1000),
}


@pytest.mark.parametrize("reason", [*CHECKPOINTS, *FILES])
def test_a_folder_that_is_not_exactly_a_model_is_refused_in_a_line(reason: str, folder: Path) -> None:
    if reason in CHECKPOINTS:
        tensors = CHECKPOINTS[reason](load_file(folder / WEIGHTS))
        save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    else:
        FILES[reason](folder)
    with pytest.raises(UnusableFolder, match=reason) as refused:
        load_engine(folder, kv_tokens=256)
    assert str(folder) in str(refused.value)
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
        self.large = nn.Parameter(torch.randn(40, 256).bfloat16())
        self.odd = nn.Parameter(torch.randn(5, 3).bfloat16())
        self.cube = nn.Parameter(torch.randn(2, 3, 4)[:, :, 1:])
        self.register_buffer("scalar", torch.tensor(3))
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("nothing", torch.zeros(0, 4))
        self.register_buffer("view", torch.arange(9, dtype=torch.float32)[1:])


ODD = Odd()
CHANGES: dict[str, Callable[[Any], object]] = {
    "a value": lambda model: model.cube.data[1, 1, 1].add_(1e-6),
    "rows change places": lambda model: model.large.data.copy_(ODD.large.flip(0)),
    "a last bit": lambda model: model.large.data.view(torch.int16)[20, 100].bitwise_xor_(1),
    "columns change places": lambda model: model.odd.data.copy_(ODD.odd.roll(1, 1)),
    "a sign": lambda model: model.view[0].copy_(torch.tensor(-1.0)),
    "a flag": lambda model: model.flags[1].fill_(True),
    "a shape": lambda model: setattr(model, "scalar", model.scalar[None]),
    "a dtype": lambda model: setattr(model, "scalar", model.scalar.int()),
}


def test_a_fingerprint_notices() -> None:
    before = fingerprint(ODD)
    for change, make in CHANGES.items():
        model = copy.deepcopy(ODD)
        assert fingerprint(model) == before
        make(model)
        assert fingerprint(model) != before, change


REFUSED = {
    **dict.fromkeys(("bloom", "falcon"), "attends not exactly once"),
    **dict.fromkeys(("deepseek_v4", "recurrent_gemma", "xlstm"), "keeps a state"),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), "computes with its mask"),
    "llama4_text": "chunked attention",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_class_is_refused_in_one_line_before_its_weights_are_read(kind: str, tmp_path: Path) -> None:
    name = save_tiny(kind, "", tmp_path)
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(UnsupportedModel, match=f"^{name}.* {REFUSED[kind]}") as refused:
        load_engine(tmp_path, kv_tokens=256)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_a_class_with_experts_is_looked_at_without_its_weights(kind: str, tmp_path: Path) -> None:
    save_tiny(kind, "", tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path), dtype=torch.bfloat16)
    assert len(read_layout(model.eval()).layers) == 4


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


# Folders whose weights are quantised: served as transformers loads them, or refused in a line.

BLOCK = 32
COMPRESSED = {
    "int8": (8, "int", "int-quantized", True),
    "int4 weights": (4, "int", "pack-quantized", False),
    "fp8": (8, "float", "float-quantized", True),
}
"""of compressed-tensors: bits, type, format, and whether activations are quantised, too"""


@pytest.fixture
def halved(tmp_path: Path) -> Path:
    return make_target(tmp_path / "target", 96, hidden=64, tokenizer=False, dtype=torch.bfloat16)


def say(folder: Path, how: dict[str, Any]) -> None:
    """Add to config.json how the weights are quantised."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": how}))


def compress(folder: Path, bits: int, kind: Any, form: Any, activations: bool) -> None:
    """Quantise the layers of a folder's model, each row of a weight by its largest number."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    inputs = QuantizationArgs(num_bits=bits, type=kind, strategy="token", dynamic=True) if activations else None
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(num_bits=bits, type=kind, strategy="channel"),
        input_activations=inputs,
        format=form,
    )
    config = QuantizationConfig(
        config_groups={"all": scheme}, ignore=["lm_head"], format=form, quantization_status="compressed"
    )
    apply_quantization_config(model, config)
    largest = 448 if kind == "float" else 2 ** (bits - 1) - 1
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            module.weight_scale.data = (module.weight.abs().amax(1, keepdim=True) / largest).to(torch.bfloat16)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)


def to_fp8_blocks(folder: Path) -> None:
    """Quantise a folder as DeepSeek's and Qwen's fp8 folders are: square blocks with a scale each."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if "proj.weight" in name]:
        rows, columns = tensors[name].shape
        blocks = tensors[name].float().view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
        scales = blocks.abs().amax((1, 3)) / 448
        tensors[f"{name}_scale_inv"] = scales
        tensors[name] = (blocks / scales[:, None, :, None]).view(rows, columns).to(torch.float8_e4m3fn)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    say(
        folder,
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK], "fmt": "e4m3"},
    )


def largest_difference(engine: Engine, folder: Path, dtype: torch.dtype) -> float:
    """Of the engine's logits to those of transformers alone, by the spread of these."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, device_map="cpu")
    if not model.is_quantized:
        model.to(dtype)
    ids = list(range(1, 41))
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0].float()
    table = engine.pool.allocate("text", len(ids))
    said = engine.forward(pack([Piece.chain(table, 0, ids, range(len(ids)))])).logits.float()
    return float((said - expected).abs().max() / (expected - expected.mean(-1, keepdim=True)).abs().max())


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, "float32") for name in (*COMPRESSED, "fp8 blocks")), ("int4 weights", "bfloat16"), ("fp8", "bfloat16")],
)
def test_a_quantised_folder_says_what_transformers_says(name: str, dtype: str, halved: Path) -> None:
    folder, plain = halved, ModelSize.of(halved, dtype).weights
    if name in COMPRESSED:
        compress(folder, *COMPRESSED[name])
    else:
        to_fp8_blocks(folder)
    engine = load_engine(folder, dtype=dtype, kv_tokens=512)  # it has passed the self-check
    assert engine.pool.dtype == engine.model.dtype == getattr(torch, dtype)
    exact = dtype == "float32" and not (name in COMPRESSED and COMPRESSED[name][3])
    assert largest_difference(engine, folder, engine.model.dtype) < (1e-5 if exact else 0.25)
    size = ModelSize.of(folder, dtype).weights
    assert (0.9 * plain < size < 1.1 * plain) if name in COMPRESSED else size < 0.8 * plain


# generation_config.json: what is served, what is refused by name, and what requests say.

SERVED: tuple[tuple[dict[str, Any], float], ...] = (
    ({}, 1.0),
    ({"repetition_penalty": 1.05}, 1.05),
    ({"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1}, 1.0),
    ({"no_repeat_ngram_size": 0, "num_beams": 1, "suppress_tokens": [], "min_length": 0}, 1.0),
    ({"eos_token_id": [0, 2], "pad_token_id": 0, "max_length": 99, "max_new_tokens": 9}, 1.0),
    ({"chat_format": "chatml", "max_window_size": 6144}, 1.0),  # another program's
)
LISTS = ("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "sequence_bias", "stop_strings")
NUMBERS = (
    *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty", "forced_bos_token_id"),
    *("forced_eos_token_id", "min_length", "min_new_tokens", "num_beams", "exponential_decay_length_penalty"),
    *("guidance_scale", "token_healing", "dola_layers"),
)
UNSERVED: dict[str, Any] = {**{field: [5] for field in LISTS}, **dict.fromkeys(NUMBERS, 3)}


def told_by(path: Path, told: dict[str, Any], name: str = "generation_config.json") -> Path:
    (path / name).write_text(json.dumps(told), encoding="utf-8")
    return path


def test_what_is_served_or_a_requests_business_loads_and_what_changes_greedy_decoding_is_refused(
    tmp_path: Path,
) -> None:
    for told, penalty in SERVED:
        assert repetition_penalty(told_by(tmp_path, told), "serve") == penalty
    for field, value in UNSERVED.items():
        target = told_by(tmp_path, {field: value, "repetition_penalty": 1.3})
        with pytest.raises(InvalidField, match=rf"sets {field}, which is not served"):
            repetition_penalty(target, "serve")
        assert repetition_penalty(target, "ignore") == 1.0
    with pytest.raises(InvalidField, match="repetition_penalty 1000"):
        repetition_penalty(told_by(tmp_path, {"repetition_penalty": 1000.0}), "serve")


def test_fields_of_an_older_folders_config_count_too(tmp_path: Path) -> None:
    model = {"model_type": "llama", "repetition_penalty": 1.2}
    assert repetition_penalty(told_by(tmp_path, model, "config.json"), "serve") == 1.2


async def test_an_ignored_file_is_not_in_the_way(tmp_path: Path, start_service: StartService) -> None:
    target = make_target(tmp_path, tokenizer=False)
    told_by(target, {"no_repeat_ngram_size": 3, "repetition_penalty": 1.3, "eos_token_id": 7})
    flags = ("--verifier.target", str(target), "--verifier.generation_config", "ignore", "--verifier.prune", "false")
    told = await described(start_service("services.verifier", *flags))
    assert (told.repetition_penalty, list(told.eos_ids)) == (1.0, [7])
