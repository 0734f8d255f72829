"""Hidden states that a forward leaves behind for drafters."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from coppice.engine.attention import UnsupportedModel


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
