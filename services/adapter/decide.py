"""Decide what to train: a cost-aware bandit with the arms skip, head-only and full update, for each kind of text.

The bandit groups texts by the sketches of their prompts. An update makes a *variant* of the head for one kind of text,
which drafts for half of its texts until it is surely better or worse than what drafts for the other half in the same
minutes. Pure and deterministic: no clock, no model, no Redis; its state is JSON.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from coppice.limits import MAX_KINDS, MAX_VARIANTS
from coppice.signals.records import Demand, QueryRecord
from coppice.weights.variants import Route, Routes
from coppice.wire.adapter import ActionStatus, KindStatus


class Arm(StrEnum):
    """What to do with the texts of a query."""

    SKIP = "skip"
    HEAD = "head"
    FULL = "full"


UPDATES = (Arm.HEAD, Arm.FULL)
TEXTS = 192
"""texts that an update reads in all, as often as it takes"""
PASSES = 4
"""times at most that an update reads a text"""


def passes_over(texts: int) -> int:
    """Return how often an update reads so many texts."""
    return max(1, min(PASSES, TEXTS // max(1, texts)))


@dataclass(frozen=True, slots=True)
class Trained:
    """The figures of an update. Lengths are those of chains drafted greedily on texts that it did not learn from."""

    texts: int
    before: float
    after: float
    seconds: float

    @property
    def gain(self) -> float:
        """Share by which drafts are longer."""
        return self.after / self.before - 1 if self.before else 0.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """A change that measurements call for."""

    what: Literal["pays", "loses", "revert", "good"]
    """the variant pays or loses: push the routes; go back to `version`; or `version` is one to go back to"""
    why: str
    version: int = 0


class Rule(Protocol):
    """A decision rule. Texts are learnt from in groups: a kind of text each, or the buffer of an arm."""

    demand: Demand
    """what drafters are to send"""
    penalty: float
    """weight of the KL to the head as deployed in the loss of an update"""
    empties: bool
    """whether an update uses its texts up"""

    def take(self, record: QueryRecord, version: int | None, beside: bool) -> int:
        """Measure a query, and return the group of its text; 0: none.

        version: of the weights that drafted all of it. beside: whether something was trained meanwhile.
        """

    def begins(self, group: int) -> bool:
        """Whether the latest query began this group, perhaps in the place of another one."""
        return False

    def settle(self, record: QueryRecord, newest: int) -> Verdict | None:
        """Judge the weights in use after `take`; `newest`: the highest version so far."""

    def choose(self, group: int, texts: int) -> Arm:
        """Choose what to train on the `texts` of a group."""

    def variants(self, group: int) -> tuple[int, int]:
        """Return the variant that an update begins with, and the one that it makes; 0 as the latter: there is none."""

    def trained(self, group: int, arm: Arm, result: Trained | None) -> bool:
        """Note an update, None: it failed; returns whether to put it to use."""

    def deploy(self, group: int, arm: Arm, variant: int, version: int) -> None:
        """Note that an update comes into use with `version`."""

    def follow(self, routes: Routes, version: int) -> None:
        """Take up the routes of earlier weights, which are in use again as `version`."""

    def goes_on_as(self, version: int) -> None:
        """Note the number of the weights in use."""

    def routes(self) -> Routes:
        """Return what drafters choose by."""

    def actions(self) -> list[ActionStatus]:
        """Report what is known of each arm."""

    def kinds(self, texts: dict[int, int]) -> list[KindStatus]:
        """Report what is known of each kind, with so many texts by group."""
        return []


PRIOR_VALUES = {Arm.HEAD: 0.20, Arm.FULL: 0.25}
"""share of tokens/s that an update is first expected to gain for each rejected position a token"""
_PRIOR_TEXT_S = {Arm.HEAD: 0.075, Arm.FULL: 0.15}  # seconds assumed of reading a text once, before any was read
_PRIOR_SPREAD = 0.16  # mean squared distance assumed of a kind of few texts
_PRIOR_DRAG = 0.15  # share of its speed that serving is expected to lose while an update trains
_PRIOR_TEXTS = 8  # texts that the assumed distance weighs as many as
_ALPHA = 0.25  # weight of a new reward in an arm's value
_LEAST_VALUE = 0.125  # of an arm's first value: where a kind of text lasts, it is tried again
PROVEN_SHARE = 15 / 16
"""of a kind's texts for a variant that pays: the rest goes on being measured against it"""
YOUNG_SHARE = 0.5
"""of a kind's texts that a new variant drafts for: a comparison of equal sides ends soonest"""
APART = 2.25
"""ratio to a kind's mean squared distance from its centre beyond which a text is of another kind"""
LEAST_GAIN = 0.03
"""share by which an update must lengthen drafts on held-out texts to be put to use"""
HORIZON = 1000
"""queries to come that are expected at most: as many as there were of the kind"""
_LATEST = 64  # measurements kept of either side
_LEAST = 5  # of either side before anything is decided
_LIMIT = 40  # queries with a variant after which its mean decides
_CERTAINTY = 1.5  # standard errors
_FIRST_TEXTS = 24  # of a kind before its first update
_MOST_NEW = 128  # texts of a kind at most from one update to the next
_MARGIN = 3.0  # an update is to save so many times what it costs: neither is known well


