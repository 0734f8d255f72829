"""The heads without weights: a tree grown best first from what a session's own text says of the next token.

**Look-up.** What followed the text's latest tokens where they stood before (Saxena, Prompt lookup decoding, 2023). The
occurrences of the longest suffixes vote on what comes next, from short matches to long ones as in PPM (Cleary and
Witten, Data compression using adaptive coding and partial string matching, 1984): of the occurrences that match at
least n tokens, c_n(x) of C_n are followed by x, with T_n distinct followers, and

    P_n(x) = (c_n(x) + (T_n + 1) P_below(x)) / (C_n + T_n + 1),

P_below of the next shorter order, 0 below the shortest: Witten-Bell interpolation with one more escape. A single
occurrence of 1, 2, 4, 8 tokens then gives 0.33, 0.56, 0.70, 0.80, about as often as the same token followed in stories,
sums and Python code. A memory of its client's earlier texts votes, too, as if they stood before the session's own.

**Prediction.** Look-up in what a client predicts of the answer, through which the text is followed token by token.
Where it leaves the prediction there are three guesses: it goes on behind the longest match of its end (of equally long
ones behind the next, since edits keep the order), the tokens since then replaced as many, or they were inserted. The
first guess that comes true is followed. How often each kind does is counted in the session, and is its probability.

**Bigram.** Counts of followers above counts of tokens.
"""

import heapq
import itertools
import math
from array import array
from bisect import bisect_right
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from coppice.config.model import text_config
from coppice.config.sections import DrafterSettings
from coppice.errors import InvalidField
from coppice.heads.base import DraftJob, Growth, Head, with_tree_shape
from coppice.limits import MAX_TREE_DEPTH
from coppice.speculation.sampling import GAMMA, MASK_64, TOKEN_STREAM, mix, position_key
from coppice.speculation.tree import DraftTree
from coppice.wire.drafter import Advance, HeadDescription, OpenDraft

ORDERS = (1, 2, 4, 8, 16, 32)  # match lengths that count as further evidence
INDEXED = (8, 3, 1)  # n-grams that are looked up; longer matches are found by comparing backwards
OCCURRENCES = 16  # looked at in a draft, the longest and most recent
TEXT_END = -1  # stands behind each of several texts that are looked up together; no token

Occurrence = tuple[list[int], int, int]
"""Where a path's end stands: the ids of a text, the position of its last token, and how many tokens match there."""


class Lookup:
    """The text of one session and where its n-grams stand."""

    def __init__(self, earlier: Collection["Lookup"] = ()) -> None:
        """`earlier`: other texts to look up in, the latest first. There may be more of them later, or less."""
        self.ids: list[int] = []
        self.earlier = earlier
        # By order: the latest position of each n-gram, by hash (a collision falls out when the tokens are compared),
        # and from each position the one before it with the same n-gram, -1 for none.
        self._latest: dict[int, dict[int, int]] = {order: {} for order in INDEXED}
        self._before = {order: array("i") for order in INDEXED}

    @property
    def counted(self) -> int:
        """How many of its ids are found."""
        return len(self._before[INDEXED[0]])

    def extend(self, ids: Sequence[int]) -> None:
        """Append the text's next ids; costs the same for each, however long the text is."""
        self.ids += ids
        self.count(len(ids))

    def count(self, most: int) -> None:
        """Let `most` further ids be found."""
        start = self.counted
        for end in range(start + 1, min(start + most, len(self.ids)) + 1):
            for order, latest in self._latest.items():
                gram = hash(tuple(self.ids[max(0, end - order) : end]))
                self._before[order].append(latest.get(gram, -1))
                latest[gram] = end - 1

    def start(self, root: int) -> list[Occurrence]:
        """Find where the text's end, `root` included, stands in the texts: longest suffixes first, then most recent."""
        suffix = [*self.ids[1 - ORDERS[-1] :], root]
        occurrences: dict[tuple[int, int], Occurrence] = {}
        for order in INDEXED:
            gram = hash(tuple(suffix[-order:]))
            for number, text in enumerate((self, *self.earlier)):
                position = text._latest[order].get(gram, -1)
                while position >= 0:
                    if len(occurrences) == OCCURRENCES:
                        return list(occurrences.values())
                    place = number, position
                    if place not in occurrences and (length := text._match(position, suffix)) >= order:
                        occurrences[place] = text.ids, position, length
                    position = text._before[order][position]
        return list(occurrences.values())

    def _match(self, position: int, suffix: list[int]) -> int:
        length = 0
        while length < min(len(suffix), position + 1) and self.ids[position - length] == suffix[-1 - length]:
            length += 1
        return length

    def follow(self, state: list[Occurrence], token: int) -> list[Occurrence]:
        """Return the occurrences that `token` continues."""
        return [(ids, at + 1, length + 1) for ids, at, length in state if at + 1 < len(ids) and ids[at + 1] == token]

    def followers(self, state: list[Occurrence]) -> dict[int, float]:
        """Return the tokens that followed and their probabilities, which sum to less than 1."""
        votes = [(length, ids[at + 1]) for ids, at, length in state if at + 1 < len(ids) and ids[at + 1] != TEXT_END]
        blended: dict[int, float] = {}
        for order in ORDERS:
            counts: dict[int, int] = {}
            for length, token in votes:
                if length >= order:
                    counts[token] = counts.get(token, 0) + 1
            if not counts:
                break
            escapes = len(counts) + 1
            total = sum(counts.values()) + escapes
            below = blended or dict.fromkeys(counts, 0.0)
            blended = {token: (counts.get(token, 0) + escapes * p) / total for token, p in below.items()}
        return blended


