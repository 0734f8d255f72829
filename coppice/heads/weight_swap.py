"""The models of a head, and second ones that are made beside the drafts and take over between two of them."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from coppice.engine.linear import prepack
from coppice.errors import StaleFence
from coppice.heads.models.layers import DraftModel
from coppice.heads.public_state import fused_tensor, public_names
from coppice.weights.staging import Staging
from coppice.weights.variants import Routes, in_deployed, numbers_in, variant_name

if TYPE_CHECKING:
    from coppice.heads.feature_head import FeatureHead


@dataclass
class VariantModels:
    """The models of a head by variant, 0 the deployed one, and what each is for."""

    models: dict[int, Any]
    routes: Routes
    at_work: int = 0
    """the variant that drafts now"""

    @property
    def model(self) -> Any:
        """The model that drafts now; of a variant that is gone the deployed one."""
        return self.models.get(self.at_work, self.models[0])


class WeightSwap:
    """Models with new weights beside those that draft, ready: the next draft reads them once `swap` was called."""

    def __init__(self, head: FeatureHead, staging: Staging) -> None:
        """Make the models of a push's tensors, in the head's dtype and on its device; they share all others.

        Raises what `Staging.finish` and `Routes.of` raise.
        """
        self._head, self._weights, self._replaces = head, staging.finish(), staging.live
        routes, used = Routes.of(self._weights.tensors), head.variants.models
        changed = set(self._weights.differing(self._replaces))
        deployed = self._model(used[0], 0, changed) if self._changes(0, changed) else used[0]
        models = {0: deployed}
        for number in numbers_in(self._weights.tensors):
            kept = used.get(number) if deployed is used[0] else None
            if kept is None or self._changes(number, changed):
                own = {name for name in self._weights.tensors if name.startswith(variant_name(number, ""))}
                kept = self._model(deployed, number, own)
            models[number] = kept
        self._variants = VariantModels(models, routes)

    def _changes(self, number: int, changed: AbstractSet[str]) -> bool:
        """Whether any of the names is of a variant."""
        return any(name.startswith(variant_name(number, "")) if number else in_deployed(name) for name in changed)

    def _model(self, model: Any, number: int, names: AbstractSet[str]) -> DraftModel:
        """Copy a model with a variant's values of those of its tensors that are among the names."""
        head, state = self._head, dict(model.state_dict())
        on_cuda = head.device.type == "cuda"
        stream: Any = torch.cuda.Stream(head.device) if on_cuda else None  # type: ignore[no-untyped-call]
        given = self._weights.tensors
        own = {name: variant_name(number, name) for name in given if in_deployed(name)}
        tensors = {name: given.get(one, given[name]) for name, one in own.items()}
        with torch.cuda.stream(stream):  # its own: drafts do not wait for the copies
            for name in state:
                if any(own.get(public) in names for public in public_names(name)):
                    state[name] = fused_tensor(tensors, name).to(head.device, head.dtype)
        if on_cuda:
            stream.synchronize()
        return with_tensors(model, state)

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
        head.variants, self._variants = self._variants, head.variants
        head.weights = self._replaces = weights
        head.description = replace(head.description, weights_version=weights.version, weights_hash=weights.hash)

    def release(self) -> None:
        """Free the old models. It takes a while: call it on another thread than the head's."""
        del self._variants


def with_tensors(model: DraftModel, state: Mapping[str, Tensor]) -> DraftModel:
    """Copy a model with the tensors of `state`, which names all of its own; no tensor is copied."""
    shared = [*model.parameters(), *model.buffers(), getattr(model, "rotary", None), model.config, model.own_embedding]
    copy = deepcopy(model, {id(one): one for one in shared})
    copy.load_state_dict(dict(state), assign=True)
    prepack(copy)
    copy.freeze()
    return copy
