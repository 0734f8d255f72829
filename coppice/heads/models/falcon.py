"""The Falcon drafter as a torch module (SpecBlock, appendix A.4): stacked LSTM layers and attention that is relaxed
inside a block, for training and serving.

Falcon feeds a block with the K tokens before it. Here a block starts from one condition and one token, as SpecBlock's
does, so that the two differ in nothing but what ties the slots of a block together, and in their trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import PositiveInt
from torch import Tensor, nn

from coppice.heads.models.block import BlockConfig, BlockInput, BlockModel, Layer
from coppice.heads.models.layers import Attend
from coppice.heads.models.rotary import Rope


class FalconConfig(BlockConfig):
    """Sizes of a Falcon head."""

    kind: ClassVar[str] = "falcon"
    relaxed: ClassVar[bool] = True
    num_hidden_layers: PositiveInt = 1
    lstm_layers: PositiveInt = 2


class FalconModel(BlockModel):
    """An LSTM over the slots of each block, then layers in which they all see one another."""

    config: FalconConfig

    def __init__(self, config: FalconConfig) -> None:
        super().__init__(config)
        hidden = config.hidden_size
        self.input_layer = BlockInput(config)
        self.lstm = nn.LSTM(hidden, hidden, config.lstm_layers, batch_first=True)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.add_output()

    def forward(self, condition: Tensor, token: Tensor, rope: Rope, attends: Sequence[Attend]) -> Tensor:
        """Blocks of (B, N, hidden) conditions and token embeddings -> (B, N, K, hidden) un-normed last-layer states.

        attends: one for each layer, over the N * K slots in row-major order.
        """
        states: Tensor = self.input_layer(condition, token)
        shape = states.shape
        states = states + self.lstm(states.flatten(0, 1))[0].view(shape)
        states = states.flatten(1, 2)
        for layer, attend in zip(self.layers, attends, strict=True):
            states = layer(states, rope, attend)
        return states.view(shape)
