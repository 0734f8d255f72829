"""Heads that read the target's features: their sessions, the rows a step adds, and the KV those rows leave.

A row belongs to a committed position p: the features of p beside the token at p + 1. Each row leaves `slots` entries in
KV, the last row's token is the root, and every row is kept. Positions before the prompt window's start have no row.

New weights take over between two drafts. Rows that the old ones made stay in KV: a session that was open drafts from a
mixture until it ends. That costs accepted tokens at worst, and to make all rows again would hold up every session.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from coppice.config.sections import DrafterSettings
from coppice.engine.attention_plan import Tail, plan_tails
from coppice.engine.engine import DTYPES
from coppice.engine.kv_cache import BlockTable, KVPool, OutOfBlocks
from coppice.engine.linear import compile_ahead, prepack
from coppice.errors import InvalidField, Overloaded
from coppice.heads.base import DraftJob, Head, Miss
from coppice.heads.checkpoints import public_weights
from coppice.heads.last_draft import Recall
from coppice.heads.models.layers import Attend, HeadConfig, largest
from coppice.heads.weight_swap import SpareModel, make_spare
from coppice.messages.steps import Advance, Features, HeadDescription, OpenDraft, WeightsHeader
from coppice.speculation.sampling_torch import noise
from coppice.weights.staging import Staging
from coppice.weights.versions import Weights

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
    noise: tuple[int, int, Tensor]  # seed, first position and (P, draft vocabulary) of drafts to come
    wants_misses: bool = False
    recall: Recall | None = None  # the last draft; kept only for a session that wants misses, until ids are committed

    def take(self, upto: int) -> Tensor:
        """(upto - done, F) features of the positions done..upto-1."""
        return self.features[self.done - self.first : upto - self.first]

    def forget(self) -> None:
        """Drop the features of rows that are in KV, save the last one's: the same draft may be asked for again."""
        keep = min(max(self.done - 1, self.first), self.first + len(self.features))
        self.features, self.first = self.features[keep - self.first :], keep


@dataclass(frozen=True)
class Rows:
    """Rows of several sessions for one forward, packed in order: what they read, and what they see."""

    features: Tensor  # (N, F) target features, or (N, hidden) states of the head's own
    tokens: Sequence[int] | NDArray[np.int64]  # (N,)
    positions: Sequence[int] | NDArray[np.int64]  # (N,) where each row's features stand
    tails: Sequence[Tail]


@dataclass(frozen=True)
class Inputs:
    """The same as the model takes it: all that a forward needs is at hand."""

    features: Tensor
    embeddings: Tensor  # (1, N, hidden)
    positions: Tensor  # (1, N)
    attends: list[Attend]  # one for each layer


