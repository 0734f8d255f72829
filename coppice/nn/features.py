"""Heads that read the target's features: their sessions, the rows a step adds, and the KV those rows leave.

A row belongs to a committed position p: the features of p beside the token at p + 1. Each row leaves `slots` entries in
KV, the last row's token is the root, and every row is kept. Positions before the prompt window's start have no row.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from coppice.config import DrafterSettings
from coppice.errors import InvalidField, Overloaded
from coppice.messages import Advance, Features, HeadDescription, OpenDraft
from coppice.nn.decoder import Attend, HeadConfig
from coppice.nn.head import DraftJob, Head
from coppice.packed.batch import Earlier, Piece, pack
from coppice.packed.engine import DTYPES
from coppice.packed.kv import BlockTable, KVPool, OutOfBlocks
from coppice.packed.plan import plan_forward
from coppice.sampling_torch import noise

PREFILL_SLOTS = 1024  # KV entries made in one prefill forward

M = TypeVar("M", bound=nn.Module)
R = TypeVar("R")


@dataclass
class Session:
    """What a head knows of one session. `features` are those of the positions from `first` on."""

    table: BlockTable
    ids: list[int]
    start: int  # position of the first row
    features: Tensor
    first: int
    done: int  # rows of the positions before it are in KV
    noise: Tensor | None = None  # (n, draft vocabulary) keyed noise of the positions from noise_from on
    noise_from: int = 0

    def take(self, upto: int) -> Tensor:
        """(upto - done, F) features of the positions done..upto-1."""
        return self.features[self.done - self.first : upto - self.first]

    def forget(self) -> None:
        """Drop the features of rows that are in KV, save the last one's: the same draft may be asked for again."""
        keep = min(max(self.done - 1, self.first), self.first + len(self.features))
        self.features, self.first = self.features[keep - self.first :], keep


@dataclass(frozen=True)
class Rows:
    """Rows of several sessions for one forward, packed in order: what they read, and how they attend."""

    features: Tensor  # (N, F) target features, or (N, hidden) states of the head's own
    tokens: Tensor  # (N,)
    positions: Tensor  # (N,) where each row's features stand
    pieces: tuple[Piece, ...]


