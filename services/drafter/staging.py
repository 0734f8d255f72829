"""A push of weights: its parts are collected in a file and checked before the head sees a tensor of it.

Everything in a push is untrusted. Nothing here computes with torch's threads, so that drafting goes on beside it.
"""

import time
from tempfile import NamedTemporaryFile
from typing import Any, cast

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from coppice.adaptation.weights import Routes, Weights, shape_of
from coppice.errors import InvalidField, StaleFence
from coppice.heads.base import Head
from coppice.limits import MAX_KINDS, MAX_VARIANTS, MAX_VERSION_STEP, SKETCH
from coppice.wire.drafter import WeightsHeader, WeightsPart

MAX_FILE_HEADER = 1 << 20  # the JSON object at the file's beginning
_NAME_CHARS = 80  # of a name that the sender made up, in the answer to it


class Staging:
    """One push to a head: its header is checked at once, the tensors and the hash of all when its parts have come."""

    def __init__(self, header: WeightsHeader, head: Head) -> None:
        """Raises StaleFence when the push is for another head, no newer than what is in use, or of another parent than
        that or version 0, the checkpoint; InvalidField when weights cannot be replaced, are the same, or are far newer.
        """
        name, live, first = head.description.name, head.weights, head.checkpoint
        if live is None or first is None:
            raise InvalidField("header.head", f"a {head.description.kind} head has no weights that can be replaced")
        if header.head != name:
            raise StaleFence(f"these weights are for the head {header.head}; this drafter serves {name}")
        self.header, self._head, self._live = header, head, live
        self.in_use = (header.version, header.weights_hash) == (live.version, live.hash)
        """the push repeats what is in use: to be acknowledged, its parts do not matter"""
        if self.in_use:
            return
        if header.version <= live.version:
            reason = f"version {header.version} with hash {header.weights_hash.hex()} is old"
            raise StaleFence(f"{reason}; expected one above version {live.version} with hash {live.hash.hex()}")
        if header.version > live.version + MAX_VERSION_STEP:
            reason = f"{header.version} is more than {MAX_VERSION_STEP} above version {live.version}, which is in use"
            raise InvalidField("header.version", reason)
        parents = {weights.version: weights for weights in (first, live)}
        parent = parents.get(header.parent)
        if parent is None or parent.hash != header.parent_hash:
            reason = f"the parent is version {header.parent} with hash {header.parent_hash.hex()}"
            expected = " or ".join(f"version {number} with hash {of.hash.hex()}" for number, of in parents.items())
            raise StaleFence(f"{reason}; expected {expected}")
        if header.weights_hash == live.hash:
            raise InvalidField("header.weights_hash", f"version {header.version} would change nothing")
        self._parent = parent
        numbers = (1 + MAX_VARIANTS) * sum(tensor.numel() for tensor in first.tensors.values()) + MAX_KINDS * 2 * SKETCH
        self._most = 8 + MAX_FILE_HEADER + 4 * numbers
        self._file = NamedTemporaryFile()  # noqa: SIM115  (it goes when the push is read, or dropped)
        self.size = 0  # bytes that have come

    def add(self, part: WeightsPart) -> None:
        """Take the next part. Raises InvalidField for more bytes than a file of all of the head's tensors has."""
        self.size += len(part.data)
        if self.size > self._most:
            raise InvalidField("part.data", f"{self.size} bytes are more than this head's weights take: {self._most}")
        self._file.write(part.data)

    def finish(self) -> Weights:
        """The weights that the push makes. Raises InvalidField for no file of this head's, or another hash."""
        header = self.header
        with self._file:
            self._file.flush()
            tensors = read_file(self._file.name, self._parent)
        weights = self._parent.changed(tensors, header.version)
        if weights.hash != header.weights_hash:
            reason = f"with these tensors the weights have {weights.hash.hex()}: some are missing or others"
            raise InvalidField("header.weights_hash", reason)
        return weights

    def prepare(self) -> tuple[Weights, dict[int, Any], Routes]:
        """What the head is to exchange, made while others draft. Raises what `finish` and `Routes.of` raise."""
        weights, head = self.finish(), cast(Any, self._head)
        routes = Routes.of(weights.tensors)
        return weights, head.models_of(weights), routes

    def swap(self, weights: Weights, models: dict[int, Any], routes: Routes) -> tuple[int, dict[int, Any]]:
        """Put what `prepare` made to use, on the head's thread between drafts; its nanoseconds, and the old models.

        Raises StaleFence when the head's weights are no longer those that the push was checked against.
        """
        head = cast(Any, self._head)
        if head.weights is not self._live:
            raise StaleFence(f"version {head.weights.version} came into use while version {weights.version} was made")
        began, old = time.perf_counter_ns(), head.models
        head.exchange(weights, models, routes)
        return time.perf_counter_ns() - began, old


def read_file(path: str, parent: Weights) -> dict[str, Tensor]:
    """Copy the tensors out of a safetensors file: the parent's, or variants of them, in float32, in its shapes, finite.

    Raises InvalidField: `file` where it is no safetensors file, else `tensors.NAME`.
    """
    tensors: dict[str, Tensor] = {}
    try:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  (it is no mapping)
                field, entry = f"tensors.{name[:_NAME_CHARS]}", file.get_slice(name)
                shape, dtype = shape_of(name, parent.tensors), entry.get_dtype()
                if shape is None:
                    raise InvalidField(field, "is no tensor of this head that may be replaced")
                if dtype != "F32":
                    raise InvalidField(field, f"is of dtype {dtype}, expected F32")
                if entry.get_shape() != list(shape):
                    reason = f"has shape {str(entry.get_shape())[:_NAME_CHARS]}, expected {list(shape)}"
                    raise InvalidField(field, reason)
                values = file.get_tensor(name).numpy()  # a view of the file
                if not np.isfinite(values).all():
                    raise InvalidField(field, "is not finite")
                tensors[name] = torch.from_numpy(values.copy())
    except SafetensorError as error:
        raise InvalidField("file", f"is no safetensors file: {str(error)[:_NAME_CHARS]}") from None
    return tensors
