"""Models of a session's text without weights: what may come next, and with which probability.

**Look-up.** What followed the text's latest tokens when they stood there before. The occurrences of the longest
suffixes (Saxena, Prompt lookup decoding, 2023; here several, as branches of one tree) vote on what comes next. Their
votes are blended from short matches to long ones, as in PPM (Cleary and Witten, Data compression using adaptive coding
and partial string matching, 1984): of the occurrences that match at least n tokens, c_n(x) of C_n are followed by x,
with T_n distinct followers, and

    P_n(x) = (c_n(x) + (T_n + 1) P_below(x)) / (C_n + T_n + 1),

P_below of the next shorter order, 0 below the shortest. This is Witten-Bell interpolation, as of the bigram, with one
more escape. A single occurrence of 1, 2, 4, 8 tokens then gives 0.33, 0.56, 0.70, 0.80; in stories, sums and Python
code the same token followed in about 0.3, 0.5, 0.7, 0.85 of the cases, where Witten-Bell says 0.50 to 0.94. Earlier
texts vote with the session's own, as if they stood before it.

**Prediction.** Look-up in what a client predicts of the answer, beside look-up in the session's own text. The text is
followed through the prediction token by token. While it goes as predicted, the next token is the next one of the
prediction. Where it left it, the client or the target has edited, and there are three guesses: the text goes on behind
the longest match of its end (of equally long ones behind the next one in the prediction, since edits keep the order),
the tokens since then replaced as many, or they were inserted. The first guess that comes true is followed. How often
each kind of guess comes true is counted in the session itself, and that is its probability: a prediction that fits
makes long chains, a useless one soon promises nothing.

**Bigram.** Counts of followers above counts of tokens.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coppice.speculation.tree import DraftTree

ORDERS = (1, 2, 4, 8, 16, 32)  # match lengths that count as further evidence
INDEXED = (8, 3, 1)  # n-grams that are looked up; longer matches are found by comparing backwards
OCCURRENCES = 16  # looked at in a draft, the longest and most recent
TEXT_END = -1  # stands behind each of several texts that are looked up together; no token

Occurrence = tuple[list[int], int, int]
"""Where a path's end stands: the ids of a text, the position of its last token, and how many tokens match there."""


class Lookup:
    """The text of one session and where its n-grams stand."""

    def __init__(self, earlier: Collection[Lookup] = ()) -> None:
        """`earlier`: other texts to look up in, the latest first. There may be more of them later, or less."""
        self.ids: list[int] = []
        self.earlier = earlier
        # By order: the latest position of each n-gram, by hash (a collision falls out when the tokens are compared),
        # and from each position the one before it with the same n-gram, -1 for none.
        self._latest: dict[int, dict[int, int]] = {order: {} for order in INDEXED}
        self._before = {order: array("i") for order in INDEXED}

    @property
    def uncounted(self) -> int:
        """How many of its last ids are not found yet."""
        return len(self.ids) - len(self._before[INDEXED[0]])

    def extend(self, ids: Sequence[int]) -> None:
        """Append the text's next ids; costs the same for each, however long the text is."""
        self.ids += ids
        self.count(len(ids))

    def count(self, most: int) -> None:
        """Let `most` further ids be found."""
        start = len(self.ids) - self.uncounted
        for end in range(start + 1, min(start + most, len(self.ids)) + 1):
            for order, latest in self._latest.items():
                gram = hash(tuple(self.ids[max(0, end - order) : end]))
                self._before[order].append(latest.get(gram, -1))
                latest[gram] = end - 1

    def start(self, root: int) -> list[Occurrence]:
        """Find where the text's end, `root` included, stands in the texts: longest suffixes first, then most recent."""
        suffix = [*self.ids[1 - ORDERS[-1] :], root]
        found: dict[tuple[int, int], Occurrence] = {}
        for order in INDEXED:
            gram = hash(tuple(suffix[-order:]))
            for number, text in enumerate((self, *self.earlier)):
                for position in text.positions(order, gram):
                    if len(found) == OCCURRENCES:
                        return list(found.values())
                    place = number, position
                    if place not in found and (length := text.match(position, suffix)) >= order:
                        found[place] = text.ids, position, length
        return list(found.values())

    def positions(self, order: int, gram: int) -> Iterator[int]:
        """Where n-grams with a hash end, the latest first."""
        position = self._latest[order].get(gram, -1)
        while position >= 0:
            yield position
            position = self._before[order][position]

    def match(self, position: int, suffix: list[int]) -> int:
        """Count the tokens before and at `position` that equal the end of `suffix`."""
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

    latest: tuple[int, ...]
    """the text's last tokens"""
    next: int = 0
    """the place behind the last token that was as predicted"""
    matched: int = 0
    """tokens that were, in a row; 0 where the text has left the prediction"""
    since: int = 0
    """tokens since then"""


