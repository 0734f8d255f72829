"""python -m services.drafter: serve one head."""

from __future__ import annotations

import asyncio
import sys

from coppice.config import Settings, load_settings
from coppice.errors import CoppiceError
from coppice.nn.registry import build_head
from coppice.rpc.server import Serving
from coppice.rpc.sessions import StreamWaits
from coppice.telemetry import SessionMetrics, configure_logging, serve_metrics
from coppice.v1 import drafter_pb2
from services.drafter.service import DrafterServicer
from services.drafter.worker import Worker


async def serve(settings: Settings) -> int:
    """Build the head and serve it until told to stop; returns the exit code."""
    metrics = SessionMetrics("drafter")
    serving = Serving(settings.server, settings.limits, "drafter")
    worker = Worker(lambda: build_head(settings.drafter), metrics, settings.drafter.max_context)
    await worker.start()
    waits = StreamWaits(settings.limits.idle_s, serving.draining)
    servicer = DrafterServicer(worker, settings.limits, waits)
    background = [asyncio.create_task(waits.end_on_drain()), asyncio.create_task(_drain_on(worker.failed, serving))]
    port = serve_metrics(metrics.registry, settings.server)
    await serving.start(drafter_pb2.DESCRIPTOR.services_by_name["DrafterService"], servicer, port)
    await serving.until_stopped()
    await worker.stop()
    for task in background:
        task.cancel()
    return 1 if worker.failed.is_set() else 0


async def _drain_on(failed: asyncio.Event, serving: Serving) -> None:
    await failed.wait()
    serving.draining.set()


def main() -> int:
    """Entry point; exit code 2 on unusable settings."""
    try:
        settings = load_settings()
        configure_logging(settings.server)
        return asyncio.run(serve(settings))
    except CoppiceError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
