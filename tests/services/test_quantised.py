"""Folders whose weights are quantised: served as transformers loads them, or refused in a line."""

from __future__ import annotations

import json
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
from transformers import AutoModelForCausalLM

from coppice.config.model import ModelSize
from coppice.engine.engine import Engine
from coppice.engine.loading import UnusableFolder, load_engine
from coppice.engine.rows import Piece, pack
from tests.tiny import make_target

VOCAB, BLOCK = 96, 32
COMPRESSED = {
    "int8": (8, "int", "int-quantized", True),
    "int8 weights": (8, "int", "pack-quantized", False),
    "int4 weights": (4, "int", "pack-quantized", False),
    "fp8": (8, "float", "float-quantized", True),
}
"""of compressed-tensors: bits, type, format, and whether activations are quantised, too"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_target(tmp_path / "target", VOCAB, hidden=64, tokenizer=False, dtype=torch.bfloat16)


def say(folder: Path, quantization: dict[str, Any]) -> None:
    """Add to config.json how the weights are quantised."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": quantization}))


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
def test_a_quantised_folder_says_what_transformers_says(name: str, dtype: str, folder: Path) -> None:
    plain = ModelSize.of(folder, dtype).weights
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


@pytest.mark.parametrize(
    ("method", "options", "reason"),
    [
        ("gptq", {"bits": 4, "group_size": 32}, "GPTQ quantized model requires optimum"),
        ("awq", {"bits": 4, "group_size": 32}, "AWQ quantized model requires gptqmodel"),
        ("bitsandbytes", {"load_in_4bit": True}, "requires bitsandbytes"),
        ("torchao", {"quant_type": "int8_weight_only"}, "No module named 'torchao'"),
    ],
)
def test_a_kind_whose_package_is_missing_is_refused_in_a_line_that_names_it(
    method: str, options: dict[str, Any], reason: str, folder: Path
) -> None:
    say(folder, {"quant_method": method, **options})
    with pytest.raises(UnusableFolder, match=reason) as refused:
        load_engine(folder, kv_tokens=256)
    assert "\n" not in str(refused.value)
