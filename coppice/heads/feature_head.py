"""Heads that read the target's features: prefill, packed attention and the scores of drafts.

A row belongs to a committed position p: the features of p beside the token at p + 1. Each row leaves `slots` entries in
KV, the last row's token is the root, and every row is kept. Positions before the prompt window's start have no row.

New weights take over between two drafts. Rows that the old ones made stay in KV: a session that was open drafts from a
mixture until it ends. That costs accepted tokens at worst, and to make all rows again would hold up every session.

A session drafts with the variant of the weights that its prompt was found to be for; sessions with different ones take
turns in a draft.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coppice.config.sections import DrafterSettings
from coppice.engine.engine import DTYPES, Timed
from coppice.engine.kv_cache import KVPool, KVShape, OutOfBlocks
from coppice.engine.modules import prepack
from coppice.engine.rows import NOTHING, Tail
from coppice.errors import InvalidField, Overloaded, StaleFence
from coppice.heads.base import DraftJob, Growth, Head, with_tree_shape
from coppice.heads.checkpoints import fused_tensor, load_head, public_names, public_weights
from coppice.heads.models.layers import DraftModel
from coppice.heads.ranking import Noise, Ranking, noise_there, places, target_ids
from coppice.heads.rows import FeatureSession, Inputs, LastDraft, RowInputs, Rows, join
from coppice.weights.staging import Staging
from coppice.weights.variants import Routes, in_deployed, numbers_in, sketch_of, variant_name
from coppice.weights.versions import Weights
from coppice.wire.common import Features
from coppice.wire.drafter import Advance, DraftOpened, HeadDescription, OpenDraft, WeightsHeader


@dataclass
class VariantModels:
    """The models of a head by variant, 0 the deployed one, and what each is for."""

    models: dict[int, Any]
    routes: Routes
    at_work: int = 0
    """the variant that drafts now"""

    @property
    def model(self) -> Any:
        """The model that drafts now; of a variant that is gone the deployed one."""
        return self.models.get(self.at_work, self.models[0])


class WeightSwap:
    """Models with new weights beside those that draft, ready: the next draft reads them once `swap` was called."""

    def __init__(self, head: FeatureHead, staging: Staging) -> None:
        """Make the models of a push's tensors, in the head's dtype and on its device; they share all others.

        Raises what `Staging.finish` and `Routes.of` raise.
        """
        self._head, self._weights, self._replaces = head, staging.finish(), staging.live
        routes, used = Routes.of(self._weights.tensors), head.variants.models
        changed = set(self._weights.differing(self._replaces))
        deployed = self._model(used[0], 0, changed) if self._changes(0, changed) else used[0]
        models = {0: deployed}
        for number in numbers_in(self._weights.tensors):
            model = used.get(number) if deployed is used[0] else None
            if model is None or self._changes(number, changed):
                own = {name for name in self._weights.tensors if name.startswith(variant_name(number, ""))}
                model = self._model(deployed, number, own)
            models[number] = model
        self._variants = VariantModels(models, routes)

    def _changes(self, number: int, changed: AbstractSet[str]) -> bool:
        """Whether any of the names is of a variant."""
        return any(name.startswith(variant_name(number, "")) if number else in_deployed(name) for name in changed)

    def _model(self, model: Any, number: int, names: AbstractSet[str]) -> DraftModel:
        """Copy a model with a variant's values of those of its tensors that are among the names."""
        head, state = self._head, dict(model.state_dict())
        on_cuda = head.device.type == "cuda"
        stream: Any = torch.cuda.Stream(head.device) if on_cuda else None  # type: ignore[no-untyped-call]
        pushed = self._weights.tensors
        own = {name: variant_name(number, name) for name in pushed if in_deployed(name)}
        tensors = {name: pushed.get(own_name, pushed[name]) for name, own_name in own.items()}
        with torch.cuda.stream(stream):  # its own: drafts do not wait for the copies
            for name in state:
                if any(own.get(public) in names for public in public_names(name)):
                    state[name] = fused_tensor(tensors, name).to(head.device, head.dtype)
        if on_cuda:
            stream.synchronize()
        return with_tensors(model, state)

    def swap(self) -> None:
        """Exchange the models. Call it on the head's thread between drafts.

        Raises StaleFence when the head's weights are no longer those that the push was checked against.
        """
        head, weights = self._head, self._weights
        if head.weights is not self._replaces:
            raise StaleFence(
                f"version {weights.version} was made to replace version {self._replaces.version}; version "
                f"{head.weights.version} with hash {head.weights.hash.hex()} came into use meanwhile"
            )
        head.variants, self._variants = self._variants, head.variants
        head.weights = self._replaces = weights
        head.description = replace(head.description, weights_version=weights.version, weights_hash=weights.hash)

    def release(self) -> None:
        """Free the old models. It takes a while: call it on another thread than the head's."""
        del self._variants


