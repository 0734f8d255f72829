"""`coppice doctor --size`: the memory that targets, draft heads and their sessions take, from their shapes alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from coppice.config.sections import VerifierSettings
from coppice.engine.attention import NAME
from coppice.engine.engine import DTYPES, MIN_FEATURE_LAYERS
from coppice.engine.kv_layout import read_layout
from coppice.errors import InvalidField
from coppice.heads.models.eagle3 import Eagle3Config, Eagle3Model
from coppice.heads.models.specblock import SpecBlockConfig, SpecBlockModel
from coppice.limits import TREE_ROOM

GIB = 1 << 30
_Models: Any = AutoModelForCausalLM  # whose methods have no types
_DRAFT_VOCAB = 32_000  # of the published heads
_BESIDE = 0.1  # of a device's memory: activations, kernels, fragments
_TOP: dict[str, Any] = {
    "vocab_size": 128_256,
    "num_key_value_heads": 8,
    "rope_theta": 500_000.0,
    "max_position_embeddings": 131_072,
}
SHAPES = {
    "8B": LlamaConfig(hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32, num_attention_heads=32, **_TOP),
    "70B": LlamaConfig(
        hidden_size=8192, intermediate_size=28_672, num_hidden_layers=80, num_attention_heads=64, **_TOP
    ),
}
"""Targets of Llama 3's shapes"""


@dataclass(frozen=True, slots=True)
class Size:
    """What one process that serves a model needs, bytes."""

    model: str
    parameters: int
    weights: int
    """on the device; of a head with the target's embedding, which its drafter holds too"""
    kv_token: int
    """on the device, for each token of a session"""
    kv_session: int
    """on the device, for a session that takes all of the context"""
    features: int
    """in the host's memory, for that session: a window of what feature-fed heads may fetch"""

    def sessions(self, memory: int) -> int:
        """How many such sessions a device of so many bytes holds, 0 when it cannot hold the weights."""
        return max(0, int(memory * (1 - _BESIDE)) - self.weights) // self.kv_session


def sizes(name: str, config: Any, context: int, dtype: str) -> Iterator[Size]:
    """A target of a transformers configuration, then an EAGLE-3 and a SpecBlock head with layers of its shape.

    context: prompt and new tokens of a session. Raises InvalidField for another dtype, UnsupportedModel.
    """
    if dtype not in DTYPES:
        raise InvalidField("dtype", f"{dtype!r} is not one of {', '.join(DTYPES)}")
    width = DTYPES[dtype].itemsize
    with torch.device("meta"):  # shapes without memory
        model: Any = _Models.from_config(config)
        model.set_attn_implementation(NAME)
        layout = read_layout(model)
    pair = 2 * layout.kv_heads * layout.head_dim * width  # key and value of one token in one layer

    def size(what: str, module: nn.Module, beside: int, entries: int, features: int) -> Size:
        count = sum(parameter.numel() for parameter in module.parameters())
        return Size(what, count, (count + beside) * width, entries * pair, entries * pair * context, features)

    text = config.get_text_config()
    window = min(context, VerifierSettings.model_fields["feature_window"].default)
    fed = layout.layers >= MIN_FEATURE_LAYERS
    target = size(name, model, 0, layout.layers, fed * window * 3 * text.hidden_size * width)
    yield replace(target, kv_session=target.kv_token * (context + TREE_ROOM))
    if not fed:
        return
    sketch = {
        "hidden_size": text.hidden_size,
        "intermediate_size": text.intermediate_size,
        "num_attention_heads": layout.kv_heads * layout.group,
        "num_key_value_heads": layout.kv_heads,
        "head_dim": layout.head_dim,
        "vocab_size": layout.vocab_size,
        "draft_vocab_size": min(_DRAFT_VOCAB, layout.vocab_size),
    }
    eagle3, specblock = Eagle3Config.model_validate(sketch), SpecBlockConfig.model_validate(sketch)
    embedding = layout.vocab_size * text.hidden_size
    with torch.device("meta"):
        yield size(f"{name} eagle3", Eagle3Model(eagle3), embedding, eagle3.num_hidden_layers, 0)
        entries = specblock.num_hidden_layers * specblock.slots
        yield size(f"{name} specblock", SpecBlockModel(specblock), embedding, entries, 0)


def report(console: Console, targets: Sequence[str], context: int, dtype: str, memory_gib: float) -> None:
    """Print a row for each model. `targets`: names of SHAPES or folders; all shapes when there are none.

    Raises InvalidField naming the option that is of no use.
    """
    if context < 1 or memory_gib <= 0:
        raise InvalidField("context" if context < 1 else "memory", "must be above 0")
    rows = [row for name in targets or SHAPES for row in sizes(Path(name).name, _config(name), context, dtype)]
    title = f"{dtype}, sessions of {context:,} tokens, devices of {memory_gib:g} GiB"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 0), collapse_padding=True)
    for heading in ("model", "params", "weights", "KV/token", "KV/session", "sessions", "features"):
        table.add_column(heading, justify="left" if heading == "model" else "right", no_wrap=True)
    for row in rows:
        sessions = row.sessions(int(memory_gib * GIB))
        table.add_row(
            row.model,
            f"{row.parameters / 1e9:.2f} B",
            f"{row.weights / GIB:.1f} GiB",
            f"{row.kv_token / 1024:g} KiB",
            f"{row.kv_session / GIB:.2f} GiB",
            f"{sessions:,}" if sessions else "too large",
            f"{row.features / (1 << 20):.0f} MiB" if row.features else "-",
        )
    console.print(table)
    console.print(
        "Weights and KV lie on the device, one for each process; features, of a session, in the verifier's host "
        "memory. A tenth of the device is left for activations."
    )


def _config(name: str) -> Any:
    if name in SHAPES:
        return SHAPES[name]
    if not (Path(name) / "config.json").is_file():
        raise InvalidField("target", f"{name!r} is neither a folder with a config.json nor one of {', '.join(SHAPES)}")
    return AutoConfig.from_pretrained(name, local_files_only=True, trust_remote_code=False)