class FeatureHead(Head, Generic[M]):
    """Sessions, prefill and packed attention of a head of our own; a kind adds its model and its tree."""

    slots = 1
    """KV entries of a row"""

    def __init__(self, settings: DrafterSettings, kind: str, model: M, config: HeadConfig, embedding: Tensor) -> None:
        """embedding: (V, hidden) of the target. The model's buffers d2t (draft vocabulary,) say which id is which."""
        if settings.threads:
            torch.set_num_threads(settings.threads)
        self.settings, self.config = settings, config
        self.device, self.dtype = torch.device(settings.device), DTYPES[settings.dtype]
        self.model = model.to(self.device, self.dtype).requires_grad_(False).train(False)
        self.embedding = embedding.to(self.device, self.dtype)
        self.target_ids = target_ids(model, config).to(self.device)
        self.pool = KVPool(
            layers=config.num_hidden_layers,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            tokens=settings.kv_tokens * self.slots,
            dtype=self.dtype,
            device=self.device,
        )
        self.description = HeadDescription(
            settings.name or kind, kind, config.vocab_size, feature_layers=config.feature_layers
        )
        self.deepest = settings.depth
        self.max_context = settings.max_context or config.max_position_embeddings
        self._row_bytes = 3 * config.target_hidden_size
        self._sessions: dict[int, Session] = {}

    def open(self, key: int, opening: OpenDraft) -> Iterator[None]:
        """Make the rows of the prompt's window, chunk by chunk. Raises InvalidField, and Overloaded without KV room."""
        if opening.want_q_rows:
            raise InvalidField("open.want_q_rows", f"a {self.description.kind} head does not sample its drafts")
        features = self._read(opening.features, "open.features")
        assert opening.features is not None
        start, ids = opening.features.start, list(opening.ids)
        if start + len(features) != len(ids):
            raise InvalidField("open.features", f"end at position {start + len(features)} of {len(ids)} committed ids")
        try:
            table = self.pool.allocate(str(key), len(features) * self.slots)
        except OutOfBlocks as error:
            raise Overloaded(str(error)) from None
        session = self._sessions[key] = Session(table, ids, start, features, start, start)
        chunk = max(1, PREFILL_SLOTS // self.slots)
        while session.done < len(ids) - 1:  # the last position's row waits for the root
            self._prefill(session, min(session.done + chunk, len(ids) - 1))
            session.forget()
            yield

    def close(self, key: int) -> None:
        """Free the session's KV."""
        session = self._sessions.pop(key, None)
        if session is not None:
            self.pool.free(session.table)

    def advance(self, key: int, advance: Advance) -> None:
        """Remember ids and features; their rows ride on the next draft's first forward."""
        if not advance.ids:
            return
        session = self._sessions[key]
        features = self._read(advance.features, "step.advance.features")
        assert advance.features is not None
        if (advance.features.start, len(features)) != (len(session.ids), len(advance.ids)):
            raise InvalidField("step.advance.features", "are not those of the committed ids")
        session.ids += advance.ids
        session.features = torch.cat((session.features, features))

    def _read(self, features: Features | None, field: str) -> Tensor:
        """(n, F) rows of inline features."""
        if features is None or features.inline is None or not features.count:
            raise InvalidField(field, f"a {self.description.kind} head drafts from the target's features")
        dtype = DTYPES[features.dtype or "float32"]
        if len(features.inline) != features.count * self._row_bytes * dtype.itemsize:
            raise InvalidField(field, f"{len(features.inline)} bytes are not {features.count} rows of {features.dtype}")
        rows = torch.frombuffer(bytearray(features.inline), dtype=dtype).view(features.count, -1)
        return rows.to(self.device, self.dtype)

    # --- rows ---

    def _room(self, job: DraftJob, extra: int) -> bool:
        """Whether there is anything to draft and room for it, `extra` KV entries behind the rows; takes the room."""
        session = self._sessions[job.key]
        if job.budget == 0 or job.committed_len + 1 + self.deepest > self.max_context:
            return False
        entries = (job.committed_len - session.start) * self.slots + extra
        try:
            self.pool.extend(session.table, max(entries, session.table.num_tokens))
        except OutOfBlocks:
            return False
        return True

    def _committed_rows(self, session: Session, upto: int, root: int | None) -> Rows:
        """The rows of the positions done..upto-1; the last one's token is `root` when it is not committed yet."""
        tokens = session.ids[session.done + 1 : upto + 1]
        if root is not None:
            tokens = [*tokens[: upto - session.done - 1], root]
        positions = torch.arange(session.done, upto, device=self.device)
        piece = Piece.chain(session.table, self._entry(session, session.done), range(len(tokens) * self.slots))
        return Rows(session.take(upto), torch.tensor(tokens, device=self.device), positions, (piece,))

    def _query_rows(self, jobs: Sequence[DraftJob]) -> tuple[Rows, Tensor]:
        """All jobs' rows up to the one that reads the root, and the (J,) indices of those last ones."""
        parts = []
        for job in jobs:
            session = self._sessions[job.key]
            session.done = min(session.done, job.committed_len - 1)  # the same draft once more: its row once more
            parts.append(self._committed_rows(session, job.committed_len, job.root))
        ends = np.cumsum([len(part.tokens) for part in parts]) - 1
        return join(parts), torch.from_numpy(ends).to(self.device)

    def _settle(self, jobs: Sequence[DraftJob]) -> None:
        """The jobs' rows are in KV now."""
        for job in jobs:
            session = self._sessions[job.key]
            session.done = job.committed_len
            session.forget()

    def _entry(self, session: Session, position: int) -> int:
        """KV entries before a position's row."""
        return (position - session.start) * self.slots

    def _tree_piece(self, session: Session, prefix: int, parents: Sequence[int], earlier: Earlier) -> Piece:
        """Rows behind `prefix` KV entries and a tree's earlier ones, as far as attention sees them."""
        count = len(parents)
        return Piece(session.table, prefix, [0] * count, parents, [0] * count, (), earlier)

    def _attends(self, rows: Rows) -> list[Attend]:
        """One attention for each layer."""
        plan = plan_forward(pack(rows.pieces), self.pool, self.config.group, frozenset((None,)))[None]

        def attend_in(layer: int) -> Attend:
            return lambda query, key, value: plan.attend(layer, query, key, value, None, None)

        return [attend_in(layer) for layer in range(self.config.num_hidden_layers)]

    def _timed(self, work: Callable[[], R]) -> R:
        """Run a part of the nn forward on the head's clock."""
        began = time.perf_counter_ns()
        with torch.inference_mode():
            made = work()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.forward_ns += time.perf_counter_ns() - began
        return made

    def _prefill(self, session: Session, upto: int) -> None:
        rows = self._committed_rows(session, upto, None)
        self._timed(lambda: self._states(rows))
        session.done = upto

    @abstractmethod
    def _states(self, rows: Rows) -> Tensor:
        """The forward over rows of target features, keys and values stored; states of each row."""

    # --- scores ---

    def _noise(self, job: DraftJob, depths: int) -> Tensor | None:
        """(depths, draft vocabulary) float32 keyed noise of nodes at depth 1.. when the job is coupled at T > 0."""
        if not job.coupled or job.sampling.temperature == 0:
            return None
        session, first = self._sessions[job.key], job.committed_len + 1
        known = None if session.noise is None else session.noise[max(0, first - session.noise_from) :]
        have = 0 if known is None or first < session.noise_from else len(known)
        if have < depths:  # a step moves on by a few positions: most of them were needed before
            positions = torch.arange(first + have, first + depths, device=self.device)
            new = noise(job.sampling.seed, positions, self.target_ids).float()
            session.noise = new if known is None or not have else torch.cat((known, new))
            session.noise_from = first
        assert session.noise is not None
        return session.noise[first - session.noise_from :][:depths]


def scores_of(logits: Tensor, temperature: float, noise_rows: Tensor | None) -> Tensor:
    """(..., V) log-scores: log q at the temperature (1 when greedy), reweighted by the noise where there is any."""
    scores = (logits.float() / (temperature or 1.0)).log_softmax(-1)
    return scores if noise_rows is None else (scores + noise_rows).log_softmax(-1)


def join(parts: Sequence[Rows]) -> Rows:
    """Rows of several sessions as one."""
    return Rows(
        torch.cat([part.features for part in parts]),
        torch.cat([part.tokens for part in parts]),
        torch.cat([part.positions for part in parts]),
        tuple(piece for part in parts for piece in part.pieces),
    )


def target_ids(model: nn.Module, config: HeadConfig) -> Tensor:
    """(draft vocabulary,) int64 target id of each draft id; d2t holds offsets, as the public checkpoints do."""
    draft = torch.arange(config.draft_vocab_size)
    d2t = getattr(model, "d2t", None)
    return draft if d2t is None else draft + d2t.cpu()
