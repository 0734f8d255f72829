"""One head's loop: records in, decisions, and one piece of work at a time (SpecBlock, algorithm 1)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path

import structlog

from coppice.adaptation.records import Demand, QueryRecord, Sample
from coppice.config.settings import Settings
from coppice.errors import InvalidField, StaleFence
from coppice.telemetry import AdapterMetrics
from coppice.wire.adapter import STANDING_BY, HeadStatus, VersionStatus

from .atomic import BadFile
from .branching import Branching
from .overwriting import Overwriting
from .replicas import Replicas
from .rollout import OnThread, Rollout
from .state import State
from .training_copy import TrainingCopy

log = structlog.get_logger()

_SAVE_S = 5.0


class HeadLoop:
    """Adapts one head. Its policy decides; `run` trains and pushes, one thing at a time."""

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
        self._settings, self._metrics = settings, metrics
        self._state = State.load(folder)
        self.positions, self.numbers = self._state.positions, self._state.numbers  # the inbox moves them on
        self._rollout = Rollout(name, training, replicas, self._state, on_thread, metrics)
        policy = Branching if settings.bandit.policy == "bandit" else Overwriting
        self._policy = self._rollout.watcher = policy(self._rollout, settings, self._plan, self._drop)
        self._work: deque[Callable[[], Awaitable[None]]] = deque()
        self._wake = asyncio.Event()
        self._saved_at = 0.0

    @property
    def demand(self) -> Demand:
        """What is wanted of drafters now."""
        return self._policy.demand

    async def start(self) -> None:
        """Take up the weights that were live, and give them to every replica that answers."""
        await self._rollout.start()
        self._policy.want_samples()

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
        self._policy.take_sample(sample)

    def take_query(self, record: QueryRecord) -> None:
        """Measure a query, and let the policy decide what it is for."""
        version = self._state.lived_on(record.versions)
        self._metrics.signal.labels(self.name).observe(record.s)
        busy = bool(self._work) or self._rollout.doing not in ("idle", "canary")
        action = self._policy.take_query(record, version, busy)
        before = set(self._state.taus)
        self._state.observe(record, version, action)
        if version in self._state.taus:
            self._metrics.tau.labels(self.name, str(version)).set(self._state.taus[version][1])
        for forgotten in before - self._state.taus.keys():
            with contextlib.suppress(KeyError):  # not shown since the restart
                self._metrics.tau.remove(self.name, str(forgotten))

    # --- operators ---

    def pause(self, paused: bool) -> None:
        """Stop or go on training; what is under way is finished."""
        self._state.paused = paused
        self._metrics.paused.labels(self.name).set(paused)
        self._policy.want_samples()
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
        state, rollout, policy = self._state, self._rollout, self._policy
        return HeadStatus(
            head=self.name,
            policy=self._settings.bandit.policy,
            paused=state.paused,
            doing=rollout.doing if self.active() else STANDING_BY,
            version=state.live,
            weights_hash=rollout.training.live.hash,
            good_version=state.good,
            queries=state.queries,
            events=policy.events,
            reverts=state.reverts,
            actions=policy.actions(),
            kinds=policy.kinds(),
            replicas=rollout.replicas.status(),
            versions=[VersionStatus(number, *tau) for number, tau in state.taus.items()],
            history=state.history[-history:] if history else [],
            changes=list(state.changes),
        )
