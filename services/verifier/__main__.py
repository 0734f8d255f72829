"""python -m services.verifier: serve one target."""

import sys
from contextlib import AsyncExitStack
from pathlib import Path

from google.protobuf.descriptor import ServiceDescriptor

from coppice.config.model import check_model
from coppice.config.sections import DrafterSettings
from coppice.config.settings import Settings, load_settings
from coppice.rpc import tracing
from coppice.rpc.directory import own_registries
from coppice.rpc.server import Serving, run_service
from coppice.telemetry import SessionMetrics
from coppice.v1 import drafter_pb2, verifier_pb2


def _named(settings: Settings) -> Settings:
    """The settings with the target's folder checked and its name filled in."""
    check_model("verifier.target", settings.verifier.target)
    name = settings.verifier.name or Path(settings.verifier.target).resolve().name
    return settings.model_copy(update={"verifier": settings.verifier.model_copy(update={"name": name})})


def heads_beside(settings: Settings) -> dict[str, Settings]:
    """The settings of each head of `verifier.drafters`: section drafter's, where that is silent the target's."""
    placed = {name: getattr(settings.verifier, name) for name in ("device", "dtype", "target")}
    given = settings.drafter.model_dump(include=settings.drafter.model_fields_set)
    heads = {}
    for drafter in settings.verifier.drafters:
        name, _, head = drafter.partition("=")
        kind, _, path = head.partition(":")
        own = DrafterSettings(**{**placed, **given, "name": name, "kind": kind, "path": path})
        heads[name] = settings.model_copy(update={"drafter": own})
    return heads


async def serve(settings: Settings) -> int:
    """Load the target and serve it until told to stop; returns the exit code."""
    from .service import VerifierServicer  # torch comes with it, settings are checked before
    from .worker import Worker

    tracing.start(settings.telemetry, "verifier")
    metrics = SessionMetrics("verifier")
    heads = heads_beside(settings)
    registries = own_registries(settings, "verifier") + (own_registries(settings, "drafter", *heads) if heads else [])
    serving = Serving(settings, "verifier", registries=registries)
    worker = Worker(settings.verifier, metrics, settings.limits.sessions)
    serving.links = metrics.links.track_inprogress
    await worker.start()
    settings = settings.model_copy(update={"verifier": worker.settings})
    serving.others["memory"] = worker.engine.memory
    async with AsyncExitStack() as stack:
        stack.push_async_callback(worker.stop)
        target, drafter = (pb.DESCRIPTOR.services_by_name for pb in (verifier_pb2, drafter_pb2))
        servicers: dict[ServiceDescriptor, object]
        servicers = {target["VerifierService"]: VerifierServicer(settings, worker)}
        if heads:
            from ..drafter.service import drafting

            drafters = drafting(heads, SessionMetrics("drafter", metrics.registry), worker, worker)
            servicers[drafter["DrafterService"]] = await stack.enter_async_context(drafters)
        await serving.start(servicers, metrics.registry)
        worker.address = serving.address
        return await serving.until_stopped(worker.failed)


if __name__ == "__main__":
    sys.exit(run_service(serve, lambda: _named(load_settings())))
