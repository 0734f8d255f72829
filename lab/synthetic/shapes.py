"""Targets and heads of any shape with random weights: as fast as trained ones, and as wrong as can be."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from coppice.engine.engine import DTYPES
from coppice.errors import InvalidField
from coppice.heads.checkpoints import read_output, read_target, save_head
from coppice.stack.spec import HeadSpec
from coppice.training.heads import build_student, head_config
from coppice.training.trainer import replacing

DRAFT_VOCAB = 32_000
"""SpecBlock, A.1, as EAGLE-3"""

_FIELDS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
    "tie_word_embeddings",
)
_PRESETS = {
    "demo": ("llama", 256, 768, 20, 4, 2, 8192, 1024, True),
    "0.5b": ("qwen2", 896, 4864, 24, 14, 2, 151_936, 32_768, True),
    "llama-3.1-8b": ("llama", 4096, 14_336, 32, 32, 8, 128_256, 8192, False),
    "qwen3-8b": ("qwen3", 4096, 12_288, 36, 32, 8, 151_936, 40_960, False),
}
SHAPES: dict[str, dict[str, Any]] = {name: dict(zip(_FIELDS, row, strict=True)) for name, row in _PRESETS.items()}
"""What costs time in a config.json, by name: models/demo, Qwen2.5-0.5B, Llama-3.1-8B, Qwen3-8B."""


def read_shape(text: str) -> PretrainedConfig:
    """The configuration of a preset, or of a folder's config.json. Raises InvalidField."""
    auto: Any = AutoConfig
    if text in SHAPES:
        preset: PretrainedConfig = auto.for_model(**SHAPES[text])
        return preset
    if not (Path(text) / "config.json").is_file():
        raise InvalidField("shape", f"{text!r} is neither a folder with config.json nor one of {', '.join(SHAPES)}")
    own: PretrainedConfig = auto.from_pretrained(text, local_files_only=True, trust_remote_code=False)
    return own


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
        with replacing(target) as partial:
            model.save_pretrained(partial)
        del model
    heads = []
    for kind in kinds:
        if not (folder / kind / "config.json").is_file():
            with replacing(folder / kind) as partial:
                _make_head(partial, kind, config, target, dtype, seed)
        heads.append(HeadSpec(kind, kind, folder / kind))
    return target, tuple(heads)


def _make_head(folder: Path, kind: str, config: Any, target: Path, dtype: str, seed: int) -> None:
    parts = read_target(target)
    shape = head_config(kind, config.get_text_config(), parts, DRAFT_VOCAB)
    output = read_output(target).float()
    student = build_student(shape, parts.embedding, output, torch.arange(shape.draft_vocab_size), seed)
    save_head(folder, student.model.to(DTYPES[dtype]), shape)
