"""Kinds of text: what traffic there is, what is to be learnt of each kind, and whether its variant pays.

Pure and deterministic, with JSON state, as `coppice.adaptation.bandit`. A kind is a centre in the space of sketches
(coppice/weights/variants.py): texts whose sketches are near it. Each kind may have one variant of the head. While
nobody knows whether it pays it drafts for YOUNG_SHARE of the kind's texts, and the deployed weights draft for the
others; both are measured in the same minutes.
"""

from __future__ import annotations

import math
import statistics
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from coppice.adaptation.records import QueryRecord
from coppice.limits import MAX_KINDS, MAX_VARIANTS
from coppice.weights.variants import Route, Routes

YOUNG_SHARE = 0.25
PROVEN_SHARE = 15 / 16
"""of a variant that pays: the rest goes on being measured against it"""
APART = 2.25
"""ratio to a kind's mean squared distance from its centre beyond which a text is of another kind"""
_FIRST_SPREAD = 0.16  # mean squared distance assumed of a kind of few texts
_PRIOR = 8  # texts that the assumption weighs as many as
_LATEST = 64  # measurements kept of either side
_LEAST = 5  # of either side before anything is decided
_LIMIT = 40  # queries with a variant after which its mean decides
_CERTAINTY = 1.5  # standard errors
_PRIOR_GAIN = 0.25  # share of a kind's misses that a first update is expected to save
HORIZON = 1000
"""queries to come that are expected at most: as many as there were of the kind"""

Verdict = Literal["undecided", "pays", "loses"]


class Gain(BaseModel):
    """What a variant gains over the deployed weights on the same kind of text in the same minutes."""

    share: float = 0.0
    """of tau"""
    error: float = 0.0
    """standard error"""
    variant: int = 0
    """queries that it drafted"""
    deployed: int = 0
    """queries that the deployed weights drafted"""


class KindState(BaseModel):
    """All that is known of a kind."""

    centre: list[float]
    spread: float = _FIRST_SPREAD
    """mean squared distance from the centre"""
    queries: int = 0
    last: int = 0
    """number of the latest query"""
    query_s: float = 0.0
    """mean seconds of a query"""
    tau: float = 1.0
    """mean accepted length with the deployed weights"""
    variant: int = 0
    share: float = 0.0
    since: int = 0
    """version of the weights that the measurements below begin with"""
    with_variant: list[float] = []
    with_deployed: list[float] = []
    updates: int = 0
    """in a row that were put to use"""
    failures: int = 0
    """in a row that were no better"""
    expected_gain: float | None = None
    """of the next update, share of tau; None: nothing is known of it"""


class KindsState(BaseModel):
    """All kinds, by place; None: a place that no kind has."""

    kinds: list[KindState | None] = []
    queries: int = 0


