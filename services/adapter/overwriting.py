"""Adapting a head by overwriting its weights (SpecBlock, algorithm 1): every policy but `bandit`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import structlog

from coppice import failpoints
from coppice.adaptation.records import Demand, Kind, QueryRecord, Sample
from coppice.config.settings import Settings
from coppice.weights.versions import Weights
from coppice.wire.adapter import ActionStatus, KindStatus

from .atomic import BadFile
from .bandit import Action, Bandit, Query, Trigger
from .buffers import KINDS, Buffers, Drop
from .canary import Canary
from .drift import Drift
from .rollout import Rollout
from .sorting import Sorting

log = structlog.get_logger()

Plan = Callable[[Callable[[], Awaitable[None]]], None]
"""Queues a piece of work; one is done at a time"""


class Overwriting:
    """Decides for every query what its samples are for, and trains and measures updates of the live weights."""

    demand: Demand = "misses"
    """what is wanted now"""

    def __init__(self, rollout: Rollout, settings: Settings, plan: Plan, drop: Drop) -> None:
        state = rollout.state.overwriting
        self._rollout, self._settings, self._plan = rollout, settings, plan
        self._bandit, self._drift = Bandit(settings.bandit, state.bandit), Drift(settings.drift, state.drift)
        capacities: dict[Kind, int] = {"head": settings.adapter.head_samples, "full": settings.adapter.full_samples}
        self.buffers = Buffers(capacities, rollout.training.draft_ids, drop)
        self._sorting: Sorting[Action] = Sorting(self.buffers.keep, drop)

    def take_sample(self, sample: Sample) -> None:
        """Keep a sample until its query's end says what it is for."""
        self._sorting.take(sample)

    def take_query(self, record: QueryRecord, version: int | None, busy: bool) -> str:
        """Decide what a query's samples are for, measure it, and look for drift (lines 2 to 24).

        busy: work is queued or under way. Returns the action.
        """
        state, rollout = self._rollout.state, self._rollout
        query = Query(s=record.s, tokens_per_s=record.tokens_per_s, version=version, load=max(record.load, 1e-3))
        action = Action.SKIP if state.paused else self._bandit.decide(query)
        if not state.paused:
            rollout.metrics.actions.labels(rollout.name, action.value).inc()
        self._sorting.claim(record.session, action)
        if rollout.canary is not None:
            self._judge(rollout.canary, record, version, busy)
        elif not self._watch_drift(record, version) and action is not Action.SKIP and not busy:
            self._train_if_due(action, query)
        self.want_samples(query)
        return action.value

    def _judge(self, canary: Canary, record: QueryRecord, version: int | None, busy: bool) -> None:
        canary.observe(record, version, self._rollout.state.live)
        verdict = canary.verdict(self._settings.drift, self._bandit.patience)
        if verdict != "undecided" and not busy:
            self._plan(partial(self._settle, canary, verdict == "promote"))

    def _watch_drift(self, record: QueryRecord, version: int | None) -> bool:
        """Go back when tau has fallen (lines 22 to 24); a window without an alarm makes its version the good one.

        Returns whether it has fallen.
        """
        alarm, drift = self._drift.observe(record.tau, version), self._drift.state
        if alarm is not None:
            log.warning(
                "accepted length has fallen", head=self._rollout.name, why=alarm.reason, good=alarm.good_version
            )
            self._plan(partial(self._revert, alarm.good_version, alarm.reason))
        elif not drift.taus and drift.windows:
            good = drift.windows[-1].version
            if good is not None and good != self._rollout.state.good:
                self._rollout.mark_good(good)
        return alarm is not None

    def _train_if_due(self, action: Action, query: Query) -> None:
        """Begin an update (lines 12 to 16): one at a time, and none while a canary is out."""
        kind = KINDS[action]
        trigger = self._bandit.due(action, query, self.buffers.size(kind), self.buffers.capacities[kind])
        if trigger is not None:
            self._plan(partial(self._update, trigger, kind, self.buffers.take(kind)))

    def want_samples(self, query: Query | None = None) -> None:
        """Ask for the samples that the next query would be used for, were it like this one."""
        rollout = self._rollout
        expected = Action.SKIP if rollout.state.paused else self._bandit.expected(query)
        self.demand = "misses" if expected is Action.SKIP else KINDS[expected]
        for kind in self.buffers.capacities:
            rollout.metrics.waiting.labels(rollout.name, kind).set(self.buffers.size(kind))

    # --- work ---

    async def _update(self, trigger: Trigger, kind: Kind, samples: list[Sample]) -> None:
        """Train on samples (lines 14 to 16); the result goes to a canary where there are replicas."""
        rollout = self._rollout
        number, anchored = rollout.state.next_number(), self._settings.bandit.policy != "always"
        trained = await rollout.train(rollout.training.train, kind, samples, number, anchored)
        if trained is None:
            return
        update, weights = trained
        failpoints.hit("adapter.step")
        rollout.metrics.train_seconds.labels(rollout.name, kind).observe(update.seconds)
        if weights.hash == rollout.training.live.hash:
            rollout.failed("changed nothing", f"{update.samples} samples")
            return
        rollout.metrics.updates.labels(rollout.name, kind).inc()
        if len(rollout.replicas) > 1 and self._settings.adapter.canary:
            await rollout.try_out(Canary(weights, trigger, update.seconds))
            return
        why = f"loss {update.loss_before:.2f} to {update.loss_after:.2f}, {update.samples} samples"
        await self._promote(weights, trigger, update.seconds, why)

    async def _settle(self, canary: Canary, good: bool) -> None:
        """End a canary: its weights go to all replicas, or the live ones back to it."""
        rollout, trigger = self._rollout, canary.trigger
        if rollout.canary is not canary:  # taken back meanwhile
            return
        rollout.metrics.canaries.labels(rollout.name, "promoted" if good else "refused").inc()
        rollout.canary = None
        if good:
            await self._promote(canary.weights, trigger, canary.train_s, f"a canary of {len(canary.new)} queries")
            return
        why = f"{canary.weights.version} was no better"
        version = await rollout.put_back(None, "refused", why, canary.train_s)
        self._layers_changed(trigger, version)
        rates = ([record.tokens_per_s for record in records] for records in (canary.old, canary.new))
        self._bandit.refused(trigger, *rates)

    async def _revert(self, version: int | None, reason: str) -> None:
        """Go back to good weights. When these are live already the traffic has changed: only the values are void."""
        rollout = self._rollout
        back_to = rollout.state.good if version is None else version
        if back_to == rollout.state.live:
            self._void(back_to)
            return
        try:
            await rollout.put_back(back_to, "revert", reason)
        except BadFile:
            await rollout.put_back(0, "revert", reason)
        rollout.metrics.reverts.labels(rollout.name, reason).inc()
        rollout.state.reverts += 1

    async def _promote(self, weights: Weights, trigger: Trigger, train_s: float, why: str) -> None:
        rollout = self._rollout
        await rollout.release(weights, KINDS[trigger.action], train_s, why)
        self._layers_changed(trigger, weights.version)
        self._bandit.synced(trigger, weights.version)
        for action, value in self._bandit.state.values.items():
            rollout.metrics.value.labels(rollout.name, action.value).set(value.value)

    def _layers_changed(self, trigger: Trigger, version: int) -> None:
        if KINDS[trigger.action] == "full":
            self.buffers.layers_changed(version)

    # --- what others changed ---

    def renumbered(self) -> None:
        """The live weights have another number."""
        self._bandit.state.version = self._rollout.state.live

    def taken_back(self, weights: Weights) -> None:
        """Earlier weights are live: what was measured of others is void."""
        self.buffers.layers_changed(weights.version)
        self._void(weights.version)

    def _void(self, version: int) -> None:
        self._bandit.reverted(version)
        self._drift.reset()

    # --- what is known ---

    @property
    def events(self) -> int:
        """Updates that were put to use or refused."""
        return self._bandit.state.events

    def actions(self) -> list[ActionStatus]:
        """Report what is known of each action."""
        bandit, actions = self._bandit.state, []
        for kind, capacity in self.buffers.capacities.items():
            action = Action(kind)
            known = bandit.values.get(action)
            value, error = (known.value, known.error) if known else (None, 0.0)
            waiting = self.buffers.size(kind)
            actions.append(ActionStatus(kind, value, error, bandit.updates.get(action, 0), waiting, capacity))
        return actions

    def kinds(self) -> list[KindStatus]:
        """Report none: all texts are alike to it."""
        return []
