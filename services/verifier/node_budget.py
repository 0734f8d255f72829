"""Which nodes of all packed trees are worth their rows: what a forward costs, what a node promises, the best cut.

A node promises its calibrated path probability. Forwards have a price by rows that depends on model, machine and load,
so it is measured. Knows nothing of models or messages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from coppice.limits import MAX_HEAD_NODES

FloatArray = NDArray[np.float64]
Seconds = Callable[[ArrayLike], FloatArray]
"""wall time of a packed step, by the rows of its forward"""


class CostCurve:
    """Seconds of a forward by its rows: measured at a few numbers of rows, kept fresh, never falling.

    What a served forward took moves the points around its rows, and all points a little: texts grow longer and
    machines slow down at every number of rows. Both are exponential averages of the logarithm, so that factors count.
    """

    OWN, SHARED = 0.1, 0.05  # shares of an observation
    MOST = 0.7  # of the logarithm of one observation's factor: a stall is no measurement

    def __init__(self, seconds: Mapping[int, float]) -> None:
        """`seconds` of at least one number of rows. Raises ValueError without any or on one that is not positive."""
        if not seconds or min(seconds.values()) <= 0:
            raise ValueError("a cost curve needs positive times")
        self._rows = np.array(sorted(seconds), np.float64)
        self._log = np.log([seconds[rows] for rows in sorted(seconds)])
        self._points, self._places = np.maximum.accumulate(np.exp(self._log)), np.arange(len(self._rows))

    def __call__(self, rows: ArrayLike) -> FloatArray:
        """Seconds at each number of rows; straight lines between the points and beyond the last one."""
        at, points = np.asarray(rows, np.float64), self._points
        slope = (points[-1] - points[-2]) / (self._rows[-1] - self._rows[-2]) if len(points) > 1 else 0.0
        beyond = np.maximum(at - self._rows[-1], 0.0) * slope
        between: FloatArray = np.interp(at, self._rows, points) + beyond
        return between

    def observe(self, rows: int, seconds: float) -> None:
        """Take in what a forward of so many rows took."""
        factor = min(self.MOST, max(-self.MOST, math.log(seconds / float(self(rows)))))
        place = np.interp(rows, self._rows, self._places)
        near = np.maximum(0.0, 1.0 - np.abs(self._places - place))
        self._log += factor * (self.SHARED + self.OWN * near)
        self._points = np.maximum.accumulate(np.exp(self._log))


def share(scores: Sequence[ArrayLike], rows: int, gain: float, seconds: Seconds) -> list[int]:
    """How many nodes of each packed tree to verify, its likeliest ones, for the most expected tokens a second.

    scores: per tree (n,) log-probabilities of its nodes, none above its parent's (`tree.path_scores`), so that the
    likeliest nodes of a tree hold their ancestors. rows and gain: of the forward, and the tokens expected of it,
    without any of these nodes. Every set of n nodes costs the same and the n likeliest promise most, so trying each n
    finds the best set there is; of equals the smallest.
    """
    ends = np.cumsum([0, *map(len, map(np.asarray, scores))])
    flat = np.concatenate([np.zeros(0), *map(np.asarray, scores)])
    order = np.argsort(-flat, kind="stable")
    promised = gain + np.concatenate((np.zeros(1), np.cumsum(np.exp(flat[order]))))
    count = int(np.argmax(promised / seconds(rows + np.arange(len(promised)))))
    return np.histogram(order[:count], ends)[0].tolist() if len(scores) else []


class Profile:
    """What trees lately promised: the mean confidence of their likeliest node, of the second one, and so on."""

    RATE = 0.05

    def __init__(self) -> None:
        self._means = np.zeros(MAX_HEAD_NODES)
        self._known = 0  # nodes of the largest tree
        self._told: int | None = None  # the last hint

    def observe(self, scores: ArrayLike) -> None:
        """Take in the (n,) log-probabilities of a tree's nodes; more than a head may draft are not looked at.

        A tree that is as large as the hint would have gone on, with nodes up to as likely as its last one: trees that
        were worse made the hint small, and none that is cut short could make it larger again.
        """
        found = np.sort(np.exp(np.asarray(scores, np.float64)))[::-1][:MAX_HEAD_NODES]
        old = min(self._known, len(found))
        self._means[:old] += self.RATE * (found[:old] - self._means[:old])
        self._means[old : len(found)] = found[old:]
        if self._told is not None and 0 < len(found) >= self._told:
            self._means[len(found) : self._known] += self.RATE * (found[-1] - self._means[len(found) : self._known])
        self._known = max(self._known, len(found))

    def hint(self, sessions: int, rows: int, seconds: Seconds) -> int | None:
        """How many nodes each of `sessions` should draft if all drafted alike; `rows` are those of no tree.

        What pays for the mean tree, as drafting costs too; 0 when not one node pays, and None when all of the largest
        tree would, or nothing is known.
        """
        means = np.minimum.accumulate(self._means[: self._known])
        promised = sessions * (1 + np.concatenate((np.zeros(1), np.cumsum(means))))
        best = int(np.argmax(promised / seconds(rows + sessions * np.arange(len(promised)))))
        self._told = None if best == self._known else best
        return self._told
