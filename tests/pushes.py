"""Pushes of weights for tests: a good one, and every way to spoil it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from coppice.adaptation.weights import Weights, pack_update
from coppice.errors import CoppiceError, InvalidField, StaleFence
from coppice.heads.feature_head import FeatureHead
from coppice.limits import MAX_VERSION_STEP
from coppice.wire.drafter import WeightsHeader, WeightsPart
from services.drafter.staging import Staging

PART = 4096  # bytes; a tiny head's file in several parts
MATRICES = ("lm_head.weight", "markov_head.markov_w2.weight")
"""a head's last matrix: a dspark head's output layer is the target's and never replaced"""
_FIELD = rf"tensors\.(?:{'|'.join(map(re.escape, MATRICES))})"


def matrix_of(weights: Weights) -> str:
    """The name of the head's last matrix."""
    return next(name for name in MATRICES if name in weights.tensors)


def altered(weights: Weights, seed: int, names: Sequence[str] | None = None, version: int | None = None) -> Weights:
    """The next version: some tensors (None: all) moved a little."""
    generator = torch.Generator().manual_seed(seed)
    moved = {}
    for name in names if names is not None else weights.tensors:
        tensor = weights.tensors[name]
        moved[name] = tensor + 0.3 * tensor.std(correction=0) * torch.randn(tensor.shape, generator=generator) + 0.01
    return weights.changed(moved, weights.version + 1 if version is None else version)


@dataclass(frozen=True)
class Push:
    """What is sent."""

    header: WeightsHeader
    parts: list[WeightsPart]

    @classmethod
    def of(cls, head: str, parent: Weights, weights: Weights) -> Push:
        """As the adapter would send it, in smaller parts."""
        header, parts = pack_update(head, parent, weights)
        return cls(header, parts).with_file(b"".join(part.data for part in parts))

    @property
    def file(self) -> bytes:
        return b"".join(part.data for part in self.parts)

    def announcing(self, **numbers: object) -> Push:
        """The same with another header."""
        return Push(replace(self.header, **numbers), self.parts)  # type: ignore[arg-type]

    def with_file(self, file: bytes) -> Push:
        """Another file under the same header."""
        return Push(self.header, [WeightsPart(file[at : at + PART]) for at in range(0, len(file), PART)])

    def of_parts(self, *numbers: int) -> Push:
        """These parts alone."""
        return Push(self.header, [self.parts[number] for number in numbers])


@dataclass(frozen=True)
class Case:
    """A good push over `live`, a version above 1 whose checkpoint is `first`."""

    head: str
    first: Weights
    live: Weights

    @property
    def holder(self) -> Any:
        """As much of the head as a push needs."""
        description = SimpleNamespace(name=self.head, kind="eagle3")
        return SimpleNamespace(description=description, weights=self.live, checkpoint=self.first)

    @property
    def new(self) -> Weights:
        return altered(self.live, 17)

    @property
    def good(self) -> Push:
        return Push.of(self.head, self.live, self.new)

    def sending(self, tensors: Mapping[str, Tensor | None]) -> Push:
        """The good push with some tensors replaced in the file and None left out, its hash that of what is sent."""
        sent = load(self.good.file) | {name: tensor for name, tensor in tensors.items() if tensor is not None}
        sent = {name: tensor for name, tensor in sent.items() if tensors.get(name, tensor) is not None}
        push = self.good.with_file(save(sent))
        told = self.live.changed({name: tensor.float() for name, tensor in sent.items()}, 0)
        return push.announcing(weights_hash=told.hash)

    @property
    def matrix(self) -> Tensor:
        """The head's last matrix as the good push has it."""
        return self.new.tensors[matrix_of(self.live)]

    def with_matrix(self, tensor: Tensor | None) -> Push:
        """The good push with another last matrix, None: without."""
        return self.sending({matrix_of(self.live): tensor})

    def spoiled(self, value: float) -> Push:
        """The good push with one number replaced."""
        tensor = self.matrix.clone()
        tensor[3, 5] = value
        return self.with_matrix(tensor)

    def flipped(self) -> bytes:
        """The file with its last number's lowest bit flipped."""
        file = bytearray(self.good.file)
        file[-4] ^= 1
        return bytes(file)


def _stranger(case: Case) -> Push:
    """Another head's update under this head's name."""
    other = Weights.of({name: tensor + 1 for name, tensor in case.live.tensors.items()}, case.live.version)
    return Push.of(case.head, other, altered(other, 3))


