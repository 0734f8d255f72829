"""A head's weights as drafters and the adapter name, compare and send them.

Names are the public ones (coppice/heads/checkpoints.py), values float32 whatever a drafter computes in. d2t is no
weight: which id is which never changes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save
from torch import Tensor

from coppice.limits import CHUNK_BYTES
from coppice.wire.drafter import WeightsHeader, WeightsPart


def float_bytes(tensor: Tensor) -> NDArray[np.float32]:
    """Return a tensor's values on the CPU, row by row, as little-endian float32."""
    return tensor.detach().to("cpu", torch.float32).contiguous().numpy().astype("<f4", copy=False)


def tensor_digest(tensor: Tensor) -> bytes:
    """Return the SHA-256 of `F32[2,3]`, the dtype and shape, and the values as little-endian float32."""
    digest = hashlib.sha256(f"F32[{','.join(map(str, tensor.shape))}]".encode())
    digest.update(float_bytes(tensor).reshape(-1).data)
    return digest.digest()


@dataclass(frozen=True, eq=False)
class Weights:
    """One version of a head's weights. Nobody writes into its tensors."""

    version: int
    tensors: Mapping[str, Tensor]
    """float32 on the CPU, by public name"""
    digests: Mapping[str, bytes]

    @cached_property
    def hash(self) -> bytes:
        """The SHA-256 of all names in order, each followed by a zero byte and its tensor's digest."""
        digest = hashlib.sha256()
        for name in sorted(self.digests):
            digest.update(name.encode() + b"\0" + self.digests[name])
        return digest.digest()

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], version: int = 0) -> Weights:
        """Make weights of all their tensors; those of a checkpoint are version 0."""
        return cls(version, {}, {}).changed(tensors, version)

    def changed(self, tensors: Mapping[str, Tensor], version: int) -> Weights:
        """Return these weights with some tensors replaced; the others are shared. Only the new ones are hashed."""
        digests = {name: tensor_digest(tensor) for name, tensor in tensors.items()}
        return Weights(version, {**self.tensors, **tensors}, {**self.digests, **digests})

    def differing(self, other: Weights) -> list[str]:
        """Return the names of the tensors whose values are not the other's."""
        return [name for name in self.tensors if self.digests[name] != other.digests.get(name)]


def pack_update(head: str, parent: Weights, weights: Weights) -> tuple[WeightsHeader, list[WeightsPart]]:
    """Pack what makes `weights` of `parent`, the version in use or version 0: a safetensors file in parts of 1 MiB.

    It holds the tensors that differ, as float32 whatever they were computed in.
    """
    file = save({name: torch.from_numpy(float_bytes(weights.tensors[name])) for name in weights.differing(parent)})
    cuts = range(0, len(file), CHUNK_BYTES)
    parts = [WeightsPart(number, file[start : start + CHUNK_BYTES]) for number, start in enumerate(cuts)]
    header = WeightsHeader(
        head=head,
        version=weights.version,
        parent=parent.version,
        parent_hash=parent.hash,
        weights_hash=weights.hash,
        sha256=hashlib.sha256(file).digest(),
        size=len(file),
        parts=len(parts),
    )
    return header, parts
