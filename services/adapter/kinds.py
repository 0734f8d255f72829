"""Kinds of text: what traffic there is, what is to be learnt of each kind, and whether its variant pays.

Pure and deterministic, with JSON state, as `services.adapter.bandit`. A kind is a centre in the space of sketches
(coppice/weights/variants.py): texts whose sketches are near it. Each kind may have a variant of the head. A new one is
young: it drafts for YOUNG_SHARE of the texts, and what drafted before drafts for the others. Both are measured in
the same minutes. A variant that is surely better drafts for PROVEN_SHARE, and the deployed weights for the rest.
"""

from __future__ import annotations

import math
import statistics
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from coppice.adaptation.records import QueryRecord
from coppice.limits import MAX_KINDS, MAX_VARIANTS
from coppice.weights.variants import Route, Routes

from .kind_state import PROVEN_SHARE, Gain, KindsState, KindState

YOUNG_SHARE = 0.5
"""of a kind's texts that a new variant drafts for: a comparison of equal sides ends soonest"""
APART = 2.25
"""ratio to a kind's mean squared distance from its centre beyond which a text is of another kind"""
_PRIOR = 8  # texts that the assumption weighs as many as
_LATEST = 64  # measurements kept of either side
_LEAST = 5  # of either side before anything is decided
_LIMIT = 40  # queries with a variant after which its mean decides
_CERTAINTY = 1.5  # standard errors
_PRIOR_GAIN = 0.25  # tokens a step that a first update is expected to gain
_FIRST_TEXTS = 24  # of a kind before its first update
_MARGIN = 2.0  # an update is to save so many times what it costs: neither is known well
_MOST_NEW = 128  # texts of a kind at most from one update to the next
HORIZON = 1000
"""queries to come that are expected at most: as many as there were of the kind"""

Verdict = Literal["undecided", "pays", "loses"]