class Gain(BaseModel):
    """What a variant gains over what drafts for the rest of its kind of text, in the same minutes."""

    share: float = 0.0
    """of tokens/s"""
    error: float = 0.0
    """standard error"""
    variant: int = 0
    """queries that it drafted"""
    others: int = 0
    """queries that it was compared with"""


class KindState(BaseModel):
    """All that is known of a kind."""

    centre: list[float]
    spread: float = _PRIOR_SPREAD
    """mean squared distance from the centre"""
    queries: int = 0
    last: int = 0
    """number of the latest query"""
    query_s: float = 0.0
    """mean seconds of a query"""
    tau: float = 1.0
    """mean accepted length with the deployed weights"""
    signal: float = 0.0
    """mean rejected positions a token (equation 8)"""
    variant: int = 0
    """what drafts for `share` of the texts; 0: the deployed weights"""
    share: float = 0.0
    other: int = 0
    """what drafts for the others"""
    since: int = 0
    """version of the weights that the measurements below begin with"""
    with_variant: list[float] = []
    """tokens/s of queries"""
    with_other: list[float] = []
    learnt: int = 0
    """queries before the last update"""
    updates: int = 0
    failures: int = 0
    """in a row that were no better"""
    values: dict[Arm, float] = {}
    """of arms that were tried: share of tokens/s that the next update is to gain for each unit of the signal"""
    arm: Arm = Arm.SKIP
    """of the last update"""
    cost_s: float = 0.0
    """seconds of serving that it cost"""

    @property
    def young(self) -> bool:
        """Whether its variant has to be measured yet."""
        return 0 < self.share < PROVEN_SHARE


class BanditState(BaseModel):
    """All kinds, by place (None: a place that no kind has), and what holds for all of them."""

    kinds: list[KindState | None] = []
    queries: int = 0
    step_s: float = 0.0
    """mean time of a step while nothing is trained"""
    drag: float = _PRIOR_DRAG
    """share by which steps were longer while something was"""
    values: dict[Arm, float] = Field(default_factory=lambda: dict(PRIOR_VALUES))
    """share of tokens/s that an arm gains for each unit of the signal, training's cost taken off: a moving mean"""
    updates: dict[Arm, int] = {}
    """updates that were put to use"""
    text_s: dict[Arm, float] = Field(default_factory=lambda: dict(_PRIOR_TEXT_S))
    """seconds that an update takes to read a text once"""


