"""What a head that reads features keeps of a session, the rows of a forward made of it, and what the forward reads of
them: on a CPU from where it lies, on a device by one copy for all sessions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coppice.engine.attention import Attention, Layer
from coppice.engine.kv_cache import BlockTable, KVPool
from coppice.engine.rows import NOTHING, Ints, PackedBatch, RowTable, Tail
from coppice.engine.sdpa import sdpa
from coppice.engine.steps import Bucket, StepInputs, padded
from coppice.heads.base import DraftJob
from coppice.heads.models.layers import Attend
from coppice.heads.ranking import Noise
from coppice.weights.variants import Choice
from coppice.wire.drafter import Advance


@dataclass
class LastDraft:
    """One draft: its candidates, sent or not, and the states that their children were predicted from.

    Candidate i is node i + 1, the root is node 0.
    """

    job: DraftJob
    version: int
    """of the weights that drafted"""
    tokens: list[int]
    parents: list[int]
    predictions: list[tuple[list[int], Tensor]] = field(default_factory=list)
    """of each forward (N,) nodes, -1 for none, and the (N, hidden) un-normed states that predicted their children"""

    def state_where_rejected(self, advance: Advance, committed_len: int) -> Tensor | None:
        """Return the (hidden,) state that predicted the token where the target disagreed.

        `committed_len` is that before the advance. None when the rejection is not about this draft, or when no forward
        predicted there.
        """
        rejection = advance.rejection
        if rejection is None or (self.job.committed_len, self.job.root) != (committed_len, advance.ids[0]):
            return None
        depth = rejection.position - committed_len - 1
        if not 0 <= depth < len(advance.ids):
            return None
        known = {pair: node for node, pair in enumerate(zip(self.parents, self.tokens, strict=True), start=1)}
        node = 0
        for token in advance.ids[1 : depth + 1]:
            if (node := known.get((node, token), -1)) < 0:
                return None
        for nodes, states in self.predictions:
            if node in nodes:
                return states[nodes.index(node)]
        return None


@dataclass
class FeatureSession:
    """One session: its text, its KV, and the features of the positions from `first` on."""

    table: BlockTable
    ids: list[int]
    start: int  # position of the first row
    features: Tensor  # in the host's memory
    first: int
    done: int  # rows of the positions before it are in KV
    noise: Noise
    wants_misses: bool = False
    sketch: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    choice: Choice = field(default_factory=Choice)
    last_draft: LastDraft | None = None  # only for a session that wants misses, until ids are committed

    def take(self, upto: int) -> Tensor:
        """Return the (upto - done, F) features of the positions done..upto-1."""
        return self.features[self.done - self.first : upto - self.first]

    def forget(self) -> None:
        """Drop the features of rows that are in KV, save the last one's: the same draft may be asked for again."""
        keep = min(max(self.done - 1, self.first), self.first + len(self.features))
        self.features, self.first = self.features[keep - self.first :], keep


@dataclass(frozen=True)
class Rows:
    """Rows of several sessions for one forward, packed in order: what they read, and what they see."""

    features: (
        Tensor  # (N, F) target features, in the host's memory; or with sources (M, hidden) states of the head's own
    )
    tokens: Sequence[int] | NDArray[np.int64]  # (N,)
    positions: Sequence[int] | NDArray[np.int64]  # (N,) where each row's features stand
    tails: Sequence[Tail]
    kept: Sequence[int] = ()  # rows whose states are read
    sources: Sequence[int] | None = None  # (N,) which of the states each row reads


def join(parts: Sequence[Rows]) -> Rows:
    """Join the rows of several sessions that read target features; of each the last one's state is read."""
    kept = [end - 1 for end in accumulate(len(part.tokens) for part in parts)]
    if len(parts) == 1:
        return replace(parts[0], kept=kept)
    return Rows(
        torch.cat([part.features for part in parts]),
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([part.positions for part in parts]),
        [tail for part in parts for tail in part.tails],
        kept,
    )


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

    def make(self, rows: Rows, beside: Ints = NOTHING) -> Inputs:
        """Inputs of some rows; `beside` them come further numbers to the device."""
        return self._here(rows, beside) if self.pool.device.type == "cpu" else self._there(rows, beside)

    def _here(self, rows: Rows, beside: Ints) -> Inputs:
        return Inputs(
            rows.features if rows.sources is None else rows.features.index_select(0, _tensor(rows.sources)),
            self.embedding.index_select(0, _tensor(rows.tokens))[None],
            _tensor(rows.positions)[None],
            self._attends(sdpa(rows.tails, self.pool)),
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
            self._attends(inputs.narrowed(entries)),
            inputs.keep[: len(rows.kept)],
            rest,
        )

    def _attends(self, attention: Attention) -> list[Attend]:
        return [partial(attention.attend, Layer(number)) for number in range(self._layers)]

    def _made(self, bucket: Bucket, beside: int) -> StepInputs:
        return StepInputs(bucket, self._group, self.pool, beside)


def _tensor(numbers: Sequence[int] | Ints) -> Tensor:
    return torch.from_numpy(np.asarray(numbers, np.int64))


def _as_ints(features: Tensor) -> Ints:
    """The bytes of host features as whole numbers, zeros behind them."""
    data = features.contiguous().view(torch.uint8).numpy().ravel()
    return np.pad(data, (0, -len(data) % 8)).view(np.int64)
