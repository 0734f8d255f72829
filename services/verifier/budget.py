"""Which nodes of all packed trees are worth their rows: what a forward costs, what a node promises, the best cut.

A node promises its calibrated path probability. What forwards cost by their rows is measured.
"""

import math
import time
from bisect import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from operator import truediv

import numpy as np

from coppice.engine.engine import Engine
from coppice.limits import MAX_HEAD_NODES
from coppice.speculation.tree import path_scores

from .session import Job

Seconds = Callable[[Sequence[int]], list[float]]  # wall time of a packed step, by the rows of its forward
_FAR = 1 << 20  # rows behind the last point of a curve, which goes on there as before it


class CostCurve:
    """Seconds of a forward by its rows: measured at a few numbers of rows, kept fresh, never falling.

    What a served forward took moves the points around its rows, and all points a little: texts grow longer and
    machines slow down at every number of rows. Both are exponential averages of the logarithm, so that factors count.
    """

    OWN, SHARED = 0.1, 0.05  # shares of an observation
    MOST = 0.7  # of the logarithm of one observation's factor: a stall is no measurement

    def __init__(self, seconds: Mapping[int, float]) -> None:
        """`seconds`, above 0, of at least one number of rows."""
        self._rows = sorted(seconds)
        self._log = [math.log(seconds[rows]) for rows in self._rows]
        self._draw()

    def __call__(self, rows: Sequence[int]) -> list[float]:
        """Seconds at each number of rows; straight lines between the points and beyond the last one."""
        seconds: list[float] = np.interp(rows, self._ends, self._points).tolist()
        return seconds

    def observe(self, rows: int, seconds: float) -> None:
        """Take in what a forward of so many rows took."""
        factor = min(self.MOST, max(-self.MOST, math.log(seconds / self((rows,))[0])))
        self._log = [point + factor * self.SHARED for point in self._log]
        at = bisect(self._rows, rows, 1) - 1
        width = self._rows[at + 1] - self._rows[at] if at + 1 < len(self._rows) else math.inf
        onward = max(0, rows - self._rows[at]) / width
        self._log[at] += factor * self.OWN * (1 - onward)
        if onward:
            self._log[at + 1] += factor * self.OWN * onward
        self._draw()

    def _draw(self) -> None:
        rows, points = self._rows, list(accumulate(map(math.exp, self._log), max))
        slope = (points[-1] - points[-2]) / (rows[-1] - rows[-2]) if len(rows) > 1 else 0.0
        self._ends, self._points = [*rows, rows[-1] + _FAR], [*points, points[-1] + slope * _FAR]


def _best(tokens: Sequence[float], seconds: Sequence[float]) -> int:
    """Where most tokens a second are expected; of equals the first."""
    rates = list(map(truediv, tokens, seconds))
    return rates.index(max(rates))


def share(scores: Sequence[Iterable[float]], rows: int, gain: float, seconds: Seconds) -> list[int]:
    """How many nodes of each packed tree to verify, its likeliest ones, for the most expected tokens a second.

    scores: per tree (n,) log-probabilities of its nodes, none above its parent's (`tree.path_scores`), so that the
    likeliest nodes hold their ancestors. rows and gain: of the forward, and the tokens expected of it, without any of
    these nodes. As n nodes cost the same whichever they are, trying each n finds the best set; of equals the smallest.
    """
    ranked = sorted([(-score, tree) for tree, of_tree in enumerate(scores) for score in of_tree])
    promised = list(accumulate([math.exp(-less) for less, _ in ranked], initial=gain))
    budgets = [0] * len(scores)
    for _, tree in ranked[: _best(promised, seconds(range(rows, rows + len(promised))))]:
        budgets[tree] += 1
    return budgets