def _mixed(case: Case) -> Push:
    """The good push with the last part of another one."""
    good, other = case.good, Push.of(case.head, case.live, altered(case.live, 18))
    return Push(good.header, [*good.parts[:-1], other.parts[-1]])


Made = Callable[[Case], Push]
_NO_FILE, _OTHER_HASH = "file: is no safetensors file", r"header\.weights_hash: .* some are missing"

_INVALID: dict[str, tuple[Made, str]] = {
    "truncated": (lambda case: case.good.with_file(case.good.file[:-8]), _NO_FILE),
    "flipped bit": (lambda case: case.good.with_file(case.flipped()), _OTHER_HASH),
    "no chunk": (lambda case: case.good.of_parts(), _NO_FILE),
    "missing chunk": (lambda case: case.good.of_parts(0, 2), _NO_FILE),
    "duplicate last chunk": (lambda case: case.good.of_parts(*range(len(case.good.parts)), -1), _NO_FILE),
    "another push's last chunk": (_mixed, _OTHER_HASH),
    "unknown key": (
        lambda case: case.sending({"extra.weight": torch.ones(2)}),
        r"tensors\.extra\.weight: is no tensor of this head",
    ),
    "unknown key d2t": (
        lambda case: case.sending({"d2t": torch.zeros(48, dtype=torch.int64)}),
        r"tensors\.d2t: is no tensor of this head that may be replaced",
    ),
    "missing key": (lambda case: case.with_matrix(None).announcing(weights_hash=case.new.hash), _OTHER_HASH),
    "wrong shape": (
        lambda case: case.with_matrix(case.matrix.T.contiguous()),
        rf"{_FIELD}: has shape \[(\d+), 48\], expected \[48, \1\]",
    ),
    "wrong dtype": (
        lambda case: case.with_matrix(case.matrix.bfloat16()),
        rf"{_FIELD}: is of dtype BF16, expected F32",
    ),
    "NaN": (lambda case: case.spoiled(float("nan")), rf"{_FIELD}: is not finite"),
    "a version that nobody can have made": (
        lambda case: case.good.announcing(version=case.live.version + MAX_VERSION_STEP + 1),
        r"header\.version: .* is more than \d+ above version 2",
    ),
    "more bytes than a head has": (lambda case: case.good.of_parts(*[0] * 6000), r"part\.data: \d+ bytes are more"),
    "changes nothing": (
        lambda case: case.sending(case.live.tensors),
        r"header\.weights_hash: version 3 would change nothing",
    ),
}
_STALE: dict[str, tuple[Made, str]] = {
    "old version": (
        lambda case: case.good.announcing(version=case.live.version - 1),
        r"version 1 with hash .* is old; expected one above version 2",
    ),
    "the version in use with other weights": (
        lambda case: case.good.announcing(version=case.live.version),
        r"version 2 with hash .* is old",
    ),
    "wrong parent": (
        lambda case: case.good.announcing(parent=1),
        r"the parent is version 1 .*; expected version 0 with hash .* or version 2 with hash",
    ),
    "wrong parent's hash": (
        lambda case: case.good.announcing(parent_hash=case.first.hash),
        r"the parent is version 2 .*; expected",
    ),
    "another head's": (
        lambda case: case.good.announcing(head="another"),
        r"these weights are for the head another; this drafter serves",
    ),
    "another head's under this one's name": (_stranger, r"the parent is version 2"),
}
CORRUPTIONS: dict[str, tuple[Made, type[CoppiceError], str]] = {
    name: (make, error, reason)
    for error, table in ((InvalidField, _INVALID), (StaleFence, _STALE))
    for name, (make, reason) in table.items()
}


def staged(header: WeightsHeader, parts: Sequence[WeightsPart], head: Any) -> Staging:
    """A push that has come as a whole, to a head or to what stands for one."""
    staging = Staging(header, head)
    for part in parts:
        staging.add(part)
    return staging


@torch.no_grad()
def swap(head: FeatureHead, weights: Weights, parent: Weights | None = None) -> None:
    """Put weights to use as a push would that starts from `parent`, None: from those in use."""
    header, parts = pack_update(head.description.name, parent or head.weights, weights)
    staging = staged(header, parts, head)
    staging.swap(*staging.prepare())
