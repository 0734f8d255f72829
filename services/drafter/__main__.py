"""python -m services.drafter: serve one head."""

from __future__ import annotations

import asyncio
import sys

from coppice.adaptation.producer import Producer
from coppice.config.model_folder import check_model
from coppice.config.sections import FEATURE_KINDS
from coppice.config.settings import Settings
from coppice.heads.registry import served_head
from coppice.rpc import tracing
from coppice.rpc.channels import Dialer
from coppice.rpc.directory import Directory, Registration, directory
from coppice.rpc.server import Serving, run_service
from coppice.telemetry import SessionMetrics, SignalMetrics, serve_metrics
from coppice.v1 import drafter_pb2

from .features import FeatureSource
from .samples import Samples
from .service import DrafterServicer
from .worker import Worker


def _verifiers(settings: Settings) -> Directory | None:
    """Where features may come from; None: anywhere. Raises InvalidField."""
    allowed = settings.drafter.verifiers
    return directory(allowed, "verifier", "", settings.directory, "drafter.verifiers") if allowed else None


async def serve(settings: Settings) -> int:
    """Build the head and serve it until told to stop; returns the exit code."""
    if settings.drafter.kind in (*FEATURE_KINDS, "lm"):
        check_model("drafter.path", settings.drafter.path)
    metrics = SessionMetrics("drafter")
    name = settings.drafter.name or settings.drafter.kind
    tracing.start(settings.telemetry, f"drafter-{name}")
    registration = Registration.of(settings, "drafter", name)
    serving = Serving(settings.server, settings.limits, "drafter", settings.tls, registration=registration)
    source = FeatureSource(Dialer(settings.limits, settings.tls), _verifiers(settings), settings.drafter.vocab_size)
    producer = Producer(settings.adaptation, SignalMetrics(metrics.registry), [name])
    told = settings.adaptation
    samples = Samples(producer, name, told.window, told.stride) if told.redis else None
    worker = Worker(lambda: served_head(settings.drafter), metrics, settings.drafter.max_context, samples)
    await worker.start()
    if samples is not None:
        producer.start()
    following = asyncio.create_task(source.run())
    servicer = DrafterServicer(worker, settings.limits, serving.waits, source, settings.drafter.ahead)
    port = serve_metrics(metrics.registry, settings.server.host, settings.server.metrics_port)
    await serving.start(drafter_pb2.DESCRIPTOR.services_by_name["DrafterService"], servicer, port)
    code = await serving.until_stopped(worker.failed)
    following.cancel()
    await worker.stop()
    await producer.stop()
    return code


if __name__ == "__main__":
    sys.exit(run_service(serve))
