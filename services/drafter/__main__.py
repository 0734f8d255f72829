"""python -m services.drafter: serve one head."""

from __future__ import annotations

import sys

from coppice.config.model import check_model
from coppice.config.sections import FEATURE_KINDS
from coppice.config.settings import Settings
from coppice.rpc import tracing
from coppice.rpc.directory import own_registries
from coppice.rpc.server import Serving, run_service
from coppice.telemetry import serve_metrics
from coppice.v1 import drafter_pb2

from .service import Drafters


def pool_name(settings: Settings) -> str:
    """What a drafter's pool is called. Raises InvalidField for a folder that holds no head."""
    if settings.drafter.kind in (*FEATURE_KINDS, "lm"):
        check_model("drafter.path", settings.drafter.path)
    return settings.drafter.name or settings.drafter.kind


async def serve(settings: Settings) -> int:
    """Build the head and serve it until told to stop; returns the exit code."""
    name = pool_name(settings)
    tracing.start(settings.telemetry, f"drafter-{name}")
    registries = own_registries(settings, "drafter", name)
    serving = Serving(settings.server, settings.limits, "drafter", settings.tls, registries=registries)
    drafters = Drafters({name: settings}, serving)
    await drafters.start()
    port = serve_metrics(drafters.registry, settings.server.host, settings.server.metrics_port)
    await serving.start(drafter_pb2.DESCRIPTOR.services_by_name["DrafterService"], drafters.servicer, port)
    code = await serving.until_stopped(drafters.workers[name].failed)
    await drafters.stop()
    return code


if __name__ == "__main__":
    sys.exit(run_service(serve))
