"""What every kind of draft head does for a drafter: hold sessions by key and draft for many of them at once.

A head knows nothing of streams, fences or threads. Its drafter calls it from one thread (the one that owns torch),
has checked ids, budgets and lengths, and turns what it raises into the end of one session.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import structlog
from numpy.typing import NDArray

from coppice.config.model import text_config
from coppice.config.sections import HEADS, DrafterSettings
from coppice.errors import CoppiceError, InvalidField, Overloaded
from coppice.limits import MAX_HEAD_NODES
from coppice.machine import extension
from coppice.speculation.sampling import SamplingParams
from coppice.speculation.tree import DraftTree
from coppice.wire.common import Features
from coppice.wire.drafter import Advance, DraftOpened, HeadDescription, OpenDraft

if TYPE_CHECKING:
    from coppice.adaptation.weights import Weights
    from coppice.engine.kv_cache import KVPool

log = structlog.get_logger()

TOP_K, DEPTH = 8, 6  # of a tree, for heads whose settings leave them open
DEPTH_OF_BLOCK = 32  # as deep as the block says
_SHAPES = {
    "eagle3": (10, 8),  # as it was published: its "depth 7" are the levels behind the first
    "dflash": (MAX_HEAD_NODES, DEPTH_OF_BLOCK),  # a slot's tokens are the same behind every node: the tree may need all
    "jetspec": (MAX_HEAD_NODES, DEPTH_OF_BLOCK),
    "dspark": (TOP_K, DEPTH_OF_BLOCK),
}
WARM_IDS, WARM_ROWS = 16, 12  # of the text that a head warms up with: its prompt, and what a step adds at most
WARM_BUDGET = 5  # times the rows: large trees too


def with_tree_shape(settings: DrafterSettings) -> DrafterSettings:
    """Return the settings with the kind's `top_k` and `depth` where they are 0. `top_k` 1 makes a chain."""
    top_k, depth = _SHAPES.get(settings.kind, (TOP_K, DEPTH))
    return settings.model_copy(update={"top_k": settings.top_k or top_k, "depth": settings.depth or depth})


@dataclass(frozen=True, slots=True)
class DraftJob:
    """The order of one tree below `root`, which stands at absolute position `committed_len`.

    A child of the root is drawn at position committed_len + 1, a node of depth d at committed_len + d: noise of other
    positions couples with nothing.
    """

    key: int
    root: int
    committed_len: int
    budget: int
    sampling: SamplingParams
    coupled: bool = True
    want_q_rows: bool = False

    @property
    def noisy(self) -> bool:
        """Tell whether candidates are ranked with the target's noise; greedy drawing and sampled drafts have none."""
        return self.coupled and self.sampling.temperature > 0 and not self.want_q_rows


@dataclass(frozen=True, slots=True)
class Growth:
    """Nodes to append to one job's tree; parents are numbers in the whole tree."""

    job: int
    """index into the jobs of the call"""
    nodes: DraftTree
    last: bool
    """nothing more comes for this job"""
    q_rows: NDArray[np.float32] | None = None
    """(len(nodes), vocab_size) probabilities the nodes were sampled from; only for jobs that want them"""
    predicted: tuple[int, ...] = ()
    """of each node its place in the session's prediction, from 1, or 0; empty when there is none"""


