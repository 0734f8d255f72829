"""The heads without weights: a tree grown best first from what a session's own text says of the next token, and with a
memory what its client's earlier texts say.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coppice.config.model import text_config
from coppice.config.sections import DrafterSettings
from coppice.errors import InvalidField
from coppice.heads.base import DraftJob, Growth, Head, with_tree_shape
from coppice.heads.text_models import TEXT_END, Bigram, Lookup, Predicted, TextModel
from coppice.limits import MAX_TREE_DEPTH
from coppice.speculation.sampling import (
    DRAFT_STREAM,
    GAMMA,
    MASK_64,
    TOKEN_STREAM,
    decode_row,
    draw,
    mix,
    position_key,
)
from coppice.speculation.tree import DraftTree
from coppice.wire.drafter import Advance, HeadDescription, OpenDraft

SALTS = 64  # remembered at once
BLOCKS = 8  # parts that a full memory consists of, about: it forgets one at a time
CHUNK = 4096  # ids counted before other sessions get their turn


class Memory:
    """The latest texts of one salt, in blocks of several texts or of a long one. Each block has an index of its own."""

    def __init__(self, most: int) -> None:
        """`most`: tokens that are remembered."""
        self._most = most
        self.blocks: deque[Lookup] = deque()
        """the latest first"""
        self.tokens = 0

    def add(self, ids: list[int]) -> None:
        """Remember a text, the end of one that is too long, and forget the oldest block when there is no room.

        It is found once `count` has taken it in.
        """
        text = [*ids[-self._most + 1 :], TEXT_END]
        if not self.blocks or len(self.blocks[0].ids) + len(text) > self._most // BLOCKS:
            self.blocks.appendleft(Lookup())
        self.blocks[0].ids += text
        self.tokens += len(text)
        while self.tokens > self._most:
            self.tokens -= len(self.blocks.pop().ids)

    def count(self) -> Iterator[None]:
        """Take in what was added, a chunk for each item: texts may be long, and other sessions wait."""
        for block in list(self.blocks):
            while block.uncounted:
                block.count(CHUNK)
                yield


class Memories:
    """The memories of a head by salt. The salt that was used longest ago is forgotten when there are too many."""

    def __init__(self, most: int) -> None:
        """`most`: tokens that are remembered for each salt; 0: none."""
        self._most = most
        self._of: OrderedDict[str, Memory] = OrderedDict()

    @property
    def tokens(self) -> int:
        """Tokens that are remembered for all salts together."""
        return sum(memory.tokens for memory in self._of.values())

    def of(self, salt: str) -> Memory | None:
        """What is remembered for a salt; None for the empty one, which remembers nothing."""
        if not salt or not self._most:
            return None
        memory = self._of.setdefault(salt, Memory(self._most))
        self._of.move_to_end(salt)
        if len(self._of) > SALTS:
            self._of.popitem(last=False)
        return memory


LEAST_REST = 1e-6  # mass left to tokens that are no candidates: no draft is certain
LEAST_TEMPERATURE = 1e-3  # below it scores are those of this one, still finite
EXP_EULER_GAMMA = 1.7810724179901979  # exp of the mean of Gumbel noise
LEAST_SCORE = math.log(1 / 64)  # of a node where chains are long: a row costs more than a lower one promises


def draft_scores(candidates: dict[int, float], job: DraftJob, position: int, width: int) -> list[tuple[float, int]]:
    """Return (log-score, id) of the `width` best candidates of one row, best first, all below 0.

    Greedy scores are the log-probabilities. At T > 0 they are log_softmax(log q / T + noise at the position) when the
    job is coupled, without the noise when it is not. All tokens that are no candidates stand in the softmax as one,
    with the mean of the noise and the mass they have at T = 1: it is that of many tokens, so T says little about it.
    """
    if job.sampling.temperature == 0 or not candidates:
        weights = [(q, token) for token, q in candidates.items()]
        total = 1.0
    else:
        power = 1 / max(job.sampling.temperature, LEAST_TEMPERATURE)
        mass, most = sum(candidates.values()), max(candidates.values())
        rest = max(1 - mass, LEAST_REST)
        weights = [((q / most) ** power, token) for token, q in candidates.items()]
        scale = mass / sum(weight for weight, _ in weights)
        if job.coupled:
            # exp(score + Gumbel noise) is the weight over an exponential variable: no logarithm for each candidate.
            key = position_key(job.sampling.seed, position, TOKEN_STREAM)
            weights = [(weight / _exponential(key, token), token) for weight, token in weights]
            rest *= EXP_EULER_GAMMA
        total = rest / scale + sum(weight for weight, _ in weights)
    best = sorted(weights, key=itemgetter(0), reverse=True)[:width]
    return [(min(math.log(weight / total), -LEAST_REST), token) for weight, token in best if weight > 0]


@lru_cache(1 << 14)  # rows of one level share candidates, and the next step drafts some of the same positions
def _exponential(key: int, token: int) -> float:
    """Return exp(-g) of the token's noise g in `sampling.noise`; for a handful of ids numpy would be the main cost."""
    return -math.log(((mix(key + token * GAMMA & MASK_64) >> 12) + 0.5) * 2.0**-52)


class _Row(NamedTuple):
    """The candidates behind one node: the node, its score, the state behind it, its children's level and scored ids."""

    parent: int
    score: float
    state: Any
    level: int
    best: list[tuple[float, int]]