SALTS = 64  # remembered at once
BLOCKS = 8  # parts that a full memory consists of, about: it forgets one at a time
CHUNK = 4096  # ids counted before other sessions get their turn


class Memory:
    """The latest texts of one salt, in blocks of several texts or of a long one. Each block has an index of its own."""

    def __init__(self, most: int) -> None:
        """`most`: tokens that are remembered."""
        self._most = most
        self.blocks: deque[Lookup] = deque()  # the latest first
        self.tokens = 0

    def add(self, ids: list[int]) -> None:
        """Remember a text, or its end, which is found once `count` took it in; forget the oldest block without room."""
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
            while block.counted < len(block.ids):
                block.count(CHUNK)
                yield


MATCHES = (1, 2, 4, 8)  # lengths of matches that are told apart
INSERTED, REPLACED, MATCHED, FOLLOWED = 0, 1, 2, 2 + len(MATCHES)
"""Kinds of guesses. The last two are as many kinds as there are MATCHES of matches: of the text's end, wherever, and of
tokens that went as predicted."""
FIRST_RATES = (0.2, 0.5, *(0.3, 0.5, 0.7, 0.8), *(0.8, 0.9, 0.95, 0.97))
"""how often each kind comes true, before the session has shown it"""
FIRST_STEPS, MEMORY = 4.0, 32.0  # how many tokens that weighs, and of how many the rates are averages
SURE = 4  # tokens as predicted after which no other place is looked for


class Guess(NamedTuple):
    """A place in the prediction, whose token may be the next one: its index, the kind, the tokens matched before it."""

    at: int
    kind: int
    matched: int


class Track(NamedTuple):
    """Where a text is in the prediction."""

    latest: tuple[int, ...]  # the text's last tokens
    next: int = 0  # the place behind the last token that was as predicted
    matched: int = 0  # tokens that were, in a row; 0 where the text has left the prediction
    since: int = 0  # tokens since then


State = tuple[list[Guess], list[Occurrence]]
"""what may come next behind a path, best first, and where the path's end stands in the text itself and in others"""


