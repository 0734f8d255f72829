"""A second model for a head, ready to take over: made beside the drafts, exchanged between two of them."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from coppice.engine.linear import prepack
from coppice.errors import StaleFence
from coppice.heads.base import Spare
from coppice.heads.checkpoints import fused_tensor, public_names
from coppice.messages.steps import HeadDescription
from coppice.weights.staging import Staging
from coppice.weights.versions import Weights

M = TypeVar("M", bound=nn.Module)


class Swappable(Protocol[M]):
    """The parts of a head that a swap exchanges."""

    model: M
    weights: Weights
    description: HeadDescription
    device: torch.device
    dtype: torch.dtype


class SpareModel(Spare, Generic[M]):
    """A model beside the one that drafts."""

    def __init__(self, head: Swappable[M], model: M, weights: Weights, replaces: Weights) -> None:
        self._head, self._model, self._weights, self._replaces = head, model, weights, replaces

    def swap(self) -> None:
        """Exchange the models."""
        head, weights = self._head, self._weights
        if head.weights is not self._replaces:
            raise StaleFence(
                f"version {weights.version} was made to replace version {self._replaces.version}; version "
                f"{head.weights.version} with hash {head.weights.hash.hex()} came into use meanwhile"
            )
        head.model, self._model = self._model, head.model
        head.weights = self._replaces = weights
        head.description = replace(head.description, weights_version=weights.version, weights_hash=weights.hash)

    def release(self) -> None:
        """Let go of the old model."""
        del self._model


def make_spare(head: Swappable[M], staging: Staging) -> SpareModel[M]:
    """The head's model with a push's tensors in the head's dtype and on its device. It shares all others."""
    made, old = staging.finish(), staging.live
    model, changed = head.model, set(made.differing(old))
    state: dict[str, Tensor] = model.state_dict()
    on_cuda = head.device.type == "cuda"
    stream: Any = torch.cuda.Stream(head.device) if on_cuda else None  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):  # its own: drafts do not wait for the copies
        for name in state:
            if not changed.isdisjoint(public_names(name)):
                state[name] = fused_tensor(made.tensors, name).to(head.device, head.dtype)
    if on_cuda:
        stream.synchronize()
    return SpareModel(head, with_tensors(model, state), made, old)


def with_tensors(model: M, state: Mapping[str, Tensor]) -> M:
    """The same model with the tensors of `state`, which names all of its own, and no copy of any."""
    shared = [*model.parameters(), *model.buffers(), getattr(model, "rotary", None), model.config]
    copy = deepcopy(model, {id(one): one for one in shared})
    copy.load_state_dict(dict(state), assign=True)
    prepack(copy)
    return copy
