"""A forward over inputs at fixed addresses that asks the host for nothing: it can be compiled, and held by a graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from coppice.engine.attention import Scoring, using
from coppice.engine.kv_cache import KVPool
from coppice.engine.ragged import Bucket, StepInputs
from coppice.engine.taps import Taps
from coppice.engine.tree_attention import tree_attention


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
