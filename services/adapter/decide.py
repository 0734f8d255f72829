"""Decide what to train, with the arms skip, head-only and full update: two rules, each with a state that is JSON.

`Bandit` is cost-aware and groups texts by the sketches of their prompts. An update makes a *variant* of the head for
one kind of text, which drafts for half of its texts until it is surely better or worse than what drafts for the other
half in the same minutes. `Paper` is SpecBlock's own rule: one variant for all texts, before and after. Pure and
deterministic: no clock, no model, no Redis.
"""

import math
import statistics
from dataclasses import dataclass
from enum import StrEnum
from itertools import zip_longest
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from coppice.adaptation.signals import Demand, QueryRecord
from coppice.adaptation.weights import Route, Routes
from coppice.limits import MAX_KINDS, MAX_VARIANTS, SKETCH
from coppice.speculation.sampling import uniform
from coppice.v1 import adapter_pb2 as pb


class Arm(StrEnum):
    """What to do with the texts of a query."""

    SKIP = "skip"
    HEAD = "head"
    FULL = "full"


UPDATES = (Arm.HEAD, Arm.FULL)


def passes_over(texts: int) -> int:
    """Return how often an update reads so many texts: 192 in all, and none more than four times."""
    return max(1, min(4, 192 // max(1, texts)))


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
    why: str = ""
    version: int = 0


PRIOR_VALUES = {Arm.HEAD: 0.20, Arm.FULL: 0.25}
"""share of tokens/s that an update is first expected to gain for each rejected position a token"""
PROVEN_SHARE = 15 / 16  # of a kind's texts for a variant that pays: the rest goes on being measured against it
YOUNG_SHARE = 0.5  # of a kind's texts that a new variant drafts for: a comparison of equal sides ends soonest
_PRIOR_TEXT_S = {Arm.HEAD: 0.075, Arm.FULL: 0.15}  # seconds assumed of reading a text once, before any was read
_PRIOR_SPREAD = 0.16  # mean squared distance assumed of a kind of few texts
_PRIOR_DRAG = 0.15  # share of its speed that serving is expected to lose while an update trains
_PRIOR_TEXTS = 8  # texts that the assumed distance weighs as many as
_APART = 2.25  # ratio to a kind's mean squared distance from its centre beyond which a text is of another kind
_ALPHA = 0.25  # weight of a new reward in an arm's value
_LEAST_VALUE = 0.125  # of an arm's first value: where a kind of text lasts, it is tried again
_LEAST_GAIN = 0.03  # share by which an update must lengthen drafts on held-out texts to be put to use
_HORIZON = 1000  # queries to come that are expected at most: as many as there were of the kind
_LATEST = 64  # measurements kept of either side
_LEAST = 5  # of either side before anything is decided
_LIMIT = 40  # queries with a variant after which its mean decides
_CERTAINTY = 1.5  # standard errors
_FIRST_TEXTS = 24  # of a kind before its first update
_MOST_NEW = 128  # texts of a kind at most from one update to the next
_MARGIN = 3.0  # an update is to save so many times what it costs: neither is known well


class KindState(BaseModel):
    """All that is known of a kind of text."""

    centre: list[float]
    spread: float = _PRIOR_SPREAD  # mean squared distance from the centre
    queries: int = 0
    last: int = 0  # number of the latest query
    query_s: float = 0.0  # mean seconds of a query
    tau: float = 1.0  # mean accepted length with the deployed weights
    signal: float = 0.0  # mean rejected positions a token (equation 8)
    variant: int = 0  # what drafts for `share` of the texts; 0: the deployed weights
    share: float = 0.0
    other: int = 0  # what drafts for the others
    since: int = 0  # version of the weights that the two measurements begin with
    with_variant: list[float] = []  # tokens/s of queries
    with_other: list[float] = []
    learnt: int = 0  # queries before the last update
    updates: int = 0
    failures: int = 0  # in a row that were no better
    values: dict[Arm, float] = {}  # as BanditState's, of arms that were tried: what the next update is to gain
    arm: Arm = Arm.SKIP  # of the last update
    cost_s: float = 0.0  # seconds of serving that it cost

    @property
    def young(self) -> bool:
        """Whether its variant has to be measured yet."""
        return 0 < self.share < PROVEN_SHARE

    def gain(self) -> tuple[float, float]:
        """Return what share of tokens/s its variant gains over the other one, in the same minutes, and the error."""
        new, old = self.with_variant, self.with_other
        if min(len(new), len(old)) < 2:
            return 0.0, 0.0
        mean = statistics.fmean(old)
        error = math.hypot(statistics.stdev(new) / math.sqrt(len(new)), statistics.stdev(old) / math.sqrt(len(old)))
        return statistics.fmean(new) / mean - 1, error / mean

    def let(self, variant: int, other: int, share: float, since: int) -> None:
        """Let a variant draft for a share of the texts, and the other one for the rest, from version `since` on."""
        self.variant, self.other, self.share = variant, other, share
        if since != self.since:
            self.since, self.with_variant, self.with_other = since, [], []


class BanditState(BaseModel):
    """All kinds, by number from 1, and what holds for all of them."""

    kinds: list[KindState] = []
    queries: int = 0
    step_s: float = 0.0  # mean time of a step while nothing is trained
    drag: float = _PRIOR_DRAG  # share by which steps were longer while something was
    values: dict[Arm, float] = Field(default_factory=lambda: dict(PRIOR_VALUES))
    """share of tokens/s that an arm gains for each rejected position a token, training's cost off: a moving mean"""
    updates: dict[Arm, int] = {}  # that were put to use
    text_s: dict[Arm, float] = Field(default_factory=lambda: dict(_PRIOR_TEXT_S))  # of an update, to read a text once


class Bandit:
    """Tells kinds of text apart, and decides for each of them: policy `bandit`. Texts of a kind are a group."""

    demand: Demand = "texts"  # what drafters are to send
    penalty = 0.0  # weight of the KL to the head as deployed in the loss of an update
    empties = False  # whether an update uses its texts up
    arms: tuple[Arm, ...] = UPDATES

    def __init__(self, state: BanditState | None = None) -> None:
        self.state = state or BanditState()

    def __getitem__(self, number: int) -> KindState:
        """Return kind `number`, from 1."""
        return self.state.kinds[number - 1]

    # --- measuring ---

    def take(self, record: QueryRecord, live: bool, beside: bool) -> tuple[int, bool]:
        """Measure a query. Return the group of its text, 0: none, and whether it begins that group. live: whether the
        live weights drafted all of it. beside: whether something was trained meanwhile.
        """
        state = self.state
        state.queries += 1
        seconds = record.new_tokens / record.tokens_per_s if record.tokens_per_s else 0.0
        if record.steps and seconds:  # steps beside training are longer by what it costs
            step_s = seconds / record.steps
            if not beside:
                state.step_s += (step_s - state.step_s) / min(state.queries, _LATEST)
            elif state.step_s:
                state.drag += (max(0.0, 1 - state.step_s / max(step_s, 1e-9)) - state.drag) / 16
        self._compare(record)
        if not record.sketch:
            return 0, False
        sketch = np.array(record.sketch)
        number = self.routes().choose(sketch.astype(np.float32), record.session)[0] or self._new(sketch)
        kind = self[number]
        distance = float(np.square(np.array(kind.centre) - sketch).sum())
        kind.queries += 1
        kind.last = state.queries
        weight = 1 / min(kind.queries, _HORIZON)
        centre = (1 - weight) * np.array(kind.centre) + weight * sketch
        kind.centre = (centre / max(1e-9, float(np.linalg.norm(centre)))).tolist()
        kind.spread += (distance - kind.spread) / min(kind.queries + _PRIOR_TEXTS, _HORIZON)
        kind.query_s += weight * (seconds - kind.query_s)
        recent = max(weight, 1 / _LATEST)
        # Every step ends at a rejected position, but for drafts that were accepted whole.
        rejected = (record.s or record.steps) / max(1, record.new_tokens)
        kind.signal += recent * (min(1.0, rejected) - kind.signal)
        if not record.variant:
            kind.tau += recent * (record.tau - kind.tau) if kind.tau > 1 else record.tau - kind.tau
        return number, kind.queries == 1

    def _new(self, sketch: NDArray[np.float64]) -> int:
        """Begin a kind; where all places are taken, evict the least recently met kind, if possible without variant."""
        kinds, kind = self.state.kinds, KindState(centre=sketch.tolist())
        if len(kinds) < MAX_KINDS:
            kinds.append(kind)
            return len(kinds)
        without = [number for number in range(1, MAX_KINDS + 1) if not self[number].variant]
        evicted = min(without or range(1, MAX_KINDS + 1), key=lambda number: self[number].last)
        kinds[evicted - 1] = kind
        return evicted

    def _compare(self, record: QueryRecord) -> None:
        """Add a query to the measurements of the variant that it might have had."""
        if not 0 < record.kind <= len(self.state.kinds) or not record.tokens_per_s:
            return
        kind, (first, last) = self[record.kind], record.versions
        if not kind.share or first != last or first < kind.since or record.variant not in (kind.variant, kind.other):
            return
        side = kind.with_variant if record.variant == kind.variant else kind.with_other
        side.append(record.tokens_per_s)
        del side[:-_LATEST]

    # --- judging a variant ---

    def settle(self, record: QueryRecord, live: int, newest: int) -> Verdict | None:
        """Judge the weights in use after `take`; version `live` is in use, `newest` the highest number so far.

        A variant is judged once its gain is surely above or below zero. One that pays drafts for nearly all texts; one
        that loses is replaced by what was before it.
        """
        if not 0 < record.kind <= len(self.state.kinds):
            return None
        kind = self[record.kind]
        (gain, error), new, old = kind.gain(), len(kind.with_variant), len(kind.with_other)
        pays, surely = gain > 0, abs(gain) > _CERTAINTY * error or new >= _LIMIT
        if min(new, old) < _LEAST or not surely or not kind.share or (pays and not kind.young):
            return None
        if kind.young:
            self._reward(kind, gain)
        if pays:
            kind.failures = 0
            kind.let(kind.variant, 0, PROVEN_SHARE, newest + 1 if kind.other else kind.since)
        else:
            kind.failures += 1
            kind.let(kind.other, 0, PROVEN_SHARE if kind.other else 0.0, newest + 1)
        why = f"gain {gain:+.1%} ± {error:.1%}; variant {kind.variant} drafts for {kind.share:.0%}"
        return Verdict("pays" if pays else "loses", f"kind {record.kind}: {why}")

    def _reward(self, kind: KindState, gain: float) -> None:
        """Revise an arm's value (SpecBlock, equation 10) by a gain in tokens/s, what training cost taken off."""
        if kind.arm is Arm.SKIP or not kind.signal:
            return
        reward = gain - kind.cost_s / max(1e-9, kind.query_s * min(kind.queries, _HORIZON))
        value = self.state.values[kind.arm]
        value += _ALPHA * (reward / kind.signal - value)
        self.state.values[kind.arm] = max(value, _LEAST_VALUE * PRIOR_VALUES[kind.arm])

    # --- choosing ---

    def choose(self, group: int, texts: int) -> Arm:
        """Choose what to train on `texts` of a group: the arm that saves most beyond its cost, skip if none does."""
        kind = self[group]
        if kind.young or kind.queries - kind.learnt < min(_MOST_NEW, max(_FIRST_TEXTS, kind.learnt)):
            return Arm.SKIP
        best = self._best(group, texts)
        return best if self.saves(group, best) > _MARGIN * self.costs(group, best, texts) else Arm.SKIP

    def _best(self, number: int, texts: int) -> Arm:
        return max(UPDATES, key=lambda arm: self.saves(number, arm) - _MARGIN * self.costs(number, arm, texts))

    def costs(self, number: int, arm: Arm, texts: int) -> float:
        """Return the seconds of serving that an update would cost; each failure doubles them."""
        update_s = self.state.text_s[arm] * texts * passes_over(texts)
        return update_s * self.state.drag * 2.0 ** min(self[number].failures, 16)

    def saves(self, number: int, arm: Arm) -> float:
        """Return the seconds of serving that an update is expected to save in the queries to come: as many as there
        were. The gain is the arm's value times the signal (SpecBlock, equation 9).
        """
        kind = self[number]
        gain = kind.values.get(arm, self.state.values[arm]) * kind.signal
        return min(kind.queries, _HORIZON) * kind.query_s * gain / (1 + gain)

    def variants(self, group: int) -> tuple[int, int]:
        """Return the variant that an update begins with, and the one that it makes: one that no kind has, or that of
        the least recently met kind, which loses it; 0: there is none.
        """
        kind = self[group]
        users = {variant: user for user in self.state.kinds for variant in (user.variant, user.other) if variant}
        free = [variant for variant in range(1, MAX_VARIANTS + 1) if variant not in users]
        others = [user for user in users.values() if user is not kind]
        if free or not others:
            return kind.variant, free[0] if free else 0
        least = min(others, key=lambda user: user.last)
        taken = least.variant or least.other
        least.let(0, 0, 0.0, least.since)
        return kind.variant, taken

    def trained(self, group: int, arm: Arm, result: Trained | None, variant: int, version: int) -> bool:
        """Note an update, None: it failed. Return whether it comes into use, as a young variant, with `version`. The
        arm's next update of the kind is expected to gain a quarter of what this one would.
        """
        kind, state = self[group], self.state
        gain = result.gain if result else 0.0
        kind.learnt = kind.queries
        kind.values[arm] = max(0.0, gain) / 4 / max(kind.signal, 1e-9)
        if result:
            state.text_s[arm] = result.seconds / max(1, result.texts * passes_over(result.texts))
            kind.arm, kind.cost_s = arm, result.seconds * state.drag
        if gain < _LEAST_GAIN:
            kind.failures += 1
            if result:
                self._reward(kind, 0.0)
            return False
        kind.updates += 1
        state.updates[arm] = state.updates.get(arm, 0) + 1
        kind.let(variant, kind.variant, YOUNG_SHARE, version)
        return True

    # --- routes and a report ---

    def follow(self, routes: Routes, version: int) -> None:
        """Take up the routes of earlier weights, which are in use again as `version`."""
        for kind, route in zip_longest(self.state.kinds, routes[: len(self.state.kinds)]):
            kind.let(*((route.variant, route.other, route.share) if route else (0, 0, 0.0)), version)

    def routes(self) -> Routes:
        kinds = self.state.kinds
        return Routes(Route(each.centre, _APART * each.spread, each.variant, each.share, each.other) for each in kinds)

    def kinds(self, texts: dict[int, int]) -> list[pb.KindStatus]:
        """Report what is known of each kind, with so many texts by group."""
        reports = []
        for number, kind in enumerate(self.state.kinds, 1):
            count = texts.get(number, 0)
            best, (gain, error) = self._best(number, count), kind.gain()
            known = kind.model_dump(include={"queries", "tau", "variant", "other", "share", "updates"})
            known |= {"saves_s": self.saves(number, best), "costs_s": self.costs(number, best, count)}
            measured = len(kind.with_variant)
            reports.append(pb.KindStatus(kind=number, texts=count, gain=gain, error=error, measured=measured, **known))
        return reports


# --- the paper's rule ---

ARMS = {"paper": UPDATES, "head-only": (Arm.HEAD,), "full-only": (Arm.FULL,), "always": (Arm.FULL,)}
GROUPS = {Arm.SKIP: 0, Arm.HEAD: 1, Arm.FULL: 2}  # the buffer of each arm
EPSILON = (0.30, 0.10)  # chance of a random arm at the first and the last event of the cold start, linear between
ALPHA = 0.10  # weight of a new reward in a value
COLD_EVENTS, WARMUP, BLOCKED, LEAST_S, WINDOWS = 8, 10, 2, 5.0, 3
_EXPLORE, _ARM = 0, 1  # streams of chance
_EVERYWHERE = 4.0  # a squared distance that no two sketches are apart


class PaperState(BaseModel):
    """What Paper knows."""

    queries: int = 0
    last_event: int = 0  # number of the query it came after
    blocked: int = 0
    s: float = 0.0  # of the latest query
    trigger_s: float = 0.0  # of the query that filled the buffer
    variant: int = 0
    values: dict[Arm, float] = {}  # tokens/s that an arm gains for each unit of s
    updates: dict[Arm, int] = {}
    rates: list[float] = []  # tokens/s of the latest queries on these weights
    arm: Arm = Arm.SKIP  # of the event that is measured
    before: list[float] = []  # rates before it
    taus: list[float] = []  # of the window that is filling
    windows: list[tuple[float, int]] = []  # mean tau and version of the last ones that closed


class Paper:
    """SpecBlock's rule (section 3.4, appendix A.3, algorithm 1): one variant of the head drafts for all texts.

    Policy `paper` has the actions skip, head-only and full; `head-only` and `full-only` lack one of them, and `always`
    is online speculative decoding. For its methods see Bandit.
    """

    demand: Demand = "misses"
    penalty, empties = 0.01, True

    def __init__(self, policy: str, interval: int, state: PaperState | None = None) -> None:
        """`interval`: N, queries of a measurement and of a window, and texts of an update."""
        self.state, self.arms, self._interval = state or PaperState(), ARMS[policy], interval
        self._always = policy == "always"

    def take(self, record: QueryRecord, live: bool, beside: bool) -> tuple[int, bool]:
        """Decide what a query's text is for (lines 3 to 8), and measure the query (lines 19 to 21)."""
        state = self.state
        state.queries += 1
        state.s = record.s
        arm = self._decide(record.s)
        state.taus.append(record.tau)
        if live:
            state.rates = [*state.rates, record.tokens_per_s][-self._interval :]
        if state.arm is not Arm.SKIP and len(state.rates) == self._interval:
            if state.trigger_s >= LEAST_S and state.before:  # equation 10; an arm's first observation is its value
                gain = (statistics.fmean(state.rates) - statistics.fmean(state.before)) / state.trigger_s
                state.values[state.arm] = (1 - ALPHA) * state.values.get(state.arm, gain) + ALPHA * gain
            state.arm = Arm.SKIP
        return GROUPS[arm], False

    def _decide(self, s: float) -> Arm:
        state = self.state
        blocked = state.blocked > 0 or state.queries <= min(WARMUP, self._interval)
        state.blocked = max(0, state.blocked - 1)
        if not s or self._always or blocked:
            return Arm.FULL if s and self._always else Arm.SKIP
        (first, last), events = EPSILON, sum(state.updates.values())
        epsilon = first + (last - first) * events / (COLD_EVENTS - 1)
        if events < COLD_EVENTS and uniform(0, state.last_event, _EXPLORE) < epsilon:
            return self.arms[int(uniform(0, state.last_event, _ARM) * len(self.arms))]
        best = max(self.arms, key=lambda arm: state.values.get(arm, math.inf))
        return best if events < COLD_EVENTS or s * state.values.get(best, math.inf) > 0 else Arm.SKIP

    def settle(self, record: QueryRecord, live: int, newest: int) -> Verdict | None:
        """Go back when tau has fallen over three windows (lines 22 to 24); else the window's version is a good one."""
        state = self.state
        if len(state.taus) < self._interval:
            return None
        state.windows = [*state.windows, (statistics.fmean(state.taus), live)][-WINDOWS:]
        state.taus = []
        taus = [tau for tau, _ in state.windows]
        if len(taus) == WINDOWS and taus[0] > taus[1] > taus[2]:
            if state.windows[0][1] != live:
                return Verdict("revert", f"tau fell: {', '.join(f'{tau:.2f}' for tau in taus)}", state.windows[0][1])
            self.follow(self.routes(), live)  # the traffic has changed: measurements are void, the weights are not
        return Verdict("good", version=live)

    def choose(self, group: int, texts: int) -> Arm:
        """Choose the arm of a buffer that is full (lines 12 and 13), while no event is measured."""
        state = self.state
        measured = state.arm is Arm.SKIP and len(state.rates) >= min(WARMUP, self._interval)
        on_time = texts > 0 and state.queries % self._interval == 0
        if not (on_time if self._always else texts >= self._interval and measured):
            return Arm.SKIP
        if state.arm is Arm.SKIP:
            state.trigger_s = state.s
        return list(Arm)[group]

    def variants(self, group: int) -> tuple[int, int]:
        """Train the one variant further."""
        return self.state.variant, 1

    def trained(self, group: int, arm: Arm, result: Trained | None, variant: int, version: int) -> bool:
        """Put every update to use, and begin an event (lines 16 and 17)."""
        if result is None:
            return False
        state = self.state
        state.last_event, state.blocked, state.variant = state.queries, BLOCKED, variant
        state.updates[arm] = state.updates.get(arm, 0) + 1
        state.arm, state.before, state.rates = arm, state.rates, []
        return True

    def follow(self, routes: Routes, version: int) -> None:
        """Reset the values (line 23): earlier weights are in use again."""
        state, first = self.state, next(iter(routes), None)
        state.values, state.rates, state.taus, state.windows, state.arm = {}, [], [], [], Arm.SKIP
        state.variant, state.blocked = first.variant if first else 0, BLOCKED

    def routes(self) -> Routes:
        """Let the variant draft for all texts."""
        return Routes([Route([0.0] * SKETCH, _EVERYWHERE, self.state.variant, 1.0)] if self.state.variant else [])
