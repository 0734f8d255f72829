"""One head's loop: records in, decisions, updates, pushes, and what is taken back (SpecBlock, algorithm 1)."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import structlog

from coppice import failpoints
from coppice.adaptation.bandit import Action, Bandit, Query, Trigger
from coppice.adaptation.records import Demand, Kind, QueryRecord, Sample
from coppice.config.settings import Settings
from coppice.errors import InvalidField, StaleFence
from coppice.messages.adapter import STANDING_BY, ActionStatus, Change, HeadStatus, QueryPoint, VersionStatus
from coppice.telemetry import AdapterMetrics
from coppice.weights.versions import Weights
from services.adapter.buffers import Buffers
from services.adapter.drift import Drift, canary_verdict
from services.adapter.replicas import Replicas
from services.adapter.sorting import KINDS, Desk
from services.adapter.state import Canary, Memory
from services.adapter.training_copy import Copies
from services.adapter.versions import BadVersion

log = structlog.get_logger()

T = TypeVar("T")
OnThread = Callable[..., Awaitable[Any]]
"""Runs a function on the thread that owns torch"""

_SAVE_S = 5.0


class HeadLoop:
    """Adapts one head. `take_query` and `take_sample` decide; `run` trains and pushes, one thing at a time."""

    def __init__(
        self,
        name: str,
        copies: Copies,
        replicas: Replicas,
        settings: Settings,
        folder: Path,
        on_thread: OnThread,
        metrics: AdapterMetrics,
        active: Callable[[], bool],
    ) -> None:
        """Goes on from what `folder` remembers of an earlier run. While not `active` it begins and saves nothing."""
        self.name, self.vocab_size = name, copies.vocab_size
        self._copies, self._replicas, self._settings, self._on_thread = copies, replicas, settings, on_thread
        self._metrics, self.active = metrics, active
        self.memory = Memory.load(folder)
        self._bandit = Bandit(settings.bandit, self.memory.bandit)
        self._drift = Drift(settings.drift, self.memory.drift)
        self._buffers = Buffers({"head": settings.adapter.head_samples, "full": settings.adapter.full_samples})
        self._desk = Desk(name, self._buffers, copies.draft_ids, metrics)
        self._work: deque[Callable[[], Awaitable[None]]] = deque()
        self._wake = asyncio.Event()
        self._doing = "idle"
        self._canary_weights = copies.live
        self._saved_at = 0.0
        self._shown: set[int] = set()  # versions that a metric tells of
        self.demand: Demand = ""
        """which samples are wanted now"""

    async def start(self) -> None:
        """Take up the weights that were live, and let every replica that answers have them."""
        live = await self._on_thread(self._copies.open, self.memory.live)
        await self._replicas.look()
        if live != self.memory.live:
            self.memory.went_back(live)
            self._bandit.state, self._drift.state = self.memory.bandit, self.memory.drift
        self.memory.newest = max([self.memory.newest, live, self._replicas.newest, *self._copies.versions.numbers()])
        self._note_live(self._copies.live)
        self._replicas.want(self._copies.live)
        await self._bring()
        self._want_samples(None)
        log.info("adapting", head=self.name, version=live, replicas=len(self._replicas))

    async def run(self) -> None:
        """Train, push and look after replicas for ever."""
        while True:
            try:
                while self._work and self.active():
                    await self._work.popleft()()
                    self._save()
                if self.active():
                    await self._bring()
                self._save(every_s=_SAVE_S)
            except Exception:
                log.exception("the loop goes on without what failed", head=self.name)
            self._doing = "canary" if self.memory.canary else "idle"
            self._wake.clear()
            if not self._work or not self.active():
                try:
                    async with asyncio.timeout(self._settings.adapter.poll_s):
                        await self._wake.wait()
                except TimeoutError:
                    continue

    async def _bring(self) -> None:
        """See that replicas use what they are to. One with a higher number gets the same weights under a new one."""
        await self._replicas.bring()
        self.memory.newest = max(self.memory.newest, self._replicas.newest)
        if not self.memory.canary and self._replicas.ahead > self._copies.live.version:
            await self._go_live(await self._on_thread(self._copies.again, self.memory.next_number()), layers=False)
            self._bandit.state.version = self.memory.live
        if not self.memory.canary:
            for number in self._replicas.numbers():
                self.memory.know(self._copies.live, number)

    async def stop(self) -> None:
        """Give up an update under way, and remember everything."""
        self._copies.stop()
        self._save()
        await self._replicas.close()

    # --- records ---

    def take_sample(self, sample: Sample) -> None:
        """Keep a sample until its query's end says what it is for."""
        self._desk.take(sample)

    def take_query(self, record: QueryRecord) -> None:
        """A query ended: decide what its samples are for, measure, look for drift (algorithm 1, lines 2 to 24)."""
        first, last = (self.memory.same_as_live(version) for version in record.versions)
        version = first if first == last else None
        query = Query(s=record.s, tokens_per_s=record.tokens_per_s, version=version, load=max(record.load, 1e-3))
        action = Action.SKIP if self.memory.paused else self._bandit.decide(query)
        if not self.memory.paused:
            self._metrics.actions.labels(self.name, action.value).inc()
        self._metrics.signal.labels(self.name).observe(record.s)
        self._show_tau(self.memory.observe(record, version, action.value), version)
        self._desk.claim(record.session, action)
        if self.memory.canary is not None:
            self._judge(self.memory.canary, record, version)
        else:
            self._watch(record, version)
        if action is not Action.SKIP:
            self._consider(action, query)
        self._want_samples(query)

    def _show_tau(self, tau: float | None, version: int | None) -> None:
        """As many versions as are remembered."""
        if tau is None or version is None:
            return
        self._metrics.tau.labels(self.name, str(version)).set(tau)
        self._shown.add(version)
        for gone in self._shown - self.memory.taus.keys():
            self._metrics.tau.remove(self.name, str(gone))
            self._shown.discard(gone)

    def _want_samples(self, query: Query | None) -> None:
        """Ask for what the next query would be used for, were it like the last one."""
        expected = Action.SKIP if self.memory.paused else self._bandit.expected(query)
        self.demand = "" if expected is Action.SKIP else KINDS[expected]
        for kind in self._buffers.capacities:
            self._metrics.waiting.labels(self.name, kind).set(self._buffers.size(kind))

    # --- events ---

    def _consider(self, action: Action, query: Query) -> None:
        """Lines 12 to 16: one update at a time, and none while a canary is out."""
        kind = KINDS[action]
        if self._doing != "idle" or self._work or self.memory.canary is not None:
            return
        trigger = self._bandit.due(action, query, self._buffers.size(kind), self._buffers.capacities[kind])
        if trigger is not None:
            samples = self._buffers.take(kind)
            self._doing = "training"
            self._plan(lambda: self._update(trigger, kind, samples))

    def _plan(self, work: Callable[[], Awaitable[None]]) -> None:
        self._work.append(work)
        self._wake.set()

    async def _update(self, trigger: Trigger, kind: Kind, samples: list[Sample]) -> None:
        number, anchored = self.memory.next_number(), self._settings.bandit.policy != "always"
        try:
            update, weights = await self._on_thread(self._copies.train, kind, samples, number, anchored)
        except FloatingPointError as error:
            log.warning("an update was not finite", head=self.name, why=str(error))
            self._metrics.failed.labels(self.name, "not finite").inc()
            return
        failpoints.hit("adapter.step")
        self._metrics.train_seconds.labels(self.name, kind).observe(update.seconds)
        if weights.hash == self._copies.live.hash:
            log.warning("an update changed nothing", head=self.name, samples=update.samples)
            self._metrics.failed.labels(self.name, "changed nothing").inc()
            return
        self._metrics.updates.labels(self.name, kind).inc()
        if len(self._replicas) > 1 and self._settings.adapter.canary:
            self.memory.canary = Canary(version=weights.version, trigger=trigger, train_s=update.seconds)
            self._canary_weights = weights
            self._replicas.want(weights, first_only=True)
            await self._replicas.bring()
            self.memory.know(weights)
            return
        sync_s = await self._go_live(weights, layers=kind == "full")
        self._bandit.synced(trigger, weights.version)
        why = f"loss {update.loss_before:.2f} to {update.loss_after:.2f}, {update.samples} samples"
        self._changed(kind, weights.version, update.seconds, sync_s, why)

    async def _go_live(self, weights: Weights, layers: bool) -> float:
        """Every replica is to use these; returns how long that took, seconds."""
        self._doing, began = "syncing", time.monotonic()
        self._copies.live = weights
        self._note_live(weights)
        if layers:
            self._buffers.layers_changed(weights.version)
        self._replicas.want(weights)
        await self._replicas.bring()
        took = time.monotonic() - began
        self._metrics.sync_seconds.labels(self.name).observe(took)
        return took

    def _note_live(self, weights: Weights) -> None:
        self.memory.live = weights.version
        self.memory.know(weights)
        self._metrics.version.labels(self.name).set(weights.version)

    # --- canary ---

    def _judge(self, canary: Canary, record: QueryRecord, version: int | None) -> None:
        """Compare queries that ran meanwhile on the new weights with those on the old ones."""
        canary.queries += 1
        if version == canary.version:
            canary.new.append((record.tau, record.tokens_per_s))
        elif version == self.memory.live:
            canary.old.append((record.tau, record.tokens_per_s))
        verdict = canary_verdict(self._settings.drift, [tau for tau, _ in canary.old], [tau for tau, _ in canary.new])
        if verdict == "undecided" and canary.queries >= self._settings.bandit.patience:
            verdict = "reject"  # its replica answers too little, or is gone
        if verdict != "undecided" and not self._work:
            self._plan(lambda: self._settle(canary, verdict == "promote"))

    async def _settle(self, canary: Canary, good: bool) -> None:
        if self.memory.canary is not canary:  # taken back meanwhile
            return
        self._metrics.canaries.labels(self.name, "promoted" if good else "refused").inc()
        self.memory.canary = None
        kind = KINDS[canary.trigger.action]
        if good:
            sync_s = await self._go_live(self._canary_weights, layers=kind == "full")
            self._bandit.synced(canary.trigger, canary.version)
            self._changed(kind, canary.version, canary.train_s, sync_s, f"a canary of {len(canary.new)} queries")
            return
        weights = await self._on_thread(self._copies.again, self.memory.next_number())
        await self._go_live(weights, layers=kind == "full")
        self._bandit.refused(canary.trigger, [rate for _, rate in canary.old], [rate for _, rate in canary.new])
        self._changed("refused", weights.version, canary.train_s, 0.0, f"version {canary.version} was no better")

    # --- drift ---

    def _watch(self, record: QueryRecord, version: int | None) -> None:
        """Lines 22 to 24; a window without an alarm makes its version the good one."""
        alarm = self._drift.observe(record.tau, version)
        if alarm is not None:
            log.warning("accepted length has fallen", head=self.name, why=alarm.reason, good=alarm.good_version)
            self._plan(lambda: self._revert(alarm.good_version, alarm.reason))
            return
        windows = self._drift.state.windows
        if not self._drift.state.taus and windows and windows[-1].version is not None:
            self._found_good(windows[-1].version)

    def _found_good(self, version: int) -> None:
        if version == self.memory.good:
            return
        try:
            self._copies.versions.mark_good(version)
            self.memory.good = version
        except BadVersion as error:
            log.warning("a good version is not on disk", head=self.name, why=str(error))

    async def _revert(self, version: int | None, reason: str) -> None:
        """Back to good weights. When they are the live ones, the traffic has changed, and only the values are void."""
        back_to = self.memory.good if version is None else version
        if back_to != self.memory.live:
            await self._back_to(back_to, "revert", reason)
            self._metrics.reverts.labels(self.name, reason).inc()
            self.memory.reverts += 1
        else:
            self._bandit.reverted(self.memory.live)
        self._forget_windows()

    def _forget_windows(self) -> None:
        self._drift.reset()
        self.memory.drift = self._drift.state

    async def _back_to(self, back_to: int, what: str, why: str) -> int:
        """Earlier weights as a new version, everywhere. Raises BadVersion when they cannot be had."""
        number = self.memory.next_number()
        try:
            weights: Weights = await self._on_thread(self._copies.restore, back_to, number)
        except BadVersion:
            if what == "rollback":
                raise
            weights = await self._on_thread(self._copies.restore, 0, number)
            back_to = 0
        self.memory.canary = None
        sync_s = await self._go_live(weights, layers=True)
        self._bandit.reverted(weights.version)
        self._changed(what, weights.version, 0.0, sync_s, f"{why}; as version {back_to}")
        self._found_good(weights.version)
        return weights.version

    def _changed(self, what: str, version: int, train_s: float, sync_s: float, why: str) -> None:
        self.memory.change(Change(self.memory.queries, what, version, train_s, sync_s, why))
        for action, value in self._bandit.state.values.items():
            self._metrics.value.labels(self.name, action.value).set(value.value)
        log.info("weights changed", head=self.name, what=what, version=version, why=why)

    # --- operators ---

    def pause(self, paused: bool) -> None:
        """Stop or go on training; what is under way is finished."""
        self.memory.paused = paused
        self._metrics.paused.labels(self.name).set(paused)
        self._want_samples(None)
        self._save()

    async def rollback(self, version: int | None) -> int:
        """Put back a version, None: the last good one; returns the new one. Raises InvalidField, StaleFence."""
        if self._work or self._doing in ("training", "syncing"):
            raise StaleFence(f"{self.name} is {self._doing} or about to; pause it, and try again when it is idle")
        back_to = self.memory.good if version is None else version
        if back_to and back_to not in self._copies.versions.numbers():
            there = ", ".join(map(str, [0, *self._copies.versions.numbers()]))
            raise InvalidField("version", f"{back_to} is not there; there are {there}")
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def work() -> None:
            self._doing = "syncing"
            try:
                made = await self._back_to(back_to, "rollback", "asked for")
                self._forget_windows()
                done.set_result(made)
            except BadVersion as error:
                done.set_exception(InvalidField("version", str(error)))
            except Exception as error:
                done.set_exception(error)

        self._plan(work)
        version_made: int = await asyncio.shield(done)  # the operator may leave, the work is done all the same
        return version_made

    def status(self, history: int) -> HeadStatus:
        """What an operator is shown."""
        state, buffers = self._bandit.state, self._buffers
        actions = []
        for kind in buffers.capacities:
            known = state.values.get(Action(kind))
            actions.append(
                ActionStatus(
                    kind,
                    known.value if known else None,
                    known.error if known else 0.0,
                    state.updates.get(Action(kind), 0),
                    buffers.size(kind),
                    buffers.capacities[kind],
                )
            )
        memory = self.memory
        return HeadStatus(
            head=self.name,
            policy=self._settings.bandit.policy,
            paused=memory.paused,
            doing=self._doing if self.active() else STANDING_BY,
            version=memory.live,
            weights_hash=self._copies.live.hash,
            good_version=memory.good,
            queries=memory.queries,
            events=state.events,
            reverts=memory.reverts,
            actions=actions,
            replicas=self._replicas.status(),
            versions=[VersionStatus(number, *told) for number, told in memory.taus.items()],
            history=[QueryPoint(**point) for point in memory.history[-history:]] if history else [],
            changes=[Change(**change) for change in memory.changes],
        )

    def _save(self, every_s: float = 0.0) -> None:
        now = time.monotonic()
        if now - self._saved_at >= every_s and self.active():
            self._saved_at = now
            self.memory.save()