def grow(model: TextModel, job: DraftJob, depth: int, width: int, least: float = -math.inf) -> DraftTree:
    """Grow the `budget` best nodes, at most `depth` deep and `width` wide, best-first on the sum of log-scores, which
    are `least` or more.

    A score is below its parent's, so nodes leave the heap in order of score and parents before children.
    """
    tokens: list[int] = []
    parents: list[int] = []
    log_probs: list[float] = []
    order = itertools.count()  # first come first served among equal scores
    heap: list[tuple[float, int, _Row, int]] = []  # score times -1, tie-breaker, row, place in the row

    def push(row: _Row, place: int) -> None:
        if place < len(row.best):
            heapq.heappush(heap, (-(row.score + row.best[place][0]), next(order), row, place))

    def open_row(parent: int, score: float, state: Any, level: int) -> None:
        best = draft_scores(model.followers(state), job, job.committed_len + level, width)
        push(_Row(parent, score, state, level, best), 0)

    if job.budget:
        open_row(0, 0.0, model.start(job.root), 1)
    while heap and len(tokens) < job.budget:
        negated, _, row, place = heapq.heappop(heap)
        if -negated < least:
            break
        token = row.best[place][1]
        tokens.append(token)
        parents.append(row.parent)
        log_probs.append(-negated)
        push(row, place + 1)  # it could not come before this one
        if row.level < depth and len(tokens) < job.budget:
            open_row(len(tokens), -negated, model.follow(row.state, token), row.level + 1)
    return DraftTree(np.array(tokens, np.int64), np.array(parents, np.int64), np.array(log_probs, np.float32))


def sample_chain(model: Bigram, job: DraftJob, depth: int) -> tuple[DraftTree, NDArray[np.float32]]:
    """Draw a chain of min(budget, depth) tokens; returns it and the model's rows (n, vocab_size) that it is drawn from.

    It is drawn with a stream of its own: the p/q rule needs drafts that do not depend on its accept and residual draws.
    """
    tokens: list[int] = []
    log_probs: list[float] = []
    rows = np.zeros((min(job.budget, depth), model.vocab_size), np.float32)
    token, score = job.root, 0.0
    for level, row in enumerate(rows, start=1):
        ids, row_log_probs = decode_row(np.log(model.row(token)), job.sampling)
        row[ids] = np.exp(row_log_probs)
        token = draw(ids, row_log_probs, job.sampling.seed, job.committed_len + level, DRAFT_STREAM)
        score += float(row_log_probs[np.searchsorted(ids, token)])
        tokens.append(token)
        log_probs.append(score)
    return DraftTree.chain(np.array(tokens, np.int64), np.array(log_probs, np.float32)), rows


class NgramHead(Head):
    """Sessions that draft from their own text. Those of one salt share a memory, if there is any, and nothing else."""

    def __init__(self, settings: DrafterSettings) -> None:
        """Draft as `settings.kind` says, lookup or bigram. Raise InvalidField for a path: there are no weights."""
        if settings.path:
            raise InvalidField("drafter.path", f"a {settings.kind} head reads no weights, as of {settings.path}")
        vocab_size = int(text_config(settings.target).get("vocab_size", 0)) if settings.target else 0
        self.description = HeadDescription(settings.name or settings.kind, settings.kind, vocab_size)
        settings = with_tree_shape(settings)
        self._depth, self._width = settings.depth, settings.top_k
        self._models: dict[int, TextModel] = {}
        self._memories = Memories(settings.memory_tokens)
        self._memory: dict[int, Memory] = {}

    def open(self, key: int, opening: OpenDraft) -> Iterator[None]:
        """Count the prompt, a chunk at a time, and first what its salt's sessions said since the last opening."""
        head = self.description
        memory = self._memories.of(opening.salt)
        if memory is not None:
            self._memory[key] = memory
            yield from memory.count()
        model: TextModel = Bigram(head.vocab_size) if head.kind == "bigram" else Lookup(memory.blocks if memory else ())
        if opening.want_q_rows:
            if not isinstance(model, Bigram):
                raise InvalidField("open.want_q_rows", f"a {self.description.kind} head does not sample")
            if not model.vocab_size:
                raise InvalidField("open.want_q_rows", "this drafter does not know the vocabulary (drafter.target)")
        self._models[key] = model
        for start in range(0, len(opening.ids), CHUNK):
            model.extend(opening.ids[start : start + CHUNK])
            yield
        if opening.prediction and isinstance(model, Lookup):
            self._models[key] = Predicted(model, opening.prediction, opening.ids)

    def close(self, key: int) -> None:
        """Forget the session's text, or leave it to the memory of its salt."""
        model, memory = self._models.pop(key, None), self._memory.pop(key, None)
        if memory is not None and isinstance(model, Lookup | Predicted):
            memory.add(model.ids)
            self.remembered = self._memories.tokens

    def advance(self, key: int, advance: Advance) -> None:
        """Count the committed ids."""
        self._models[key].extend(advance.ids)

    def draft(self, jobs: Sequence[DraftJob]) -> Iterator[list[Growth]]:
        """Draft session by session: there is no forward to share, so each tree goes out when it is ready."""
        for index, job in enumerate(jobs):
            model = self._models[job.key]
            if job.want_q_rows and isinstance(model, Bigram):
                chain, rows = sample_chain(model, job, self._depth)
                yield [Growth(index, chain, last=True, q_rows=rows)]
            elif isinstance(model, Predicted):
                tree = grow(model, job, MAX_TREE_DEPTH, self._width, LEAST_SCORE)
                yield [Growth(index, tree, last=True, predicted=model.places(tree, job.root))]
            elif isinstance(model, Lookup) and model.earlier:
                yield [Growth(index, grow(model, job, MAX_TREE_DEPTH, self._width, LEAST_SCORE), last=True)]
            else:
                yield [Growth(index, grow(model, job, self._depth, self._width), last=True)]
