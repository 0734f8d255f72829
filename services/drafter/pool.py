"""The heads of a process: their threads, where their features come from, their samples, and who answers for them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from prometheus_client import CollectorRegistry

from coppice.config.model_folder import check_model
from coppice.config.sections import FEATURE_KINDS
from coppice.config.settings import Settings
from coppice.engine.batching import BatchingThread
from coppice.heads.registry import served_head
from coppice.rpc.channels import Dialer
from coppice.rpc.directory import directory
from coppice.rpc.server import Serving
from coppice.signals.producer import Producer
from coppice.telemetry import SessionMetrics, SignalMetrics

from .following import LocalVerifier, Verifiers
from .samples import Samples
from .service import DrafterServicer
from .worker import Worker


def pool_name(settings: Settings) -> str:
    """What a drafter's pool is called. Raises InvalidField for a folder that holds no head."""
    if settings.drafter.kind in (*FEATURE_KINDS, "lm"):
        check_model("drafter.path", settings.drafter.path)
    return settings.drafter.name or settings.drafter.kind


class Drafters:
    """Heads between `start` and `stop`, one or more in a process."""

    def __init__(
        self,
        each: Mapping[str, Settings],
        serving: Serving,
        registry: CollectorRegistry | None = None,
        verifier: LocalVerifier | None = None,
        host: BatchingThread | None = None,
    ) -> None:
        """each: the settings of every head, by its pool's name, which differ in section drafter alone.

        verifier and host: those of this process, which computes on the host's thread. Raises InvalidField.
        """
        settings = next(iter(each.values()))
        metrics = SessionMetrics("drafter", registry)
        self.registry = metrics.registry
        self._producer = Producer(settings.adaptation, SignalMetrics(metrics.registry), list(each))
        self._sends = bool(settings.adaptation.redis)
        self.workers = {name: self._worker(name, own, metrics, host) for name, own in each.items()}
        allowed = settings.drafter.verifiers
        known = directory(allowed, "verifier", "", settings.directory, "drafter.verifiers") if allowed else None
        self._verifiers = Verifiers(Dialer(settings.limits, settings.tls), known, verifier)
        self._watching: asyncio.Task[None] | None = None
        ahead = settings.drafter.ahead
        self.servicer = DrafterServicer(self.workers, settings.limits, serving.waits, self._verifiers, ahead)

    def _worker(self, name: str, own: Settings, metrics: SessionMetrics, host: BatchingThread | None) -> Worker:
        samples = Samples(self._producer, name) if self._sends else None
        return Worker(lambda: served_head(own.drafter), metrics, own.drafter.max_context, samples, host)

    async def start(self) -> None:
        """Load the heads. Raises what a head's builder raises."""
        for worker in self.workers.values():
            await worker.start()
        self._watching = asyncio.create_task(self._verifiers.run())
        if self._sends:
            self._producer.start()

    async def stop(self) -> None:
        """Let go of them."""
        if self._watching is not None:
            self._watching.cancel()
        for worker in self.workers.values():
            await worker.stop()
        await self._producer.stop()