class Kinds:
    """The kinds of text of one head."""

    def __init__(self, state: KindsState | None = None, most_variants: int = MAX_VARIANTS) -> None:
        self.state = state or KindsState()
        self._most_variants = most_variants

    def __getitem__(self, number: int) -> KindState:
        """Return kind `number`, from 1."""
        kind = self.state.kinds[number - 1]
        if kind is None:
            raise KeyError(number)
        return kind

    def numbers(self) -> list[int]:
        """List the kinds that there are."""
        return [number for number, kind in enumerate(self.state.kinds, 1) if kind is not None]

    def take(self, record: QueryRecord, beside: bool) -> int:
        """Measure a query, and return the kind of its text; 0: its sketch is not known.

        beside: whether something was trained meanwhile.
        """
        state = self.state
        state.queries += 1
        if record.steps and record.tokens_per_s:
            self._time(record.new_tokens / record.tokens_per_s / record.steps, beside)
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

    def _time(self, step_s: float, beside: bool) -> None:
        """Learn from the mean time of a query's steps what training costs those beside it."""
        state = self.state
        if not beside:
            state.step_s += (step_s - state.step_s) / min(state.queries, _LATEST)
        elif state.step_s:
            state.drag += (max(0.0, 1 - state.step_s / max(step_s, 1e-9)) - state.drag) / 16

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
        if not kind.share or first != last or first < kind.since or record.variant not in (kind.variant, kind.other):
            return
        side = kind.with_variant if record.variant == kind.variant else kind.with_other
        side.append(record.tau)
        del side[:-_LATEST]

    # --- decisions ---

    def gain(self, number: int) -> Gain:
        """Return what the kind's variant gains, as far as that is measured."""
        kind = self[number]
        new, old = kind.with_variant, kind.with_other
        if min(len(new), len(old)) < 2:
            return Gain(variant=len(new), others=len(old))
        mean = statistics.fmean(old)
        error = math.hypot(statistics.stdev(new) / math.sqrt(len(new)), statistics.stdev(old) / math.sqrt(len(old)))
        share = statistics.fmean(new) / mean - 1
        return Gain(share=share, error=error / mean, variant=len(new), others=len(old))

    def verdict(self, number: int) -> Verdict:
        """Judge a kind's variant. Until its gain is surely above or below nothing nothing is known of it."""
        gain = self.gain(number)
        if min(gain.variant, gain.others) < _LEAST:
            return "undecided"
        if abs(gain.share) <= _CERTAINTY * gain.error and gain.variant < _LIMIT:
            return "undecided"
        return "pays" if gain.share > 0 else "loses"

    def settle(self, number: int, version: int) -> Verdict:
        """Act on the verdict on a kind's variant; returns it if drafters are to be told, else "undecided".

        One that pays drafts for nearly all texts; in the place of one that loses drafts what it was compared with.
        `version` is in use: measurements that begin anew are of later ones.
        """
        kind, verdict = self[number], self.verdict(number)
        if verdict == "pays" and kind.young:
            kind.failures = 0
            self._let(number, kind.variant, 0, PROVEN_SHARE, version + 1 if kind.other else kind.since)
            return verdict
        if verdict == "loses" and kind.share:
            kind.failures += 1
            self._let(number, kind.other, 0, PROVEN_SHARE if kind.other else 0.0, version + 1)
            return verdict
        return "undecided"

    def _let(self, number: int, variant: int, other: int, share: float, since: int) -> None:
        """Let a variant draft for a share of a kind, and the other one for the rest; `since`: see KindState."""
        kind = self[number]
        kind.variant, kind.other, kind.share = variant, other, share
        if since != kind.since:
            kind.since, kind.with_variant, kind.with_other = since, [], []

    def due(self, number: int, update_s: float) -> bool:
        """Whether an update of a kind's variant is due: there is enough to learn from, and it would pay.

        update_s: seconds that it takes.
        """
        kind = self[number]
        if kind.young or kind.queries - kind.learnt < min(_MOST_NEW, max(_FIRST_TEXTS, kind.learnt)):
            return False
        return self.saves(number) > _MARGIN * self.costs(number, update_s)

    def costs(self, number: int, update_s: float) -> float:
        """Return the seconds of serving that an update of so many seconds would cost; each failure doubles them."""
        return update_s * self.state.drag * 2.0 ** min(self[number].failures, 16)

    def saves(self, number: int) -> float:
        """Return the seconds of serving that the next update is expected to save in the queries to come.

        As many are expected as there were: traffic that has lasted will last as long again.
        """
        kind = self[number]
        gain = kind.expected_gain if kind.expected_gain is not None else _PRIOR_GAIN / max(1.0, kind.tau)
        return min(kind.queries, HORIZON) * kind.query_s * gain / (1 + gain)

    def trained(self, number: int, gain: float, least: float) -> bool:
        """Note what an update would gain on texts that it did not learn from; returns whether to put it to use.

        The next one is expected to gain half of it.
        """
        kind = self[number]
        kind.learnt, kind.expected_gain = kind.queries, max(0.0, gain) / 2
        if gain < least:
            kind.failures += 1
            return False
        return True

    def deploy(self, number: int, variant: int, version: int) -> None:
        """Note that a new variant for a kind comes into use as `version`: it is young."""
        kind = self[number]
        kind.updates += 1
        self._let(number, variant, kind.variant, YOUNG_SHARE, version)

    def free_variant(self, number: int) -> int:
        """Return a variant for a kind's next update: one that no kind has, or the one of the kind that was not met for
        longest, which loses it. 0: there is none."""
        taken: dict[int, int] = {}
        for kind in self.numbers():
            taken |= {variant: kind for variant in (self[kind].variant, self[kind].other) if variant}
        free = [variant for variant in range(1, self._most_variants + 1) if variant not in taken]
        if free:
            return free[0]
        others = [kind for kind in taken.values() if kind != number]
        if not others:
            return 0
        least = min(others, key=lambda kind: self[kind].last)
        variant = self[least].variant or self[least].other
        self._let(least, 0, 0, 0.0, self[least].since)
        return variant

    def follow(self, routes: Routes, version: int) -> None:
        """Take up what earlier weights, which are in use again as `version`, know of the kinds."""
        for number in self.numbers():
            route = routes.routes[number - 1] if number <= len(routes.routes) else None
            kept = (route.variant, route.other, route.share) if route else (0, 0, 0.0)
            self._let(number, *kept, version)

    def routes(self) -> Routes:
        """Return what drafters choose by."""
        places: list[Route | None] = [
            Route(tuple(kind.centre), APART * kind.spread, kind.variant, kind.share, kind.other) if kind else None
            for kind in self.state.kinds
        ]
        return Routes(places)