class Kinds:
    """The kinds of text of one head."""

    def __init__(self, state: KindsState | None = None, most_variants: int = MAX_VARIANTS) -> None:
        self.state = state or KindsState()
        self._most_variants = most_variants

    def __getitem__(self, number: int) -> KindState:
        """Return kind `number`, from 1."""
        kind = self.state.kinds[number - 1]
        assert kind is not None
        return kind

    def numbers(self) -> list[int]:
        """List the kinds that there are."""
        return [number for number, kind in enumerate(self.state.kinds, 1) if kind is not None]

    def take(self, record: QueryRecord) -> int:
        """Measure a query, and return the kind of its text; 0: its sketch is not known."""
        state = self.state
        state.queries += 1
        self._compare(record)
        if not record.sketch:
            return 0
        sketch = np.array(record.sketch)
        number = self._nearest(sketch) or self._new(sketch)
        kind = self[number]
        distance = float(np.square(np.array(kind.centre) - sketch).sum())
        kind.queries += 1
        weight = 1 / min(kind.queries, HORIZON)
        moved = (1 - weight) * np.array(kind.centre) + weight * sketch
        kind.centre = (moved / max(1e-9, float(np.linalg.norm(moved)))).tolist()
        spread_weight = 1 / min(kind.queries + _PRIOR, HORIZON)
        kind.spread += spread_weight * (distance - kind.spread)
        seconds = record.new_tokens / record.tokens_per_s if record.tokens_per_s else 0.0
        kind.query_s += weight * (seconds - kind.query_s)
        if not record.variant:
            kind.tau += max(weight, 1 / _LATEST) * (record.tau - kind.tau) if kind.tau > 1 else record.tau - kind.tau
        kind.last = state.queries
        return number

    def _nearest(self, sketch: NDArray[np.float64]) -> int:
        """Return the kind of a sketch, 0: it is near none."""
        nearest, least = 0, math.inf
        for number in self.numbers():
            distance = float(np.square(np.array(self[number].centre) - sketch).sum())
            if distance <= APART * self[number].spread and distance < least:
                nearest, least = number, distance
        return nearest

    def _new(self, sketch: NDArray[np.float64]) -> int:
        """Begin a kind, in the place of the one without a variant that was not met for longest if all are taken."""
        state, kind = self.state, KindState(centre=sketch.tolist())
        if None in state.kinds or len(state.kinds) < MAX_KINDS:
            at = state.kinds.index(None) if None in state.kinds else len(state.kinds)
        else:
            free = [number for number in self.numbers() if not self[number].variant] or self.numbers()
            at = min(free, key=lambda number: self[number].last) - 1
        state.kinds[at : at + 1] = [kind]
        return at + 1

    def _compare(self, record: QueryRecord) -> None:
        """Add a query to the measurements of the variant that it might have had."""
        if not record.kind or record.kind not in self.numbers():
            return
        kind, (first, last) = self[record.kind], record.versions
        if not kind.variant or first != last or first < kind.since or record.variant not in (0, kind.variant):
            return
        side = kind.with_variant if record.variant else kind.with_deployed
        side.append(record.tau)
        del side[:-_LATEST]

    # --- decisions ---

    def gain(self, number: int) -> Gain:
        """Return what the kind's variant gains, as far as that is measured."""
        kind = self[number]
        new, old = kind.with_variant, kind.with_deployed
        if min(len(new), len(old)) < 2:
            return Gain(variant=len(new), deployed=len(old))
        mean = statistics.fmean(old)
        error = math.hypot(statistics.stdev(new) / math.sqrt(len(new)), statistics.stdev(old) / math.sqrt(len(old)))
        share = statistics.fmean(new) / mean - 1
        return Gain(share=share, error=error / mean, variant=len(new), deployed=len(old))

    def verdict(self, number: int) -> Verdict:
        """Judge a kind's variant. Until its gain is surely above or below nothing it is young."""
        gain = self.gain(number)
        if min(gain.variant, gain.deployed) < _LEAST:
            return "undecided"
        if abs(gain.share) <= _CERTAINTY * gain.error and gain.variant < _LIMIT:
            return "undecided"
        return "pays" if gain.share > 0 else "loses"

    def settle(self, number: int) -> bool:
        """Give a kind's variant the share that its verdict asks for; returns whether that is another one.

        One that loses drafts no more, and the next update needs more samples.
        """
        kind, verdict = self[number], self.verdict(number)
        share = {"undecided": kind.share, "pays": PROVEN_SHARE, "loses": 0.0}[verdict]
        if not kind.variant or share == kind.share:
            return False
        kind.share = share
        if not share:
            kind.variant, kind.with_variant, kind.with_deployed = 0, [], []
            kind.failures, kind.updates = kind.failures + 1, 0
        return True

    def pays(self, number: int, cost_s: float) -> bool:
        """Whether an update that takes so many seconds from serving would be repaid by the queries to come."""
        kind = self[number]
        gain = kind.expected_gain if kind.expected_gain is not None else _PRIOR_GAIN / max(1.0, kind.tau)
        saved = min(kind.queries, HORIZON) * kind.query_s * gain / (1 + gain)
        return saved > cost_s * 2**kind.failures

    def trained(self, number: int, gain: float, least: float) -> bool:
        """Note what an update would gain on texts that it did not learn from; returns whether to put it to use.

        The next one is expected to gain half of it.
        """
        kind = self[number]
        kind.expected_gain = max(0.0, gain) / 2
        if gain < least:
            kind.failures += 1
            return False
        kind.failures = 0
        return True

    def deploy(self, number: int, version: int) -> None:
        """Note that an update of the kind's variant is in use as `version`: it is measured anew.

        A variant that paid keeps its share.
        """
        kind = self[number]
        kind.variant = kind.variant or self.free_variant(number)
        kind.share = max(kind.share, YOUNG_SHARE)
        kind.since, kind.with_variant, kind.with_deployed = version, [], []
        kind.updates += 1

    def free_variant(self, number: int) -> int:
        """Return the variant for a kind: its own, one that no kind has, or the one of the kind that needs it least."""
        if self[number].variant:
            return self[number].variant
        taken = {self[other].variant: other for other in self.numbers() if self[other].variant}
        for variant in range(1, self._most_variants + 1):
            if variant not in taken:
                return variant
        variant, other = min(taken.items(), key=lambda item: self[item[1]].last)
        self[other].variant, self[other].share = 0, 0.0
        return variant

    def routes(self) -> Routes:
        """Return what drafters choose by."""
        places: list[Route | None] = [
            kind and Route(tuple(kind.centre), APART * kind.spread, kind.variant, kind.share)
            for kind in self.state.kinds
        ]
        return Routes(places)