class Profile:
    """What trees lately promised: the mean confidence of their likeliest node, of the second one, and so on."""

    RATE = 0.05

    def __init__(self) -> None:
        self._means: list[float] = []  # of as many nodes as the largest tree had
        self._last_hint: int | None = None

    def observe(self, scores: Iterable[float]) -> None:
        """Take in the (n,) log-probabilities of a tree's nodes, of no more than a head may draft.

        A tree as large as the hint would have gone on, with nodes up to as likely as its last one: worse trees made the
        hint small, and none that is cut short could make it larger again.
        """
        chances = sorted(map(math.exp, scores), reverse=True)[:MAX_HEAD_NODES]
        means, size = self._means, len(chances)
        if self._last_hint is not None and 0 < size >= self._last_hint:
            chances += chances[-1:] * (len(means) - size)
        moved = [mean + self.RATE * (new - mean) for mean, new in zip(means, chances, strict=False)]
        self._means = moved + chances[len(means) :] + means[len(chances) :]

    def hint(self, sessions: int, rows: int, seconds: Seconds) -> int | None:
        """Nodes each of `sessions` should draft beside `rows`: 0 where none pays, None for all or if unknown."""
        promised = list(accumulate(accumulate(self._means, min), initial=1.0))
        best = _best(promised, seconds(range(rows, rows + sessions * len(promised), sessions)))
        self._last_hint = None if best == len(self._means) else best
        return self._last_hint


_ROWS = (1, 16, 64, 4, 256, 2, 8, 32, 128, 512)  # the first ones say most, should time run out
_LEAST_POINTS = 3
_MEASURE_S = 0.5
_CONTEXT, _REPEATS = 64, 3
_RATE = 0.1  # of the average of what a step takes beside its forward
_MOST_BESIDE = 4.0  # times a step so far: longer is a stall


def measure(engine: Engine, kv_tokens: int) -> CostCurve:
    """Time forwards of several numbers of rows, at least three, for half a second. `kv_tokens`: the pool's size."""
    most = min(kv_tokens, engine.info.context.tokens) - _CONTEXT
    seconds: dict[int, float] = {}
    began = time.perf_counter()
    for rows in _ROWS:
        # One row always: a small pool or context has room for no more.
        if rows == 1 or (rows <= most and (len(seconds) < _LEAST_POINTS or time.perf_counter() - began < _MEASURE_S)):
            seconds[rows] = engine.timing(rows, context=_CONTEXT, repeats=_REPEATS) / 1e9
    return CostCurve(seconds)


class Pruner:
    """Cuts the trees of one forward after another, and learns from each what the next one will cost."""

    def __init__(self, curve: CostCurve) -> None:
        self.curve = curve
        self._profile = Profile()
        self._beside_s = 0.0  # from a forward's end to the next one's start while sessions are on their way back
        self._ended = 0.0
        self._rows = 0  # of the forward under way, draft nodes left out

    def cut(self, steps: Sequence[Job], prefill_rows: int) -> None:
        """Leave out of all steps of the next forward the nodes that would cost more than they promise."""
        self._rows = len(steps) + prefill_rows
        prunable = [job for job in steps if len(job.tree) and not job.whole]
        if not prunable:
            return
        scores = [path_scores(job.tree).tolist() for job in prunable]
        for of_tree in scores:
            self._profile.observe(of_tree)
        whole = [score for job in steps if job.whole and len(job.tree) for score in path_scores(job.tree).tolist()]
        gain = len(steps) + sum(map(math.exp, whole))
        for job, budget in zip(prunable, share(scores, self._rows + len(whole), gain, self._seconds), strict=True):
            job.cut(budget)

    def hint(self, sessions: int) -> int | None:
        """How many nodes each of the sessions should draft for the next forward; None: any number."""
        return self._profile.hint(sessions, self._rows, self._seconds)

    def ran(self, rows: int, began: float, ended: float, *, decoded: bool, awaited: bool) -> float:
        """Learn from a forward on one clock, in seconds; returns its share without a draft node.

        decoded: it held no prompt, whose rows are cheaper. awaited: some session of the forward before was in it, so
        that the time between was a step's and not a rest.
        """
        if decoded:
            self.curve.observe(rows, ended - began)
        plain_s, whole_s = self.curve((self._rows, rows))
        if awaited:
            most = _MOST_BESIDE * (self._beside_s + whole_s)
            self._beside_s += _RATE * (min(began - self._ended, most) - self._beside_s)
        self._ended = ended
        return plain_s / whole_s

    def _seconds(self, rows: Sequence[int]) -> list[float]:
        return [self._beside_s + seconds for seconds in self.curve(rows)]
