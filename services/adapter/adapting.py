"""What the adapter does from its start to its end: load the heads, then adapt them, or stand by."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import torch

from coppice.config.adaptation import AdapterSettings
from coppice.config.settings import Settings
from coppice.errors import InvalidField
from coppice.rpc.channels import Dialer
from coppice.rpc.directory import Directory, drafter_pools
from coppice.rpc.server import Serving
from coppice.telemetry import AdapterMetrics, serve_metrics
from coppice.v1 import adapter_pb2

from .head_loop import HeadLoop
from .inbox import Inbox
from .lease import Lease
from .replicas import Replicas
from .rollout import OnThread
from .service import AdapterServicer
from .training_copy import TrainingCopy

log = structlog.get_logger()


@dataclass(frozen=True)
class _Head:
    """One head's weights, loaded, and where its drafters are."""

    name: str
    training: TrainingCopy
    drafters: Directory
    folder: Path


async def _load(settings: Settings, on_thread: OnThread, home: Path) -> list[_Head]:
    """Load the heads; nothing is read from `home`, or written there. Raises InvalidField."""
    adapter = settings.adapter
    paths = dict(pair.split("=", 1) for pair in adapter.heads)
    drafters = drafter_pools(adapter.drafters, settings.directory, "adapter.drafters")
    if unknown := [name for name in drafters if name not in paths]:
        raise InvalidField("adapter.drafters", f"{unknown[0]} is none of {', '.join(paths)}")
    heads = []
    for name, path in paths.items():
        if name not in drafters:
            raise InvalidField("adapter.drafters", f"none serves {name}")
        training = await on_thread(TrainingCopy, path, settings, home / name)
        heads.append(_Head(name, training, drafters[name], home / name))
    return heads


class _Adapter:
    """Stands by until the lease is its own, then adapts for as long as it is."""

    def __init__(self, settings: Settings, heads: list[_Head], on_thread: OnThread, metrics: AdapterMetrics) -> None:
        self._settings, self._heads, self._on_thread, self._metrics = settings, heads, on_thread, metrics
        self._lease = Lease(settings.adaptation, settings.adapter.lease_s)
        metrics.active.set_function(self._lease.held)
        self.servicer = AdapterServicer([head.name for head in heads], settings.bandit.policy)
        self.decided = asyncio.Event()
        """it adapts, or stands by, or failed"""

    async def run(self) -> None:
        """Adapt until cancelled. Raises an exception group with LeaseLost, or with what a task ended by."""
        loops: list[HeadLoop] = []
        try:
            if not await self._lease.take():
                log.info("standing by: another adapter is active, or redis is away")
                self.decided.set()
                await self._lease.wait()
            async with asyncio.TaskGroup() as group:
                group.create_task(self._lease.keep())
                for head in self._heads:
                    replicas, loop = self._loop(head)
                    loops.append(loop)
                    await loop.start()
                    group.create_task(replicas.follow())
                inbox = Inbox(self._settings.adaptation, loops, self._metrics)
                await inbox.begin()
                group.create_task(inbox.run())
                for loop in loops:
                    group.create_task(loop.run())
                self.servicer.adapt(loops)
                self.decided.set()
        finally:
            self.decided.set()
            for loop in loops:
                await loop.stop()
            await self._lease.give_back()

    def _loop(self, head: _Head) -> tuple[Replicas, HeadLoop]:
        head.folder.mkdir(parents=True, exist_ok=True)
        held, dialer = self._lease.held, Dialer(self._settings.limits, self._settings.tls)
        replicas = Replicas(head.name, head.drafters, head.training.deployed, dialer, self._metrics, held)
        loop = HeadLoop(
            head.name, head.training, replicas, self._settings, head.folder, self._on_thread, self._metrics, held
        )
        return replicas, loop


def _yielding(settings: AdapterSettings) -> None:
    """Make the calling thread, and those that torch starts from it, give way to everything else on the machine."""
    os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))
    torch.set_num_threads(settings.threads)


async def serve(settings: Settings) -> int:
    """Load the heads and adapt them, or stand by, until told to stop; returns the exit code."""
    thread = ThreadPoolExecutor(1, "learner", _yielding, (settings.adapter,))

    async def on_thread(work: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(thread, work, *arguments)

    metrics = AdapterMetrics()
    with contextlib.ExitStack() as stack:
        home = settings.adapter.folder or stack.enter_context(tempfile.TemporaryDirectory(prefix="coppice-adapter-"))
        adapter = _Adapter(settings, await _load(settings, on_thread, Path(home)), on_thread, metrics)
        failed = asyncio.Event()
        adapting = asyncio.create_task(adapter.run())
        adapting.add_done_callback(lambda done: None if done.cancelled() else failed.set())
        await adapter.decided.wait()
        serving = Serving(settings.server, settings.limits, "adapter", settings.tls)
        port = serve_metrics(metrics.registry, settings.server.host, settings.server.metrics_port)
        await serving.start(adapter_pb2.DESCRIPTOR.services_by_name["AdapterService"], adapter.servicer, port)
        code = await serving.until_stopped(failed)
        adapting.cancel()
        for outcome in await asyncio.gather(adapting, return_exceptions=True):
            if isinstance(outcome, Exception):
                log.error("a task of the adapter ended", why=repr(outcome))
        thread.shutdown(wait=False, cancel_futures=True)
    return code
