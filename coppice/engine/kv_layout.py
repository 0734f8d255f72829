"""What a model's attention needs from the pool, read off one recorded forward instead of guessed from its config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from coppice.engine.attention import NAME, Scoring, UnsupportedModel, one_line, using
from coppice.engine.kv_cache import KVShape


@dataclass(frozen=True)
class KVLayout:
    """The KV of a model and the width of its logits.

    layers: what each layer keeps of a token. groups: for every window that some layer has, None being none, how many
    query heads these layers have for each key head.
    """

    layers: tuple[KVShape, ...]
    groups: Mapping[int | None, int]
    vocab_size: int


class _Call(NamedTuple):
    layer: int
    window: int | None
    group: int
    shape: KVShape


@dataclass
class _Recorder:
    """Notes what the layers with one window keep, and answers zeros."""

    window: int | None
    calls: list[_Call]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        (_, heads, rows, dim), (_, kv_heads, *kept) = query.shape, key.shape
        if value.shape[1] != kv_heads or heads % kv_heads or kept != [rows, dim] or value.shape[2] != rows:
            raise UnsupportedModel(f"layer {layer} attends with {heads} heads from {key.shape} to {value.shape}")
        shape = KVShape(kv_heads, dim, value.shape[3])
        self.calls.append(_Call(layer, self.window, heads // kv_heads, shape))
        return value.new_zeros(1, rows, heads, shape.value_dim)


def read_layout(model: PreTrainedModel) -> KVLayout:
    """Run one row through a model, which may be on the meta device. Raises UnsupportedModel where a pool cannot serve
    it; what kept it from running is the cause.
    """
    name = type(model).__name__
    if getattr(model, "_is_stateful", False):  # of transformers: a text's state cannot be taken back to an earlier row
        raise UnsupportedModel(f"{name} keeps a state of the text beside its keys and values")
    model.set_attn_implementation(NAME)
    calls: list[_Call] = []
    groups: dict[int | None, int] = {}

    def record(window: int | None) -> _Recorder:
        groups[window] = 1  # asked for, whether or not a layer has it
        return _Recorder(window, calls)

    row = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    try:
        with torch.inference_mode(), using(record):
            present = torch.ones_like(row, dtype=torch.bool)
            logits = model(
                input_ids=row, attention_mask=present, position_ids=row, use_cache=False, logits_to_keep=0
            ).logits
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{name}: {error}") from None
    except Exception as error:
        reads = isinstance(error, AttributeError | TypeError) and _Recorder.__name__ in str(error)
        why = "it computes with its mask" if reads else one_line(error)
        raise UnsupportedModel(f"{name} cannot run packed: {why}") from error
    layers = model.config.get_text_config().num_hidden_layers
    if [call.layer for call in calls] != list(range(layers)):
        raise UnsupportedModel(f"{name} does not attend exactly once in each of its {layers} layers")
    groups |= {call.window: call.group for call in calls}
    if any(call.group != groups[call.window] for call in calls):
        raise UnsupportedModel(f"{name} has layers of one window with several numbers of query heads for a key head")
    return KVLayout(tuple(call.shape for call in calls), groups, logits.shape[-1])
