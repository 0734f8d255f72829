"""A whole pipeline inside this process: what is patched here is patched in every service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


@dataclass
class Faults:
    """What the pipeline does to its own sessions, when told to."""

    lose_steps: bool = False
    """a verifier loses every session at some step"""
    break_streams: bool = False
    """the orchestrator loses every answer that was not resumed, after some tokens"""


class _Losing:
    """A verifier's worker that loses sessions."""

    def __init__(self, worker: Verifier, faults: Faults) -> None:
        self._worker, self._faults, self._steps = worker, faults, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    async def verify(self, key: int, step: Any, arrived: int) -> Any:
        self._steps += 1
        if self._faults.lose_steps and self._steps % 3 == 0:
            raise Unavailable("lost")
        return await self._worker.verify(key, step, arrived)


class _Breaking(GenerationServicer):
    """An orchestrator that loses answers."""

    faults: Faults

    async def Generate(self, message: Any, context: Any) -> AsyncIterator[Any]:
        came = 0
        async for response in super().Generate(message, context):
            if self.faults.break_streams and not message.resume_ids and came > 3:
                raise Unavailable("lost")
            came += 1
            yield response


@dataclass
class Pipeline:
    """A running one."""

    address: str
    verifiers: list[Verifier]
    faults: Faults


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
    faults, verifiers, at, drafters_at = Faults(), list[Verifier](), list[str](), dict[str, str]()
    async with AsyncExitStack() as close:
        for _ in range(2):
            worker = Verifier(settings.verifier, SessionMetrics("verifier"))
            await worker.start()
            close.push_async_callback(worker.stop)
            service = verifier_pb2.DESCRIPTOR.services_by_name["VerifierService"]

            def verifying(waits: Any, worker: Any = worker) -> Any:
                return VerifierServicer(settings, _Losing(worker, faults), worker.engine.info, waits)  # type: ignore[arg-type]

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
        orchestrator = _Breaking(settings, description, pool, pools, None, metrics)
        orchestrator.faults = faults
        service = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"]
        address = await _served(close, settings, "orchestrator", service, lambda _: orchestrator)
        yield Pipeline(address, verifiers, faults)
        for task in watching:
            task.cancel()
