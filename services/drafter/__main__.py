"""python -m services.drafter: serve one head."""

import sys

from coppice.config.model import check_model
from coppice.config.sections import TRAINED_KINDS
from coppice.config.settings import Settings
from coppice.rpc import tracing
from coppice.rpc.directory import own_registries
from coppice.rpc.server import Serving, run_service
from coppice.telemetry import SessionMetrics
from coppice.v1 import drafter_pb2

from .service import drafting


async def serve(settings: Settings) -> int:
    """Build the head and serve it until told to stop; returns the exit code."""
    if settings.drafter.kind in ("lm", *TRAINED_KINDS):
        check_model("drafter.path", settings.drafter.path)
    name = settings.drafter.name or settings.drafter.kind
    tracing.start(settings.telemetry, f"drafter-{name}")
    registries = own_registries(settings, "drafter", name)
    serving = Serving(settings, "drafter", registries=registries)
    metrics = SessionMetrics("drafter")
    serving.links = metrics.links.track_inprogress
    async with drafting({name: settings}, metrics) as servicer:
        await serving.start({drafter_pb2.DESCRIPTOR.services_by_name["DrafterService"]: servicer}, metrics.registry)
        return await serving.until_stopped(servicer.workers[name].failed)


if __name__ == "__main__":
    sys.exit(run_service(serve))
