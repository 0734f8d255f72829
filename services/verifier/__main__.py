"""python -m services.verifier: serve one target."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from coppice.config import Settings, load_settings
from coppice.errors import CoppiceError, InvalidField
from coppice.rpc.server import Serving
from coppice.rpc.sessions import StreamWaits
from coppice.telemetry import SessionMetrics, configure_logging, serve_metrics
from coppice.v1 import verifier_pb2
from services.verifier.service import VerifierServicer
from services.verifier.worker import Worker


def _named(settings: Settings) -> Settings:
    """The settings with the target's folder checked and its name filled in."""
    target = Path(settings.verifier.target)
    if not settings.verifier.target or not (target / "config.json").is_file():
        raise InvalidField("verifier.target", f"no Hugging Face model folder: {settings.verifier.target!r}")
    name = settings.verifier.name or target.resolve().name
    return settings.model_copy(update={"verifier": settings.verifier.model_copy(update={"name": name})})


async def serve(settings: Settings) -> int:
    """Load the target and serve it until told to stop; returns the exit code."""
    metrics = SessionMetrics("verifier")
    serving = Serving(settings.server, settings.limits, "verifier")
    worker = Worker(settings.verifier, metrics)
    worker.start()
    info = await worker.loaded
    waits = StreamWaits(settings.limits.idle_s, serving.draining)
    servicer = VerifierServicer(settings, worker, info, waits)
    background = [asyncio.create_task(waits.end_on_drain()), asyncio.create_task(_drain_on(worker.failed, serving))]
    port = serve_metrics(metrics.registry, settings.server)
    await serving.start(verifier_pb2.DESCRIPTOR.services_by_name["VerifierService"], servicer, port)
    worker.address = serving.address
    await serving.until_stopped()
    worker.stop()
    await asyncio.to_thread(worker.join, 10)
    for task in background:
        task.cancel()
    return 1 if worker.failed.is_set() else 0


async def _drain_on(failed: asyncio.Event, serving: Serving) -> None:
    await failed.wait()
    serving.draining.set()


def main() -> int:
    """Entry point; exit code 2 on unusable settings."""
    try:
        settings = _named(load_settings())
        configure_logging(settings.server)
        return asyncio.run(serve(settings))
    except CoppiceError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