class FeatureHead(Head, Generic[M]):
    """Sessions, prefill and packed attention of a head of our own; a kind adds its model and its tree."""

    slots = 1
    """KV entries of a row"""

    def __init__(self, settings: DrafterSettings, kind: str, model: M, config: HeadConfig, embedding: Tensor) -> None:
        """embedding: (V, hidden) of the target. The model's buffers d2t (draft vocabulary,) say which id is which."""
        if settings.threads:
            torch.set_num_threads(settings.threads)
        self.settings, self.config = settings.of_kind(), config
        self.device, self.dtype = torch.device(settings.device), DTYPES[settings.dtype]
        self.weights = self._checkpoint = Weights.of(public_weights(model, config))
        self.model = model.to(self.device, self.dtype).requires_grad_(False).train(False)
        self.embedding = embedding.to(self.device, self.dtype)
        prepack(self.model)
        compile_ahead(self.model)
        ids = target_ids(model, config)
        self.target_ids, self._ids = ids.to(self.device), ids.numpy()
        self.pool = KVPool(
            layers=config.num_hidden_layers,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            tokens=settings.kv_tokens * self.slots,
            dtype=self.dtype,
            device=self.device,
        )
        self.description = HeadDescription(
            settings.name or kind,
            kind,
            config.vocab_size,
            feature_layers=config.feature_layers,
            weights_hash=self.weights.hash,
        )
        self.deepest = self.settings.depth
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
        session = self._sessions[key] = Session(
            table,
            ids,
            start,
            features,
            start,
            start,
            (0, 0, features.new_empty(0, len(self._ids), dtype=torch.float32)),
            opening.want_misses,
        )
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

    def advance(self, key: int, advance: Advance) -> Miss | None:
        """Remember ids and features; their rows ride on the next draft's first forward."""
        if not advance.ids:
            return None
        session = self._sessions[key]
        features = self._read(advance.features, "step.advance.features")
        assert advance.features is not None
        if (advance.features.start, len(features)) != (len(session.ids), len(advance.ids)):
            raise InvalidField("step.advance.features", "are not those of the committed ids")
        miss = self._miss(session, advance)
        session.recall = None
        session.ids += advance.ids
        session.features = torch.cat((session.features, features))
        return miss

    def blank_features(self, start: int, count: int) -> Features:
        """Zeros."""
        size = count * self._row_bytes * self.dtype.itemsize
        return Features(start, count, self.settings.dtype, bytes(size))

    def _read(self, features: Features | None, field: str) -> Tensor:
        """(n, F) rows of inline features."""
        if features is None or features.inline is None or not features.count:
            raise InvalidField(field, f"a {self.description.kind} head drafts from the target's features")
        dtype = DTYPES[features.dtype or "float32"]
        if len(features.inline) != features.count * self._row_bytes * dtype.itemsize:
            raise InvalidField(field, f"{len(features.inline)} bytes are not {features.count} rows of {features.dtype}")
        rows = torch.frombuffer(bytearray(features.inline), dtype=dtype).view(features.count, -1)
        return rows.to(self.device, self.dtype)

    # --- weights ---

    def staging(self, header: WeightsHeader) -> Staging:
        """Where the parts of a push go; its parent is what is in use or the checkpoint."""
        return Staging(header, self.description.name, self.weights, self._checkpoint)

    def spare(self, staging: Staging) -> SpareModel[M]:
        """A model with the push's tensors, in the head's dtype and on its device. It shares the others."""
        return make_spare(self, staging)

    # --- misses ---

    def _recall(self, job: DraftJob) -> Recall | None:
        """Where to note the draft that begins; None in a session that does not want misses."""
        session = self._sessions[job.key]
        session.recall = Recall(job, self.description.weights_version) if session.wants_misses else None
        return session.recall

    @torch.inference_mode()
    def _miss(self, session: Session, advance: Advance) -> Miss | None:
        """What the last draft missed the target's token by; `advance` is not taken yet.

        None when the rejection is not about that draft, or other weights made it.
        """
        recall, rejection = session.recall, advance.rejection
        if recall is None or rejection is None or recall.version != self.description.weights_version:
            return None
        depth = rejection.position - len(session.ids) - 1
        drafted = recall.job.committed_len, recall.job.root
        if drafted != (len(session.ids), advance.ids[0]) or not 0 <= depth < len(advance.ids):
            return None
        state = recall.state(advance.ids[1 : depth + 1])
        if state is None:
            return None
        normed, logits = self._score(state[None])
        places = np.flatnonzero(self._ids == rejection.target_id)
        chance = logits[0].float().softmax(-1)[places[:1].tolist()]
        found = torch.cat((normed[0].float(), chance)).cpu().numpy()
        value = 1.0 - float(found[-1]) if len(places) else 1.0
        return Miss(float(np.float32(min(1.0, max(0.0, value)))), found[: normed.shape[1]].copy())

    def _score(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """(N, hidden) un-normed states to (N, hidden) normed ones and their (N, draft vocabulary) logits.

        Asked of kinds that recall their drafts; the others say of no miss.
        """
        raise NotImplementedError

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
        tail = Tail(session.table, self._entry(session, session.done), self._visible(len(tokens)))
        return Rows(session.take(upto), tokens, range(session.done, upto), (tail,))

    def _visible(self, rows: int) -> NDArray[np.bool_]:
        """(rows * slots, rows * slots) which entries of rows in a row each of them sees."""
        return np.tri(rows * self.slots, dtype=np.bool_)

    def _query_rows(self, jobs: Sequence[DraftJob]) -> tuple[Rows, Tensor]:
        """All jobs' rows up to the one that reads the root, and the (J,) indices of those last ones."""
        parts = []
        for job in jobs:
            session = self._sessions[job.key]
            session.done = min(session.done, job.committed_len - 1)  # the same draft once more: its row once more
            parts.append(self._committed_rows(session, job.committed_len, job.root))
        ends = list(accumulate(len(part.tokens) for part in parts))
        return join(parts), self._tensor(ends) - 1

    def _settle(self, jobs: Sequence[DraftJob]) -> None:
        """The jobs' rows are in KV now."""
        for job in jobs:
            session = self._sessions[job.key]
            session.done = job.committed_len
            session.forget()

    def _entry(self, session: Session, position: int) -> int:
        """KV entries before a position's row."""
        return (position - session.start) * self.slots

    def _tensor(self, numbers: Sequence[int] | NDArray[np.int64]) -> Tensor:
        """int64 on the head's device, in the same shape."""
        return torch.from_numpy(np.asarray(numbers, np.int64)).to(self.device)

    def _inputs(self, rows: Rows) -> Inputs:
        plan = plan_tails(rows.tails, self.pool, self.config.group)

        def attend_in(layer: int) -> Attend:
            return lambda query, key, value: plan.attend(layer, query, key, value, None, None)

        return Inputs(
            rows.features,
            self.embedding.index_select(0, self._tensor(rows.tokens))[None],
            self._tensor(rows.positions)[None],
            [attend_in(layer) for layer in range(self.config.num_hidden_layers)],
        )

    def timed(self, work: Callable[..., R], *inputs: Any) -> R:
        """Run a part of the nn forward, its inputs at hand, on the head's clock."""
        began = time.perf_counter_ns()
        made = work(*inputs)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.forward_ns += time.perf_counter_ns() - began
        return made

    @torch.inference_mode()
    def _prefill(self, session: Session, upto: int) -> None:
        inputs = self._inputs(self._committed_rows(session, upto, None))
        self.timed(self._states, inputs)
        session.done = upto

    def _states(self, inputs: Inputs) -> Tensor:
        """The forward over rows of target features, keys and values stored; states of each row.

        Asked of kinds that keep KV.
        """
        raise NotImplementedError

    # --- scores ---

    def _noise(self, job: DraftJob, depths: int) -> Tensor | None:
        """(depths, draft vocabulary) float32 keyed noise of nodes at depth 1.. when the job is coupled at T > 0.

        Most positions of a draft were drafted at before: their noise is kept between steps.
        """
        if not job.noisy:
            return None
        session, seed, first = self._sessions[job.key], job.sampling.seed, job.committed_len + 1
        of_seed, start, known = session.noise
        known = known[first - start :] if of_seed == seed and start <= first else known[:0]
        if len(known) < depths:
            positions = torch.arange(first + len(known), first + depths, device=self.device)
            known = torch.cat((known, noise(seed, positions, self.target_ids).float()))
        session.noise = seed, first, known
        return known[:depths]

    def _likeliest(
        self, scores: Tensor, width: int, *more: Tensor, wanted: Tensor | None = None
    ) -> tuple[Any, Any, Any]:
        """(..., width) target ids and log-scores of the best of (..., V) scores, best first, and (..., M) int64 more.

        wanted: (..., 1) draft ids that are the last ones where they are not among the best. As numpy arrays, int64,
        float32 and int64; one transfer from the device.
        """
        scores = scores.log_softmax(-1)
        values, indices = largest(scores, width)
        if wanted is not None:
            absent = (indices != wanted).all(-1, keepdim=True)
            indices[..., -1:] = torch.where(absent, wanted, indices[..., -1:])
            values[..., -1:] = torch.where(absent, scores.gather(-1, wanted), values[..., -1:])
            more = (*more, (indices == wanted).int().argmax(-1, keepdim=True))
        parts = (indices.int(), values.view(torch.int32), *(part.int() for part in more))
        found = torch.cat(parts, dim=-1).cpu().numpy()
        return self._ids[found[..., :width]], found[..., width : 2 * width].view(np.float32), found[..., 2 * width :]


def join(parts: Sequence[Rows]) -> Rows:
    """Rows of several sessions as one."""
    if len(parts) == 1:
        return parts[0]
    return Rows(
        torch.cat([part.features for part in parts]),
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([part.positions for part in parts]),
        [tail for part in parts for tail in part.tails],
    )


def target_ids(model: nn.Module, config: HeadConfig) -> Tensor:
    """(draft vocabulary,) int64 target id of each draft id; d2t holds offsets, as the public checkpoints do."""
    draft = torch.arange(config.draft_vocab_size)
    d2t = getattr(model, "d2t", None)
    return draft if d2t is None else draft + d2t.cpu()
