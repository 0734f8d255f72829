"""Heads that read the target's features: sessions, prefill, packed forwards and what they missed.

A row belongs to a committed position p: the features of p beside the token at p + 1. Each row leaves an
entry in KV, or one for each slot; the last one's token is the root. Positions before the prompt's window have none.

New weights take over between two drafts. Rows that the old ones made stay in KV: to make them again would hold up every
session, and a mixture costs accepted tokens at worst. A session drafts with the variant of the weights that is for its
prompt's kind of text; sessions with different ones take turns in a draft.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coppice.adaptation.weights import Routes, Weights, numbers_in, sketch_of, variant_name
from coppice.config.sections import DrafterSettings
from coppice.engine.attention import Attention, Sdpa
from coppice.engine.engine import DTYPES, Clock
from coppice.engine.kv_cache import BlockTable, KVPool
from coppice.engine.modules import prepack
from coppice.engine.rows import Ints, PackedBatch, RowTable, Tail
from coppice.engine.steps import Bucket, StepInputs, padded
from coppice.errors import InvalidField
from coppice.heads.base import DraftJob, Growth, KVHead, with_tree_shape
from coppice.heads.checkpoints import fused_tensor, load_head, public_names, public_weights
from coppice.heads.layers import DraftModel
from coppice.heads.tree import BlockTree, Ranking
from coppice.speculation.tree import DraftTree
from coppice.wire.common import Features
from coppice.wire.drafter import Advance, DraftOpened, HeadDescription, OpenDraft

PREFILL_SLOTS = 1024  # KV entries made in one prefill forward
_INPUTS = 16  # kept on a device, the latest ones


@dataclass
class FeatureSession:
    """One session: its text, its KV, and the features of the positions from `first` on."""

    table: BlockTable
    ids: list[int]
    start: int  # position of the first row
    features: Tensor  # in the host's memory
    first: int
    done: int  # rows of the positions before it are in KV
    opened: DraftOpened
    wants_misses: bool = False
    last_tree: BlockTree | None = None  # only for a session that wants misses, until ids are committed

    def take(self, upto: int) -> Tensor:
        """Return the (upto - done, F) features of the positions done..upto-1."""
        return self.features[self.done - self.first : upto - self.first]

    def finish(self, upto: int) -> None:
        """Note that the rows before `upto` are in KV. The last one's features stay: a draft may be asked for again."""
        self.done = upto
        keep = min(max(upto - 1, self.first), self.first + len(self.features))
        self.features, self.first = self.features[keep - self.first :], keep


@dataclass(frozen=True)
class Rows:
    """Rows of several sessions for one forward, packed in order: what they read, and what they see."""

    tokens: Sequence[int] | Ints  # (N,)
    positions: Sequence[int] | Ints  # (N,) where each row's features stand
    tails: Sequence[Tail]
    features: Tensor | None = None
    """(N, F) target features, in the host's memory; or with sources (M, hidden) states of the head's own"""
    outputs: Sequence[int] = ()  # rows whose states are read
    sources: Sequence[int] | None = None  # (N,) which of the states each row reads


@dataclass(frozen=True)
class Inputs:
    """Rows as the model takes them: all that a forward needs is at hand."""

    features: Tensor
    embeddings: Tensor  # (1, N, hidden)
    positions: Tensor  # (1, N)
    attends: list[Any]  # one for each layer, as the model takes it
    outputs: Tensor  # (J,) rows whose states are read


def _tensor(numbers: Sequence[int] | Ints) -> Tensor:
    return torch.from_numpy(np.asarray(numbers, np.int64))


def _as_ints(features: Tensor) -> Ints:
    """Return the bytes of host features as whole numbers, zeros behind them."""
    data = features.contiguous().view(torch.uint8).numpy().ravel()
    return np.pad(data, (0, -len(data) % 8)).view(np.int64)


