"""What a text says of the trees that heads drafted: which nodes came true, how far to trust a head's scores, and
whether it drafts as it should.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from coppice.speculation.tree import DraftTree

FloatArray = NDArray[np.float64]

FALSE_ALARMS = 1e-6
"""chance that a head which reaches what is expected is ever suspected, however long it serves"""
USELESS = 0.05
"""share of right first tokens that a head has to reach to be of any use; expected of one that nobody measured"""
_SHARES = np.array([1 / 2, 1 / 8, 1 / 64])  # of what is expected: what a faulty head may reach
_MOST = 0.999  # a head that is always right proves nothing with its first miss


Offer = tuple[int, int, int, float, float, bool]
"""a node whose parent spells the text: its number and its parent's, the parent's depth, its log-probability given the
parent (at most 0), its score, and whether it spells the text, too"""


def offers(tree: DraftTree, continuation: Sequence[int]) -> list[Offer]:
    """The nodes of a head's own tree that the text says something about; the root, at depth 0, always spells it.

    `continuation` is the target's tokens after the root: the accepted path and the next root. So a tree that was not
    verified, or was pruned before it was, is judged like one that was.
    """
    found, depths, end = list[Offer](), {0: 0}, len(continuation)
    scores = [0.0, *tree.log_probs.tolist()]
    # Plain numbers: a step offers a handful of nodes, too few to pay for array calls.
    for node, (token, parent) in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True), 1):
        depth = depths.get(parent, end)
        if depth < end:
            right = token == continuation[depth]
            if right:
                depths[node] = depth + 1
            found.append((node, parent, depth, min(scores[node] - scores[parent], 0.0), scores[node], right))
    return found


def first_miss(tree: DraftTree, continuation: Sequence[int]) -> tuple[int, int] | None:
    """Where a head's own tree first left the text: (depth of the node it left at, the node); None if it never did.

    `continuation` is the target's tokens after the root. The tree left it at the first node on it that has children
    none of which is the target's token; a text that leads to a leaf was drafted as far as the tree goes.
    """
    found = offers(tree, continuation)
    deepest = max([depth + right for _, _, depth, _, _, right in found], default=0)
    left = [parent for _, parent, depth, *_ in found if depth == deepest]
    return (deepest, min(left)) if left else None


def accepted(tree: DraftTree, continuation: Sequence[int]) -> list[int]:
    """The numbers of the nodes of a head's own tree that spell the target's tokens after the root."""
    return [offer[0] for offer in offers(tree, continuation) if offer[-1]]


def step_log_probs(tree: DraftTree) -> FloatArray:
    """(n,) log-probability of each node given its parent, s_i - s_parent, at most 0."""
    scores: FloatArray = np.concatenate((np.zeros(1), tree.log_probs))
    return np.minimum(scores[1:] - scores[tree.parents], 0.0)


def best_path(found: Sequence[Offer]) -> list[bool]:
    """Return whether a head's best token was right at depth 1, 2, ..., as far as the best ones before it were.

    The best of a node's children has the highest score.
    """
    best = dict[int, Offer]()
    for offer in found:
        parent, score = offer[1], offer[4]
        if parent not in best or score > best[parent][4]:
            best[parent] = offer
    path, at = list[bool](), 0
    while at in best:
        path.append(best[at][5])
        at = best[at][0] if path[-1] else -1
    return path


class Calibration:
    """Online calibration of one head: P(accepted | parent accepted) = sigmoid(scale * logit(q) + shift).

    q is the head's conditional probability of a node. Scale and shift start at the identity (1, 0), where a prior
    weighs as much as PRIOR_NODES observed nodes, and follow the text by online Newton steps of the logistic loss. The
    curvature is Boehning's bound of it, 1/4 x x', so that no surprise can overshoot; evidence older than about
    MEMORY_STEPS steps fades, since heads are trained while they serve. The state is five numbers.

    As scale stays positive, no two children of a node change places; a calibrated node never exceeds its parent.
    """

    PRIOR_NODES = 64
    MEMORY_STEPS = 512
    MAX_LOGIT = 8.0  # a probability nearer to 0 or 1 than 3e-4 is not told from it
    _LEAST, _MOST = -math.log1p(math.exp(MAX_LOGIT)), -math.log1p(math.exp(-MAX_LOGIT))  # its log-probabilities
    MAX_CORRECTION = 20.0  # bounds scale and shift, and so every exponent below
    _PRIOR = (PRIOR_NODES / 4 * 4.0, 0.0, PRIOR_NODES / 4)  # that of nodes with logits of +-2

    def __init__(self) -> None:
        self.scale, self.shift = 1.0, 0.0
        # Precision of (scale, shift), a symmetric 2 x 2 matrix: entries 00, 01 and 11.
        self._precision = self._PRIOR

    def observe(self, seen: Sequence[tuple[float, bool]]) -> None:
        """Learn from one step: of each offered node its log-prob given its parent, and whether it was right."""
        if not seen:
            return
        fade, h = 1 / self.MEMORY_STEPS, self._precision
        h00, h01, h11 = (each + fade * (prior - each) for each, prior in zip(h, self._PRIOR, strict=True))
        g0 = g1 = 0.0
        for log_prob, was_accepted in seen:
            q = min(max(log_prob, self._LEAST), self._MOST)
            x = q - math.log(-math.expm1(q))
            error = was_accepted - 1 / (1 + math.exp(-(self.scale * x + self.shift)))
            g0, g1 = g0 + error * x, g1 + error
            h00, h01, h11 = h00 + x * x / 4, h01 + x / 4, h11 + 1 / 4
        determinant = h00 * h11 - h01 * h01
        scale = self.scale + (h11 * g0 - h01 * g1) / determinant
        shift = self.shift + (h00 * g1 - h01 * g0) / determinant
        self.scale = max(1 / self.MAX_CORRECTION, min(self.MAX_CORRECTION, scale))
        self.shift = max(-self.MAX_CORRECTION, min(self.MAX_CORRECTION, shift))
        self._precision = (h00, h01, h11)

    def of(self, tree: DraftTree) -> DraftTree:
        """The tree with calibrated cumulative log-probs."""
        q = np.minimum(np.maximum(step_log_probs(tree), self._LEAST), self._MOST)
        steps = -np.log1p(np.exp(-(self.scale * (q - np.log(-np.expm1(q))) + self.shift)))
        scores = [0.0]
        for step, parent in zip(steps.tolist(), tree.parents.tolist(), strict=True):
            scores.append(scores[parent] + step)
        return DraftTree(tree.tokens, tree.parents, np.array(scores[1:], np.float32))


class AcceptanceWatch:
    """A sequential test of whether a head drafts far below what it was trained to, as one that was loaded wrongly does:
    every text is right, only slow. The share of right tokens is compared with that which the head's folder expects
    (coppice/config/model.py).

    It is an e-process: a bet against "the head is right at least as often as expected", which wins only if it is not.

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
        self._bets = np.full((depths, len(_SHARES)), -np.inf)  # logs of the mixtures over starts
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
        for depth, right in enumerate(path[: len(self.expected)]):
            self.trials[depth] += 1
            self.hits[depth] += right
            expected, trial = min(self.expected[depth], _MOST), self.trials[depth]
            ratios = _SHARES if right else (1 - _SHARES * expected) / (1 - expected)
            started = np.logaddexp(self._bets[depth], -math.log(trial * (trial + 1)))
            self._bets[depth] = started + np.log(ratios)
        self.suspect = self.evidence >= math.log(self._pushes * (self._pushes + 1) / self._false_alarms)
        return self.suspect

    @property
    def evidence(self) -> float:
        """The log of what the bet is worth: depth d weighs 2^-d, the shares all alike."""
        depths = np.arange(1, len(self.expected) + 1)[:, None]
        return float(np.logaddexp.reduce(self._bets - depths * math.log(2) - math.log(len(_SHARES)), axis=None))
