"""python -m orchestrator: serve generation over verifiers and drafters."""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from coppice.config.settings import Settings
from coppice.rpc import tracing
from coppice.rpc.channels import Dialer
from coppice.rpc.directory import Directory, directory, drafter_pools
from coppice.rpc.server import Serving, run_service
from coppice.signals.producer import Producer
from coppice.telemetry import OrchestratorMetrics, SignalMetrics, serve_metrics
from coppice.v1 import generation_pb2

from .encoder import TextCodec
from .heads import HeadPool, feature_layers
from .service import GenerationServicer, Signals
from .targets import Pool, TargetPool
from .tokens import Tokens

if TYPE_CHECKING:
    from .http.server import HttpServer


async def _follow(pool: Pool[Any], where: Directory) -> None:
    """Keep a pool as its directory says, and look at its replicas, until cancelled."""
    async with asyncio.TaskGroup() as group:
        group.create_task(where.run(pool.update))
        group.create_task(pool.watch())


def _gauge(metrics: OrchestratorMetrics, servicer: GenerationServicer) -> None:
    """Have scrapes read what is known anyway."""
    pools: list[Pool[Any]] = [servicer.verifiers, *servicer.heads.values()]
    for pool in pools:
        metrics.replicas_fit.labels(pool.name).set_function(partial(_fit, pool))
    metrics.running.set_function(lambda: servicer.seats.used)
    metrics.waiting.set_function(lambda: servicer.seats.waiting)
    metrics.kv_usage.set_function(lambda: servicer.verifiers.kv_usage)


def _fit(pool: Pool[Any]) -> int:
    return sum(replica.fit for replica in pool.replicas)


def _http_server(settings: Settings, servicer: GenerationServicer, serving: Serving) -> HttpServer:
    """The server of OpenAI's API, whose packages nobody else needs."""
    from .http.server import HttpServer

    return HttpServer(settings, servicer, serving.access, serving.draining)


async def serve(settings: Settings) -> int:
    """Reach the verifiers and serve until told to stop; returns the exit code."""
    told = settings.orchestrator
    tracing.start(settings.telemetry, "orchestrator")
    at = directory(told.verifiers, "verifier", "", settings.directory, "orchestrator.verifiers")
    heads_at = drafter_pools(told.heads, settings.directory, "orchestrator.heads")
    dialer = Dialer(settings.limits, settings.tls)
    codec = TextCodec.find(told.target)
    verifiers = TargetPool(at.addresses, dialer, told.failover_s)
    following = [asyncio.create_task(_follow(verifiers, at))]
    target = await verifiers.first_target()
    metrics = OrchestratorMetrics(target.name, target.dtype)
    vocabulary = codec.vocabulary_hash if codec else b""
    heads = {
        name: HeadPool(name, where.addresses, dialer, metrics, target.layers, target.vocab_size, vocabulary)
        for name, where in heads_at.items()
    }
    following += [asyncio.create_task(_follow(heads[name], where)) for name, where in heads_at.items()]
    failed = asyncio.Event()
    for task in following:
        task.add_done_callback(lambda done: None if done.cancelled() else failed.set())
    await feature_layers(list(heads.values()), "orchestrator.heads")
    producer = Producer(settings.adaptation, SignalMetrics(metrics.registry), list(heads))
    signals = Signals(producer) if settings.adaptation.redis else None
    if signals is not None:
        producer.start()
    servicer = GenerationServicer(settings, target, verifiers, heads, codec, metrics, signals)
    if servicer.encoder is not None:
        await servicer.encoder.start()
    _gauge(metrics, servicer)
    tokens = Tokens(told.tokens, metrics.client_requests) if told.tokens else None
    serving = Serving(settings.server, settings.limits, "orchestrator", settings.tls, tokens)
    port = serve_metrics(metrics.registry, settings.server.host, settings.server.metrics_port)
    http = _http_server(settings, servicer, serving) if told.http_port >= 0 else None
    if http is not None:
        serving.others["http"] = await http.start()
    await serving.start(
        generation_pb2.DESCRIPTOR.services_by_name["GenerationService"], servicer, port, servicer.check_seats
    )
    code = await serving.until_stopped(failed)
    if http is not None:
        await http.stop()
    if servicer.encoder is not None:
        await servicer.encoder.stop()
    for task in following:
        task.cancel()
    if signals is not None:
        await signals.stop()
    return code


if __name__ == "__main__":
    sys.exit(run_service(serve))
