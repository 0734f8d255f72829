"""One head's loop: records in, decisions, and one piece of work at a time (SpecBlock, algorithm 1)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import structlog
from torch import Tensor

from coppice import failpoints
from coppice.config.adaptation import AdapterSettings
from coppice.errors import InvalidField, StaleFence
from coppice.signals.records import Demand, QueryRecord, Sample, Widths
from coppice.telemetry import AdapterMetrics
from coppice.weights.variants import ROUTES, Routes, in_deployed, variant_name
from coppice.weights.versions import Weights
from coppice.wire.adapter import STANDING_BY, Change, HeadStatus, VersionStatus

from .decide import Arm, Bandit, Rule, Trained, Verdict
from .groups import Groups
from .learn import Interrupted, Learner
from .paper import Paper
from .push import Replicas
from .state import BadFile, State, Versions

log = structlog.get_logger()

OnThread = Callable[..., Awaitable[Any]]
"""Runs a function on the thread that owns torch"""
_SAVE_S = 5.0
_LEAST_TEXTS = 8  # to learn from, where an update is judged by texts held out
_LEAST_HELD_OUT = 2


class HeadLoop:
    """Adapts one head: its rule decides; `run` trains and pushes, one thing at a time.

    The deployed weights stay as they are. What is learnt becomes a variant of the head beside them, and `routes` say
    which texts it drafts for.
    """

    def __init__(
        self,
        name: str,
        learner: Learner,
        replicas: Replicas,
        settings: AdapterSettings,
        folder: Path,
        on_thread: OnThread,
        metrics: AdapterMetrics,
        active: Callable[[], bool],
    ) -> None:
        """Go on from what `folder` remembers of an earlier run. Nothing begins or is saved while not `active`."""
        config = learner.config
        self.name, self.active = name, active
        self.widths = Widths(config.vocab_size, config.feature_width)
        self._learner, self._replicas, self._settings = learner, replicas, settings
        self._on_thread, self._metrics = on_thread, metrics
        self._state = State.load(folder)
        self.positions, self.numbers = self._state.positions, self._state.numbers  # the inbox moves them on
        self._versions = Versions(folder, replicas.checkpoint)
        self._live = replicas.checkpoint
        bandit = settings.policy == "bandit"
        self._rule: Rule = (
            Bandit(self._state.bandit) if bandit else Paper(settings.policy, settings.interval, self._state.paper)
        )
        self._groups = Groups(lambda count, reason: metrics.dropped.labels(name, reason).inc(count))
        self._doing = "idle"
        self._work: deque[Callable[[], Awaitable[None]]] = deque()
        self._wake = asyncio.Event()
        self._saved_at = 0.0

    @property
    def demand(self) -> Demand:
        """What drafters are to send now: nothing while paused."""
        return "" if self._state.paused else self._rule.demand

    async def start(self) -> None:
        """Take up the weights that were live, and give them to every replica that answers.

        A damaged file is no reason not to start: the good version takes its place, or version 0.
        """
        state = self._state
        for number in (state.live, state.good, 0):
            try:
                self._live = await asyncio.to_thread(self._versions.load, number)
                break
            except BadFile as error:
                log.warning("a version cannot be read; going back to the last good one", why=str(error))
        await self._replicas.look()
        if self._live.version != state.live:
            state.live = state.good = self._live.version
            self._rule.follow(Routes.of(self._live.tensors), state.live)
        self._versions.good = state.good
        state.newest = max([state.newest, state.live, self._replicas.newest, *self._versions.numbers()])
        self._note_live(self._live)
        await self._keep_up()
        log.info("adapting", head=self.name, version=state.live, replicas=len(self._replicas))

    async def run(self) -> None:
        """Train, push and look after replicas for ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._look_after_replicas())
            group.create_task(self._do_work())

    async def stop(self) -> None:
        """Give up an update under way, and remember everything."""
        self._learner.stopped.set()
        self._save()
        await self._replicas.close()

    async def _do_work(self) -> None:
        """Train and change weights, one thing at a time."""
        while True:
            try:
                while self._work and self.active():
                    await self._work.popleft()()
                    self._save()
                self._save(every_s=_SAVE_S)
            except Exception:
                log.exception("the loop goes on without what failed", head=self.name)
            self._doing = "idle"
            self._wake.clear()
            if not self._work or not self.active():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._settings.poll_s):
                        await self._wake.wait()

    async def _look_after_replicas(self) -> None:
        """Bring replicas to the live weights, also while an update is trained."""
        while True:
            try:
                if self.active():
                    await self._keep_up()
            except Exception:
                log.exception("replicas are looked after again", head=self.name)
            await asyncio.sleep(self._settings.poll_s)

    def _plan(self, work: Callable[[], Awaitable[None]]) -> None:
        self._work.append(work)
        self._wake.set()

    def _save(self, every_s: float = 0.0) -> None:
        now = time.monotonic()
        if now - self._saved_at >= every_s and self.active():
            self._saved_at = now
            self._state.save()

    # --- records ---

    def take_sample(self, sample: Sample) -> None:
        """Hold a sample until its query's end says what it is for."""
        self._groups.take(sample)

    def take_query(self, record: QueryRecord) -> None:
        """Measure a query, judge the weights in use, and choose what to do with its text."""
        state, rule, metrics = self._state, self._rule, self._metrics
        version, before = state.lived_on(record.versions), set(state.taus)
        metrics.signal.labels(self.name).observe(record.s)
        group = rule.take(record, version, self._doing == "training")
        if rule.begins(group):
            self._groups.forget(group)
        self._groups.claim(record.session, 0 if state.paused else group)
        if verdict := rule.settle(record, state.newest):
            self._act(verdict)
        arm = self._choose(group)
        metrics.actions.labels(self.name, arm.value).inc()
        state.observe(record, version, arm.value)
        for number, count in self._groups.counts().items():
            metrics.waiting.labels(self.name, str(number)).set(count)
        if version in state.taus:
            metrics.tau.labels(self.name, str(version)).set(state.taus[version][1])
        for forgotten in before - state.taus.keys():
            with contextlib.suppress(KeyError):  # not shown since the restart
                metrics.tau.remove(self.name, str(forgotten))

    def _choose(self, group: int) -> Arm:
        """Choose an arm for a group of texts; what is not skip is planned."""
        texts, held_out = self._groups.of(group)
        enough = len(texts) >= _LEAST_TEXTS and len(held_out) >= _LEAST_HELD_OUT
        if not group or self._state.paused or self._work or self._doing != "idle":
            return Arm.SKIP
        arm = self._rule.choose(group, len(texts)) if enough or self._rule.empties else Arm.SKIP
        if arm is not Arm.SKIP:
            self._plan(partial(self._update, group, arm))
        return arm

    def _act(self, verdict: Verdict) -> None:
        if verdict.what == "good":
            self._mark_good(verdict.version)
        elif verdict.what == "revert":
            self._plan(partial(self._revert, verdict))
        else:
            self._plan(partial(self._reroute, verdict))

    # --- work ---

    async def _update(self, group: int, arm: Arm) -> None:
        """Train a variant on the texts of a group, and put it to use if the rule says so."""
        rule, live = self._rule, self._live.tensors
        texts, held_out = self._groups.of(group)
        begin, variant = rule.variants(group)
        if not variant or not texts:
            return
        if rule.empties:
            self._groups.forget(group)
        names = [name for name in live if in_deployed(name)]
        values = {name: live.get(variant_name(begin, name), live[name]) for name in names}
        result, tensors = await self._train(arm, values, texts, held_out)
        failpoints.hit("adapter.step")
        use = rule.trained(group, arm, result)
        if result is None:
            return
        self._metrics.train_seconds.labels(self.name, arm.value).observe(result.seconds)
        why = f"drafts of {result.before:.2f} to {result.after:.2f}, {result.texts} texts"
        if not use:
            self._failed("no better", f"group {group}, {why}")
            return
        self._metrics.updates.labels(self.name, arm.value).inc()
        rule.deploy(group, arm, variant, self._state.newest + 1)
        stale = {name: live[name] for name in names if variant_name(variant, name) in live}
        changed = {variant_name(variant, name): tensor for name, tensor in (stale | tensors).items()}
        await self._release(changed, arm.value, f"variant {variant} of group {group}: {why}", result.seconds)

    async def _train(
        self, arm: Arm, values: dict[str, Tensor], texts: list[Sample], held_out: list[Sample]
    ) -> tuple[Trained | None, dict[str, Tensor]]:
        """Train on the learner's thread; None when that failed, which is noted. Raises Interrupted."""
        self._doing = "training"
        try:
            result, tensors = await self._on_thread(
                self._learner.learn, arm, values, texts, held_out, self._rule.penalty
            )
        except Interrupted:
            raise
        except FloatingPointError as error:
            self._failed("not finite", str(error))
        except Exception as error:
            log.exception("an update failed", head=self.name)
            self._failed("error", str(error)[:200])
        else:
            return result, tensors
        return None, {}

    def _failed(self, reason: str, why: str) -> None:
        """Note that an update is thrown away."""
        log.warning("an update is thrown away", head=self.name, reason=reason, why=why)
        self._metrics.failed.labels(self.name, reason).inc()

    async def _reroute(self, verdict: Verdict) -> None:
        """Give drafters the routes that follow from a verdict."""
        if verdict.what == "loses":
            self._metrics.reverts.labels(self.name, "no better").inc()
            self._state.reverts += 1
        await self._release({}, verdict.what, verdict.why)
        self._mark_good(self._state.live)

    async def _revert(self, verdict: Verdict) -> None:
        """Go back to good weights. When these are live already the traffic has changed: measurements alone are void."""
        log.warning("accepted length has fallen", head=self.name, why=verdict.why, good=verdict.version)
        if verdict.version == self._state.live:
            self._rule.follow(Routes.of(self._live.tensors), self._state.live)
            return
        try:
            await self._put_back(verdict.version, "revert", verdict.why)
        except BadFile:
            await self._put_back(0, "revert", verdict.why)
        self._metrics.reverts.labels(self.name, "falling").inc()
        self._state.reverts += 1

    async def _put_back(self, back_to: int, what: str, why: str) -> int:
        """Give every replica an earlier version's weights under a new number, which is returned. Raises BadFile."""
        earlier = await asyncio.to_thread(self._versions.load, back_to)
        weights = earlier.changed({}, self._state.next_number())
        await self._go_live(weights, what, why)
        self._rule.follow(Routes.of(weights.tensors), weights.version)
        self._mark_good(weights.version)
        return weights.version

    # --- weights ---

    async def _release(self, tensors: dict[str, Tensor], what: str, why: str, train_s: float = 0.0) -> None:
        """Give every replica the live weights with some tensors added or replaced, and the rule's routes."""
        changed = tensors | {ROUTES: self._rule.routes().tensor()}
        weights = await asyncio.to_thread(self._live.changed, changed, self._state.next_number())
        await self._go_live(weights, what, why, train_s)

    async def _go_live(self, weights: Weights, what: str, why: str, train_s: float = 0.0) -> None:
        """Write weights to disk, then give them to every replica, and note what changed."""
        self._doing, began = "syncing", time.monotonic()
        await asyncio.to_thread(self._versions.save, weights)
        self._note_live(weights)
        await self._replicas.bring()
        sync_s = time.monotonic() - began
        self._metrics.sync_seconds.labels(self.name).observe(sync_s)
        self._state.change(Change(self._state.queries, what, weights.version, train_s, sync_s, why))
        log.info("weights changed", head=self.name, what=what, version=weights.version, why=why)

    def _note_live(self, weights: Weights) -> None:
        self._live, self._state.live = weights, weights.version
        self._state.know(weights)
        self._replicas.use(weights)
        self._rule.goes_on_as(weights.version)
        self._metrics.version.labels(self.name).set(weights.version)

    async def _keep_up(self) -> None:
        """Bring replicas that came, restarted or were pushed something else to the live weights.

        A replica refuses versions up to its own: the live weights then get a higher number.
        """
        state, replicas, live = self._state, self._replicas, self._live
        await replicas.bring()
        state.newest = max(state.newest, replicas.newest)
        if replicas.ahead:
            renumbered = live.changed({}, state.next_number())
            await asyncio.to_thread(self._versions.save, renumbered)
            if self._live is live:  # else they have been replaced meanwhile
                self._note_live(renumbered)
            await replicas.bring()
        for number in replicas.numbers_in_use():
            state.know(self._live, number)

    def _mark_good(self, version: int) -> None:
        """Remember a version as the one to go back to, if it is on disk."""
        if version and version not in self._versions.numbers():
            log.warning("a good version is not on disk", head=self.name, version=version)
            return
        self._state.good = self._versions.good = version

    # --- operators ---

    def pause(self, paused: bool) -> None:
        """Stop or go on training; what is under way is finished."""
        self._state.paused = paused
        self._metrics.paused.labels(self.name).set(paused)
        self._save()

    async def rollback(self, version: int | None) -> int:
        """Put back a version, None: the last good one; returns the new one. Raises InvalidField, StaleFence."""
        if self._work or self._doing != "idle":
            raise StaleFence(f"{self.name} has work under way; pause it, and try again when it is idle")
        back_to = self._state.good if version is None else version
        there = [0, *self._versions.numbers()]
        if back_to not in there:
            raise InvalidField("version", f"{back_to} is not there; there are {', '.join(map(str, there))}")
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def work() -> None:
            try:
                done.set_result(await self._put_back(back_to, "rollback", "asked for"))
            except BadFile as error:
                done.set_exception(InvalidField("version", str(error)))
            except Exception as error:
                done.set_exception(error)

        self._plan(work)
        return await asyncio.shield(done)  # the operator may leave, the work is done all the same

    def status(self, history: int) -> HeadStatus:
        """Report what the loop does and knows, with that many of the latest queries."""
        state, actions = self._state, self._rule.actions()
        return HeadStatus(
            head=self.name,
            policy=self._settings.policy,
            paused=state.paused,
            doing=self._doing if self.active() else STANDING_BY,
            version=state.live,
            weights_hash=self._live.hash,
            good_version=state.good,
            queries=state.queries,
            events=sum(action.updates for action in actions),
            reverts=state.reverts,
            actions=actions,
            kinds=self._rule.kinds(self._groups.counts()),
            replicas=self._replicas.status(),
            versions=[VersionStatus(number, *tau) for number, tau in state.taus.items()],
            history=state.history[-history:] if history else [],
            changes=list(state.changes),
        )
