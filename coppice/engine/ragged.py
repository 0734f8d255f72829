"""Where the rows of one forward write and what they see, as numbers at fixed addresses: nothing is rows times context.

A key's index is its position in the row's own text. A row sees keys 0 to length - 1: the first `paged` lie in the
session's blocks, in order, and the others, the row's tail, wherever its ancestors among the rows of this forward and of
earlier ones were written. A row that sees all rows before it, as in a prompt or on a tree's first path, has no tail.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coppice.engine.batch import PackedBatch, Tail

KEY_BLOCK = 64
"""positions whose scores are made together; borders are multiples of it"""

MOST_SPLITS = 32
"""parts that a row's key blocks are cut into at most"""

TILE = 64
"""queries, of rows of one session, that share the keys they read"""

BESIDE = 32
"""numbers a row that may be sent along with a forward's inputs"""

Ints = NDArray[np.int64]


def padded(count: int) -> int:
    """The least size of a bucket that holds `count`: powers of two, and from 64 on also what lies halfway."""
    power = 1 << max(0, count - 1).bit_length()
    return power * 3 // 4 if power >= 128 and count <= power * 3 // 4 else power


def tile_rows(group: int) -> int:
    """Rows of a tile, where each key head has `group` query heads."""
    return max(1, TILE // group)


def tail_blocks(tail: int) -> int:
    """Key blocks that the last `tail` positions of a text touch at most."""
    return -(-(tail - 1) // KEY_BLOCK) + 1 if tail else 0


def most_splits(blocks: Ints | int) -> Ints:
    """Splits of a row of so many key blocks, and at least those of a row of fewer, as a window leaves it.

    A split is 4 key blocks in a text of 32, 8 in one of 128, and 16 for every 512 in a longer one: short texts are read
    by many programs, and the partial sums of long ones stay small beside their keys.
    """
    fours, eights, sixteens = (-(-blocks // size) for size in (4, 8, 16))
    splits: Ints = np.minimum(np.minimum(fours, np.maximum(eights, 8)), np.clip(sixteens, 16, MOST_SPLITS))
    return splits


class Ragged(NamedTuple):
    """What each row of some tails sees; T rows of S sessions.

    session, paged, length, new_slots: (T,). table: (S, P), the blocks in use. tail: the row, the place there, and the
    slot of every entry of the rows' tails.
    """

    session: Ints
    paged: Ints
    length: Ints
    new_slots: Ints
    table: Ints
    tail: tuple[Ints, Ints, Ints]

    @classmethod
    def of(cls, tails: Sequence[Tail]) -> Ragged:
        """Read the tails: all sessions at once but for copies."""
        counts, columns = np.array([tail.visible.shape for tail in tails], np.int64).T
        block_size = tails[0].table.block_size
        used = [-(-tail.length // block_size) for tail in tails]
        first = np.cumsum(counts) - counts
        # One column more, which nobody sees, so that every row has a first one that it does not.
        seen = np.zeros((counts.sum(), columns.max() + 1), np.bool_)
        table = np.zeros((len(tails), max(used)), np.int64)
        for s, tail in enumerate(tails):
            seen[first[s] : first[s] + counts[s], : columns[s]] = tail.visible
            table[s, : used[s]] = tail.table.blocks[: used[s]]
        session = np.repeat(np.arange(len(tails)), counts)
        prefix = np.array([tail.prefix for tail in tails], np.int64)

        def slots(session: Ints, column: Ints) -> Ints:
            block, inside = np.divmod(prefix[session] + column, block_size)
            return table[session, block] * block_size + inside

        leading = seen.argmin(axis=1)
        seen &= np.arange(seen.shape[1]) >= leading[:, None]
        row, column = np.divmod(np.flatnonzero(seen), seen.shape[1])
        later = np.bincount(row, minlength=len(seen))
        place = np.arange(len(row)) - (np.cumsum(later) - later)[row]
        paged = prefix[session] + leading
        new_slots = slots(session, np.arange(len(seen)) + (columns - counts - first)[session])
        return cls(session, paged, paged + later, new_slots, table, (row, place, slots(session[row], column)))


class Bucket(NamedTuple):
    """What a forward is padded to: rows, sessions, tail entries of a row, blocks of a session, rows whose logits are
    wanted.
    """

    rows: int
    sessions: int
    tail: int
    blocks: int
    kept: int

    @classmethod
    def of(cls, batch: PackedBatch, ragged: Ragged) -> Bucket:
        """The least bucket for a batch."""
        tail = int((ragged.length - ragged.paged).max())
        sizes = (len(batch.tokens), *ragged.table.shape, len(batch.logits_to_keep))
        rows, sessions, blocks, kept = map(padded, sizes)
        return cls(rows, sessions, padded(tail) if tail else 0, blocks, kept)

    def holds(self, other: Bucket) -> bool:
        """Whether what fits in `other` fits in this one."""
        return all(mine >= size for mine, size in zip(self, other, strict=True))


class StepInputs:
    """What one forward reads, at fixed addresses on its device, whatever the batch.

    tokens, positions, new_slots: (rows,) int64. session, paged, length: (rows,) int32. tail: (rows, tail) int32, slots.
    table: (sessions, blocks) int32. keep: (kept,) int64. tiles: (1 + C, 3) int32, of which tiles[0, 0] are in use
    behind the first: first row, end row, and the part of the rows' keys, which is a key block of their tail, or above
    tail_blocks(tail) a split. Padding rows have length 0 and write to the slot `spare`; what is kept is padded with
    row 0. beside: int64, of no interest to the forward, for whoever reads its output. On a CUDA device
    they are filled through pinned memory by one copy.
    """

    tokens: Tensor
    positions: Tensor
    new_slots: Tensor
    session: Tensor
    paged: Tensor
    length: Tensor
    tail: Tensor
    table: Tensor
    keep: Tensor
    tiles: Tensor

    def __init__(
        self,
        bucket: Bucket,
        *,
        group: int,
        spare: int,
        block_size: int,
        device: torch.device | str = "cpu",
        beside: int = 0,
    ) -> None:
        """Inputs of a model of at most `group` query heads a key head; nobody owns the slot `spare`.

        beside: how many numbers are sent along at most, by default BESIDE a row.
        """
        self.bucket, self.group, self.spare = bucket, group, spare
        rows, sessions, tail, blocks, kept = bucket
        tiles = min(rows, (rows + sessions * (tile_rows(group) - 1)) // tile_rows(group))
        splits = int(most_splits(-(-blocks * block_size // KEY_BLOCK)))
        of_rows = dict.fromkeys(("tokens", "positions", "new_slots"), ((rows,), torch.int64))
        of_rows |= dict.fromkeys(("session", "paged", "length"), ((rows,), torch.int32))
        self._twins = _Twins(
            {
                **of_rows,
                "tail": ((rows, tail), torch.int32),
                "table": ((sessions, blocks), torch.int32),
                "keep": ((kept,), torch.int64),
                "tiles": ((1 + tiles * splits + rows * tail_blocks(tail), 3), torch.int32),
                "beside": ((beside or rows * BESIDE,), torch.int64),
            },
            torch.device(device),
        )
        for name, tensor in self._twins.tensors.items():
            setattr(self, name, tensor)

    @property
    def nbytes(self) -> int:
        """Bytes that are copied to the device for a forward, but for those beside its inputs."""
        return self._twins.host.nbytes - self._twins.tensors["beside"].nbytes

    def fill(self, batch: PackedBatch, ragged: Ragged, beside: Ints | None = None) -> Tensor | None:
        """Take a batch, which the bucket holds, and what its rows see; returns where the numbers `beside` them are."""
        self._twins.wait()
        into, tiles = self._twins.arrays, self._tiles(ragged)
        row, place, slot = ragged.tail
        into["tail"][row, place] = slot
        into["table"][: ragged.table.shape[0], : ragged.table.shape[1]] = ragged.table
        into["tiles"][0, 0] = len(tiles)
        into["tiles"][1 : 1 + len(tiles)] = tiles
        for name, values in (
            ("tokens", batch.tokens.numpy()),
            ("positions", batch.positions.numpy()),
            ("keep", batch.logits_to_keep.numpy()),
            *((name, getattr(ragged, name)) for name in ("new_slots", "session", "paged", "length")),
        ):
            into[name][: len(values)] = values
            into[name][len(values) :] = self.spare if name == "new_slots" else 0
        if beside is None:
            self._twins.copy(self.nbytes)
            return None
        into["beside"][: len(beside)] = beside
        self._twins.copy(self.nbytes + beside.nbytes)
        return self._twins.tensors["beside"][: len(beside)]

    def narrowed(self, rows: int) -> StepInputs:
        """The same of the first rows alone, for a forward that is not padded."""
        some = copy(self)
        for name in ("new_slots", "session", "paged", "length", "tail"):
            setattr(some, name, getattr(self, name)[:rows])
        return some

    def _tiles(self, ragged: Ragged) -> Ints:
        """(C, 3): the rows and parts of their keys that are worked on together, those of most work first."""
        size, most = tile_rows(self.group), tail_blocks(self.bucket.tail)
        counts = np.bincount(ragged.session)
        tiles = -(-counts // size)
        end = np.cumsum(counts)
        first = np.repeat(end - counts, tiles) + _ranges(tiles) * size
        longest = np.maximum.reduceat(ragged.length, first)
        splits = most_splits(-(-longest // KEY_BLOCK))
        last = np.minimum(first + size, np.repeat(end, tiles))
        shared = np.stack((first.repeat(splits), last.repeat(splits), most + _ranges(splits)), axis=1)
        row = np.flatnonzero(ragged.length > ragged.paged)
        blocks = (ragged.length[row] - 1) // KEY_BLOCK - ragged.paged[row] // KEY_BLOCK + 1
        row = row.repeat(blocks)
        return np.concatenate((shared, np.stack((row, row + 1, _ranges(blocks)), axis=1)))


def _ranges(counts: Ints) -> Ints:
    """0 to count - 1 for each count, one behind the other."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


class _Twins:
    """Integer tensors of one buffer, which a copy brings to its twin on the device; on the CPU it is its own twin."""

    def __init__(self, layout: Mapping[str, tuple[tuple[int, ...], torch.dtype]], device: torch.device) -> None:
        """Zeros of these shapes and types; each starts at a multiple of 16 bytes, as wide loads want."""
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in layout.values()]
        ends = np.cumsum([-(-size // 16) * 16 for size in sizes])
        self.host = torch.zeros(int(ends[-1]), dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.device = self.host.to(device)
        self._copied: Any = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

        def cut(buffer: Tensor) -> dict[str, Tensor]:
            starts = (0, *ends.tolist())
            return {
                name: buffer[start : start + size].view(dtype).view(shape)
                for start, size, (name, (shape, dtype)) in zip(starts, sizes, layout.items(), strict=False)
            }

        self.tensors = cut(self.device)
        self.arrays: dict[str, NDArray[Any]] = {name: part.numpy() for name, part in cut(self.host).items()}

    def wait(self) -> None:
        """Return once the arrays may be written: the latest copy has read them."""
        if self._copied is not None:
            self._copied.synchronize()

    def copy(self, size: int) -> None:
        """Start to bring the first bytes of the arrays to the device."""
        if self.device is not self.host:
            self.device[:size].copy_(self.host[:size], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
