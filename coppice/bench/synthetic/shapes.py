"""Targets and heads of any shape with random weights: as fast as trained ones, and as wrong as can be."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from coppice.engine.engine import DTYPES
from coppice.errors import InvalidField
from coppice.heads.checkpoints import read_output, read_target, save_head
from coppice.stack.spec import HeadSpec
from coppice.training.feature_heads import build_student, head_config

DRAFT_VOCAB = 32_000
"""SpecBlock, A.1, as EAGLE-3"""

SHAPES = MappingProxyType(
    {
        "demo": {  # the target of models/demo
            "model_type": "llama",
            "hidden_size": 256,
            "intermediate_size": 768,
            "num_hidden_layers": 20,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 8192,
            "max_position_embeddings": 1024,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
        },
        "0.5b": {  # as Qwen2.5-0.5B
            "model_type": "qwen2",
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "vocab_size": 151_936,
            "max_position_embeddings": 32_768,
            "rope_theta": 1_000_000.0,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
        },
        "llama-3.1-8b": {
            "model_type": "llama",
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128_256,
            "max_position_embeddings": 8192,
            "rope_theta": 500_000.0,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
        },
        "qwen3-8b": {
            "model_type": "qwen3",
            "hidden_size": 4096,
            "intermediate_size": 12_288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151_936,
            "max_position_embeddings": 40_960,
            "rope_theta": 1_000_000.0,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
        },
    }
)
"""by name, under the words of a config.json"""


def read_shape(text: str) -> PretrainedConfig:
    """The configuration of a preset, or of a folder's config.json. Raises InvalidField."""
    auto: Any = AutoConfig
    if text in SHAPES:
        preset: PretrainedConfig = auto.for_model(**SHAPES[text])
        return preset
    if not (Path(text) / "config.json").is_file():
        raise InvalidField("shape", f"{text!r} is neither a folder with config.json nor one of {', '.join(SHAPES)}")
    found: PretrainedConfig = auto.from_pretrained(text, local_files_only=True, trust_remote_code=False)
    return found


def make_weights(
    folder: Path, config: PretrainedConfig, kinds: Sequence[str], dtype: str, device: str, seed: int
) -> tuple[Path, tuple[HeadSpec, ...]]:
    """Write a random target and a random head of each kind, shaped as training would shape it, unless they are there.

    The target is made on `device`, which for a large one should be an accelerator. Returns the target's folder and the
    heads. Raises InvalidField for a kind that has no such shape.
    """
    quiet: Any = transformers.utils.logging
    quiet.disable_progress_bar()
    auto: Any = AutoModelForCausalLM
    target = folder / "target"
    torch.manual_seed(seed)
    if not (target / "config.json").is_file():
        with torch.device(device):
            model = auto.from_config(config, dtype=DTYPES[dtype])
        _save(target, model.save_pretrained)
        del model
    heads = []
    for kind in kinds:
        if not (folder / kind / "config.json").is_file():
            _save(folder / kind, lambda partial, kind=kind: _make_head(partial, kind, config, target, dtype, seed))
        heads.append(HeadSpec(kind, kind, folder / kind))  # type: ignore[arg-type]
    return target, tuple(heads)


def _make_head(folder: Path, kind: str, config: Any, target: Path, dtype: str, seed: int) -> None:
    parts = read_target(target)
    shape = head_config(kind, config.get_text_config(), parts, DRAFT_VOCAB)
    output = read_output(target).float()
    student = build_student(shape, parts.embedding, output, torch.arange(shape.draft_vocab_size), seed)
    save_head(folder, student.model.to(DTYPES[dtype]), shape, kind)  # type: ignore[arg-type]


def _save(folder: Path, write: Any) -> None:
    """Write all of a folder, or nothing."""
    partial = folder.with_name(f".{folder.name}.partial")
    write(partial)
    partial.rename(folder)
