"""Adapting a head by variants beside the deployed weights, one for each kind of text: policy `bandit`.

Every query is measured; its text is kept for its kind. An update makes a new variant of the kind's texts, which drafts
for half of them until it is surely better or worse than what drafts for the other half in the same minutes.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from coppice import failpoints
from coppice.adaptation.records import Demand, QueryRecord, Sample
from coppice.config.settings import Settings
from coppice.limits import MAX_KINDS, MAX_VARIANTS
from coppice.weights.variants import ROUTES, Route, Routes
from coppice.weights.versions import Weights
from coppice.wire.adapter import ActionStatus, KindStatus

from .buffers import Drop
from .fitting import passes_over
from .rollout import Rollout
from .sorting import Sorting
from .state import PROVEN_SHARE, Gain, KindsState, KindState

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


_LONGEST_S = 1.0  # between two rests; what is longer was no computing: the process was held still


class CpuShare:
    """Sleeps often enough that a thread computes for no more than a share of the time. Make it on that thread."""

    def __init__(self, share: float) -> None:
        self.seconds = 0.0
        """passed since it was made, as far as the process ran"""
        self._share = share
        self._last, self._began = time.monotonic(), time.thread_time()

    def rest(self) -> None:
        """Sleep until the share is kept."""
        self._count()
        computed = time.thread_time() - self._began
        time.sleep(min(_LONGEST_S, max(0.0, computed / self._share - self.seconds)))
        self._count()

    def _count(self) -> None:
        now = time.monotonic()
        self.seconds += min(now - self._last, _LONGEST_S)
        self._last = now


LEAST_GAIN = 0.03
"""share by which an update must lengthen drafts on held-out texts to be put to use"""
_KEPT = 128  # texts of a kind to learn from, the latest ones
_HELD_OUT = 8  # of a kind, the latest ones
_HELD_OUT_EVERY = 6  # each such text of a kind is held out
_FIRST_TEXT_S = 0.15  # seconds assumed of reading a text once, before any was read


class Branching:
    """Learns variants of one head."""

    demand: Demand = ""
    """what is wanted now"""

    def __init__(
        self, rollout: Rollout, settings: Settings, plan: Callable[[Callable[[], Awaitable[None]]], None], drop: Drop
    ) -> None:
        self._rollout, self._plan, self._drop = rollout, plan, drop
        self._share = settings.adapter.cpu_share
        self._kinds = Kinds(rollout.state.kinds, settings.adapter.variants)
        self._sorting: Sorting[int] = Sorting(self._keep, drop)
        self._texts: dict[int, deque[Sample]] = {}
        self._held_out: dict[int, deque[Sample]] = {}
        self._taken = 0
        self._text_s = _FIRST_TEXT_S

    def take_sample(self, sample: Sample) -> None:
        """Keep a sample until its query's end says what kind of text it is."""
        self._sorting.take(sample)

    def _keep(self, kind: int, sample: Sample) -> None:
        """Keep a text for its kind, some of them to measure by."""
        if not kind or sample.kind != "full":
            self._drop(1, "unfit")
            return
        self._taken += 1
        held_out = self._taken % _HELD_OUT_EVERY == 0
        kept, most = (self._held_out, _HELD_OUT) if held_out else (self._texts, _KEPT)
        kept.setdefault(kind, deque(maxlen=most)).append(sample)

    def take_query(self, record: QueryRecord, version: int | None, busy: bool) -> str:
        """Measure a query, and act on what it says of its kind; busy: work is queued or under way.

        Returns what its text is for: "learn", or "skip".
        """
        kinds, state = self._kinds, self._rollout.state
        number = kinds.take(record, beside=self._rollout.doing == "training")
        if number and kinds[number].queries == 1:  # a new kind, in the place of another one perhaps
            self._texts.pop(number, None)
            self._held_out.pop(number, None)
        self._sorting.claim(record.session, number)
        if record.kind in kinds.numbers():
            verdict = kinds.settle(record.kind, state.newest)
            if verdict != "undecided":
                self._plan(partial(self._reroute, record.kind, verdict))
                busy = True
        if number and not (busy or state.paused) and self._ready(number) and kinds.due(number, self._cost_s(number)):
            self._plan(partial(self._learn, number))
        self.want_samples()
        return "learn" if number and not state.paused else "skip"

    def want_samples(self, query: object = None) -> None:
        """Ask for texts unless paused."""
        self.demand = "" if self._rollout.state.paused else "text"
        for number, texts in self._texts.items():
            self._rollout.metrics.waiting.labels(self._rollout.name, f"kind {number}").set(len(texts))

    def _ready(self, number: int) -> bool:
        """Whether there are texts of a kind to learn from and to measure by."""
        return len(self._texts.get(number, ())) >= _HELD_OUT and len(self._held_out.get(number, ())) > 1

    def _cost_s(self, number: int) -> float:
        """Return the seconds that an update of a kind would take."""
        texts = len(self._texts.get(number, ()))
        return self._text_s * texts * passes_over(texts)

    # --- work ---

    async def _learn(self, number: int) -> None:
        """Make a variant of a kind's texts, and put it to use if it is better on those held out."""
        rollout, kinds = self._rollout, self._kinds
        texts, held_out = list(self._texts[number]), list(self._held_out[number])
        begin, variant = kinds[number].variant, kinds.free_variant(number)
        if not variant:
            return
        rollout.doing = "training"
        pace = await rollout.on_thread(CpuShare, self._share)
        trained = await rollout.train(rollout.training.learn, variant, begin, texts, held_out, pace.rest)
        if trained is None:
            kinds.trained(number, 0.0, LEAST_GAIN)
            return
        fit, tensors = trained
        failpoints.hit("adapter.step")
        self._text_s = pace.seconds / (fit.texts * passes_over(fit.texts))
        rollout.metrics.train_seconds.labels(rollout.name, "variant").observe(pace.seconds)
        gain, why = fit.after / fit.before - 1, f"drafts of {fit.before:.2f} to {fit.after:.2f}, {fit.texts} texts"
        if not kinds.trained(number, gain, LEAST_GAIN):
            rollout.failed("no better", f"kind {number}, {why}")
            return
        rollout.metrics.updates.labels(rollout.name, "variant").inc()
        kinds.deploy(number, variant, rollout.state.newest + 1)
        await rollout.add(
            tensors | {ROUTES: kinds.routes().tensor()},
            "variant",
            pace.seconds,
            f"variant {variant} of kind {number}: {why}",
        )

    async def _reroute(self, number: int, verdict: str) -> None:
        """Tell drafters what drafts for which kinds now."""
        rollout, kind = self._rollout, self._kinds[number]
        if verdict == "loses":
            rollout.metrics.reverts.labels(rollout.name, "no better").inc()
            rollout.state.reverts += 1
        why = f"variant {kind.variant} drafts for {kind.share:.0%} of kind {number}"
        await rollout.add({ROUTES: self._kinds.routes().tensor()}, verdict, 0.0, why)
        rollout.mark_good(rollout.state.live)

    # --- what others changed ---

    def renumbered(self) -> None:
        """Versions only rise: measurements of a later one are of the same weights."""

    def taken_back(self, weights: Weights) -> None:
        """Earlier weights are live: their routes are what drafters choose by."""
        self._kinds.follow(Routes.of(weights.tensors), weights.version)

    # --- what is known ---

    @property
    def events(self) -> int:
        """Updates that were put to use."""
        return sum(self._kinds[number].updates for number in self._kinds.numbers())

    def actions(self) -> list[ActionStatus]:
        """Report none: what is known is of kinds."""
        return []

    def kinds(self) -> list[KindStatus]:
        """Report what is known of each kind of text."""
        return [self._status(number) for number in self._kinds.numbers()]

    def _status(self, number: int) -> KindStatus:
        kind, gain = self._kinds[number], self._kinds.gain(number)
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
            texts=len(self._texts.get(number, ())),
            updates=kind.updates,
            saves_s=self._kinds.saves(number),
            costs_s=self._kinds.costs(number, self._cost_s(number)),
        )
