"""A second model for a head, ready to take over: made beside the drafts, exchanged between two of them."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from coppice.engine.linear import prepack
from coppice.errors import StaleFence
from coppice.heads.public_state import fused_tensor, public_names
from coppice.weights.staging import Staging

if TYPE_CHECKING:
    from coppice.heads.feature_head import FeatureHead


class WeightSwap:
    """A model with new weights beside the one that drafts, ready: the next draft reads them once `swap` was called."""

    def __init__(self, head: FeatureHead, staging: Staging) -> None:
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
        """Exchange the models. Call it on the head's thread between drafts.

        Raises StaleFence when the head's weights are no longer those that the push was checked against.
        """
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
        """Free the old model. It takes a while: call it on another thread than the head's."""
        del self._model


def with_tensors(model: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
    """Copy a model with the tensors of `state`, which names all of its own; no tensor is copied."""
    shared = [*model.parameters(), *model.buffers(), getattr(model, "rotary", None), model.config, model.own_embedding]
    copy = deepcopy(model, {id(one): one for one in shared})
    copy.load_state_dict(dict(state), assign=True)
    prepack(copy)
    return copy
