"""A head's weights as drafters and the adapter name, compare and send them, and its variants for kinds of text.

Names are the public ones (coppice/heads/checkpoints.py), values float32 whatever a drafter computes in. d2t is no
weight: which id is which never changes. `variants.2.NAME` is variant 2's value of the tensor NAME; of every other
tensor it has the deployed one. `routes` says which texts a variant drafts for. So one version, one hash, one push and
one rollback hold for all of them.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save
from torch import Tensor

from coppice.errors import InvalidField
from coppice.limits import CHUNK_BYTES, MAX_KINDS, MAX_VARIANTS, SKETCH
from coppice.speculation.sampling import uniform
from coppice.wire.drafter import WeightsHeader, WeightsPart

ROUTES = "routes"  # the tensor's name: a row a kind of text, which is numbered from 1
_ROUTES_SHAPE = (MAX_KINDS, SKETCH + 4)  # squared radius (0: no such kind), variant, share, other variant, centroid
_PREFIX = "variants."
_ROWS = 32  # of a prompt, its last ones, that its sketch is made of
_BUCKET_STREAM, _SIGN_STREAM = 0, 1

Vector = NDArray[np.float32]


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
    tensors: Mapping[str, Tensor]  # float32 on the CPU, by public name
    digests: Mapping[str, bytes]

    @cached_property
    def hash(self) -> bytes:
        """The SHA-256 of all names in order, each followed by a zero byte and its tensor's digest."""
        named = sorted(self.digests.items())
        return hashlib.sha256(b"".join(name.encode() + b"\0" + digest for name, digest in named)).digest()

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], version: int = 0) -> Self:
        """Make weights of all their tensors; those of a checkpoint are version 0."""
        return cls(version, {}, {}).changed(tensors, version)

    def changed(self, tensors: Mapping[str, Tensor], version: int) -> Self:
        """Return these weights with some tensors replaced; the others are shared. Only the new ones are hashed."""
        digests = {name: tensor_digest(tensor) for name, tensor in tensors.items()}
        return type(self)(version, {**self.tensors, **tensors}, {**self.digests, **digests})

    def differing(self, other: Self) -> list[str]:
        """Return the names of the tensors whose values are not the other's."""
        return [name for name in self.tensors if self.digests[name] != other.digests.get(name)]


def pack_update(head: str, parent: Weights, weights: Weights) -> tuple[WeightsHeader, list[WeightsPart]]:
    """Pack the float32 tensors that make `weights` of `parent`, in use or version 0: safetensors in parts of 1 MiB."""
    file = save({name: torch.from_numpy(float_bytes(weights.tensors[name])) for name in weights.differing(parent)})
    parts = [WeightsPart(file[start : start + CHUNK_BYTES]) for start in range(0, len(file), CHUNK_BYTES)]
    return WeightsHeader(head, weights.version, parent.version, parent.hash, weights.hash), parts


def variant_name(variant: int, name: str) -> str:
    return f"{_PREFIX}{variant}.{name}" if variant else name


def numbers_in(tensors: Mapping[str, Tensor]) -> list[int]:
    """List the variants, from 1, that have a tensor of their own."""
    own = {name.split(".")[1] for name in tensors if name.startswith(_PREFIX)}
    return [number for number in range(1, MAX_VARIANTS + 1) if str(number) in own]


def shape_of(name: str, tensors: Mapping[str, Tensor]) -> tuple[int, ...] | None:
    """Return the shape that a tensor of this name must have beside a head's own; None: there can be no such tensor."""
    if name == ROUTES:
        return _ROUTES_SHAPE
    if name.startswith(_PREFIX):
        number, _, name = name.removeprefix(_PREFIX).partition(".")
        if number not in map(str, range(1, MAX_VARIANTS + 1)) or name.startswith(_PREFIX) or name == ROUTES:
            return None
    return tuple(tensors[name].shape) if name in tensors else None


@cache
def _hashing(width: int) -> tuple[NDArray[np.int64], Vector]:
    """Return the bucket and the sign of each of `width` numbers."""
    buckets = [int(SKETCH * uniform(0, at, _BUCKET_STREAM)) for at in range(width)]
    signs = [1.0 if uniform(0, at, _SIGN_STREAM) < 0.5 else -1.0 for at in range(width)]
    return np.array(buckets, np.int64), np.array(signs, np.float32)


def sketch_of(rows: Tensor) -> Vector:
    """Return (SKETCH,) numbers of length 1 that say what a prompt with these (n, F) features is like.

    The mean of the last rows, its F numbers added up in SKETCH buckets under random signs (count sketch), which keeps
    distances nearly.
    """
    mean = rows[-_ROWS:].float().mean(0).cpu().numpy()
    buckets, signs = _hashing(len(mean))
    sketch = np.bincount(buckets, signs * mean, SKETCH)
    length = float(np.linalg.norm(sketch))
    return (sketch / length if length > 0 else sketch).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Route:
    """The variant for a kind of text: those whose sketches are near its centroid."""

    centroid: Sequence[float]  # (SKETCH,)
    radius: float  # largest squared distance
    variant: int = 0
    share: float = 0.0  # of these texts that it drafts for
    other: int = 0  # the variant for the others


class Routes(list[Route | None]):
    """Which variant drafts for which texts. Kind n is route n - 1; None: there is no such kind."""

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Read the routes among a head's tensors. Raises InvalidField."""
        if ROUTES not in tensors:
            return cls()
        there, routes = {0, *numbers_in(tensors)}, cls()
        for radius, variant, share, other, *centroid in tensors[ROUTES].tolist():
            if radius < 0 or not {variant, other} <= there or not 0 <= share <= 1:
                why = f"has a radius of {radius:g}, variants {variant:g} and {other:g} or a share of {share:g}"
                raise InvalidField(f"tensors.{ROUTES}", why)
            routes.append(Route(tuple(centroid), radius, int(variant), share, int(other)) if radius else None)
        return routes

    def tensor(self) -> Tensor:
        """Return the tensor that `of` reads."""
        tensor = torch.zeros(_ROUTES_SHAPE)
        for row, route in zip(tensor, self, strict=False):
            if route is not None:
                row.copy_(torch.tensor([route.radius, route.variant, route.share, route.other, *route.centroid]))
        return tensor

    def choose(self, sketch: Vector, session: str) -> tuple[int, int]:
        """Return the kind that a text is of, 0: none, and the variant that drafts for it.

        Chance decides by the session's name, so that a session that moves keeps its variant.
        """
        near = [
            (away, kind, route)
            for kind, route in enumerate(self, 1)
            if route and (away := np.square(np.array(route.centroid, np.float32) - sketch).sum().item()) <= route.radius
        ]
        if not near:
            return 0, 0
        _, kind, route = min(near, key=lambda each: each[:2])
        chance = int.from_bytes(hashlib.sha256(session.encode()).digest()[:8]) / 2**64
        return kind, route.variant if chance < route.share else route.other
