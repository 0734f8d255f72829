"""A bigram model of one text, learned while it is written: smoothed probabilities of what follows a token.

Interpolated Witten-Bell smoothing (Witten and Bell, The zero-frequency problem, IEEE Transactions on Information Theory
37(4), 1991; Chen and Goodman, An empirical study of smoothing techniques, 1998, section 2.5): the number of distinct
followers T(a) of a context counts how often something new followed it, so of c(a) + T(a) events T(a) go to the model
below,

    P(x | a) = (c(a, x) + T(a) P_below(x | a)) / (c(a) + T(a)).

A pair seen once therefore has about one half, not certainty. Below the session's pairs lie its single tokens, below
those the uniform distribution.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

# Most frequent followers and tokens that are looked at: a row costs the same however long the text is.
FOLLOWERS = 12
FREQUENT = 4


class Ranking:
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
        self._tokens = Ranking()
        self._followers: dict[int, Ranking] = {}
        self._last: int | None = None
        self._frequent: dict[int, float] = {}  # the most frequent tokens and their probabilities
        self._rows: dict[int, dict[int, float]] = {}  # followers() since the text grew last

    def extend(self, ids: Sequence[int]) -> None:
        """Count the text's next ids."""
        for token in ids:
            self._tokens.add(token)
            if self._last is not None:
                self._followers.setdefault(self._last, Ranking()).add(token)
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

    def _row(self, seen: Ranking) -> dict[int, float]:
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


def _interpolate(row: NDArray[np.float64], seen: Ranking) -> None:
    """Put counts above a (V,) row of the model below, in place."""
    row *= len(seen.ids)
    row[seen.ids] += seen.counts()
    row /= seen.total + len(seen.ids)
