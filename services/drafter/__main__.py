"""python -m services.drafter: serve one head."""

from __future__ import annotations

import sys

from coppice.adaptation.stream import Producer
from coppice.config import Settings
from coppice.nn.registry import build_head
from coppice.rpc.channels import Dialer
from coppice.rpc.server import Serving, run_service
from coppice.telemetry import SessionMetrics, SignalMetrics, serve_metrics
from coppice.v1 import drafter_pb2
from services.drafter.features import FeatureSource
from services.drafter.samples import Samples
from services.drafter.service import DrafterServicer
from services.drafter.worker import Worker


async def serve(settings: Settings) -> int:
    """Build the head and serve it until told to stop; returns the exit code."""
    metrics = SessionMetrics("drafter")
    serving = Serving(settings.server, settings.limits, "drafter", settings.tls)
    name = settings.drafter.name or settings.drafter.kind
    producer = Producer(settings.adaptation, SignalMetrics(metrics.registry), name)
    told = settings.adaptation
    samples = Samples(producer, name, told.window, told.stride) if told.redis else None
    worker = Worker(lambda: build_head(settings.drafter), metrics, settings.drafter.max_context, samples)
    await worker.start()
    if samples is not None:
        producer.start()
    source = FeatureSource(settings.drafter.verifiers, Dialer(settings.limits, settings.tls))
    servicer = DrafterServicer(worker, settings.limits, serving.waits, source)
    port = serve_metrics(metrics.registry, settings.server)
    await serving.start(drafter_pb2.DESCRIPTOR.services_by_name["DrafterService"], servicer, port)
    code = await serving.until_stopped(worker.failed)
    await worker.stop()
    await producer.stop()
    return code


if __name__ == "__main__":
    sys.exit(run_service(serve))