class Predicted:
    """A session's look-up model with the client's prediction before it."""

    def __init__(self, text: Lookup, prediction: Sequence[int], ids: Sequence[int]) -> None:
        """ids: those that `text` holds. Any of them may be of the answer already."""
        self._text, self.ids = text, text.ids
        self._ids, self._array = list(prediction), np.array(prediction, np.int64)
        self._rates, self._seen = list(FIRST_RATES), [0] * len(FIRST_RATES)
        self._track = Track(tuple(ids[-MATCHES[-1] :]))
        self._guesses = self._guess(self._track)

    def extend(self, ids: Sequence[int]) -> None:
        """Append the text's next ids, and learn from them what guesses are worth."""
        self._text.extend(ids)
        for token in ids:
            for guess in self._guesses:
                right = self._ids[guess.at] == token
                self._seen[guess.kind] += 1
                tokens = min(MEMORY, FIRST_STEPS + self._seen[guess.kind])
                self._rates[guess.kind] += (right - self._rates[guess.kind]) / tokens
                if right:
                    break
            self._track = self._step(self._track, self._guesses, token)
            self._guesses = self._guess(self._track)

    def start(self, root: int) -> State:
        """Find where the text's end, `root` included, stands in the prediction and in the text."""
        return self._guess(self._step(self._track, self._guesses, root)), self._text.start(root)

    def follow(self, state: State, token: int) -> State:
        """Return what goes on as predicted, and the occurrences in texts that `token` continues."""
        guesses, occurrences = state
        return self._follow(guesses, token), self._text.follow(occurrences, token)

    def followers(self, state: State) -> dict[int, float]:
        """Return the next tokens and their probabilities: each guess has its share of what those before it leave."""
        guesses, occurrences = state
        shares: dict[int, float] = {}
        rest = 1.0
        for guess in guesses:
            token, rate = self._ids[guess.at], self._rates[guess.kind]
            shares[token] = shares.get(token, 0.0) + rest * rate
            rest *= 1 - rate
        for token, share in self._text.followers(occurrences).items():
            shares[token] = shares.get(token, 0.0) + rest * share
        return shares

    def place(self, state: State, token: int) -> int:
        """Return which token of the prediction this one is behind a path, from 1; 0: it is not drafted from it."""
        return next((guess.at + 1 for guess in state[0] if self._ids[guess.at] == token), 0)

    def _follow(self, guesses: list[Guess], token: int) -> list[Guess]:
        """What comes behind the first guess that says `token`."""
        for at, _, matched in guesses:
            if self._ids[at] == token:
                return [Guess(at + 1, _kind(FOLLOWED, matched + 1), matched + 1)] if at + 1 < len(self._ids) else []
        return []

    def _step(self, track: Track, guesses: list[Guess], token: int) -> Track:
        latest = (*track.latest[1 - MATCHES[-1] :], token)
        for at, _, matched in guesses:
            if self._ids[at] == token:
                return Track(latest, at + 1, matched + 1)
        return Track(latest, track.next, 0, track.since + 1)

    def _guess(self, track: Track) -> list[Guess]:
        """What may come next in a text, best first, each place once."""
        guesses = [Guess(track.next, _kind(FOLLOWED, track.matched), track.matched)] if track.matched else []
        if track.matched < SURE:
            guesses += self._longest(track)
        if not track.matched:
            guesses += (Guess(track.next + track.since, REPLACED, 0), Guess(track.next, INSERTED, 0))
        places = {guess.at: guess for guess in reversed(guesses) if guess.at < len(self._ids)}
        return [guess for guess in guesses if places.get(guess.at) is guess]

    def _longest(self, track: Track) -> list[Guess]:
        """The place behind the longest match of the text's end, longer than what was followed; of several the next."""
        latest, ids = track.latest, self._array
        places = np.flatnonzero(ids[:-1] == latest[-1]) + 1
        length = 1
        while places.size and length < len(latest):
            longer = places[places > length]
            longer = longer[ids[longer - length - 1] == latest[-1 - length]]
            if not longer.size:
                break
            places, length = longer, length + 1
        if not places.size or length <= track.matched:
            return []
        nearest = min(int(np.searchsorted(places, track.next)), places.size - 1)
        return [Guess(int(places[nearest]), _kind(MATCHED, length), length)]


def _kind(first: int, length: int) -> int:
    """Return the kind of a guess behind a match: that of the longest of MATCHES that it reaches."""
    return first + bisect_right(MATCHES, length) - 1


FOLLOWERS, FREQUENT = 12, 4  # most frequent followers, and tokens of all, that are candidates


