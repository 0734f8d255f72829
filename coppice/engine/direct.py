"""Calls inside a model without what torch allows for around each of them: hooks, and parts that are replaced."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from typing import Any

from torch import nn
from transformers import PreTrainedModel

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def call_directly(model: nn.Module, hooked: Collection[nn.Module] = ()) -> None:
    """Have a model's modules called as their `forward`, and their parts found as plain attributes.

    A call of nn.Module looks into four dictionaries for hooks, and a part is searched in three more; all these are cold
    whenever the weights of a layer have gone through the caches. Left to torch are modules that are `hooked` later or
    already, those that are called in a way of their own, whole models, which transformers knows by their class, and
    buffers, which some modules replace. A part is still replaced by assignment, and by nothing else.
    """
    for module in model.modules():
        kind: Any = type(module)
        replaced = "forward" in module.__dict__  # such a forward may exchange the module's parameters meanwhile
        module.__dict__.update(module._modules if replaced else module._modules | module._parameters)
        own = replaced or kind.__call__ is not nn.Module.__call__
        watched = module in hooked or any(map(module.__dict__.get, _HOOKS))
        if not (own or watched or isinstance(module, PreTrainedModel)):
            module.__class__ = _direct(kind)


@cache
def _direct(kind: type[nn.Module]) -> type[nn.Module]:
    """The class with its `forward` as the call."""
    return type(kind.__name__, (kind,), {"__call__": kind.forward, "__module__": kind.__module__})
