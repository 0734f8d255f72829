"""Prompt look-up: what followed the text's latest tokens when they stood there before.

The occurrences of the longest suffixes (Saxena, Prompt lookup decoding, 2023; here several, as branches of one tree)
vote on what comes next. Their votes are blended from short matches to long ones, as in PPM (Cleary and Witten, Data
compression using adaptive coding and partial string matching, 1984): of the occurrences that match at least n tokens,
c_n(x) of C_n are followed by x, with T_n distinct followers, and

    P_n(x) = (c_n(x) + (T_n + 1) P_below(x)) / (C_n + T_n + 1),

P_below of the next shorter order, 0 below the shortest. This is Witten-Bell interpolation (see coppice/heads/ngram.py)
with one more escape. A single occurrence of 1, 2, 4, 8 tokens then gives 0.33, 0.56, 0.70, 0.80; in stories, sums and
Python code the same token followed in about 0.3, 0.5, 0.7, 0.85 of the cases, where Witten-Bell says 0.50 to 0.94.

Earlier texts (coppice/heads/ngram.py) vote with the session's own, as if they stood before it.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Sequence

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
