"""Pushes of weights that a drafter must refuse: one good update, spoiled in every way."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load, save
from torch import Tensor

from coppice.heads.checkpoints import load_head
from coppice.heads.public_state import public_weights
from coppice.messages.steps import WeightsHeader, WeightsPart
from coppice.stack.spec import HeadSpec
from coppice.weights.versions import Weights, pack_update

MATRIX = "lm_head.weight"
_PARTS = 4  # of a push; a tiny head's file would fit into one

Push = tuple[WeightsHeader, Sequence[WeightsPart]]


def _in_parts(header: WeightsHeader, file: bytes) -> Push:
    """A file in several parts, announced as it is."""
    size = max(1, min(1 << 20, -(-len(file) // _PARTS)))
    parts = [WeightsPart(number, file[at : at + size]) for number, at in enumerate(range(0, len(file), size))]
    sha256 = hashlib.sha256(file).digest()
    return replace(header, sha256=sha256, size=len(file), parts=len(parts)), parts


@dataclass(frozen=True, eq=False)
class Head:
    """A head's checkpoint, which is version 0, and the updates that are tried on it."""

    name: str
    checkpoint: Weights

    @classmethod
    def of(cls, spec: HeadSpec, target: Path) -> Head:
        """Read a head that weights can be pushed to. Raises InvalidField."""
        assert spec.path
        loaded = load_head(spec.kind, spec.path, target)
        return cls(spec.name, Weights.of(public_weights(loaded.model, loaded.config)))

    def random(self, version: int, name: str | None = MATRIX) -> Push:
        """A valid update to random weights, of one tensor or (None) of all."""
        generator = torch.Generator().manual_seed(version)
        names = [name] if name else list(self.checkpoint.tensors)
        drawn = {each: torch.randn(self.checkpoint.tensors[each].shape, generator=generator) for each in names}
        return pack_update(self.name, self.checkpoint, self.checkpoint.changed(drawn, version))

    def good(self) -> tuple[WeightsHeader, bytes]:
        """What would be taken: a header and the file."""
        header, parts = self.random(1)
        return header, b"".join(part.data for part in parts)

    def with_header(self, **changes: object) -> Push:
        """The good update under another header."""
        header, file = self.good()
        header, parts = _in_parts(header, file)
        return replace(header, **changes), parts  # type: ignore[arg-type]

    def with_parts(self, chosen: Callable[[Sequence[WeightsPart]], Sequence[WeightsPart]]) -> Push:
        """The good update, some of its parts."""
        header, parts = _in_parts(*self.good())
        return header, chosen(parts)

    def with_tensors(self, tensors: Mapping[str, Tensor | None]) -> Push:
        """The good update with some tensors replaced and None left out, announced as what is sent."""
        header, file = self.good()
        merged = {**load(file), **tensors}
        sent = {name: tensor.contiguous() for name, tensor in merged.items() if tensor is not None}
        changed = self.checkpoint.changed({name: tensor.float() for name, tensor in sent.items()}, 1)
        return _in_parts(replace(header, weights_hash=changed.hash), save(sent))

    def spoiled(self, value: float) -> Push:
        """One number of the matrix replaced."""
        matrix = self.checkpoint.tensors[MATRIX].clone()
        matrix.view(-1)[0] = value
        return self.with_tensors({MATRIX: matrix})


def _flipped(head: Head) -> Push:
    """One bit of the last part, under the hash of the right file."""

    def flip(parts: Sequence[WeightsPart]) -> list[WeightsPart]:
        last = bytearray(parts[-1].data)
        last[-1] ^= 1
        return [*parts[:-1], WeightsPart(parts[-1].number, bytes(last))]

    return head.with_parts(flip)


def _missing_key(head: Head) -> Push:
    """All tensors are announced as changed, and one does not come."""
    header, parts = head.random(1, name=None)
    sent = load(b"".join(part.data for part in parts))
    del sent[MATRIX]
    return _in_parts(header, save(sent))


CORRUPTIONS: Mapping[str, Callable[[Head], Push]] = {
    "a truncated file": lambda head: head.with_parts(
        lambda parts: [*parts[:-1], WeightsPart(parts[-1].number, parts[-1].data[:-8])]
    ),
    "a flipped bit": _flipped,
    "a missing part": lambda head: head.with_parts(lambda parts: [parts[0], *parts[2:]]),
    "a part sent twice": lambda head: head.with_parts(lambda parts: [parts[0], *parts]),
    "a wrong SHA-256": lambda head: head.with_header(sha256=b"\1" * 32),
    "an unknown tensor": lambda head: head.with_tensors({"extra.weight": torch.ones(2)}),
    "a missing tensor": _missing_key,
    "a wrong shape": lambda head: head.with_tensors({MATRIX: head.checkpoint.tensors[MATRIX].T}),
    "a wrong dtype": lambda head: head.with_tensors({MATRIX: head.checkpoint.tensors[MATRIX].bfloat16()}),
    "a NaN": lambda head: head.spoiled(float("nan")),
    "an infinity": lambda head: head.spoiled(float("inf")),
    "an old version": lambda head: head.with_header(version=0),
    "a wrong parent": lambda head: head.with_header(parent_hash=b"\2" * 32),
    "another head's": lambda head: head.with_header(head="another"),
}
"""Each makes a push that must be refused with nothing changed."""
