"""What a head's forward reads of its rows: on a CPU from where it lies, on a device by one copy for all sessions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coppice.engine.attention import Attention, Layer
from coppice.engine.kv_cache import KVPool
from coppice.engine.rows import PackedBatch, RowTable
from coppice.engine.sdpa import Sdpa
from coppice.engine.steps import Bucket, StepInputs, TreeAttention, padded
from coppice.heads.feature_session import Rows
from coppice.heads.models.layers import Attend

Ints = NDArray[np.int64]
_NOTHING: Ints = np.zeros(0, np.int64)
_INPUTS = 16  # that are kept, the latest ones


@dataclass(frozen=True)
class Inputs:
    """Rows as the model takes them: all that a forward needs is at hand."""

    features: Tensor
    embeddings: Tensor  # (1, N, hidden)
    positions: Tensor  # (1, N)
    attends: list[Attend]  # one for each layer
    kept: Tensor  # (J,) rows whose states are read
    beside: Tensor  # numbers that came with them


class RowInputs:
    """Makes the inputs of a head whose entries are in a pool."""

    def __init__(self, pool: KVPool, embedding: Tensor, group: int, layers: int) -> None:
        """group: query heads for each key head."""
        self.pool, self.embedding, self._group, self._layers = pool, embedding, group, layers
        self._on_device = lru_cache(_INPUTS)(self._made)

    def make(self, rows: Rows, beside: Ints = _NOTHING) -> Inputs:
        """Inputs of some rows; `beside` them come further numbers to the device."""
        return self._here(rows, beside) if self.pool.device.type == "cpu" else self._there(rows, beside)

    def _here(self, rows: Rows, beside: Ints) -> Inputs:
        return Inputs(
            rows.features if rows.sources is None else rows.features.index_select(0, _tensor(rows.sources)),
            self.embedding.index_select(0, _tensor(rows.tokens))[None],
            _tensor(rows.positions)[None],
            self._attends(Sdpa(rows.tails, self.pool)),
            _tensor(rows.kept),
            torch.from_numpy(beside),
        )

    def _there(self, rows: Rows, beside: Ints) -> Inputs:
        """One copy: what the rows read and see, and behind it their features, sources and the numbers beside them."""
        table = RowTable.of(rows.tails)
        entries, tail = len(table.session), int((table.length - table.paged).max())
        sessions, blocks = map(padded, table.table.shape)
        bucket = Bucket(padded(entries), sessions, padded(tail) if tail else 0, blocks, padded(len(rows.kept) or 1))
        read = _as_ints(rows.features) if rows.sources is None else np.array(rows.sources, np.int64)
        flat = np.concatenate((read, beside))
        inputs = self._on_device(bucket, padded(max(1, len(flat))))
        batch = PackedBatch(_tensor(rows.tokens), _tensor(rows.positions), tuple(rows.tails), _tensor(rows.kept))
        sent = inputs.fill(batch, table, flat)
        assert sent is not None
        came, rest = sent.split_with_sizes([len(read), len(beside)])
        if rows.sources is None:
            size, kind = rows.features.nbytes, rows.features.dtype
            features = came.view(torch.uint8)[:size].view(kind).view(rows.features.shape)
        else:
            features = rows.features.index_select(0, came)
        return Inputs(
            features,
            self.embedding.index_select(0, inputs.tokens[: len(rows.tokens)])[None],
            inputs.positions[None, : len(rows.tokens)],
            self._attends(TreeAttention(inputs.narrowed(entries), self.pool)),
            inputs.keep[: len(rows.kept)],
            rest,
        )

    def _attends(self, attention: Attention) -> list[Attend]:
        return [partial(attention.attend, Layer(number)) for number in range(self._layers)]

    def _made(self, bucket: Bucket, beside: int) -> StepInputs:
        pool = self.pool
        return StepInputs(
            bucket, group=self._group, spare=pool.spare, block_size=pool.block_size, device=pool.device, beside=beside
        )


def _tensor(numbers: Sequence[int] | Ints) -> Tensor:
    return torch.from_numpy(np.asarray(numbers, np.int64))


def _as_ints(features: Tensor) -> Ints:
    """The bytes of host features as whole numbers, zeros behind them."""
    data = features.contiguous().view(torch.uint8).numpy().ravel()
    return np.pad(data, (0, -len(data) % 8)).view(np.int64)
