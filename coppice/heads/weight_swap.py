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
from coppice.heads.base import WeightSwap
from coppice.heads.public_state import fused_tensor, public_names
from coppice.messages.steps import HeadDescription
from coppice.weights.staging import Staging
from coppice.weights.versions import Weights

M = TypeVar("M", bound=nn.Module)


class Swappable(Protocol[M]):
    """The parts of a head that a swap exchanges."""

    model: M
    weights: Weights
    description: HeadDescription
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        """Where it computes."""


class ModelSwap(WeightSwap, Generic[M]):
    """A model beside the one that drafts."""

    def __init__(self, head: Swappable[M], staging: Staging) -> None:
        """Make the head's model with a push's tensors, in its dtype and on its device; it shares all others.

        Raises what `Staging.finish` raises.
        """
        self._head, self._weights, self._replaces = head, staging.finish(), staging.live
        changed = set(self._weights.differing(self._replaces))
        state: dict[str, Tensor] = head.model.state_dict()
        on_cuda = head.device.type == "cuda"
        stream: Any = torch.cuda.Stream(head.device) if on_cuda else None  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):  # its own: drafts do not wait for the copies
            for name in state:
                if not changed.isdisjoint(public_names(name)):
                    state[name] = fused_tensor(self._weights.tensors, name).to(head.device, head.dtype)
        if on_cuda:
            stream.synchronize()
        self._model = with_tensors(head.model, state)

    def swap(self) -> None:
        """Exchange the models. Raises StaleFence when other weights came into use meanwhile."""
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
        """Free the old model."""
        del self._model


def with_tensors(model: M, state: Mapping[str, Tensor]) -> M:
    """Copy a model with the tensors of `state`, which names all of its own; no tensor is copied."""
    shared = [*model.parameters(), *model.buffers(), getattr(model, "rotary", None), model.config]
    copy = deepcopy(model, {id(one): one for one in shared})
    copy.load_state_dict(dict(state), assign=True)
    prepack(copy)
    return copy
