"""A forward over inputs at fixed addresses that asks the host for nothing: it can be compiled, and held by a graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from coppice.engine.attention import Scoring, UnsupportedModel, using
from coppice.engine.kv_cache import KVPool
from coppice.engine.ragged import Bucket, StepInputs
from coppice.engine.tree_attention import tree_attention


class Taps:
    """Hooks on a model's decoder layers: layer i's input is hidden_states[i]."""

    def __init__(self, model: PreTrainedModel, count: int) -> None:
        """Of a model with `count` layers. Raises UnsupportedModel."""
        self.layers = decoder_layers(model, count)
        self._wanted: tuple[int, ...] = ()
        self._handles: list[RemovableHandle] = []  # one for each of `_wanted`
        self._hidden: dict[int, Tensor] = {}

    def want(self, wanted: tuple[int, ...]) -> None:
        """Have the next forwards keep these hidden states. Most want those of the one before."""
        if wanted == self._wanted:
            return
        for handle in self._handles:
            handle.remove()

        def tap(index: int) -> RemovableHandle:
            def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                self._hidden[index] = args[0] if args else kwargs["hidden_states"]

            return self.layers[index].register_forward_pre_hook(keep, with_kwargs=True)

        self._wanted, self._handles = wanted, [tap(index) for index in wanted]

    def take(self) -> Tensor | None:
        """(T, len(wanted) * H) of the last forward, side by side; None when none are wanted."""
        kept = [self._hidden[index] for index in self._wanted]
        self._hidden.clear()
        return torch.cat(kept, dim=-1)[0] if kept else None


def decoder_layers(model: PreTrainedModel, count: int) -> nn.ModuleList:
    """The text model's outermost list of `count` modules: lists inside a layer (experts) come later in the walk, and a
    vision tower, which may be as deep, is outside the decoder.
    """
    decoder: Any = model.get_decoder()  # type: ignore[no-untyped-call]
    for module in chain(decoder.modules(), model.modules()):  # some call their output layer the decoder
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise UnsupportedModel(f"{type(model).__name__} has no list of {count} decoder layers")


@dataclass(frozen=True)
class StaticPlan:
    """How the rows in some inputs attend in the layers of one window."""

    window: int | None
    inputs: StepInputs
    pool: KVPool

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """query (1, H, T, D), key (1, KVH, T, D) and value (1, KVH, T, V) of the rows -> (1, T, H, V)."""
        inputs, (keys, values) = self.inputs, self.pool.layers[layer]
        out: Tensor = tree_attention(
            query[0].transpose(0, 1),
            key[0].transpose(0, 1),
            value[0].transpose(0, 1),
            keys,
            values,
            scoring.sinks,
            inputs.new_slots,
            inputs.session,
            inputs.paged,
            inputs.length,
            inputs.tail,
            inputs.table,
            inputs.tiles,
            self.pool.block_size,
            self.window or 0,
            query.shape[-1] ** -0.5 if scoring.scaling is None else scoring.scaling,
            scoring.softcap or 0.0,
        )
        return out[None]


class Output(NamedTuple):
    """What a step answers; its rows behind the batch's own mean nothing.

    logits: (kept, V). features: (rows, len(feature_layers) * H), None for no feature layers.
    """

    logits: Tensor
    features: Tensor | None


class StaticStep:
    """The forward of a model over the inputs of one bucket, with the same hidden states tapped in every call."""

    def __init__(
        self,
        model: PreTrainedModel,
        pool: KVPool,
        groups: Mapping[int | None, int],
        taps: Taps,
        bucket: Bucket,
        feature_layers: tuple[int, ...],
    ) -> None:
        """groups: query heads for each key head in the layers of each window."""
        self.model, self._taps, self.feature_layers = model, taps, feature_layers
        self.inputs = StepInputs(
            bucket, group=max(groups.values()), spare=pool.spare, block_size=pool.block_size, device=pool.device
        )
        self.inputs.new_slots.fill_(pool.spare)  # a step that is run without a batch harms nobody
        self.plans = {window: StaticPlan(window, self.inputs, pool) for window in groups}
        self._present = torch.ones(1, bucket.rows, dtype=torch.bool, device=pool.device)  # no token is padding

    def __call__(self) -> Output:
        """Run it, operator by operator."""
        self.tap()
        with torch.inference_mode(), using(self.plans.__getitem__):
            return self.forward()

    def tap(self) -> None:
        """Have the model keep the hidden states of this step; done before it is traced."""
        self._taps.want(self.feature_layers)

    def forward(self) -> Output:
        """The part that can be traced."""
        logits: Tensor = self.model(
            input_ids=self.inputs.tokens[None],
            attention_mask=self._present,
            position_ids=self.inputs.positions[None],
            use_cache=False,
            logits_to_keep=self.inputs.keep,
        ).logits
        return Output(logits[0], self._taps.take())
