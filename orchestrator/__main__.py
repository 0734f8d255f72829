"""python -m orchestrator: serve generation over verifiers and drafters."""

import asyncio
import sys
from contextlib import AsyncExitStack
from pathlib import Path

from coppice.adaptation.signals import Producer
from coppice.config.settings import Settings
from coppice.rpc import tracing
from coppice.rpc.channels import Dialer
from coppice.rpc.directory import directory, drafter_pools
from coppice.rpc.server import Serving, run_service
from coppice.v1 import generation_pb2
from coppice.wire.drafter import vocabulary_hash

from .heads import HeadPool, feature_layers
from .metrics import OrchestratorMetrics
from .service import GenerationServicer
from .targets import Pool, TargetPool
from .text import TextCodec
from .tokens import Tokens


async def serve(settings: Settings) -> int:
    """Reach the verifiers and serve until told to stop; returns the exit code."""
    options = settings.orchestrator
    tracing.start(settings.telemetry, "orchestrator")
    verifiers_at = directory(options.verifiers, "verifier", "", settings.directory.redis, "orchestrator.verifiers")
    heads_at = drafter_pools(options.heads, settings.directory.redis, "orchestrator.heads")
    dialer = Dialer(settings.tls)
    has_tokenizer = options.target and (Path(options.target) / "tokenizer.json").is_file()  # else only ids work
    codec = TextCodec(Path(options.target)) if has_tokenizer else None
    verifiers = TargetPool(verifiers_at.addresses, dialer, options.failover_s, settings.limits.call_s)
    following = [asyncio.create_task(verifiers.follow(verifiers_at))]
    target = await verifiers.first_target()
    metrics = OrchestratorMetrics(target.names[0], target.dtype)
    vocabulary = vocabulary_hash(codec.tokenizer.get_vocab()) if codec else b""
    heads = {
        name: HeadPool(name, where.addresses, dialer, metrics, target.layers, target.vocab_size, vocabulary)
        for name, where in heads_at.items()
    }
    following += [asyncio.create_task(heads[name].follow(where)) for name, where in heads_at.items()]
    failed = asyncio.Event()
    for task in following:
        task.add_done_callback(lambda done: None if done.cancelled() else failed.set())
    await asyncio.gather(*(head.look_at_all() for head in heads.values()))
    feature_layers(list(heads.values()), "orchestrator.heads")
    async with AsyncExitStack() as stopping:
        producer = Producer(settings.adaptation.redis, metrics.registry, list(heads))
        signals = producer if settings.adaptation.redis else None
        if signals is not None:
            signals.start()
            stopping.push_async_callback(signals.stop)
        for task in following:
            stopping.callback(task.cancel)
        servicer = GenerationServicer(settings, target, verifiers, heads, codec, metrics, signals)
        if servicer.encoder is not None:
            await servicer.encoder.start()
            stopping.push_async_callback(servicer.encoder.stop)
        pools: list[Pool] = [verifiers, *heads.values()]
        for pool in pools:  # scrapes read what is known anyway
            metrics.replicas_fit.labels(pool.name).set_function(pool.num_fit)
        metrics.running.set_function(lambda: servicer.seats.used)
        metrics.waiting.set_function(lambda: servicer.seats.waiting)
        metrics.kv_usage.set_function(lambda: verifiers.kv_usage)
        tokens = Tokens(options.tokens, metrics.client_requests) if options.tokens else None
        serving = Serving(settings, "orchestrator", tokens)
        if options.http_port >= 0:
            from .http.server import HttpServer  # its packages nobody else needs

            http = HttpServer(settings, servicer, serving.access, serving.draining)
            serving.others["http"] = await http.start()
            stopping.push_async_callback(http.stop)
        service = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"]
        await serving.start({service: servicer}, metrics.registry, servicer.check_seats)
        return await serving.until_stopped(failed)


if __name__ == "__main__":
    sys.exit(run_service(serve))
