"""Scores of draft trees, the choice between heads, and the online calibration that makes their scores comparable."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from coppice.speculation.tree import DraftTree

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
Rule = Literal["mean", "sum"]


def mean_confidence(tree: DraftTree) -> float:
    """mu_h, the mean of c_i = exp(s_i) over the nodes (seeds/dual-draft-routing section 5); 0 for an empty tree."""
    return sum_confidence(tree) / max(1, len(tree))


def sum_confidence(tree: DraftTree) -> float:
    """The sum of c_i: the expected number of accepted drafts if the drafter is calibrated; 0 for an empty tree.

    Unlike the mean it does not fall when a tree grows, so a small confident tree does not beat a larger one that
    holds it.
    """
    return float(np.exp(tree.log_probs, dtype=np.float64).sum())


def route(trees: Sequence[DraftTree], rule: Rule = "mean", calibrations: Sequence[Calibration] | None = None) -> int:
    """Index of the tree to verify, the argmax of the heads' scores; ties go to the first. ValueError without trees."""
    if calibrations is not None:
        trees = [calibration.of(tree) for tree, calibration in zip(trees, calibrations, strict=True)]
    score = mean_confidence if rule == "mean" else sum_confidence
    return int(np.argmax([score(tree) for tree in trees]))


def step_log_probs(tree: DraftTree) -> FloatArray:
    """(n,) log-probability of each node given its parent, s_i - s_parent, at most 0."""
    scores: FloatArray = np.concatenate((np.zeros(1), tree.log_probs))
    return np.minimum(scores[1:] - scores[tree.parents], 0.0)


def first_miss(tree: DraftTree, continuation: Sequence[int]) -> tuple[int, int] | None:
    """Where a head's own tree first left the text: (depth of the node it left at, the node); None if it never did.

    `continuation` is the target's tokens after the root. The tree left it at the first node on it that has children
    none of which is the target's token; a text that leads to a leaf was drafted as far as the tree goes.
    """
    tokens, children = tree.tokens.tolist(), tree.children()
    at = [0]
    for depth, token in enumerate(continuation):
        candidates = [child for node in at for child in children[node]]
        following = [node for node in candidates if tokens[node - 1] == token]
        if not following:
            return (depth, next(node for node in at if children[node])) if candidates else None
        at = following
    return None


def outcomes(tree: DraftTree, continuation: Iterable[int]) -> tuple[BoolArray, BoolArray]:
    """What the text said about every node of a head's own tree: ((n,) offered, (n,) accepted).

    `continuation` is the target's tokens after the root: the accepted path and the next root. A node was offered when
    its parent spells the text (the root always does), and accepted when it does too. So a tree that was not verified,
    or was pruned before it was, is judged like one that was.
    """
    offered, accepted = np.zeros(len(tree), np.bool_), np.zeros(len(tree), np.bool_)
    tokens, children = tree.tokens.tolist(), tree.children()
    at = [0]
    for token in continuation:
        candidates = [child for node in at for child in children[node]]
        at = [node for node in candidates if tokens[node - 1] == token]
        offered[[node - 1 for node in candidates]] = True
        accepted[[node - 1 for node in at]] = True
    return offered, accepted


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
    MAX_CORRECTION = 20.0  # bounds scale and shift, and so every exponent below
    _PRIOR = (PRIOR_NODES / 4 * 4.0, 0.0, PRIOR_NODES / 4)  # that of nodes with logits of +-2

    def __init__(self) -> None:
        self.scale, self.shift = 1.0, 0.0
        # Precision of (scale, shift), a symmetric 2 x 2 matrix: entries 00, 01 and 11.
        self._precision = self._PRIOR

    def observe(self, step_log_probs: FloatArray, offered: BoolArray, accepted: BoolArray) -> None:
        """Learn from one step: (n,) conditional log-probs, which nodes were offered, and which of them accepted."""
        seen = list(zip(step_log_probs[offered].tolist(), accepted[offered].tolist(), strict=True))
        if not seen:
            return
        # Plain floats: a step offers a handful of nodes, too few to pay for array calls.
        fade = 1 / self.MEMORY_STEPS
        h00, h01, h11 = (kept + fade * (prior - kept) for kept, prior in zip(self._precision, self._PRIOR, strict=True))
        g0 = g1 = 0.0
        for log_prob, was_accepted in seen:
            x = self._logit(log_prob)
            error = was_accepted - math.exp(self._log_sigmoid(x))
            g0, g1 = g0 + error * x, g1 + error
            h00, h01, h11 = h00 + x * x / 4, h01 + x / 4, h11 + 1 / 4
        determinant = h00 * h11 - h01 * h01
        scale = self.scale + (h11 * g0 - h01 * g1) / determinant
        shift = self.shift + (h00 * g1 - h01 * g0) / determinant
        self.scale = max(1 / self.MAX_CORRECTION, min(self.MAX_CORRECTION, scale))
        self.shift = max(-self.MAX_CORRECTION, min(self.MAX_CORRECTION, shift))
        self._precision = (h00, h01, h11)

    def apply(self, tree: DraftTree) -> NDArray[np.float32]:
        """(n,) calibrated cumulative log-probs of a tree."""
        scores = [0.0]
        for log_prob, parent in zip(step_log_probs(tree).tolist(), tree.parents.tolist(), strict=True):
            scores.append(scores[parent] + self._log_sigmoid(self._logit(log_prob)))
        return np.array(scores[1:], np.float32)

    def of(self, tree: DraftTree) -> DraftTree:
        """A tree with its calibrated log-probs."""
        return DraftTree(tree.tokens, tree.parents, self.apply(tree))

    def _logit(self, log_prob: float) -> float:
        """log(q / (1 - q)) of log q, bounded."""
        rest = -math.expm1(log_prob)
        return max(-self.MAX_LOGIT, min(self.MAX_LOGIT, log_prob - math.log(rest))) if rest else self.MAX_LOGIT

    def _log_sigmoid(self, logit: float) -> float:
        """log P(accepted) of a node with this logit."""
        return -math.log1p(math.exp(-(self.scale * logit + self.shift)))
