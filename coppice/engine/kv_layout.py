"""What a model's attention needs from the pool, read off one recorded forward instead of guessed from its config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from coppice.engine.attention import UnsupportedModel, using


@dataclass(frozen=True)
class KVLayout:
    """The KV of a model and the width of its logits. group: query heads for each key head; windows: None is none."""

    layers: int
    kv_heads: int
    head_dim: int
    group: int
    windows: frozenset[int | None]
    vocab_size: int


class _Call(NamedTuple):
    layer: int
    heads: int
    key: torch.Size
    value: torch.Size


@dataclass
class _Recorder:
    """Notes what the layers with one window ask for, and answers zeros."""

    window: int | None
    calls: list[_Call]

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, softcap: float | None
    ) -> Tensor:
        self.calls.append(_Call(layer, query.shape[1], key.shape, value.shape))
        return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])


def read_layout(model: PreTrainedModel) -> KVLayout:
    """Run one row through a model set to packed attention. Raises UnsupportedModel where one pool cannot serve it."""
    calls: list[_Call] = []
    windows: set[int | None] = set()  # asked for, whether or not a layer has it

    def record(window: int | None) -> _Recorder:
        windows.add(window)
        return _Recorder(window, calls)

    row = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    name = type(model).__name__
    try:
        with torch.inference_mode(), using(record):
            present = torch.ones_like(row, dtype=torch.bool)
            logits = model(
                input_ids=row, attention_mask=present, position_ids=row, use_cache=False, logits_to_keep=0
            ).logits
    except (AttributeError, TypeError) as error:  # a model that reads its mask, or knows no such arguments
        raise UnsupportedModel(f"{name} cannot run packed: {error}") from error
    layers = model.config.get_text_config().num_hidden_layers
    if [call.layer for call in calls] != list(range(layers)):
        raise UnsupportedModel(f"{name} does not attend exactly once in each of its {layers} layers")
    shapes = {shape for call in calls for shape in (call.key, call.value)}
    if len(shapes) > 1 or len({call.heads for call in calls}) > 1:
        raise UnsupportedModel(f"{name} has keys and values of several shapes: {sorted(map(tuple, shapes))}")
    _, kv_heads, _, head_dim = calls[0].key
    group = calls[0].heads // kv_heads
    return KVLayout(layers, kv_heads, head_dim, group, frozenset(windows), logits.shape[-1])
