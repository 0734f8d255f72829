"""One head's loop: records in, decisions, and one piece of work at a time (SpecBlock, algorithm 1)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path

import structlog

from coppice.adaptation.bandit import Action, Bandit, Query
from coppice.adaptation.record_queue import Stream
from coppice.adaptation.records import Demand, Kind, QueryRecord, Sample
from coppice.config.settings import Settings
from coppice.errors import InvalidField, StaleFence
from coppice.messages.adapter import STANDING_BY, ActionStatus, HeadStatus, VersionStatus
from coppice.telemetry import AdapterMetrics

from .atomic import BadFile
from .buffers import Buffers
from .canary import Canary
from .drift import Drift
from .replicas import Replicas
from .rollout import OnThread, Rollout
from .sorting import KINDS, Sorting
from .state import State
from .training_copy import TrainingCopy

log = structlog.get_logger()

_SAVE_S = 5.0


class HeadLoop:
    """Adapts one head. `take_query` and `take_sample` decide; `run` trains and pushes, one thing at a time."""

    def __init__(
        self,
        name: str,
        training: TrainingCopy,
        replicas: Replicas,
        settings: Settings,
        folder: Path,
        on_thread: OnThread,
        metrics: AdapterMetrics,
        active: Callable[[], bool],
    ) -> None:
        """Go on from what `folder` remembers of an earlier run. Nothing begins or is saved while not `active`."""
        self.name, self.widths, self.active = name, training.widths, active
        self.demand: Demand = ""
        """which samples are wanted now"""
        self._settings, self._metrics = settings, metrics
        self._state = state = State.load(folder)
        self._bandit, self._drift = Bandit(settings.bandit, state.bandit), Drift(settings.drift, state.drift)
        capacities: dict[Kind, int] = {"head": settings.adapter.head_samples, "full": settings.adapter.full_samples}
        self._sorting = Sorting(Buffers(capacities, self._drop), training.draft_ids, self._drop)
        learners = self._bandit, self._drift, self._sorting.buffers
        self._rollout = Rollout(name, training, replicas, settings, state, learners, on_thread, metrics)
        self._work: deque[Callable[[], Awaitable[None]]] = deque()
        self._wake = asyncio.Event()
        self._saved_at = 0.0

    @property
    def positions(self) -> dict[Stream, str]:
        """How far the head's streams were read; the inbox moves it on."""
        return self._state.positions

    async def start(self) -> None:
        """Take up the weights that were live, and give them to every replica that answers."""
        await self._rollout.start()
        self._want_samples(None)

    async def run(self) -> None:
        """Train, push and look after replicas for ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._look_after_replicas())
            group.create_task(self._do_work())

    async def _do_work(self) -> None:
        """Train and change weights, one thing at a time."""
        rollout = self._rollout
        while True:
            try:
                while self._work and self.active():
                    await self._work.popleft()()
                    self._save()
                self._save(every_s=_SAVE_S)
            except Exception:
                log.exception("the loop goes on without what failed", head=self.name)
            rollout.doing = "canary" if rollout.canary else "idle"
            self._wake.clear()
            if not self._work or not self.active():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._settings.adapter.poll_s):
                        await self._wake.wait()

    async def _look_after_replicas(self) -> None:
        """Bring replicas to their weights, also while an update is trained or a canary is out."""
        while True:
            try:
                if self.active():
                    await self._rollout.keep_up()
            except Exception:
                log.exception("replicas are looked after again", head=self.name)
            await asyncio.sleep(self._settings.adapter.poll_s)

    async def stop(self) -> None:
        """Give up an update under way, and remember everything."""
        self._rollout.training.stop()
        self._save()
        await self._rollout.replicas.close()

    def _plan(self, work: Callable[[], Awaitable[None]]) -> None:
        self._work.append(work)
        self._wake.set()

    def _save(self, every_s: float = 0.0) -> None:
        now = time.monotonic()
        if now - self._saved_at >= every_s and self.active():
            self._saved_at = now
            self._state.save()

    def _drop(self, count: int, why: str) -> None:
        if count:
            self._metrics.dropped.labels(self.name, why).inc(count)

    # --- records ---

    def take_sample(self, sample: Sample) -> None:
        """Keep a sample until its query's end says what it is for."""
        self._sorting.take(sample)

    def take_query(self, record: QueryRecord) -> None:
        """Decide what a query's samples are for, measure it, and look for drift (algorithm 1, lines 2 to 24)."""
        version = self._state.lived_on(record.versions)
        query = Query(s=record.s, tokens_per_s=record.tokens_per_s, version=version, load=max(record.load, 1e-3))
        action = Action.SKIP if self._state.paused else self._bandit.decide(query)
        if not self._state.paused:
            self._metrics.actions.labels(self.name, action.value).inc()
        self._metrics.signal.labels(self.name).observe(record.s)
        self._observe(record, version, action)
        self._sorting.claim(record.session, action)
        if self._rollout.canary is not None:
            self._judge(self._rollout.canary, record, version)
        else:
            self._watch_drift(record, version)
        if action is not Action.SKIP:
            self._train_if_due(action, query)
        self._want_samples(query)

    def _observe(self, record: QueryRecord, version: int | None, action: Action) -> None:
        """Note a query; the metric shows the tau of as many versions as are remembered."""
        before = set(self._state.taus)
        self._state.observe(record, version, action.value)
        if version in self._state.taus:
            self._metrics.tau.labels(self.name, str(version)).set(self._state.taus[version][1])
        for forgotten in before - self._state.taus.keys():
            with contextlib.suppress(KeyError):  # not shown since the restart
                self._metrics.tau.remove(self.name, str(forgotten))

    def _judge(self, canary: Canary, record: QueryRecord, version: int | None) -> None:
        canary.observe(record, version, self._state.live)
        verdict = canary.verdict(self._settings.drift, self._bandit.patience)
        if verdict != "undecided" and not self._work:
            self._plan(lambda: self._rollout.settle(canary, verdict == "promote"))

    def _watch_drift(self, record: QueryRecord, version: int | None) -> None:
        """Go back when tau has fallen (lines 22 to 24); a window without an alarm makes its version the good one."""
        alarm, state = self._drift.observe(record.tau, version), self._drift.state
        if alarm is not None:
            log.warning("accepted length has fallen", head=self.name, why=alarm.reason, good=alarm.good_version)
            self._plan(lambda: self._rollout.revert(alarm.good_version, alarm.reason))
        elif not state.taus and state.windows:
            good = state.windows[-1].version
            if good is not None and good != self._state.good:
                self._rollout.mark_good(good)

    def _train_if_due(self, action: Action, query: Query) -> None:
        """Begin an update (lines 12 to 16): one at a time, and none while a canary is out."""
        rollout, kind = self._rollout, KINDS[action]
        if rollout.doing != "idle" or self._work or rollout.canary is not None:
            return
        trigger = self._bandit.due(
            action, query, self._sorting.buffers.size(kind), self._sorting.buffers.capacities[kind]
        )
        if trigger is not None:
            samples = self._sorting.buffers.take(kind)
            self._plan(lambda: rollout.update(trigger, kind, samples))

    def _want_samples(self, query: Query | None) -> None:
        """Ask for the samples that the next query would be used for, were it like the last one."""
        expected = Action.SKIP if self._state.paused else self._bandit.expected(query)
        self.demand = "" if expected is Action.SKIP else KINDS[expected]
        for kind in self._sorting.buffers.capacities:
            self._metrics.waiting.labels(self.name, kind).set(self._sorting.buffers.size(kind))

    # --- operators ---

    def pause(self, paused: bool) -> None:
        """Stop or go on training; what is under way is finished."""
        self._state.paused = paused
        self._metrics.paused.labels(self.name).set(paused)
        self._want_samples(None)
        self._save()

    async def rollback(self, version: int | None) -> int:
        """Put back a version, None: the last good one; returns the new one. Raises InvalidField, StaleFence."""
        if self._work or self._rollout.doing in ("training", "syncing"):
            raise StaleFence(f"{self.name} has work under way; pause it, and try again when it is idle")
        back_to = self._state.good if version is None else version
        there = [0, *self._rollout.training.versions.numbers()]
        if back_to not in there:
            raise InvalidField("version", f"{back_to} is not there; there are {', '.join(map(str, there))}")
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def work() -> None:
            try:
                done.set_result(await self._rollout.put_back(back_to, "rollback", "asked for"))
            except BadFile as error:
                done.set_exception(InvalidField("version", str(error)))
            except Exception as error:
                done.set_exception(error)

        self._plan(work)
        return await asyncio.shield(done)  # the operator may leave, the work is done all the same

    def status(self, history: int) -> HeadStatus:
        """Report what the loop does and knows, with that many of the latest queries."""
        state, bandit, rollout = self._state, self._bandit.state, self._rollout
        actions = []
        for kind, capacity in self._sorting.buffers.capacities.items():
            action = Action(kind)
            known = bandit.values.get(action)
            value, error = (known.value, known.error) if known else (None, 0.0)
            waiting = self._sorting.buffers.size(kind)
            actions.append(ActionStatus(kind, value, error, bandit.updates.get(action, 0), waiting, capacity))
        return HeadStatus(
            head=self.name,
            policy=self._settings.bandit.policy,
            paused=state.paused,
            doing=rollout.doing if self.active() else STANDING_BY,
            version=state.live,
            weights_hash=rollout.training.live.hash,
            good_version=state.good,
            queries=state.queries,
            events=bandit.events,
            reverts=state.reverts,
            actions=actions,
            replicas=rollout.replicas.status(),
            versions=[VersionStatus(number, *tau) for number, tau in state.taus.items()],
            history=state.history[-history:] if history else [],
            changes=list(state.changes),
        )
