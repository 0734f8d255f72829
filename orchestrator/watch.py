"""A sequential test of whether a head drafts far below what it was trained to.

A head that was loaded wrongly fails nobody: every text is right, only slow. So each step's draft is compared with the
share of right tokens that the head's folder expects (coppice/heads/models/expectation.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from coppice.speculation.tree import DraftTree

FALSE_ALARMS = 1e-6
"""chance that a head which reaches what is expected is ever suspected, however long it serves"""
USELESS = 0.05
"""share of right first tokens that a head has to reach to be of any use; expected of one that nobody measured"""
_SHARES = (1 / 2, 1 / 8, 1 / 64)  # of what is expected: what a faulty head may reach
_MOST = 0.999  # a head that is always right proves nothing with its first miss


def best_path(tree: DraftTree, continuation: Sequence[int]) -> list[bool]:
    """Return whether a head's best token was right at depth 1, 2, ..., as far as the best ones before it were.

    `continuation` is the target's tokens after the root. The best of a node's children has the highest score.
    """
    best: dict[int, int] = {}  # node: its likeliest child
    scores = tree.log_probs.tolist()
    for node, parent in enumerate(tree.parents.tolist(), 1):
        if parent not in best or scores[node - 1] > scores[best[parent] - 1]:
            best[parent] = node
    path, at = list[bool](), 0
    for token in continuation:
        if at not in best:
            break
        at = best[at]
        path.append(int(tree.tokens[at - 1]) == token)
        if not path[-1]:
            break
    return path


class AcceptanceWatch:
    """An e-process: a bet against "the head is right at least as often as expected", which wins only if it is not.

    For each depth and each of a few shares of what is expected, the likelihood ratio of that share (Wald, 1945) over
    all trials since some start; a start at trial n weighs 1 / (n (n + 1)), so that a head which becomes faulty late is
    found, too. Of a head whose every trial is right with at least the expected chance, whatever came before, such a
    mixture is a supermartingale that begins at 1, so it ever reaches 1 / a with a chance of at most a (Ville, 1939).

    Each push of weights begins anew; the nth may raise a false alarm with 1 / (n (n + 1)) of the chance.
    """

    def __init__(self, expected: Sequence[float], false_alarms: float = FALSE_ALARMS) -> None:
        """expected: the least share of right tokens at depth 1, 2, ..., each among trials whose path was right."""
        self.expected = tuple(expected)
        self.version, self.suspect = 0, False
        self._false_alarms, self._pushes = false_alarms, 0
        self._begin()

    def _begin(self) -> None:
        depths = len(self.expected)
        self.trials, self.hits = [0] * depths, [0] * depths
        self._bets = [[-math.inf] * len(_SHARES) for _ in range(depths)]  # logs of the mixtures over starts
        self._pushes += 1
        self.suspect = False

    def observe(self, path: Sequence[bool], version: int = 0) -> bool:
        """Learn from a draft's `best_path`, and return whether the head is suspected now and was not before.

        `version` is that of the weights that drafted; drafts of earlier ones are not counted.
        """
        if version > self.version:
            self.version = version
            self._begin()
        if version < self.version or self.suspect:
            return False
        self._bet(path)
        least = math.log(self._pushes * (self._pushes + 1) / self._false_alarms)
        self.suspect = self.evidence >= least
        return self.suspect

    def _bet(self, path: Sequence[bool]) -> None:
        for depth, right in enumerate(path[: len(self.expected)]):
            expected = min(self.expected[depth], _MOST)
            self.trials[depth] += 1
            self.hits[depth] += right
            trial = self.trials[depth]
            start = -math.log(trial * (trial + 1))
            for number, share in enumerate(_SHARES):
                ratio = math.log(share) if right else math.log((1 - share * expected) / (1 - expected))
                self._bets[depth][number] = float(np.logaddexp(self._bets[depth][number], start)) + ratio

    @property
    def evidence(self) -> float:
        """The log of what the bet is worth: depth d weighs 2^-d, the shares all alike."""
        shares = math.log(len(_SHARES))
        weighed = [one - depth * math.log(2) - shares for depth, bets in enumerate(self._bets, 1) for one in bets]
        return float(np.logaddexp.reduce(weighed)) if weighed else -math.inf
