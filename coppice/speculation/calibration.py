"""The online calibration that makes heads' scores comparable: how much of what a head promises comes true."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from coppice.speculation.tree import DraftTree

FloatArray = NDArray[np.float64]


BoolArray = NDArray[np.bool_]


def step_log_probs(tree: DraftTree) -> FloatArray:
    """(n,) log-probability of each node given its parent, s_i - s_parent, at most 0."""
    scores: FloatArray = np.concatenate((np.zeros(1), tree.log_probs))
    return np.minimum(scores[1:] - scores[tree.parents], 0.0)


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
        if not offered.any():
            return
        seen = zip(self._logits(step_log_probs[offered]).tolist(), accepted[offered].tolist(), strict=True)
        # Plain floats: a step offers a handful of nodes, too few to pay for array calls.
        fade = 1 / self.MEMORY_STEPS
        h00, h01, h11 = (kept + fade * (prior - kept) for kept, prior in zip(self._precision, self._PRIOR, strict=True))
        g0 = g1 = 0.0
        for x, was_accepted in seen:
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
        steps = -np.log1p(np.exp(-(self.scale * self._logits(step_log_probs(tree)) + self.shift)))
        scores = [0.0]
        for step, parent in zip(steps.tolist(), tree.parents.tolist(), strict=True):
            scores.append(scores[parent] + step)
        return DraftTree(tree.tokens, tree.parents, np.array(scores[1:], np.float32))

    def _logits(self, log_probs: FloatArray) -> FloatArray:
        """log(q / (1 - q)) of each log q, bounded by MAX_LOGIT."""
        with np.errstate(divide="ignore"):
            logits = log_probs - np.log(-np.expm1(log_probs))
        return np.clip(logits, -self.MAX_LOGIT, self.MAX_LOGIT)