State = tuple[list[Guess], list[Occurrence]]
"""what may come next behind a path, best first, and where the path's end stands in the text itself and in others"""


class Predicted:
    """A session's look-up model with the client's prediction before it."""

    def __init__(self, text: Lookup, prediction: Sequence[int], ids: Sequence[int]) -> None:
        """ids: those that `text` holds. Any of them may be of the answer already."""
        self._text = text
        self._ids, self._array = list(prediction), np.array(prediction, np.int64)
        self._rates, self._seen = list(FIRST_RATES), [0] * len(FIRST_RATES)
        self._track = Track(tuple(ids[-MATCHES[-1] :]))
        self._guesses = self._guess(self._track)

    @property
    def ids(self) -> list[int]:
        """Those of the text."""
        return self._text.ids

    def extend(self, ids: Sequence[int]) -> None:
        """Append the text's next ids, and learn from them what guesses are worth."""
        self._text.extend(ids)
        for token in ids:
            for guess in self._guesses:
                right = self._ids[guess.at] == token
                self._learn(guess.kind, right)
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
        found: dict[int, float] = {}
        rest = 1.0
        for guess in guesses:
            token, rate = self._ids[guess.at], self._rates[guess.kind]
            found[token] = found.get(token, 0.0) + rest * rate
            rest *= 1 - rate
        for token, share in self._text.followers(occurrences).items():
            found[token] = found.get(token, 0.0) + rest * share
        return found

    def places(self, tree: DraftTree, root: int) -> tuple[int, ...]:
        """Each node's place in the prediction, from 1; 0 for what is not drafted from it."""
        guesses = [self._guess(self._step(self._track, self._guesses, root))]
        places = []
        for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
            right = next((guess for guess in guesses[parent] if self._ids[guess.at] == token), None)
            places.append(0 if right is None else right.at + 1)
            guesses.append(self._follow(guesses[parent], token))
        return tuple(places)

    def _learn(self, kind: int, right: bool) -> None:
        self._seen[kind] += 1
        self._rates[kind] += (right - self._rates[kind]) / min(MEMORY, FIRST_STEPS + self._seen[kind])

    def _follow(self, guesses: list[Guess], token: int) -> list[Guess]:
        """What comes behind the first guess that says `token`."""
        for at, _, matched in guesses:
            if self._ids[at] == token:
                return [_followed(at + 1, matched + 1)] if at + 1 < len(self._ids) else []
        return []

    def _step(self, track: Track, guesses: list[Guess], token: int) -> Track:
        """Where a text is behind its next token."""
        latest = (*track.latest[1 - MATCHES[-1] :], token)
        for at, _, matched in guesses:
            if self._ids[at] == token:
                return Track(latest, at + 1, matched + 1)
        return Track(latest, track.next, 0, track.since + 1)

    def _guess(self, track: Track) -> list[Guess]:
        """What may come next in a text, best first, each place once."""
        guesses = [_followed(track.next, track.matched)] if track.matched else []
        if track.matched < SURE:
            guesses += self._longest(track)
        if not track.matched:
            guesses += (Guess(track.next + track.since, REPLACED, 0), Guess(track.next, INSERTED, 0))
        places = {guess.at: guess for guess in reversed(guesses) if guess.at < len(self._ids)}
        return [guess for guess in guesses if places.get(guess.at) is guess]

    def _longest(self, track: Track) -> list[Guess]:
        """The place behind the longest match of the text's end that is longer than what was followed: the next one of
        several, the last one where all are behind.
        """
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
        return [Guess(int(places[nearest]), MATCHED + _order(length), length)]


def _order(length: int) -> int:
    """Number of the longest of MATCHES that a match reaches."""
    return bisect_right(MATCHES, length) - 1


def _followed(at: int, matched: int) -> Guess:
    return Guess(at, FOLLOWED + _order(matched), matched)


# Most frequent followers and tokens that are looked at: a row costs the same however long the text is.
FOLLOWERS = 12
FREQUENT = 4


