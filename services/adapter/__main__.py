"""The adapter process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import structlog
import torch

from coppice.config import AdapterSettings, Settings
from coppice.errors import InvalidField
from coppice.rpc.channels import Dialer
from coppice.rpc.server import Serving, run_service
from coppice.telemetry import AdapterMetrics, serve_metrics
from coppice.v1 import adapter_pb2
from services.adapter.copies import Copies
from services.adapter.inbox import Inbox
from services.adapter.loop import HeadLoop, OnThread
from services.adapter.replicas import Replicas
from services.adapter.service import AdapterServicer

log = structlog.get_logger()


def _pairs(field: str, pairs: list[str]) -> Iterator[tuple[str, str]]:
    for pair in pairs:
        name, _, value = pair.partition("=")
        yield name, value
    if not pairs:
        raise InvalidField(field, "names none")


async def _build(settings: Settings, on_thread: OnThread, metrics: AdapterMetrics, home: Path) -> list[HeadLoop]:
    """A loop for each head, its weights loaded. Raises InvalidField."""
    told = settings.adapter
    drafters = list(_pairs("adapter.drafters", told.drafters))
    heads = dict(_pairs("adapter.heads", told.heads))
    for name, address in drafters:
        if name not in heads:
            raise InvalidField("adapter.drafters", f"{name}={address} serves none of {', '.join(heads)}")
    loops = []
    for name, path in heads.items():
        addresses = [address for pool, address in drafters if pool == name]
        if not addresses:
            raise InvalidField("adapter.drafters", f"none serves {name}")
        folder = home / name
        folder.mkdir(parents=True, exist_ok=True)
        copies = await on_thread(Copies, path, settings, folder)
        replicas = Replicas(name, addresses, copies.checkpoint, Dialer(settings.limits, settings.tls), metrics)
        loops.append(HeadLoop(name, copies, replicas, settings, folder, on_thread, metrics))
    return loops


def _yielding(told: AdapterSettings) -> None:
    """Make the calling thread, and those that torch starts from it, give way to everything else on the machine."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), told.nice)
    torch.set_num_threads(told.threads)


async def serve(settings: Settings) -> int:
    """Load the heads and adapt them until told to stop; returns the exit code."""
    if not settings.adaptation.redis:
        raise InvalidField("adaptation.redis", "the adapter reads from Redis; give its URL")
    thread = ThreadPoolExecutor(1, "learner", _yielding, (settings.adapter,))

    async def on_thread(work: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(thread, work, *arguments)

    metrics = AdapterMetrics()
    with contextlib.ExitStack() as stack:
        home = settings.adapter.folder or stack.enter_context(tempfile.TemporaryDirectory(prefix="coppice-adapter-"))
        loops = await _build(settings, on_thread, metrics, Path(home))
        for loop in loops:
            await loop.start()
        inbox = Inbox(settings.adaptation, loops, metrics)
        failed = asyncio.Event()
        tasks = [asyncio.create_task(work) for work in (inbox.run(), *(loop.run() for loop in loops))]
        for task in tasks:
            task.add_done_callback(lambda done: None if done.cancelled() else failed.set())
        serving = Serving(settings.server, settings.limits, "adapter", settings.tls)
        port = serve_metrics(metrics.registry, settings.server)
        servicer = AdapterServicer(loops)
        await serving.start(adapter_pb2.DESCRIPTOR.services_by_name["AdapterService"], servicer, port)
        code = await serving.until_stopped(failed)
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                log.error("a task of the adapter ended", why=repr(outcome))
        for loop in loops:
            await loop.stop()
        thread.shutdown(wait=False, cancel_futures=True)
    return code


if __name__ == "__main__":
    sys.exit(run_service(serve))
