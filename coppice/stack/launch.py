"""A whole stack on one machine: verifiers, drafter pools and orchestrators as processes of their own."""

from __future__ import annotations

import contextlib
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from coppice.config.sections import FEATURE_KINDS, DrafterSettings, VerifierSettings
from coppice.stack.preflight import PORTS, preflight, reserve
from coppice.stack.process import ProcessFailed, Ready, ServiceProcess
from coppice.stack.redis_server import LocalRedis
from coppice.stack.spec import HTTP_PORT, HeadSpec, StackSpec, checkout, module_of

MODULES = {
    "verifier": module_of("services.verifier"),
    "drafter": module_of("services.drafter"),
    "orchestrator": module_of("orchestrator"),
    "adapter": module_of("services.adapter"),
}
STOP_GRACE_S = 15.0
ANSWERS_S = 5
"""how long running answers have when a whole stack is stopped"""
FAILOVER_LOADS = 3
"""loads of the slowest verifier that an orchestrator waits for one at least: one that died has to load again"""
_CALLERS = ("orchestrator", "adapter")  # stopped before those whom they call
ADAPTER, REDIS = "adapter", "redis"
# Only the first orchestrator is for others; what settings say of listening is meant for it.
_LOOPBACK = {
    "server.host": "127.0.0.1",
    "server.advertise": "127.0.0.1",
    "server.port": 0,
    "server.health_port": 0,
    "server.metrics_port": 0,
}


