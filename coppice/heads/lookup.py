"""Prompt look-up: what followed the text's latest tokens when they stood there before.

The occurrences of the longest suffixes (Saxena, Prompt lookup decoding, 2023; here several, as branches of one tree)
vote on what comes next. Their votes are blended from short matches to long ones, as in PPM (Cleary and Witten, Data
compression using adaptive coding and partial string matching, 1984): of the occurrences that match at least n tokens,
c_n(x) of C_n are followed by x, with T_n distinct followers, and

    P_n(x) = (c_n(x) + (T_n + 1) P_below(x)) / (C_n + T_n + 1),

P_below of the next shorter order, 0 below the shortest. This is Witten-Bell interpolation (see coppice/heads/bigram.py)
with one more escape. A single occurrence of 1, 2, 4, 8 tokens then gives 0.33, 0.56, 0.70, 0.80; in stories, sums and
Python code the same token followed in about 0.3, 0.5, 0.7, 0.85 of the cases, where Witten-Bell says 0.50 to 0.94.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

ORDERS = (1, 2, 4, 8)  # match lengths that count as further evidence
INDEXED = (4, 2, 1)  # n-grams that are looked up; longer matches are found by comparing backwards
OCCURRENCES = 16  # looked at in a draft, the longest and most recent

Occurrence = tuple[int, int]
"""Where in the text a path's end stands: position of its last token, and how many tokens match there."""


class Lookup:
    """The text of one session and where its n-grams stand."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        # By order: the latest position of each n-gram, by hash (a collision falls out when the tokens are compared),
        # and from each position the one before it with the same n-gram, -1 for none.
        self._latest: dict[int, dict[int, int]] = {order: {} for order in INDEXED}
        self._earlier = {order: array("i") for order in INDEXED}

    def extend(self, ids: Sequence[int]) -> None:
        """Append the text's next ids; costs the same for each, however long the text is."""
        for token in ids:
            self._ids.append(token)
            position = len(self._ids) - 1
            for order, latest in self._latest.items():
                gram = hash(tuple(self._ids[-order:]))
                self._earlier[order].append(latest.get(gram, -1))
                latest[gram] = position

    def start(self, root: int) -> list[Occurrence]:
        """Find where the text's end, `root` included, stands in the text: longest suffixes first, then most recent."""
        suffix = [*self._ids[1 - ORDERS[-1] :], root]
        lengths: dict[int, int] = {}
        for order in INDEXED:
            position = self._latest[order].get(hash(tuple(suffix[-order:])), -1)
            while position >= 0 and len(lengths) < OCCURRENCES:
                if position not in lengths and (length := self._match(position, suffix)) >= order:
                    lengths[position] = length
                position = self._earlier[order][position]
        return list(lengths.items())

    def _match(self, position: int, suffix: list[int]) -> int:
        """Count the tokens before and at `position` that equal the end of `suffix`."""
        length = 0
        while length < min(len(suffix), position + 1) and self._ids[position - length] == suffix[-1 - length]:
            length += 1
        return length

    def follow(self, state: list[Occurrence], token: int) -> list[Occurrence]:
        """Return the occurrences that `token` continues."""
        after, end = self._ids, len(self._ids) - 1
        return [(at + 1, length + 1) for at, length in state if at < end and after[at + 1] == token]

    def followers(self, state: list[Occurrence]) -> dict[int, float]:
        """Return the tokens that followed and their probabilities, which sum to less than 1."""
        after, end = self._ids, len(self._ids) - 1
        votes = [(length, after[at + 1]) for at, length in state if at < end]
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
