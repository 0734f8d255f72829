"""python -m orchestrator: serve generation over verifiers and drafters."""

from __future__ import annotations

import asyncio
import sys

from coppice.config import Settings, load_settings
from coppice.errors import CoppiceError, InvalidField
from coppice.rpc.server import Serving
from coppice.telemetry import OrchestratorMetrics, configure_logging, serve_metrics
from coppice.v1 import generation_pb2
from orchestrator.head import HeadPool
from orchestrator.service import GenerationServicer
from orchestrator.target import TargetPool
from orchestrator.text import TextCodec


def _head_pools(settings: Settings, metrics: OrchestratorMetrics) -> dict[str, HeadPool]:
    """The heads in the order they were given; replicas share a name."""
    addresses: dict[str, list[str]] = {}
    for head in settings.orchestrator.heads:
        name, _, address = head.partition("=")
        addresses.setdefault(name, []).append(address)
    return {name: HeadPool(name, pool, settings.limits, metrics) for name, pool in addresses.items()}


async def serve(settings: Settings) -> int:
    """Reach the verifiers and serve until told to stop; returns the exit code."""
    if not settings.orchestrator.verifiers:
        raise InvalidField("orchestrator.verifiers", "name at least one verifier's HOST:PORT")
    metrics = OrchestratorMetrics()
    codec = TextCodec.find(settings.orchestrator.target)
    verifiers = TargetPool(settings.orchestrator.verifiers, settings.limits)
    target = await verifiers.describe()
    servicer = GenerationServicer(settings, target, verifiers, _head_pools(settings, metrics), codec, metrics)
    serving = Serving(settings.server, settings.limits, "orchestrator")
    port = serve_metrics(metrics.registry, settings.server)
    await serving.start(generation_pb2.DESCRIPTOR.services_by_name["GenerationService"], servicer, port)
    await serving.until_stopped()
    return 0


def main() -> int:
    """Entry point; exit code 2 on unusable settings, 3 when no verifier answers."""
    try:
        settings = load_settings()
        configure_logging(settings.server)
        return asyncio.run(serve(settings))
    except CoppiceError as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, InvalidField) else 3


if __name__ == "__main__":
    sys.exit(main())