class Bandit:
    """Tells kinds of text apart, and decides for each of them: policy `bandit`."""

    demand: Demand = "texts"
    penalty, empties = 0.0, False

    def __init__(self, state: BanditState | None = None, most_variants: int = MAX_VARIANTS) -> None:
        self.state = state or BanditState()
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

    # --- measuring ---

    def take(self, record: QueryRecord, version: int | None, beside: bool) -> int:
        """See Rule; a group is a kind of text. A query without a sketch is of none."""
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
        kind.last = state.queries
        weight = 1 / min(kind.queries, HORIZON)
        moved = (1 - weight) * np.array(kind.centre) + weight * sketch
        kind.centre = (moved / max(1e-9, float(np.linalg.norm(moved)))).tolist()
        kind.spread += (distance - kind.spread) / min(kind.queries + _PRIOR_TEXTS, HORIZON)
        seconds = record.new_tokens / record.tokens_per_s if record.tokens_per_s else 0.0
        kind.query_s += weight * (seconds - kind.query_s)
        recent = max(weight, 1 / _LATEST)
        # Every step ends at a rejected position, but for drafts that were accepted whole.
        rejected = (record.s or record.steps) / max(1, record.new_tokens)
        kind.signal += recent * (min(1.0, rejected) - kind.signal)
        if not record.variant:
            kind.tau += recent * (record.tau - kind.tau) if kind.tau > 1 else record.tau - kind.tau
        return number

    def begins(self, group: int) -> bool:
        """See Rule."""
        return bool(group) and self[group].queries == 1

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
        """Begin a kind; where all places are taken, evict the least recently met kind, if possible without variant."""
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
        if record.kind not in self.numbers() or not record.tokens_per_s:
            return
        kind, (first, last) = self[record.kind], record.versions
        if not kind.share or first != last or first < kind.since or record.variant not in (kind.variant, kind.other):
            return
        side = kind.with_variant if record.variant == kind.variant else kind.with_other
        side.append(record.tokens_per_s)
        del side[:-_LATEST]

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

    # --- judging a variant ---

    def settle(self, record: QueryRecord, newest: int) -> Verdict | None:
        """See Rule. A variant that pays drafts for nearly all texts; one that loses is replaced by what was before it.

        It is judged once its gain is surely above or below zero.
        """
        if record.kind not in self.numbers():
            return None
        kind, gain = self[record.kind], self.gain(record.kind)
        surely = abs(gain.share) > _CERTAINTY * gain.error or gain.variant >= _LIMIT
        if min(gain.variant, gain.others) < _LEAST or not surely or not kind.share:
            return None
        if gain.share > 0 and not kind.young:
            return None
        if kind.young:
            self._reward(kind, gain.share)
        if gain.share > 0:
            what: Literal["pays", "loses"] = "pays"
            kind.failures = 0
            self._let(record.kind, kind.variant, 0, PROVEN_SHARE, newest + 1 if kind.other else kind.since)
        else:
            what = "loses"
            kind.failures += 1
            self._let(record.kind, kind.other, 0, PROVEN_SHARE if kind.other else 0.0, newest + 1)
        why = f"gain {gain.share:+.1%} ± {gain.error:.1%}; variant {kind.variant} drafts for {kind.share:.0%}"
        return Verdict(what, f"kind {record.kind}: {why}")

    def _reward(self, kind: KindState, gain: float) -> None:
        """Revise an arm's value (SpecBlock, equation 10) by a gain in tokens/s, what training cost taken off."""
        if kind.arm is Arm.SKIP or not kind.signal:
            return
        reward = gain - kind.cost_s / max(1e-9, kind.query_s * min(kind.queries, HORIZON))
        value = self.state.values[kind.arm]
        value += _ALPHA * (reward / kind.signal - value)
        self.state.values[kind.arm] = max(value, _LEAST_VALUE * PRIOR_VALUES[kind.arm])

    def _let(self, number: int, variant: int, other: int, share: float, since: int) -> None:
        """Let a variant draft for a share of a kind, and the other one for the rest; `since`: see KindState."""
        kind = self[number]
        kind.variant, kind.other, kind.share = variant, other, share
        if since != kind.since:
            kind.since, kind.with_variant, kind.with_other = since, [], []

    # --- choosing ---

    def choose(self, group: int, texts: int) -> Arm:
        """See Rule: the arm that saves most beyond its cost, skip if none does; enough texts must be new."""
        kind = self[group]
        if kind.young or kind.queries - kind.learnt < min(_MOST_NEW, max(_FIRST_TEXTS, kind.learnt)):
            return Arm.SKIP
        net = {arm: self.saves(group, arm) - _MARGIN * self.costs(group, arm, texts) for arm in UPDATES}
        best = max(UPDATES, key=net.__getitem__)
        return best if net[best] > 0 else Arm.SKIP

    def costs(self, number: int, arm: Arm, texts: int) -> float:
        """Return the seconds of serving that an update would cost; each failure doubles them."""
        update_s = self.state.text_s[arm] * texts * passes_over(texts)
        return update_s * self.state.drag * 2.0 ** min(self[number].failures, 16)

    def saves(self, number: int, arm: Arm) -> float:
        """Return the seconds of serving that an update is expected to save in the queries to come.

        As many are expected as there were: traffic that has lasted will last as long again. The gain is the arm's value
        times the signal (SpecBlock, equation 9).
        """
        kind = self[number]
        gain = kind.values.get(arm, self.state.values[arm]) * kind.signal
        return min(kind.queries, HORIZON) * kind.query_s * gain / (1 + gain)

    def variants(self, group: int) -> tuple[int, int]:
        """See Rule. The new one is one that no kind has, or that of the least recently met kind, which loses it."""
        users: dict[int, int] = {}
        for number in self.numbers():
            users |= {variant: number for variant in (self[number].variant, self[number].other) if variant}
        begin = self[group].variant
        free = [variant for variant in range(1, self._most_variants + 1) if variant not in users]
        others = [number for number in users.values() if number != group]
        if free or not others:
            return begin, free[0] if free else 0
        least = min(others, key=lambda number: self[number].last)
        variant = self[least].variant or self[least].other
        self._let(least, 0, 0, 0.0, self[least].since)
        return begin, variant

    def trained(self, group: int, arm: Arm, result: Trained | None) -> bool:
        """See Rule. The arm's next update of the kind is expected to gain a quarter of what this one would."""
        kind = self[group]
        gain = result.gain if result else 0.0
        kind.learnt = kind.queries
        kind.values[arm] = max(0.0, gain) / 4 / max(kind.signal, 1e-9)
        if result:
            self.state.text_s[arm] = result.seconds / max(1, result.texts * passes_over(result.texts))
            kind.arm, kind.cost_s = arm, result.seconds * self.state.drag
        if gain < LEAST_GAIN:
            kind.failures += 1
            if result:
                self._reward(kind, 0.0)
            return False
        return True

    def deploy(self, group: int, arm: Arm, variant: int, version: int) -> None:
        """See Rule: the variant is young."""
        kind = self[group]
        kind.updates += 1
        self.state.updates[arm] = self.state.updates.get(arm, 0) + 1
        self._let(group, variant, kind.variant, YOUNG_SHARE, version)

    def follow(self, routes: Routes, version: int) -> None:
        """See Rule."""
        for number in self.numbers():
            route = routes.routes[number - 1] if number <= len(routes.routes) else None
            self._let(number, *((route.variant, route.other, route.share) if route else (0, 0, 0.0)), version)

    def goes_on_as(self, version: int) -> None:
        """See Rule. Versions only rise: measurements of a later one are of the same weights."""

    def routes(self) -> Routes:
        """See Rule."""
        places: list[Route | None] = [
            Route(tuple(kind.centre), APART * kind.spread, kind.variant, kind.share, kind.other) if kind else None
            for kind in self.state.kinds
        ]
        return Routes(places)

    # --- reporting ---

    def actions(self) -> list[ActionStatus]:
        """See Rule: values in share of tokens/s for each rejected position a token."""
        return [ActionStatus(arm, self.state.values[arm], self.state.updates.get(arm, 0)) for arm in UPDATES]

    def kinds(self, texts: dict[int, int]) -> list[KindStatus]:
        """See Rule."""
        return [self._status(number, texts.get(number, 0)) for number in self.numbers()]

    def _status(self, number: int, texts: int) -> KindStatus:
        kind, gain = self[number], self.gain(number)
        best = max(UPDATES, key=lambda arm: self.saves(number, arm) - _MARGIN * self.costs(number, arm, texts))
        return KindStatus(
            kind=number,
            queries=kind.queries,
            tau=kind.tau,
            variant=kind.variant,
            other=kind.other,
            share=kind.share,
            gain=gain.share,
            error=gain.error,
            measured=gain.variant,
            texts=texts,
            updates=kind.updates,
            saves_s=self.saves(number, best),
            costs_s=self.costs(number, best, texts),
        )
