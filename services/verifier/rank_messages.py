"""What rank 0 of a target tells the others of a forward, as one run of 64-bit words."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from coppice.engine.batch import PackedBatch, Tail
from coppice.engine.kv_cache import BlockTable

Words = NDArray[np.int64]
AT_ONCE = 4096
"""words of the one broadcast that a forward takes unless it has more to say"""
_PER_TAIL = 4  # arrays


def encode(batch: PackedBatch, moves: Sequence[Words]) -> Words:
    """A forward, and the slots (2, n) that the pool moved before it."""
    tensors = (batch.tokens, batch.positions, batch.logits_to_keep)
    moved = np.concatenate(moves, axis=1) if moves else np.empty((2, 0), np.int64)
    arrays = [*(tensor.numpy() for tensor in tensors), np.array(batch.feature_layers, np.int64), moved.ravel()]
    for tail in batch.tails:
        bits = np.packbits(tail.visible)
        facts = [tail.prefix, *tail.visible.shape, tail.table.consecutive]
        positions = np.empty(0, np.int64) if tail.positions is None else tail.positions
        padded = np.pad(bits, (0, -len(bits) % 8)).view(np.int64)
        arrays += [np.array(facts, np.int64), tail.table.blocks, positions, padded]
    lengths = [len(array) for array in arrays]
    return np.concatenate([[len(arrays)], lengths, *arrays])


def decode(words: Words, block_size: int) -> tuple[PackedBatch, Words]:
    """What `encode` was given; the moves as one array. Block tables are good for a forward alone."""
    count = int(words[0])
    arrays = np.split(words[1 + count :], np.cumsum(words[1 : 1 + count])[:-1])
    tokens, positions, kept, layers, moved, *told = arrays
    tails: list[Tail] = []
    for first in range(0, len(told), _PER_TAIL):
        facts, blocks, at, bits = told[first : first + _PER_TAIL]
        prefix, rows, keys, consecutive = map(int, facts)
        visible = np.unpackbits(bits.view(np.uint8), count=rows * keys).reshape(rows, keys).view(np.bool_)
        table = BlockTable("", block_size, blocks, prefix + keys, bool(consecutive))
        tails.append(Tail(table, prefix, visible, at if len(at) else None))
    batch = PackedBatch(
        tokens=torch.from_numpy(tokens),
        positions=torch.from_numpy(positions),
        tails=tuple(tails),
        logits_to_keep=torch.from_numpy(kept),
        feature_layers=tuple(map(int, layers)),
    )
    return batch, moved.reshape(2, -1)


def send(words: Words) -> None:
    """Rank 0's broadcast: its length and the first words, and the rest in a second one if there is any."""
    first = torch.zeros(AT_ONCE, dtype=torch.int64)
    first[0] = len(words)
    said, rest = words[: AT_ONCE - 1], words[AT_ONCE - 1 :]
    first[1 : 1 + len(said)] = torch.from_numpy(said)
    dist.broadcast(first, 0)
    if len(rest):
        dist.broadcast(torch.from_numpy(rest), 0)


def receive() -> Words:
    """What `send` was given, in the other ranks."""
    first = torch.empty(AT_ONCE, dtype=torch.int64)
    dist.broadcast(first, 0)
    length = int(first[0])
    said = first[1 : 1 + length].numpy()
    if len(said) == length:
        return said
    rest = torch.empty(length - len(said), dtype=torch.int64)
    dist.broadcast(rest, 0)
    return np.concatenate([said, rest.numpy()])
