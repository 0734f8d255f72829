"""Look-up in what a client predicts of the answer (predicted outputs), beside look-up in the session's own text.

The text is followed through the prediction token by token. While it goes as predicted, the next token is the next one
of the prediction. Where it left it, the client or the target has edited, and there are three guesses: the text goes on
behind the longest match of its end (of equally long ones behind the next one in the prediction, since edits keep the
order), the tokens since then replaced as many, or they were inserted. The first guess that comes true is followed.

How often each kind of guess comes true is counted in the session itself, and that is its probability: a prediction that
fits makes long chains, a useless one soon promises nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from coppice.heads.lookup import Lookup, Occurrence
from coppice.speculation.tree import DraftTree

ORDERS = (1, 2, 4, 8)  # lengths of matches that are told apart
INSERTED, REPLACED, MATCHED, FOLLOWED = 0, 1, 2, 2 + len(ORDERS)
"""Kinds of guesses. The last two are as many kinds as there are ORDERS of matches: of the text's end, wherever, and of
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
        self._track = Track(tuple(ids[-ORDERS[-1] :]))
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
        latest = (*track.latest[1 - ORDERS[-1] :], token)
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
    """Number of the longest of ORDERS that a match reaches."""
    return bisect_right(ORDERS, length) - 1


def _followed(at: int, matched: int) -> Guess:
    return Guess(at, FOLLOWED + _order(matched), matched)