def with_tensors(model: DraftModel, state: Mapping[str, Tensor]) -> DraftModel:
    """Copy a model with the tensors of `state`, which names all of its own; no tensor is copied."""
    shared = [*model.parameters(), *model.buffers(), getattr(model, "rotary", None), model.config, model.own_embedding]
    copy = deepcopy(model, {id(part): part for part in shared})
    copy.load_state_dict(dict(state), assign=True)
    prepack(copy)
    copy.freeze()
    return copy


PREFILL_SLOTS = 1024  # KV entries made in one prefill forward

Output = tuple[Tensor, Tensor, Tensor]
"""of a forward: un-normed states, their logits, and what a kind reads off them beside"""


@lru_cache(16)
def _earlier(entries: int) -> NDArray[np.bool_]:
    """Return (entries, entries): whether the second one is no later than the first one."""
    return np.tri(entries, dtype=np.bool_)


class FeatureHead(Head):
    """Sessions, prefill and packed attention of a trained head; a kind adds its model and its tree."""

    kind: ClassVar[str]
    needs_root: ClassVar[bool] = True
    """whether a position's row reads the token behind it, so that the last one waits for the root"""

    def __init__(self, settings: DrafterSettings) -> None:
        """Load `settings.path` for the target of `settings.target`, on the thread that will use it.

        Raises InvalidField on a folder that is not exactly a checkpoint of this kind for this target.
        """
        loaded = load_head(self.kind, settings.path, settings.target)
        if settings.threads:
            torch.set_num_threads(settings.threads)
        config = self.config = loaded.config
        self.settings = with_tree_shape(settings)
        device, self.dtype = torch.device(settings.device), DTYPES[settings.dtype]
        self.weights = self._checkpoint = Weights.of(public_weights(loaded.model, config))
        model = loaded.model.to(device, self.dtype).requires_grad_(False).train(False)
        prepack(model)
        model.freeze()
        self.variants = VariantModels({0: model}, Routes())
        self.ranking = Ranking(target_ids(model, config).to(device))
        pool = KVPool(
            layers=[KVShape(config.num_key_value_heads, config.head_dim, config.head_dim)] * config.num_hidden_layers,
            tokens=settings.kv_tokens * self.slots,
            dtype=self.dtype,
            device=device,
        )
        embedding = loaded.embedding.to(device, self.dtype)
        self.row_inputs = RowInputs(pool, embedding, config.group, config.num_hidden_layers)
        self.description = HeadDescription(
            settings.name or self.kind,
            self.kind,
            config.vocab_size,
            feature_layers=config.feature_layers,
            weights_hash=self.weights.hash,
            expected_acceptance=config.acceptance.by_depth if config.acceptance else (),
        )
        self.deepest = self.settings.depth
        self.max_context = config.max_position_embeddings
        self.timed = Timed(device)  # parts of the nn forward, their inputs at hand
        self._sessions: dict[int, FeatureSession] = {}

    @property
    def slots(self) -> int:
        """KV entries of a row."""
        return 1

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.pool.device

    @property
    def pool(self) -> KVPool:
        """Keys and values of its rows."""
        return self.row_inputs.pool

    @property
    def on_device(self) -> bool:
        """Whether it computes elsewhere than on the CPU."""
        return self.device.type != "cpu"

    def open(self, key: int, opening: OpenDraft) -> Iterator[None]:
        """Make the rows of the prompt's window, chunk by chunk. Raises InvalidField, and Overloaded without KV room."""
        if opening.want_q_rows:
            raise InvalidField("open.want_q_rows", f"a {self.description.kind} head does not sample its drafts")
        start, features = self._read(opening.features, "open.features")
        ids = list(opening.ids)
        if start + len(features) != len(ids):
            raise InvalidField("open.features", f"end at position {start + len(features)} of {len(ids)} committed ids")
        try:
            table = self.pool.allocate(str(key), len(features) * self.slots)
        except OutOfBlocks as error:
            raise Overloaded(str(error)) from None
        noise = Noise(self.ranking.target_ids)
        session = FeatureSession(table, ids, start, features, start, start, noise, opening.want_misses)
        session.sketch = sketch_of(features)
        session.choice = self.variants.routes.choose(session.sketch, opening.session)
        self._sessions[key] = session
        chunk, end = max(1, PREFILL_SLOTS // self.slots), len(ids) - self.needs_root
        while session.done < end:
            self._use(session)
            self._prefill(session, min(session.done + chunk, end))
            self.forward_ns += self.timed.taken()
            session.forget()
            yield

    def opened(self, key: int) -> DraftOpened:
        """Say which variant drafts, and what the prompt is like."""
        session = self._sessions[key]
        choice, sketch = session.choice, tuple(session.sketch.tolist())
        return DraftOpened(self.description.weights_version, choice.variant, choice.kind, sketch)

    @property
    def model(self) -> Any:
        """The model that drafts now."""
        return self.variants.model

    def _use(self, session: FeatureSession) -> None:
        """Let the model of the session's variant draft."""
        self.variants.at_work = session.choice.variant

    def draft(self, jobs: Sequence[DraftJob]) -> Iterator[list[Growth]]:
        """Draft with one variant after the other."""
        groups: dict[int, list[int]] = {}
        for number, job in enumerate(jobs):
            groups.setdefault(self._sessions[job.key].choice.variant, []).append(number)
        for numbers in groups.values():
            self._use(self._sessions[jobs[numbers[0]].key])
            for grown in self._draft([jobs[number] for number in numbers]):
                self.forward_ns += self.timed.taken()
                yield [replace(part, job=numbers[part.job]) for part in grown]

    @abstractmethod
    def _draft(self, jobs: Sequence[DraftJob]) -> Iterator[list[Growth]]:
        """Draft as `draft` does for jobs of one variant, whose model is at work."""

    def close(self, key: int) -> None:
        """Free the session's KV."""
        session = self._sessions.pop(key, None)
        if session is not None:
            self.pool.free(session.table)

    def advance(self, key: int, advance: Advance) -> float | None:
        """Remember ids and features; their rows ride on the next draft's first forward."""
        if not advance.ids:
            return None
        session = self._sessions[key]
        start, features = self._read(advance.features, "step.advance.features")
        if (start, len(features)) != (len(session.ids), len(advance.ids)):
            raise InvalidField("step.advance.features", "are not those of the committed ids")
        miss = self._miss(session, advance)
        session.last_draft = None
        session.ids += advance.ids
        session.features = torch.cat((session.features, features))
        return miss

    def blank_features(self, start: int, count: int) -> Features:
        """Return zeros."""
        size = count * self.config.feature_width * self.dtype.itemsize
        return Features(start, count, self.settings.dtype, bytes(size))

    def _read(self, features: Features | None, field: str) -> tuple[int, Tensor]:
        """Return the first position and the (n, F) rows of inline features. Raises InvalidField."""
        if features is None or features.inline is None or not features.count:
            raise InvalidField(field, f"a {self.description.kind} head drafts from the target's features")
        dtype = DTYPES[features.dtype or "float32"]
        if len(features.inline) != features.count * self.config.feature_width * dtype.itemsize:
            raise InvalidField(field, f"{len(features.inline)} bytes are not {features.count} rows of {features.dtype}")
        rows = torch.frombuffer(bytearray(features.inline), dtype=dtype).view(features.count, -1)
        return features.start, rows.to(self.dtype)

    def _noise(self, job: DraftJob, depths: int) -> Tensor | None:
        """Return (depths, draft vocabulary) float32 keyed noise of nodes at depth 1.. for a job coupled at T > 0."""
        noise = self._sessions[job.key].noise
        return noise.rows(job.sampling.seed, job.committed_len + 1, depths) if job.noisy else None

    # --- weights ---

    def staging(self, header: WeightsHeader) -> Staging:
        """Return what takes the parts of a push; its parent is what is in use or the checkpoint."""
        return Staging(header, self.description.name, self.weights, self._checkpoint)

    def prepare_swap(self, staging: Staging) -> WeightSwap:
        """Make a model with the push's tensors, in the head's dtype and on its device. It shares the others."""
        return WeightSwap(self, staging)

    # --- misses ---

    def _keep_draft(self, job: DraftJob, tokens: list[int], parents: list[int]) -> LastDraft | None:
        """Return where to note the draft that begins, whose tree grows in these lists; None if no misses are wanted."""
        session, version = self._sessions[job.key], self.description.weights_version
        session.last_draft = LastDraft(job, version, tokens, parents) if session.wants_misses else None
        return session.last_draft

    @torch.inference_mode()
    def _miss(self, session: FeatureSession, advance: Advance) -> float | None:
        """Return by how much the last draft missed the target's token; `advance` is not taken yet.

        None when the rejection is not about that draft, or other weights made it.
        """
        draft, rejection = session.last_draft, advance.rejection
        if draft is None or rejection is None or draft.version != self.description.weights_version:
            return None
        state = draft.state_where_rejected(advance, len(session.ids))
        if state is None:
            return None
        previous = advance.ids[rejection.position - len(session.ids) - 1]
        self._use(session)
        places = np.flatnonzero(self.ranking.ids == rejection.target_id)
        if not len(places):
            return 1.0
        logits, _ = self.model.read_behind(state[None], self._tensor([previous]))
        miss = 1.0 - float(logits[0].float().softmax(-1)[int(places[0])])
        return float(np.float32(min(1.0, max(0.0, miss))))

    # --- rows ---

    def _room(self, job: DraftJob, extra: int) -> bool:
        """Take KV room for a job's rows and `extra` entries behind them; returns whether there is anything to draft."""
        session = self._sessions[job.key]
        if job.budget == 0 or job.committed_len + 1 + self.deepest > self.max_context:
            return False
        entries = self._entry(session, job.committed_len) + extra
        try:
            self.pool.extend(session.table, max(entries, session.table.num_tokens))
        except OutOfBlocks:
            return False
        return True

    def _committed_rows(self, session: FeatureSession, upto: int, root: int | None) -> Rows:
        """Make the rows of the positions done..upto-1; the last one's token is `root` when it is not committed yet."""
        tokens = session.ids[session.done + 1 : upto + 1]
        if root is not None:
            tokens = [*tokens[: upto - session.done - 1], root]
        tail = Tail(session.table, self._entry(session, session.done), self._visible(len(tokens)))
        return Rows(session.take(upto), tokens, range(session.done, upto), (tail,))

    def _visible(self, rows: int) -> NDArray[np.bool_]:
        """Return (rows * slots, rows * slots): which entries of rows in a row each of them sees."""
        return _earlier(rows * self.slots)

    def _query_rows(self, jobs: Sequence[DraftJob]) -> Rows:
        """Make all jobs' rows up to the one that reads the root; the (J,) last ones are kept."""
        parts = []
        for job in jobs:
            session = self._sessions[job.key]
            session.done = min(session.done, job.committed_len - 1)  # the same draft once more: its row once more
            parts.append(self._committed_rows(session, job.committed_len, job.root))
        return join(parts)

    def _settle(self, jobs: Sequence[DraftJob]) -> None:
        """Note that the jobs' rows are in KV now."""
        for job in jobs:
            session = self._sessions[job.key]
            session.done = job.committed_len
            session.forget()

    def _entry(self, session: FeatureSession, position: int) -> int:
        """Count the KV entries before a position's row."""
        return (position - session.start) * self.slots

    def _tensor(self, numbers: Sequence[int] | NDArray[np.int64]) -> Tensor:
        """Return the numbers as int64 on the head's device, in the same shape."""
        return torch.from_numpy(np.asarray(numbers, np.int64)).to(self.device)

    @torch.inference_mode()
    def _prefill(self, session: FeatureSession, upto: int) -> None:
        self.timed(self._states, self.row_inputs.make(self._committed_rows(session, upto, None)))
        session.done = upto

    def _states(self, inputs: Inputs) -> Tensor:
        """Run the forward over rows of target features, which stores keys and values; returns each row's states."""
        return self._forward(self.model.condition(inputs.features), inputs)

    def _forward(self, condition: Tensor, inputs: Inputs) -> Tensor:
        """Return the (N, ...) un-normed states of rows with these (N, hidden) conditions."""
        rope = self.model.rope(inputs.positions, self.dtype)
        states: Tensor = self.model(condition[None], inputs.embeddings, rope, inputs.attends)
        return states[0]

    def _read_states(self, states: Tensor) -> Output:
        """Return un-normed states with their logits, and whatever else a kind reads off them."""
        logits, normed = self.model.read(states)
        return states, logits, normed

    @torch.inference_mode()
    def _from_roots(self, jobs: Sequence[DraftJob], depths: int) -> tuple[Output, list[Tensor | None]]:
        """Run the jobs' rows, and read those of the roots; also returns each one's noise of so many depths, if any."""
        rows, noisy = self._query_rows(jobs), [job for job in jobs if job.noisy]
        inputs = self.row_inputs.make(rows, places(noisy) if self.on_device else NOTHING)
        out = self.timed(lambda given: self._read_states(self._states(given).index_select(0, given.kept)), inputs)
        self._settle(jobs)
        if not self.on_device:
            return out, [self._noise(job, depths) for job in jobs]
        rows_of_noise = iter(noise_there(inputs.beside, depths, self.ranking.target_ids)) if noisy else iter(())
        return out, [next(rows_of_noise) if job.noisy else None for job in jobs]

    @torch.inference_mode()
    def _from_states(self, rows: Rows) -> Output:
        """Run rows of the head's own states, and read them."""
        inputs = self.row_inputs.make(rows)
        return self.timed(lambda given: self._read_states(self._forward(given.features, given)), inputs)
