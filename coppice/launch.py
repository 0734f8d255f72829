"""A whole stack on one machine: a verifier, drafter pools and an orchestrator as processes of their own."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from coppice.adaptation.local_redis import LocalRedis
from coppice.process import ProcessFailed, Ready, ServiceProcess
from coppice.stack_spec import FEATURE_KINDS, HeadSpec, StackSpec, as_flags, checkout

MODULES = {
    "verifier": "services.verifier",
    "drafter": "services.drafter",
    "orchestrator": "orchestrator",
    "adapter": "services.adapter",
}
SERVICES = {
    "verifier": "coppice.v1.VerifierService",
    "drafter": "coppice.v1.DrafterService",
    "orchestrator": "coppice.v1.GenerationService",
    "adapter": "coppice.v1.AdapterService",
}
STOP_GRACE_S = 15.0
ADAPTER = "adapter"
# Only the orchestrator is for others; what settings say of listening is meant for it.
_LOOPBACK = {
    "server.host": "127.0.0.1",
    "server.advertise": "127.0.0.1",
    "server.port": 0,
    "server.health_port": 0,
    "server.metrics_port": 0,
}


class Stack:
    """Starts the processes of a spec and stops them: a context manager.

    A process that dies is not restarted: `check` raises with the tail of its log. After the end `unclean` names the
    processes that did not stop by themselves with exit code 0.
    """

    def __init__(self, spec: StackSpec, modules: Mapping[str, str] = MODULES) -> None:
        """`modules` are what is run for each role. Raises NoCheckout, or InvalidField for an unusable setting."""
        self.spec = spec
        self.settings = spec.settings()
        self.unclean: list[str] = []
        self._modules, self._root = modules, checkout()
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._folder = spec.log_dir
        self._processes: list[ServiceProcess] = []  # in the order of their start
        self._redis: LocalRedis | None = None
        self._signals: dict[str, Any] = {}

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def start(self) -> None:
        """Start everything and wait until it is healthy. Raises ProcessFailed; call `stop` then too."""
        if self._folder is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="coppice-")
            self._folder = Path(self._temporary.name)
        self._folder.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + self.spec.ready_s
        self._signals = self._redis_flags()
        verifier = self._launch("verifier", "verifier", self._verifier_flags())
        drafters = []
        for head in self.spec.heads:
            flags = self._drafter_flags(head)
            if head.kind in FEATURE_KINDS:  # it fetches features from this verifier only, whose port is known by then
                flags["drafter.verifiers"] = [verifier.wait_ready(deadline).address]
            for replica in range(self.spec.replicas):
                name = _drafter_name(head, replica, self.spec.replicas)
                drafters.append((head, self._launch(name, "drafter", flags)))
        verifiers = [verifier.wait_ready(deadline).address]
        heads = [f"{head.name}={drafter.wait_ready(deadline).address}" for head, drafter in drafters]
        if self.spec.adapted:
            self._launch(ADAPTER, "adapter", self._adapter_flags(heads)).wait_ready(deadline)
        flags = {**self._orchestrator_flags(), "orchestrator.verifiers": verifiers, "orchestrator.heads": heads}
        self._launch("orchestrator", "orchestrator", flags).wait_ready(deadline)

    def stop(self) -> None:
        """Stop everything, the last started first."""
        while self._processes:
            process = self._processes[-1]
            if not process.stop(STOP_GRACE_S):
                self.unclean.append(process.name)
            self._processes.pop()
        if self._redis:
            self._redis.stop()
            self._redis = None
        if self._temporary:
            self._temporary.cleanup()

    def check(self) -> None:
        """Raise ProcessFailed if a process died. The adapter and Redis are not missed: text goes on without them."""
        for process in self._processes:
            if process.name != ADAPTER:
                process.check()

    def lost(self) -> str:
        """Why the adapter is no more; empty while it runs, and without one."""
        try:
            for process in self._processes:
                process.check()
        except ProcessFailed as error:
            return str(error)
        return ""

    @property
    def services(self) -> dict[str, Ready]:
        """What runs, by name."""
        return {process.name: process.ready for process in self._processes if process.ready}

    @property
    def pids(self) -> list[int]:
        """Every process of the stack, its own Redis included."""
        redis = self._redis.pid if self._redis else None
        return [*(ready.pid for ready in self.services.values()), *([redis] if redis else [])]

    @property
    def orchestrator(self) -> Ready:
        """Where clients go."""
        ready = self._processes[-1].ready if self._processes else None
        if ready is None:
            raise ProcessFailed("the stack is not running")
        return ready

    @property
    def address(self) -> str:
        """HOST:PORT for clients."""
        return self.orchestrator.address

    def to_json(self) -> dict[str, Any]:
        """What `coppice up --ready-file` writes."""
        services = [
            {"name": name, "role": ready.role, "address": ready.address, "pid": ready.pid}
            for name, ready in self.services.items()
        ]
        return {"address": self.address, "metrics": self.orchestrator.metrics, "services": services}

    def _launch(self, name: str, role: str, flags: Mapping[str, Any]) -> ServiceProcess:
        assert self._folder
        arguments = as_flags({**flags, **self._signals, **self.spec.extra.get(role, {})})
        process = ServiceProcess(name, self._modules[role], SERVICES[role], arguments, self._folder, self._root)
        self._processes.append(process)
        process.start()
        return process

    def _redis_flags(self) -> dict[str, Any]:
        """Where signals go when settings, which every process reads by itself, name no Redis: to one of our own."""
        if not self.spec.adapted or self.settings.adaptation.redis:
            return {}
        self._redis = LocalRedis()
        self._redis.start()
        return {"adaptation.redis": self._redis.url}

    def _adapter_flags(self, drafters: Sequence[str]) -> dict[str, Any]:
        adapted = {head.name: head.path for head in self.spec.adapted}
        return {
            **_LOOPBACK,
            "server.port": self.spec.adapter_port,
            "adapter.target": self.spec.target,
            "adapter.heads": [f"{name}={path}" for name, path in adapted.items()],
            "adapter.drafters": [pair for pair in drafters if pair.partition("=")[0] in adapted],
        }

    def _verifier_flags(self) -> dict[str, Any]:
        told = self.settings.verifier
        return {
            **_LOOPBACK,
            "verifier.target": self.spec.target,
            "verifier.device": told.device,
            "verifier.dtype": told.dtype,
            "verifier.threads": told.threads,
        }

    def _drafter_flags(self, head: HeadSpec) -> dict[str, Any]:
        told = self.settings.drafter
        flags = {
            **_LOOPBACK,
            "drafter.name": head.name,
            "drafter.kind": head.kind,
            "drafter.target": self.spec.target,
            "drafter.device": told.device,
            "drafter.dtype": told.dtype,
            "drafter.threads": told.threads,
        }
        return {**flags, "drafter.path": head.path} if head.path else flags

    def _orchestrator_flags(self) -> dict[str, Any]:
        flags = {
            "orchestrator.target": self.spec.target,
            "orchestrator.budget": self.settings.orchestrator.budget,
            "server.port": self.settings.server.port,
        }
        policy = self.settings.orchestrator.policy
        return {**flags, "orchestrator.policy": policy} if policy else flags


def _drafter_name(head: HeadSpec, replica: int, replicas: int) -> str:
    return f"drafter-{head.name}" if replicas == 1 else f"drafter-{head.name}-{replica}"