class Bigram:
    """Counts of one text. `vocab_size` 0 is unknown: then what is left of a row belongs to ids never seen."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._tokens, self._length = Counter[int](), 0
        self._followers = defaultdict[int, Counter[int]](Counter)
        self._last: list[int] = []  # the text's last token
        self._frequent: dict[int, float] = {}  # the most frequent tokens and their probabilities
        self._rows: dict[int, dict[int, float]] = {}  # followers() since the text grew last

    def extend(self, ids: Sequence[int]) -> None:
        self._tokens.update(ids)
        self._length += len(ids)
        behind = [*self._last, *ids]
        for previous, token in itertools.pairwise(behind):
            self._followers[previous][token] += 1
        self._last = behind[-1:]
        top = sorted(dict.fromkeys((*self._frequent, *ids)), key=self._tokens.__getitem__, reverse=True)[:FREQUENT]
        self._frequent = {token: self._unigram(token) for token in top}
        self._rows = {}

    def start(self, root: int) -> int:
        """Return the state behind `root`: a bigram remembers one token."""
        return root

    def follow(self, state: int, token: int) -> int:
        return token

    def followers(self, state: int) -> Mapping[int, float]:
        """Return the most frequent followers and tokens of all with their probabilities, which sum to less than 1."""
        seen = self._followers.get(state)
        if seen is None:
            return self._frequent
        if state not in self._rows:
            kinds, total, below = len(seen), seen.total() + len(seen), self._frequent
            self._rows[state] = {
                token: (seen[token] + kinds * (below.get(token) or self._unigram(token))) / total
                for token in (*dict(seen.most_common(FOLLOWERS)), *below)
            }
        return self._rows[state]

    def _unigram(self, token: int) -> float:
        kinds = len(self._tokens)
        uniform = 1 / self.vocab_size if self.vocab_size else 0.0
        return (self._tokens[token] + kinds * uniform) / max(self._length + kinds, 1)


TextModel = Bigram | Lookup | Predicted
"""A model of the next token made of one session's text. Its `followers` are a bounded number of candidates, with
probabilities that sum to less than 1; a state that it makes is a place behind the root."""


LEAST_REST = 1e-6  # mass left to tokens that are no candidates: no draft is certain
LEAST_TEMPERATURE = 1e-3  # below it scores are those of this one, still finite
EXP_EULER_GAMMA = 1.7810724179901979  # exp of the mean of Gumbel noise
LEAST_SCORE = math.log(1 / 64)  # of a node where chains are long: a row costs more than a lower one promises


def draft_scores(candidates: Mapping[int, float], job: DraftJob, position: int, width: int) -> list[tuple[float, int]]:
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


def grow(
    model: TextModel, job: DraftJob, depth: int, width: int, least: float = -math.inf
) -> tuple[DraftTree, tuple[int, ...]]:
    """Grow the `budget` best nodes, at most `depth` deep and `width` wide, best-first on the sum of log-scores, which
    are `least` or more; returns them with their places in a prediction, if there is one.

    A score is below its parent's, so nodes leave the heap in order of score and parents before children.
    """
    tokens, places, parents, log_probs = list[int](), list[int](), list[int](), list[float]()
    order = itertools.count()  # first come first served among equal scores
    heap: list[tuple[float, int, int, int, Any, int]] = []  # -score, tie-breaker, parent, token, state, level

    def open_row(parent: int, above: float, state: Any, level: int) -> None:
        for score, token in draft_scores(model.followers(state), job, job.committed_len + level, width):
            heapq.heappush(heap, (-(above + score), next(order), parent, token, state, level))

    if job.budget:
        open_row(0, 0.0, model.start(job.root), 1)
    while heap and len(tokens) < job.budget:
        negated, _, parent, token, state, level = heapq.heappop(heap)
        if -negated < least:
            break
        tokens.append(token)
        parents.append(parent)
        log_probs.append(-negated)
        if isinstance(model, Predicted):
            places.append(model.place(state, token))
        if level < depth and len(tokens) < job.budget:
            open_row(len(tokens), -negated, model.follow(state, token), level + 1)
    tree = DraftTree(np.array(tokens, np.int64), np.array(parents, np.int64), np.array(log_probs, np.float32))
    return tree, tuple(places)


class NgramHead(Head):
    """Sessions that draft from their own text. Those of one salt share a memory, if there is any, and nothing else."""

    def __init__(self, settings: DrafterSettings) -> None:
        """Draft as `settings.kind` says, lookup or bigram. Raise InvalidField for a path: there are no weights."""
        if settings.path:
            raise InvalidField("drafter.path", f"a {settings.kind} head reads no weights, as of {settings.path}")
        vocab_size = int(text_config(settings.target).get("vocab_size", 0)) if settings.target else 0
        name, untrained = settings.name or settings.kind, (0.0,)
        self.description = HeadDescription(name, settings.kind, vocab_size, expected_acceptance=untrained)
        settings = with_tree_shape(settings)
        self._depth, self._width, self._memory_tokens = settings.depth, settings.top_k, settings.memory_tokens
        self._models: dict[int, TextModel] = {}
        self._memories: OrderedDict[str, Memory] = OrderedDict()  # by salt, the one used longest ago first
        self._memory: dict[int, Memory] = {}

    def open(self, key: int, opening: OpenDraft) -> Iterator[None]:
        """Count the prompt, a chunk at a time, and first what its salt's sessions said since the last opening."""
        head, memory = self.description, None
        if opening.want_q_rows:
            raise InvalidField("open.want_q_rows", f"a {head.kind} head does not sample its drafts")
        if opening.salt and self._memory_tokens:
            memory = self._memory[key] = self._memories.setdefault(opening.salt, Memory(self._memory_tokens))
            self._memories.move_to_end(opening.salt)
            if len(self._memories) > SALTS:
                self._memories.popitem(last=False)
            yield from memory.count()
        model: TextModel = Bigram(head.vocab_size) if head.kind == "bigram" else Lookup(memory.blocks if memory else ())
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
            self.remembered = sum(each.tokens for each in self._memories.values())

    def advance(self, key: int, advance: Advance) -> None:
        self._models[key].extend(advance.ids)

    def draft(self, jobs: Sequence[DraftJob]) -> Iterator[list[Growth]]:
        """Draft session by session: there is no forward to share, so each tree goes out when it is ready."""
        for index, job in enumerate(jobs):
            model = self._models[job.key]
            deep = isinstance(model, Predicted) or (isinstance(model, Lookup) and bool(model.earlier))
            depth, least = (MAX_TREE_DEPTH, LEAST_SCORE) if deep else (self._depth, -math.inf)
            tree, places = grow(model, job, depth, self._width, least)
            yield [Growth(index, tree, last=True, predicted=places)]