class Frequencies:
    """Counts of ids, kept in order of frequency: O(log n) to count, O(k) for the k most frequent.

    The order of equal counts is a function of what was counted in which order, so equal histories rank equally.
    """

    __slots__ = ("_negated", "_places", "ids", "total")

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.total = 0
        self._negated: list[int] = []  # counts times -1, ascending
        self._places: dict[int, int] = {}

    def add(self, token: int) -> None:
        """Count `token` once more."""
        place = self._places.setdefault(token, len(self.ids))
        if place == len(self.ids):
            self.ids.append(token)
            self._negated.append(0)
        first = bisect_left(self._negated, self._negated[place])  # the first of equal count: swapping keeps the order
        other = self.ids[first]
        self.ids[first], self.ids[place] = token, other
        self._places[other], self._places[token] = place, first
        self._negated[first] -= 1
        self.total += 1

    def count(self, token: int) -> int:
        """Return how often `token` was counted."""
        place = self._places.get(token)
        return 0 if place is None else -self._negated[place]

    def most_frequent(self, most: int) -> Iterator[tuple[int, int]]:
        """Yield up to `most` ids and their counts, descending."""
        return ((token, -negated) for token, negated in zip(self.ids[:most], self._negated, strict=False))

    def counts(self) -> NDArray[np.int64]:
        """Return the (len(ids),) counts of `ids`, descending."""
        return -np.array(self._negated, np.int64)


class Bigram:
    """Counts of one text. `vocab_size` 0 is unknown: then what is left of a row belongs to ids never seen."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._tokens = Frequencies()
        self._followers: dict[int, Frequencies] = {}
        self._last: int | None = None
        self._frequent: dict[int, float] = {}  # the most frequent tokens and their probabilities
        self._rows: dict[int, dict[int, float]] = {}  # followers() since the text grew last

    def extend(self, ids: Sequence[int]) -> None:
        """Count the text's next ids."""
        for token in ids:
            self._tokens.add(token)
            if self._last is not None:
                self._followers.setdefault(self._last, Frequencies()).add(token)
            self._last = token
        self._frequent = {token: self._unigram(token) for token in self._tokens.ids[:FREQUENT]}
        self._rows = {}

    def start(self, root: int) -> int:
        """Return the state behind `root`: a bigram remembers one token."""
        return root

    def follow(self, state: int, token: int) -> int:
        """Return the state after `token`."""
        return token

    def followers(self, state: int) -> dict[int, float]:
        """Return candidates and their probabilities, which sum to less than 1. Do not change the answer."""
        row = self._rows.get(state)
        if row is not None:
            return row
        seen = self._followers.get(state)
        if seen is None:
            return self._frequent
        row = self._rows[state] = self._row(seen)
        return row

    def _row(self, seen: Frequencies) -> dict[int, float]:
        """Score the most frequent followers, and the most frequent tokens of all."""
        below = self._frequent
        kinds, total = len(seen.ids), seen.total + len(seen.ids)
        own = {}
        for token, count in seen.most_frequent(FOLLOWERS):
            p = below.get(token)
            own[token] = (count + kinds * (self._unigram(token) if p is None else p)) / total
        for token, p in below.items():
            if token not in own:
                own[token] = (seen.count(token) + kinds * p) / total
        return own

    def _unigram(self, token: int) -> float:
        kinds = len(self._tokens.ids)
        uniform = 1 / self.vocab_size if self.vocab_size else 0.0
        return (self._tokens.count(token) + kinds * uniform) / max(self._tokens.total + kinds, 1)

    def row(self, previous: int) -> NDArray[np.float64]:
        """Return (vocab_size,) P(. | previous), which sums to 1; the vocabulary must be known and a text begun."""
        row = np.full(self.vocab_size, 1 / self.vocab_size)
        _interpolate(row, self._tokens)
        if seen := self._followers.get(previous):
            _interpolate(row, seen)
        return row


def _interpolate(row: NDArray[np.float64], seen: Frequencies) -> None:
    """Put counts above a (V,) row of the model below, in place."""
    row *= len(seen.ids)
    row[seen.ids] += seen.counts()
    row /= seen.total + len(seen.ids)


TextModel = Bigram | Lookup | Predicted
"""A model of the next token made of one session's text. Its `followers` are a bounded number of candidates, with
probabilities that sum to less than 1; a state that it makes is a place behind the root."""
