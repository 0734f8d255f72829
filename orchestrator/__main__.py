"""python -m orchestrator: serve generation over verifiers and drafters."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from coppice.adaptation.stream import Producer
from coppice.config import Settings
from coppice.errors import InvalidField
from coppice.rpc.channels import Dialer
from coppice.rpc.server import Serving, run_service
from coppice.rpc.tokens import Tokens
from coppice.telemetry import OrchestratorMetrics, SignalMetrics, serve_metrics
from coppice.v1 import generation_pb2
from orchestrator.head import HeadPool, feature_layers
from orchestrator.replicas import Pool
from orchestrator.service import GenerationServicer
from orchestrator.signals import Signals
from orchestrator.target import TargetPool
from orchestrator.text import TextCodec


def _head_pools(settings: Settings, dialer: Dialer, metrics: OrchestratorMetrics) -> dict[str, HeadPool]:
    """The heads in the order they were given; replicas share a name."""
    addresses: dict[str, list[str]] = {}
    for head in settings.orchestrator.heads:
        name, _, address = head.partition("=")
        addresses.setdefault(name, []).append(address)
    return {name: HeadPool(name, pool, dialer, metrics) for name, pool in addresses.items()}


async def serve(settings: Settings) -> int:
    """Reach the verifiers and serve until told to stop; returns the exit code."""
    if not settings.orchestrator.verifiers:
        raise InvalidField("orchestrator.verifiers", "name at least one verifier's HOST:PORT")
    metrics, dialer = OrchestratorMetrics(), Dialer(settings.limits, settings.tls)
    codec = TextCodec.find(settings.orchestrator.target)
    told = settings.orchestrator
    verifiers = TargetPool(told.verifiers, dialer, told.failover_s, told.reopens)
    target = await verifiers.first_target()
    heads = _head_pools(settings, dialer, metrics)
    await feature_layers(list(heads.values()), "orchestrator.heads")
    producer = Producer(settings.adaptation, SignalMetrics(metrics.registry))
    signals = Signals(producer, settings.adaptation.top_n) if settings.adaptation.redis else None
    if signals is not None:
        producer.start()
    servicer = GenerationServicer(settings, target, verifiers, heads, codec, metrics, signals)
    pools: list[Pool[Any]] = [verifiers, *heads.values()]
    watching = [asyncio.create_task(pool.watch()) for pool in pools]
    tokens = Tokens(settings.orchestrator.tokens, metrics.client_requests) if settings.orchestrator.tokens else None
    serving = Serving(settings.server, settings.limits, "orchestrator", settings.tls, tokens)
    port = serve_metrics(metrics.registry, settings.server)
    await serving.start(generation_pb2.DESCRIPTOR.services_by_name["GenerationService"], servicer, port)
    code = await serving.until_stopped()
    for task in watching:
        task.cancel()
    if signals is not None:
        await signals.stop()
    return code


if __name__ == "__main__":
    sys.exit(run_service(serve))