class Stack:
    """Starts the processes of a spec and stops them: a context manager.

    A process that dies is restarted by `restart`, `revive` or a Supervisor only: `check` raises with the tail of its
    log. After the end `unclean` names the processes that did not stop by themselves with exit code 0.
    """

    def __init__(
        self,
        spec: StackSpec,
        modules: Mapping[str, str] = MODULES,
        via: Callable[[str, str], str] = lambda name, address: address,
        log_dir: Path | None = None,
        ready_s: float = 300.0,
    ) -> None:
        """`modules` are what is run for each role. `via` says, given a process's name and HOST:PORT, where the others
        and clients are to reach it (a proxy). `log_dir` is where logs stay; None: a temporary folder. `ready_s` is how
        long the services may take to load. Raises InvalidField for an unusable setting.
        """
        self.spec = spec
        self.settings = spec.settings()
        self.unclean: list[str] = []
        self.failover_s = self.settings.orchestrator.failover_s
        """how long a request waits for a verifier; once started, long enough for one that died to load again"""
        self._modules, self._root, self._via, self._ready_s = modules, checkout(), via, ready_s
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self.log_dir = log_dir
        self.processes: dict[str, ServiceProcess] = {}
        """every process by name, whether it runs or not, in the order of their start"""
        self._reserved: list[socket.socket] = []  # the ports of all, which nobody else gets while one is dead
        self.redis: LocalRedis | None = None  # its own, when signals need one
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
        """Start everything and wait until it is healthy.

        Raises InvalidField for what `preflight` finds, and ProcessFailed; call `stop` then too.
        """
        kv_tokens = preflight(self.spec, self.settings)
        if self.log_dir is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="coppice-")
            self.log_dir = Path(self._temporary.name)
        self.log_dir.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + self._ready_s
        self._signals = self._redis_flags()
        spec, verifier_flags = self.spec, {"verifier.kv_tokens": kv_tokens, **self._verifier_flags()}
        verifiers = [self._launch(name, "verifier", verifier_flags) for name in _names("verifier", spec.verifiers)]
        drafters = []
        for head in () if spec.one_process else spec.heads:
            flags = self._drafter_flags(head)
            if head.kind in FEATURE_KINDS:  # it fetches features from these verifiers only, whose ports are known then
                flags["drafter.verifiers"] = [verifier.wait_ready(deadline).address for verifier in verifiers]
            for name in _names(f"drafter-{head.name}", spec.replicas):
                drafters.append((head, self._launch(name, "drafter", flags)))
        targets = [self._reached(verifier, deadline) for verifier in verifiers]
        heads = [f"{head.name}={self._reached(drafter, deadline)}" for head, drafter in drafters]
        if spec.one_process:
            heads = [f"{head.name}={target}" for head in spec.heads for target in targets]
        flags = {**self._orchestrator_flags(), "orchestrator.verifiers": targets, "orchestrator.heads": heads}
        loads = [process.state[1] for process in verifiers if process.state]
        self.failover_s = max(self.failover_s, FAILOVER_LOADS * max(loads, default=0.0))
        flags["orchestrator.failover_s"] = self.failover_s
        if spec.adapted:
            self._reached(self._launch(ADAPTER, "adapter", self._adapter_flags(heads)), deadline)
        first, *others = _names("orchestrator", spec.orchestrators)
        orchestrators = [self._launch(first, "orchestrator", flags)]
        flags = {**flags, **_LOOPBACK, HTTP_PORT: min(0, flags[HTTP_PORT])}
        orchestrators += [self._launch(name, "orchestrator", flags) for name in others]
        for orchestrator in orchestrators:
            self._reached(orchestrator, deadline)

    def restart(self, name: str, flags: Mapping[str, Any] | None = None, ready_s: float | None = None) -> bool:
        """Do as `revive` does, and wait until the process is healthy. Raises ProcessFailed."""
        ended_well = self.revive(name, flags)
        self.processes[name].wait_ready(time.monotonic() + (ready_s or self._ready_s))
        return ended_well

    def revive(self, name: str, flags: Mapping[str, Any] | None = None) -> bool:
        """Start a process anew on its ports, as it was started first but for `flags`, and return at once.

        What still runs of it is stopped before; whether that ended well.
        """
        ended_well = self.processes[name].stop(STOP_GRACE_S)
        self.processes[name].start(flags)
        return ended_well

    def stop(self) -> None:
        """Stop everything: first those who call others, all at once, then the others."""
        for roles in (_CALLERS, tuple(MODULES)):
            ending = [process for process in self.processes.values() if process.role in roles]
            for process in ending:
                process.terminate()
            for process in ending:
                if not process.stop(STOP_GRACE_S):
                    self.unclean.append(process.name)
                del self.processes[process.name]
        while self._reserved:
            self._reserved.pop().close()
        if self.redis:
            self.redis.stop()
            self.redis = None
        if self._temporary:
            self._temporary.cleanup()

    def check(self) -> None:
        """Raise ProcessFailed if a process died. The adapter and Redis are not missed: text goes on without them."""
        for name, process in self.processes.items():
            if name != ADAPTER:
                process.check()

    @property
    def services(self) -> dict[str, Ready]:
        """What runs, by name; addresses are the processes' own."""
        return {name: process.ready for name, process in list(self.processes.items()) if process.ready}

    @property
    def pids(self) -> list[int]:
        """Every process of the stack, its own Redis included."""
        own = self.redis.pid if self.redis else None
        return [*(ready.pid for ready in self.services.values()), *([own] if own else [])]

    @property
    def orchestrator(self) -> Ready:
        """The first one."""
        for ready in self.services.values():
            if ready.role == "orchestrator":
                return ready
        raise ProcessFailed("the stack is not running")

    @property
    def address(self) -> str:
        """Where clients go: HOST:PORT of every orchestrator, with commas between."""
        orchestrators = {name: ready for name, ready in self.services.items() if ready.role == "orchestrator"}
        if not orchestrators:
            raise ProcessFailed("the stack is not running")
        return ",".join(self._via(name, ready.address) for name, ready in orchestrators.items())

    def to_json(self) -> dict[str, Any]:
        """What `coppice up --ready-file` writes."""
        services = [{"name": name, **asdict(ready)} for name, ready in self.services.items()]
        first = self.orchestrator
        return {"address": first.address, "metrics": first.metrics, "http": first.http, "services": services}

    def _launch(self, name: str, role: str, flags: Mapping[str, Any]) -> ServiceProcess:
        assert self.log_dir
        flags = {"server.grace_s": ANSWERS_S, **flags, **self._signals, **self.spec.extra.get(role, {})}
        flags |= self._reserve(flags)
        process = self.processes[name] = ServiceProcess(
            name, role, self._modules[role], flags, self.log_dir, self._root
        )
        process.log_file.unlink(missing_ok=True)  # of another stack
        process.start()
        return process

    def _reserve(self, flags: Mapping[str, Any]) -> dict[str, int]:
        """The ports of a process, reserved for as long as the stack runs: it comes back on them."""
        ports, host = {}, flags.get("server.host", self.settings.server.host)
        for name in PORTS:
            if (port := int(flags.get(name, -1))) >= 0:
                with contextlib.suppress(OSError):  # the process says why it cannot listen
                    held = reserve(host, port)
                    ports[name] = held.getsockname()[1]
                    self._reserved.append(held)
                    if sys.platform != "linux":  # two sockets cannot share a port there
                        held.close()
        return ports

    def _reached(self, process: ServiceProcess, deadline: float) -> str:
        """Where a process is to be reached, once it is ready."""
        return self._via(process.name, process.wait_ready(deadline).address)

    def _redis_flags(self) -> dict[str, Any]:
        """Where signals go when settings, which every process reads by itself, name no Redis: to one of our own."""
        if not self.spec.adapted or self.settings.adaptation.redis:
            return {}
        self.redis = LocalRedis()
        self.redis.start()
        return {"adaptation.redis": f"redis://{self._via(REDIS, f'127.0.0.1:{self.redis.port}')}/0"}

    def _adapter_flags(self, drafters: Sequence[str]) -> dict[str, Any]:
        adapted = {head.name: head.path for head in self.spec.adapted}
        return {
            **_LOOPBACK,
            "adapter.target": self.spec.target,
            "adapter.heads": [f"{name}={path}" for name, path in adapted.items()],
            "adapter.drafters": [pair for pair in drafters if pair.partition("=")[0] in adapted],
        }

    def _verifier_flags(self) -> dict[str, Any]:
        verifier = self.settings.verifier
        named = {"verifier.target": self.spec.target, "verifier.name": verifier.name}
        flags = {**_LOOPBACK, **named, **_placed("verifier", verifier)}
        if not self.spec.one_process:
            return flags
        heads = [f"{head.name}={head.kind}" + (f":{head.path}" if head.path else "") for head in self.spec.heads]
        drafter = {**_placed("drafter", self.settings.drafter), **self.spec.extra.get("drafter", {})}
        return {**flags, **drafter, "verifier.drafters": heads}

    def _drafter_flags(self, head: HeadSpec) -> dict[str, Any]:
        flags = {"drafter.name": head.name, "drafter.kind": head.kind, "drafter.target": self.spec.target}
        path = {"drafter.path": head.path} if head.path else {}
        return {**_LOOPBACK, **flags, **_placed("drafter", self.settings.drafter), **path}

    def _orchestrator_flags(self) -> dict[str, Any]:
        flags = {
            "orchestrator.target": self.spec.target,
            "orchestrator.budget": self.settings.orchestrator.budget,
            HTTP_PORT: self.settings.orchestrator.http_port,
            **{f"server.{name}": value for name, value in self.settings.server if f"server.{name}" in PORTS},
        }
        policy = self.settings.orchestrator.policy
        return {**flags, "orchestrator.policy": policy} if policy else flags


def _placed(role: str, settings: VerifierSettings | DrafterSettings) -> dict[str, Any]:
    """Where a role's model runs, as its flags."""
    return {f"{role}.{name}": getattr(settings, name) for name in ("device", "dtype", "threads")}


def _names(stem: str, count: int) -> list[str]:
    return [stem] if count == 1 else [f"{stem}-{number}" for number in range(count)]
