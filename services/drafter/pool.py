"""One head in a process: its thread, where its features come from, its samples, and who answers for it."""

from __future__ import annotations

import asyncio

from coppice.adaptation.producer import Producer
from coppice.config.model_folder import check_model
from coppice.config.sections import FEATURE_KINDS
from coppice.config.settings import Settings
from coppice.engine.batching import BatchingThread
from coppice.heads.registry import served_head
from coppice.rpc.channels import Dialer
from coppice.rpc.directory import Directory, directory
from coppice.rpc.nearby import NearbyVerifier
from coppice.rpc.sessions import StreamWaits
from coppice.telemetry import SessionMetrics

from .features import FeatureSource
from .samples import Samples
from .service import DrafterServicer
from .worker import Worker


def pool_name(settings: Settings) -> str:
    """What a drafter's pool is called. Raises InvalidField for a folder that holds no head."""
    if settings.drafter.kind in (*FEATURE_KINDS, "lm"):
        check_model("drafter.path", settings.drafter.path)
    return settings.drafter.name or settings.drafter.kind


def _verifiers(settings: Settings) -> Directory | None:
    """Where features may come from; None: anywhere. Raises InvalidField."""
    allowed = settings.drafter.verifiers
    return directory(allowed, "verifier", "", settings.directory, "drafter.verifiers") if allowed else None


class ServedHead:
    """A head between `start` and `stop`."""

    servicer: DrafterServicer

    def __init__(
        self,
        settings: Settings,
        metrics: SessionMetrics,
        producer: Producer,
        waits: StreamWaits,
        nearby: NearbyVerifier | None = None,
        host: BatchingThread | None = None,
    ) -> None:
        """nearby and host: a verifier of this process, and its thread. Raises InvalidField."""
        told, adaptation = settings.drafter, settings.adaptation
        self._settings, self._waits = settings, waits
        dialer = Dialer(settings.limits, settings.tls)
        self._source = FeatureSource(dialer, _verifiers(settings), told.vocab_size, nearby)
        self._following: asyncio.Task[None] | None = None
        name = pool_name(settings)
        samples = Samples(producer, name, adaptation.window, adaptation.stride) if adaptation.redis else None
        self.worker = Worker(lambda: served_head(told), metrics, told.max_context, samples, host)

    async def start(self) -> None:
        """Build the head. Raises what its builder raises."""
        await self.worker.start()
        self._following = asyncio.create_task(self._source.run())
        ahead = self._settings.drafter.ahead
        self.servicer = DrafterServicer(self.worker, self._settings.limits, self._waits, self._source, ahead)

    async def stop(self) -> None:
        """Let go of it."""
        if self._following is not None:
            self._following.cancel()
        await self.worker.stop()
