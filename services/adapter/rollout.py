"""Which weights the drafters of a head use: updates go out, first to a canary, and earlier weights are put back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import structlog

from coppice import failpoints
from coppice.adaptation.bandit import Bandit, Trigger
from coppice.adaptation.records import Kind, Sample
from coppice.config.settings import Settings
from coppice.messages.adapter import Change
from coppice.telemetry import AdapterMetrics
from coppice.weights.versions import Weights

from .atomic import BadFile
from .buffers import Buffers
from .canary import Canary
from .drift import Drift
from .learner import Interrupted
from .replicas import Replicas
from .sorting import KINDS
from .state import State
from .training_copy import TrainingCopy

log = structlog.get_logger()

OnThread = Callable[..., Awaitable[Any]]
"""Runs a function on the thread that owns torch"""


class Rollout:
    """Changes a head's weights, for one caller at a time, and tells the bandit and the state about it."""

    def __init__(
        self,
        name: str,
        training: TrainingCopy,
        replicas: Replicas,
        settings: Settings,
        state: State,
        learners: tuple[Bandit, Drift, Buffers],
        on_thread: OnThread,
        metrics: AdapterMetrics,
    ) -> None:
        """`learners` are told when weights change, as what they know is about some weights."""
        self.training, self.replicas = training, replicas
        self.doing = "idle"
        """idle, training, syncing or canary"""
        self.canary: Canary | None = None
        self._name, self._settings, self._state = name, settings, state
        self._bandit, self._drift, self._buffers = learners
        self._on_thread, self._metrics = on_thread, metrics

    async def start(self) -> None:
        """Take up the weights that were live, and give them to every replica that answers."""
        state = self._state
        live = await self._on_thread(self.training.open, state.live, state.good)
        await self.replicas.look()
        if live != state.live:
            state.went_back(live)
            self._bandit.state, self._drift.state = state.bandit, state.drift
        state.newest = max([state.newest, live, self.replicas.newest, *self.training.versions.numbers()])
        self._note_live(self.training.live)
        self.replicas.want(self.training.live)
        await self.keep_up()
        log.info("adapting", head=self._name, version=live, replicas=len(self.replicas))

    async def keep_up(self) -> None:
        """Bring replicas that came, restarted or were pushed something else to the weights they are to use.

        A replica refuses versions up to its own: the weights that it is to use then get a higher number. It may run
        while an update is trained or a canary is out.
        """
        state, replicas = self._state, self.replicas
        await replicas.bring()
        state.newest = max(state.newest, replicas.newest)
        live, canary, before = self.training.live, self.canary, state.newest
        if replicas.ahead(live):
            renumbered = await asyncio.to_thread(self.training.renumber, state.next_number())
            if self.training.live is live:  # else they have been replaced meanwhile
                self.training.live = renumbered
                self._note_live(renumbered)
                self._bandit.state.version = state.live
                replicas.renumber(live, renumbered)
        if canary is not None and self.canary is canary and replicas.ahead(canary.weights):
            tried, canary.weights = canary.weights, canary.weights.changed({}, state.next_number())
            state.know(canary.weights)
            replicas.renumber(tried, canary.weights)
        if state.newest > before:
            await replicas.bring()
        for weights, number in replicas.in_use():
            state.know(weights, number)

    async def update(self, trigger: Trigger, kind: Kind, samples: list[Sample]) -> None:
        """Train on samples (algorithm 1, lines 14 to 16); the result goes to a canary where there are replicas."""
        self.doing = "training"
        number, anchored = self._state.next_number(), self._settings.bandit.policy != "always"
        try:
            update, weights = await self._on_thread(self.training.train, kind, samples, number, anchored)
        except FloatingPointError as error:
            self._failed("not finite", str(error))
            return
        except Interrupted:
            raise
        except Exception as error:
            log.exception("an update failed", head=self._name)
            self._failed("error", str(error)[:200])
            return
        failpoints.hit("adapter.step")
        self._metrics.train_seconds.labels(self._name, kind).observe(update.seconds)
        if weights.hash == self.training.live.hash:
            self._failed("changed nothing", f"{update.samples} samples")
            return
        self._metrics.updates.labels(self._name, kind).inc()
        if len(self.replicas) > 1 and self._settings.adapter.canary:
            self.canary = Canary(weights, trigger, update.seconds)
            self.replicas.want(weights, first_only=True)
            await self.replicas.bring()
            self._state.know(weights)
            return
        why = f"loss {update.loss_before:.2f} to {update.loss_after:.2f}, {update.samples} samples"
        await self._promote(weights, trigger, update.seconds, why)

    async def settle(self, canary: Canary, good: bool) -> None:
        """End a canary: its weights go to all replicas, or the live ones back to it."""
        if self.canary is not canary:  # taken back meanwhile
            return
        self._metrics.canaries.labels(self._name, "promoted" if good else "refused").inc()
        self.canary = None
        if good:
            await self._promote(
                canary.weights, canary.trigger, canary.train_s, f"a canary of {len(canary.new)} queries"
            )
            return
        weights = await self._on_thread(self.training.restore, None, self._state.next_number())
        await self._go_live(weights, layers=KINDS[canary.trigger.action] == "full")
        rates = ([record.tokens_per_s for record in records] for records in (canary.old, canary.new))
        self._bandit.refused(canary.trigger, *rates)
        self._changed("refused", weights.version, canary.train_s, 0.0, f"{canary.weights.version} was no better")

    async def revert(self, version: int | None, reason: str) -> None:
        """Go back to good weights. When these are live already the traffic has changed: only the values are void."""
        back_to = self._state.good if version is None else version
        if back_to == self._state.live:
            self._bandit.reverted(self._state.live)
            self._drift.reset()
            return
        try:
            await self.put_back(back_to, "revert", reason)
        except BadFile:
            await self.put_back(0, "revert", reason)
        self._metrics.reverts.labels(self._name, reason).inc()
        self._state.reverts += 1

    async def put_back(self, back_to: int, what: str, why: str) -> int:
        """Give every replica an earlier version's weights under a new number, which is returned. Raises BadFile."""
        self.doing = "syncing"
        weights: Weights = await self._on_thread(self.training.restore, back_to, self._state.next_number())
        self.canary = None
        sync_s = await self._go_live(weights, layers=True)
        self._bandit.reverted(weights.version)
        self._drift.reset()
        self._changed(what, weights.version, 0.0, sync_s, f"{why}; as version {back_to}")
        self.mark_good(weights.version)
        return weights.version

    def mark_good(self, version: int) -> None:
        """Remember a version as the one to go back to, if it is on disk."""
        if version and version not in self.training.versions.numbers():
            log.warning("a good version is not on disk", head=self._name, version=version)
            return
        self._state.good = self.training.versions.good = version

    async def _promote(self, weights: Weights, trigger: Trigger, train_s: float, why: str) -> None:
        kind = KINDS[trigger.action]
        sync_s = await self._go_live(weights, layers=kind == "full")
        self._bandit.synced(trigger, weights.version)
        self._changed(kind, weights.version, train_s, sync_s, why)

    async def _go_live(self, weights: Weights, layers: bool) -> float:
        """Give weights to every replica; returns how long that took, seconds.

        `layers` says whether more than the output layer changed.
        """
        self.doing, began = "syncing", time.monotonic()
        self.training.live = weights
        self._note_live(weights)
        if layers:
            self._buffers.layers_changed(weights.version)
        self.replicas.want(weights)
        await self.replicas.bring()
        seconds = time.monotonic() - began
        self._metrics.sync_seconds.labels(self._name).observe(seconds)
        return seconds

    def _note_live(self, weights: Weights) -> None:
        self._state.live = weights.version
        self._state.know(weights)
        self._metrics.version.labels(self._name).set(weights.version)

    def _failed(self, reason: str, why: str) -> None:
        log.warning("an update is thrown away", head=self._name, reason=reason, why=why)
        self._metrics.failed.labels(self._name, reason).inc()

    def _changed(self, what: str, version: int, train_s: float, sync_s: float, why: str) -> None:
        self._state.change(Change(self._state.queries, what, version, train_s, sync_s, why))
        for action, value in self._bandit.state.values.items():
            self._metrics.value.labels(self._name, action.value).set(value.value)
        log.info("weights changed", head=self._name, what=what, version=version, why=why)