class Head(ABC):
    """One set of draft weights and the sessions drafting with it.

    `description` says kind, vocabulary width (0: any id will do), weights version and the target layers whose features
    are needed; its session counts are the drafter's business. `forward_ns` grows by the time inside the head's own nn
    forward, also between two yields of `draft`.
    """

    description: HeadDescription
    forward_ns: int = 0
    remembered: int = 0
    """tokens of ended sessions' texts that it holds"""
    weights: "Weights | None" = None
    """what a push of weights replaces; None: a head whose weights cannot be replaced"""
    checkpoint: "Weights | None" = None
    """those that it was built with"""
    max_context: int = 0
    """positions of a text behind which it drafts nothing; 0: it has no limit"""

    @abstractmethod
    def open(self, key: int, opening: OpenDraft) -> Iterator[None]:
        """Start session `key` on a prompt, a bounded chunk of work for each item taken from the iterator.

        `key` must be new. Between two items the drafter serves other sessions, but nothing of this one before the
        iterator is exhausted. Raises InvalidField for what this head cannot do (`want_q_rows` without a vocabulary).
        """

    def opened(self, key: int) -> DraftOpened:
        """Return the answer to an opening that is exhausted."""
        return DraftOpened(self.description.weights_version)

    @abstractmethod
    def close(self, key: int) -> None:
        """Forget session `key`, whose opening may have failed or never begun: an unknown key is no error."""

    @abstractmethod
    def advance(self, key: int, advance: Advance) -> float | None:
        """Append committed ids, the earlier root first, with their features and the rejection if they were sent.

        `key` must be open. Forwards are left to `draft`, where sessions share them. Returns by how much the head's last
        draft missed, when the session wants misses and the rejection is about it.
        """

    @abstractmethod
    def draft(self, jobs: Sequence[DraftJob]) -> Iterator[list[Growth]]:
        """Draft for several sessions together and yield what grew as soon as it exists.

        Keys must be open and distinct. Each job ends with exactly one Growth that has `last`; of what it holds in all,
        at most MAX_TREE_NODES nodes, the `budget` likeliest count. When the job is `coupled` at T > 0, scores are
        log_softmax(log_softmax(logits / T) + noise(seed, position, id)) of each row, summed along the path. With
        `want_q_rows` the tree is a sampled chain of a length that does not depend on the tokens drawn, as the p/q rule
        needs. Only caches change: the same job may come again, also after an exception, which spoils no other session.
        """

    def warm_up(self) -> None:
        """Draft made-up trees: libraries prepare for every new number of rows, which takes up to 25 ms a draft."""
        key, length = -1, WARM_IDS
        opening = OpenDraft("", [0] * length, SamplingParams(), features=self.blank_features(0, length))
        try:
            for _ in self.open(key, opening):
                pass
            for rows in range(1, WARM_ROWS + 1):
                for temperature in (0.0, 1.0):
                    sampling = SamplingParams(temperature=temperature)
                    for _ in self.draft([DraftJob(key, 0, length, WARM_BUDGET * rows, sampling)]):
                        pass
                self.advance(key, Advance([0] * rows, self.blank_features(length, rows)))
                length += rows
        except Overloaded:  # its KV has room for hardly anything
            return
        finally:
            self.close(key)

    def blank_features(self, start: int, count: int) -> Features | None:
        """Return zeros for the target features of `count` positions; None when this head reads none."""
        return None


class KVHead(Head):
    """A head whose sessions have a `table` in a pool of keys and values."""

    pool: "KVPool"
    deepest: int  # levels of a draft
    _sessions: dict[int, Any]

    def close(self, key: int) -> None:
        """Forget a session and give its room back."""
        session = self._sessions.pop(key, None)
        if session is not None:
            self.pool.free(session.table)

    def has_room(self, job: DraftJob, entries: int) -> bool:
        """Let a session have so many KV entries; returns whether there is anything to draft, and room for it."""
        if job.budget == 0 or job.committed_len + 1 + self.deepest > self.max_context:
            return False
        table = self._sessions[job.key].table
        try:
            self.pool.extend(table, max(entries, table.num_tokens))
        except Overloaded:
            return False
        return True


_BUILDERS: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(("bigram", "lookup"), ("coppice.heads.ngram", "NgramHead")),
    "lm": ("coppice.heads.lm", "LanguageModelHead"),
    **dict.fromkeys(("eagle3", "mtp"), ("coppice.heads.block_head", "Eagle3Head")),
    "specblock": ("coppice.heads.block_head", "SpecBlockHead"),
    **dict.fromkeys(("dflash", "jetspec", "dspark"), ("coppice.heads.block_head", "MaskedBlockHead")),
}
"""by kind the module, which is imported when a head is built, and what makes one of DrafterSettings"""


def build_head(settings: DrafterSettings) -> Head:
    """Build the head of `settings.kind`. Raises as our builder does, and InvalidField whatever a package's raises."""
    if settings.kind in _BUILDERS:
        module, function = _BUILDERS[settings.kind]
        head: Head = getattr(import_module(module), function)(settings)
        return head
    builder: Callable[[DrafterSettings], Head] = extension(HEADS, settings.kind, "drafter.kind")
    try:
        return builder(settings)
    except CoppiceError:
        raise
    except Exception as error:
        log.exception("the head cannot be built", kind=settings.kind)
        reason = f"{settings.kind} cannot be built: {type(error).__name__}: {' '.join(str(error).split())}"
        raise InvalidField("drafter.kind", reason) from None


def served_head(settings: DrafterSettings) -> Head:
    """Build the head as a drafter serves it, warmed up. Raises what `build_head` raises."""
    head = build_head(settings)
    tokens = text_config(settings.target).get("max_position_embeddings") or 0 if settings.target else 0
    if 0 < head.max_context < tokens:
        log.warning("the head drafts nothing for longer texts", tokens=head.max_context, target=tokens)
    log.info("warming up")
    head.warm_up()
    return head
