"""Which weights the drafters of a head use: new ones go out, and earlier ones are put back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

import structlog
from torch import Tensor

from coppice.telemetry import AdapterMetrics
from coppice.weights.versions import Weights
from coppice.wire.adapter import Change

from .canary import Canary
from .learner import Interrupted
from .replicas import Replicas
from .state import State
from .training_copy import TrainingCopy

log = structlog.get_logger()

OnThread = Callable[..., Awaitable[Any]]
"""Runs a function on the thread that owns torch"""


class Watcher(Protocol):
    """What is to know when weights change that it did not change itself."""

    def renumbered(self) -> None:
        """The live weights have another number."""

    def taken_back(self, weights: Weights) -> None:
        """Earlier weights are live again, under the number that they have now."""


class Rollout:
    """Changes a head's weights, for one caller at a time, and notes it in the state."""

    def __init__(
        self,
        name: str,
        training: TrainingCopy,
        replicas: Replicas,
        state: State,
        on_thread: OnThread,
        metrics: AdapterMetrics,
    ) -> None:
        self.name, self.training, self.replicas = name, training, replicas
        self.state, self.on_thread, self.metrics = state, on_thread, metrics
        self.doing = "idle"
        """idle, training, syncing or canary"""
        self.canary: Canary | None = None
        """weights that one replica tries out"""
        self.watcher: Watcher | None = None

    async def start(self) -> None:
        """Take up the weights that were live, and give them to every replica that answers."""
        state = self.state
        live = await self.on_thread(self.training.open, state.live, state.good)
        await self.replicas.look()
        if live != state.live:
            state.live = state.good = live
            if self.watcher is not None:
                self.watcher.taken_back(self.training.live)
        state.newest = max([state.newest, live, self.replicas.newest, *self.training.versions.numbers()])
        self._note_live(self.training.live)
        self.replicas.want(self.training.live)
        await self.keep_up()
        log.info("adapting", head=self.name, version=live, replicas=len(self.replicas))

    async def keep_up(self) -> None:
        """Bring replicas that came, restarted or were pushed something else to the weights they are to use.

        A replica refuses versions up to its own: the weights that it is to use then get a higher number. It may run
        while an update is trained or a canary is out.
        """
        state, replicas = self.state, self.replicas
        await replicas.bring()
        state.newest = max(state.newest, replicas.newest)
        live, canary, before = self.training.live, self.canary, state.newest
        if replicas.ahead(live):
            renumbered = await asyncio.to_thread(self.training.renumber, state.next_number())
            if self.training.live is live:  # else they have been replaced meanwhile
                self.training.live = renumbered
                self._note_live(renumbered)
                replicas.renumber(live, renumbered)
                if self.watcher is not None:
                    self.watcher.renumbered()
        if canary is not None and self.canary is canary and replicas.ahead(canary.weights):
            tried, canary.weights = canary.weights, canary.weights.changed({}, state.next_number())
            state.know(canary.weights)
            replicas.renumber(tried, canary.weights)
        if state.newest > before:
            await replicas.bring()
        for weights, number in replicas.in_use():
            state.know(weights, number)

    async def train(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Return what training on the learner's thread comes to; None when it failed, which is noted.

        Raises Interrupted.
        """
        self.doing = "training"
        try:
            return await self.on_thread(work, *arguments)
        except Interrupted:
            raise
        except FloatingPointError as error:
            self.failed("not finite", str(error))
        except Exception as error:
            log.exception("an update failed", head=self.name)
            self.failed("error", str(error)[:200])
        return None

    async def try_out(self, canary: Canary) -> None:
        """Give new weights to one replica."""
        self.canary = canary
        self.replicas.want(canary.weights, first_only=True)
        await self.replicas.bring()
        self.state.know(canary.weights)

    async def release(self, weights: Weights, what: str, train_s: float, why: str) -> None:
        """Give weights to every replica, and note what changed and why."""
        sync_s = await self._go_live(weights)
        self.changed(what, weights.version, train_s, sync_s, why)

    async def add(self, tensors: Mapping[str, Tensor], what: str, train_s: float, why: str) -> None:
        """Release the live weights with some tensors added or replaced, as a new version."""
        self.doing = "syncing"
        weights = await asyncio.to_thread(self.training.add, tensors, self.state.next_number())
        await self.release(weights, what, train_s, why)

    async def put_back(self, back_to: int | None, what: str, why: str, train_s: float = 0.0) -> int:
        """Give every replica earlier weights, None: the live ones, under a new number, which is returned.

        Raises BadFile where there are none.
        """
        self.doing = "syncing"
        weights: Weights = await self.on_thread(self.training.restore, back_to, self.state.next_number())
        self.canary = None
        await self.release(weights, what, train_s, why)
        if back_to is not None and self.watcher is not None:
            self.watcher.taken_back(weights)
            self.mark_good(weights.version)
        return weights.version

    def mark_good(self, version: int) -> None:
        """Remember a version as the one to go back to, if it is on disk."""
        if version and version not in self.training.versions.numbers():
            log.warning("a good version is not on disk", head=self.name, version=version)
            return
        self.state.good = self.training.versions.good = version

    async def _go_live(self, weights: Weights) -> float:
        """Give weights to every replica; returns how long that took, seconds."""
        self.doing, began = "syncing", time.monotonic()
        self.training.live = weights
        self._note_live(weights)
        self.replicas.want(weights)
        await self.replicas.bring()
        seconds = time.monotonic() - began
        self.metrics.sync_seconds.labels(self.name).observe(seconds)
        return seconds

    def _note_live(self, weights: Weights) -> None:
        self.state.live = weights.version
        self.state.know(weights)
        self.metrics.version.labels(self.name).set(weights.version)

    def failed(self, reason: str, why: str) -> None:
        """Note that an update is thrown away."""
        log.warning("an update is thrown away", head=self.name, reason=reason, why=why)
        self.metrics.failed.labels(self.name, reason).inc()

    def changed(self, what: str, version: int, train_s: float, sync_s: float, why: str) -> None:
        """Note a change of the weights."""
        self.state.change(Change(self.state.queries, what, version, train_s, sync_s, why))
        log.info("weights changed", head=self.name, what=what, version=version, why=why)
