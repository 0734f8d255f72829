"""A push of weights to a drafter, as plain values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WeightsHeader:
    """Announces a safetensors file of `size` bytes in `parts` parts: new values of some of `parent`'s tensors.

    Hashes are SHA-256: of the parent's weights, of the weights afterwards, and of the file.
    """

    head: str
    version: int
    parent: int
    parent_hash: bytes
    weights_hash: bytes
    sha256: bytes
    size: int
    parts: int


@dataclass(frozen=True, slots=True)
class WeightsPart:
    """The `number`th piece of the file."""

    number: int
    data: bytes


@dataclass(frozen=True, slots=True)
class WeightsSynced:
    """The weights in use now, and how long drafting stood still."""

    version: int
    weights_hash: bytes
    swap_ns: int = 0
