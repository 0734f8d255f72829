"""A whole pipeline inside this process: what is patched here is patched in every service."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from coppice.config.settings import Settings
from coppice.errors import Unavailable
from coppice.heads.registry import served_head
from coppice.rpc.channels import Dialer
from coppice.rpc.server import Serving
from coppice.telemetry import SessionMetrics
from coppice.v1 import drafter_pb2, generation_pb2, verifier_pb2
from orchestrator.heads import HeadPool
from orchestrator.metrics import OrchestratorMetrics
from orchestrator.service import GenerationServicer
from orchestrator.targets import TargetPool
from services.drafter.following import Verifiers
from services.drafter.service import DrafterServicer
from services.drafter.worker import Worker as Drafter
from services.verifier.service import VerifierServicer
from services.verifier.worker import Worker as Verifier


def lose_sessions(patch: pytest.MonkeyPatch) -> None:
    """Let verifiers lose the session of every third step."""
    verify, steps = Verifier.verify, itertools.count(1)

    async def lost(self: Verifier, *arguments: Any) -> Any:
        if next(steps) % 3 == 0:
            raise Unavailable("lost")
        return await verify(self, *arguments)

    patch.setattr(Verifier, "verify", lost)


def break_streams(patch: pytest.MonkeyPatch) -> None:
    """Let orchestrators lose every answer that was not resumed, after some tokens."""
    answer = GenerationServicer.answer

    async def lost(self: GenerationServicer, message: Any, *arguments: Any) -> AsyncIterator[Any]:
        async with aclosing(answer(self, message, *arguments)) as parts:
            count = 0
            async for part in parts:
                if not message.resume_ids and count > 3:
                    raise Unavailable("lost")
                count += 1
                yield part

    patch.setattr(GenerationServicer, "answer", lost)


@dataclass
class Pipeline:
    """A running one."""

    address: str
    verifiers: list[Verifier]


async def _served(close: AsyncExitStack, settings: Settings, role: str, service: Any, make: Any) -> str:
    """Serve what `make` makes; returns its address."""
    serving = Serving(settings.server, settings.limits, role)
    await serving.start(service, make(serving.waits))
    close.push_async_callback(serving.health.stop)
    close.push_async_callback(serving.server.stop, 0)
    return serving.address


@asynccontextmanager
async def pipeline(target: Path, heads: Mapping[str, Path]) -> AsyncIterator[Pipeline]:
    """Two verifiers of a target, a drafter for each language model in `heads`, and an orchestrator."""
    told: Any = {"threads": 1, "dtype": "float32", "kv_tokens": 8192}
    settings = Settings(
        verifier={**told, "target": str(target), "name": "tiny", "prune": False},  # type: ignore[arg-type]
        orchestrator={"draft_deadline_ms": 5000.0, "budget": 8},  # type: ignore[arg-type]
    )
    verifiers, at, drafters_at = list[Verifier](), list[str](), dict[str, str]()
    async with AsyncExitStack() as close:
        for _ in range(2):
            worker = Verifier(settings.verifier, SessionMetrics("verifier"))
            await worker.start()
            close.push_async_callback(worker.stop)
            service = verifier_pb2.DESCRIPTOR.services_by_name["VerifierService"]

            def verifying(waits: Any, worker: Any = worker) -> Any:
                return VerifierServicer(settings, worker, worker.engine.info, waits)

            at.append(await _served(close, settings, "verifier", service, verifying))
            verifiers.append(worker)
        for name, path in heads.items():
            drafter = settings.drafter.model_copy(update={**told, "name": name, "kind": "lm", "path": str(path)})
            head = Drafter(lambda drafter=drafter: served_head(drafter), SessionMetrics("drafter"))  # type: ignore[misc]
            await head.start()
            close.push_async_callback(head.stop)
            service = drafter_pb2.DESCRIPTOR.services_by_name["DrafterService"]

            def drafting(waits: Any, head: Any = head) -> Any:
                return DrafterServicer({"head": head}, settings.limits, waits, Verifiers(Dialer()))

            drafters_at[name] = await _served(close, settings, "drafter", service, drafting)
        metrics, dialer = OrchestratorMetrics(), Dialer()
        pool = TargetPool(at, dialer)
        description = await pool.first_target()
        pools = {
            name: HeadPool(name, [address], dialer, metrics, description.layers)
            for name, address in drafters_at.items()
        }
        watching = [asyncio.create_task(one.watch()) for one in (pool, *pools.values())]
        await asyncio.gather(*(each.look_at_all() for each in pools.values()))
        orchestrator = GenerationServicer(settings, description, pool, pools, None, metrics)
        service = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"]
        address = await _served(close, settings, "orchestrator", service, lambda _: orchestrator)
        yield Pipeline(address, verifiers)
        for task in watching:
            task.cancel()
