"""Adapting a head by variants beside the deployed weights, one for each kind of text: policy `bandit`.

Every query is measured; its text is kept for its kind. An update makes a new variant of the kind's texts, which drafts
for half of them until it is surely better or worse than what drafts for the other half in the same minutes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial

from coppice import failpoints
from coppice.adaptation.records import Demand, QueryRecord, Sample
from coppice.config.settings import Settings
from coppice.messages.adapter import ActionStatus, KindStatus
from coppice.weights.variants import ROUTES, Routes
from coppice.weights.versions import Weights

from .buffers import Drop
from .cpu_share import CpuShare
from .fitting import passes_over
from .kinds import Kinds
from .rollout import Rollout
from .sorting import Sorting

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