class FeatureHead(KVHead):
    """Sessions of a trained head; a kind says which model it has, how its rows are run and how its trees grow."""

    kind: str
    needs_root: ClassVar[bool] = True
    """whether a position's row reads the token behind it, so that the last one waits for the root"""
    row_is_block: ClassVar[bool] = False  # whether each slot of a row has a KV entry

    def __init__(self, settings: DrafterSettings) -> None:
        """Load `settings.path` on the thread that will use it. Raises InvalidField for another kind or target."""
        loaded = load_head(self.kind, settings.path, settings.target)
        if settings.threads:
            torch.set_num_threads(settings.threads)
        config = self.config = loaded.config
        self.settings = with_tree_shape(settings)
        device = self.device = torch.device(settings.device)
        self.dtype = DTYPES[settings.dtype]
        self.weights = self.checkpoint = Weights.of(public_weights(loaded.model, config))
        model = loaded.model.to(device, self.dtype).requires_grad_(False).train(False)
        prepack(model)
        model.freeze()
        self.models, self.routes, self._variant = {0: model}, Routes(), 0
        self.ranking = Ranking(model.target_ids.to(device))
        self.slots: int = config.slots if self.row_is_block else 1
        tokens = settings.kv_tokens * self.slots
        self.pool = KVPool(layers=model.kv_shapes, tokens=tokens, dtype=self.dtype, device=device)
        self.embedding = loaded.embedding.to(device, self.dtype)
        group = config.num_attention_heads // config.num_key_value_heads
        self._step_inputs = lru_cache(_INPUTS)(lambda size, beside: StepInputs(size, group, self.pool, beside))
        self.description = HeadDescription(
            settings.name or self.kind,
            self.kind,
            config.vocab_size,
            feature_layers=config.feature_layers,
            weights_hash=self.weights.hash,
            expected_acceptance=config.acceptance.by_depth if config.acceptance else (),
        )
        self.deepest = self.settings.depth
        self.max_context: int = config.max_position_embeddings
        self.timed = Clock(device)  # parts of the nn forward, their inputs at hand
        self._sessions: dict[int, FeatureSession] = {}

    def plant(self, job: DraftJob, number: int) -> BlockTree:
        """Return the tree of the call's job `number`, whose levels have children behind all nodes of those before."""
        return BlockTree(job, number, job.budget)

    def scratch(self, tree: BlockTree) -> int:
        """Return how many KV entries a tree writes behind its session's rows."""
        return 0

    @abstractmethod
    def grow(self, trees: Sequence[BlockTree]) -> Iterator[Sequence[BlockTree]]:
        """Grow trees that have room by `self.model`, and yield those that grew whenever something is to be sent."""

    def run(self, inputs: Inputs) -> Tensor:
        """Run the forward over rows of target features, which stores keys and values; returns each row's states."""
        return self.run_behind(inputs, self.model.condition(inputs.features))

    def run_behind(self, inputs: Inputs, condition: Tensor) -> Tensor:
        """Return the (N, ...) un-normed states of rows with these (N, hidden) conditions."""
        rope = self.model.rope(inputs.positions, self.dtype)
        states: Tensor = self.model(condition[None], inputs.embeddings, rope, inputs.attends)
        return states[0]

    def inputs(self, rows: Rows) -> Inputs:
        """Return the inputs of some rows; a device gets all that is new to it in one copy, what is read at its end."""
        features = torch.empty(0) if rows.features is None else rows.features
        tokens, positions, outputs = map(_tensor, (rows.tokens, rows.positions, rows.outputs))
        attention: Attention
        if self.device.type == "cpu":
            attention = Sdpa(rows.tails, self.pool)
            if rows.sources is not None:
                features = features.index_select(0, _tensor(rows.sources))
        else:
            count, kept, table = len(tokens), len(outputs), RowTable.of(rows.tails)
            numbers = _as_ints(features) if rows.sources is None else np.array(rows.sources, np.int64)
            attention = self._step_inputs(Bucket.of(table, kept), padded(len(numbers)))
            sent = attention.fill(PackedBatch(tokens, positions, tuple(rows.tails), outputs), table, numbers)
            tokens, positions, outputs = attention.tokens[:count], attention.positions[:count], attention.keep[:kept]
            if rows.sources is None:
                features = sent.view(torch.uint8)[: features.nbytes].view(features.dtype).view(features.shape)
            else:
                features = features.index_select(0, sent)
        attends = self.model.attends(attention)
        return Inputs(features, self.embedding.index_select(0, tokens)[None], positions[None], attends, outputs)

    @property
    def model(self) -> Any:
        """The model that drafts now; of a variant that is gone the deployed one."""
        return self.models.get(self._variant, self.models[0])

    @torch.inference_mode()
    def open(self, key: int, opening: OpenDraft) -> Iterator[None]:
        """Make the rows of the prompt's window, chunk by chunk. Raises InvalidField, and Overloaded without KV room."""
        if opening.want_q_rows:
            raise InvalidField("open.want_q_rows", f"a {self.kind} head does not sample its drafts")
        start, features = self._rows_of(opening.features, "open.features")
        ids = list(opening.ids)
        if start + len(features) != len(ids):
            raise InvalidField("open.features", f"end at position {start + len(features)} of {len(ids)} committed ids")
        table = self.pool.allocate(str(key), len(features) * self.slots)
        sketch = sketch_of(features)
        kind, variant = self.routes.choose(sketch, opening.session)
        opened = DraftOpened(0, variant, kind, tuple(sketch.tolist()))
        session = FeatureSession(table, ids, start, features, start, start, opened, opening.want_misses)
        self._sessions[key] = session
        chunk, end = max(1, PREFILL_SLOTS // self.slots), len(ids) - self.needs_root
        while session.done < end:
            self._variant = session.opened.variant
            self.prefill(session, min(session.done + chunk, end))
            self.forward_ns += self.timed.taken()
            yield

    def opened(self, key: int) -> DraftOpened:
        """Say which variant drafts, and what the prompt is like."""
        return replace(self._sessions[key].opened, weights_version=self.description.weights_version)

    def advance(self, key: int, advance: Advance) -> float | None:
        """Remember ids and features; their rows ride on the next draft's first forward."""
        if not advance.ids:
            return None
        session = self._sessions[key]
        start, features = self._rows_of(advance.features, "step.advance.features")
        if (start, len(features)) != (len(session.ids), len(advance.ids)):
            raise InvalidField("step.advance.features", "are not those of the committed ids")
        miss = self._miss(session, advance)
        session.last_tree = None
        session.ids += advance.ids
        session.features = torch.cat((session.features, features))
        return miss

    def blank_features(self, start: int, count: int) -> Features:
        size = count * self.config.feature_width * self.dtype.itemsize
        return Features(start, count, self.settings.dtype, bytes(size))

    def _rows_of(self, features: Features | None, field: str) -> tuple[int, Tensor]:
        """Return the first position and the (n, F) rows of inline features. Raises InvalidField."""
        if features is None or features.inline is None or not features.count:
            raise InvalidField(field, f"a {self.kind} head drafts from the target's features")
        dtype = DTYPES[features.dtype or "float32"]
        if len(features.inline) != features.count * self.config.feature_width * dtype.itemsize:
            raise InvalidField(field, f"{len(features.inline)} bytes are not {features.count} rows of {features.dtype}")
        rows = torch.frombuffer(bytearray(features.inline), dtype=dtype).view(features.count, -1)
        return features.start, rows.to(self.dtype)

    @torch.inference_mode()
    def draft(self, jobs: Sequence[DraftJob]) -> Iterator[list[Growth]]:
        """Draft with one variant after the other."""
        by_variant: dict[int, list[BlockTree]] = {}
        for number, job in enumerate(jobs):
            session, tree = self._sessions[job.key], self.plant(job, number)
            session.last_tree = tree if session.wants_misses else None
            by_variant.setdefault(session.opened.variant, []).append(tree)
        for variant, trees in by_variant.items():
            self._variant = variant
            growing = [tree for tree in trees if self.has_room(tree.job, self._entries(tree))]
            if full := [tree for tree in trees if tree not in growing]:
                yield [Growth(tree.number, DraftTree.empty(), last=True) for tree in full]
            for grown in self.grow(growing) if growing else ():
                self.forward_ns += self.timed.taken()
                yield [tree.send() for tree in grown]

    def _entries(self, tree: BlockTree) -> int:
        return self.entry(self._sessions[tree.job.key], tree.job.committed_len) + self.scratch(tree)

    def prefill(self, session: FeatureSession, upto: int) -> None:
        """Put the rows of the positions before `upto` into KV."""
        self.timed(self.run, self.inputs(self.committed_rows(session, upto, None)))
        session.finish(upto)

    def root_rows(self, trees: Sequence[BlockTree]) -> Rows:
        """Make the rows of the trees' sessions up to the ones that read the roots; those (J,) are kept."""
        parts = []
        for tree in trees:
            session, length = self._sessions[tree.job.key], tree.job.committed_len
            session.done = min(session.done, length - 1)  # the same draft once more: its row once more
            parts.append(self.committed_rows(session, length, tree.job.root))
        outputs = [end - 1 for end in accumulate(len(part.tokens) for part in parts)]
        if len(parts) == 1:
            return replace(parts[0], outputs=outputs)
        return Rows(
            np.concatenate([part.tokens for part in parts]),
            np.concatenate([part.positions for part in parts]),
            [tail for part in parts for tail in part.tails],
            torch.cat([part.features for part in parts if part.features is not None]),
            outputs,
        )

    def committed_rows(self, session: FeatureSession, upto: int, root: int | None) -> Rows:
        """Make the rows of the positions done..upto-1; the last one's token is `root` when it is not committed yet."""
        tokens = session.ids[session.done + 1 : upto + 1]
        if root is not None:
            tokens = [*tokens[: upto - session.done - 1], root]
        tail = Tail(session.table, self.entry(session, session.done), self.visible(len(tokens)))
        return Rows(tokens, range(session.done, upto), (tail,), session.take(upto))

    def visible(self, rows: int) -> NDArray[np.bool_]:
        """Return (rows * slots, rows * slots): which entries of rows in a row each of them sees."""
        return np.tri(rows * self.slots, dtype=np.bool_)

    def entry(self, session: FeatureSession, position: int) -> int:
        """Count the KV entries before a position's row."""
        return (position - session.start) * self.slots

    def tensor(self, numbers: Sequence[int] | Ints) -> Tensor:
        """Return the numbers as int64 on the head's device, in the same shape."""
        return _tensor(numbers).to(self.device)

    def note(self, tree: BlockTree, states: Tensor) -> None:
        """Keep the (S * K, hidden) states that predicted the tree's last block, in a session that wants misses."""
        if self._sessions[tree.job.key].wants_misses:
            for node, state in zip(tree.block, states, strict=True):
                tree.predictions.setdefault(node, state)

    @torch.inference_mode()
    def _miss(self, session: FeatureSession, advance: Advance) -> float | None:
        """Return by how much the last draft missed the target's token, 1 - q of it; `advance` is not taken yet.

        None when the rejection is not about that draft, or no forward predicted there.
        """
        tree, rejection, length = session.last_tree, advance.rejection, len(session.ids)
        if tree is None or rejection is None or (tree.job.committed_len, tree.job.root) != (length, advance.ids[0]):
            return None
        depth = rejection.position - length - 1
        state = tree.state_behind(advance.ids[1 : depth + 1]) if 0 <= depth < len(advance.ids) else None
        if state is None:
            return None
        places = np.flatnonzero(self.ranking.ids == rejection.target_id)
        if not len(places):
            return 1.0
        self._variant = session.opened.variant
        logits, _ = self.model.read_behind(state[None], self.tensor([advance.ids[depth]]))
        miss = 1.0 - float(logits[0].float().softmax(-1)[int(places[0])])
        return float(np.float32(min(1.0, max(0.0, miss))))

    def models_of(self, weights: Weights) -> dict[int, Any]:
        """Return the models of other weights by variant, which share equal tensors. Any thread may call it."""
        assert self.weights is not None
        model, changed = self.models[0], set(weights.differing(self.weights))
        models: dict[int, Any] = {}
        for variant in (0, *numbers_in(weights.tensors)):
            model = models[variant] = self._with_tensors(models.get(0, model), weights.tensors, variant, changed)
            changed = set(weights.tensors)
        return models

    def _with_tensors(self, model: Any, tensors: Mapping[str, Tensor], variant: int, changed: set[str]) -> Any:
        """Copy a model with a variant's values of the changed ones of its tensors; no other tensor is copied."""
        state = dict(model.state_dict())
        on_cuda = self.device.type == "cuda"
        stream: Any = torch.cuda.Stream(self.device) if on_cuda else None  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):  # its own: drafts do not wait for the copies
            for name in state:
                own = {part: variant_name(variant, part) for part in public_names(name)}
                if changed.intersection(own.values()):
                    values = {part: tensors.get(own_name, tensors[part]) for part, own_name in own.items()}
                    state[name] = fused_tensor(values, name).to(self.device, self.dtype)
        if on_cuda:
            stream.synchronize()
        return _copied(model, state)

    def exchange(self, weights: Weights, models: dict[int, Any], routes: Routes) -> None:
        """Draft with these from now on. Call it on the head's thread between drafts."""
        self.weights, self.models, self.routes = weights, models, routes
        self.description = replace(self.description, weights_version=weights.version, weights_hash=weights.hash)
        for session in self._sessions.values():
            session.last_tree = None  # other weights predicted it


def _copied(model: DraftModel, state: Mapping[str, Tensor]) -> DraftModel:
    """Copy a model with the tensors of `state`, which names all of its own; no tensor is copied."""
    shared = [*model.parameters(), *model.buffers(), getattr(model, "rotary", None), model.config, model.own_embedding]
    copy = deepcopy(model, {id(part): part for part in shared})
    copy.load_state_dict(dict(state), assign=True)
    prepack(copy)
    copy.freeze()
    return copy
