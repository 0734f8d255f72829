"""A whole stack on one machine: verifiers, drafter pools and orchestrators as processes of their own."""

import contextlib
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from coppice.config.sections import FEATURE_KINDS
from coppice.stack.process import LocalRedis, ProcessFailed, Ready, ServiceProcess, module_of, preload, reserve
from coppice.stack.spec import HTTP_PORT, PORTS, StackSpec, preflight

_FOLDERS = {"verifier": "services.", "drafter": "services.", "orchestrator": "", "adapter": "services."}
MODULES = {role: module_of(folder + role) for role, folder in _FOLDERS.items()}
_LATE = (module_of("orchestrator.http.server"), "transformers.models.llama.modeling_llama")
IMPORTS = (*(f"{module}.service" for module in MODULES.values()), *_LATE)
"""what takes services seconds to import"""
STOP_GRACE_S = 15.0
ANSWERS_S = 5  # that running answers have when a whole stack is stopped
FAILOVER_LOADS = 3
"""loads of the slowest verifier that an orchestrator waits for one at least: one that died has to load again"""
ADAPTER, REDIS = "adapter", "redis"
_CALLERS = ("orchestrator", "adapter")  # stopped before those whom they call
# Only the first orchestrator is for others; what settings say of listening is meant for it.
_LOOPBACK = {"server.host": "127.0.0.1", "server.advertise": "127.0.0.1", **dict.fromkeys(PORTS[:3], 0)}
LOOK_S, FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 0.5, 30.0
MOST_DEATHS, WITHIN_S = 3, 60.0  # an orchestrator that dies so often in so many seconds is not started again


class Stack:
    """Starts the processes of a spec and stops them: a context manager.

    A process that dies is restarted by `restart` or a Supervisor only: `check` raises with the tail of its log. After
    the end `unclean` names the processes that did not stop by themselves with exit code 0.
    """

    def __init__(
        self,
        spec: StackSpec,
        modules: Mapping[str, str] = MODULES,
        via: Callable[[str, str], str] = lambda name, address: address,
        log_dir: Path | None = None,
        ready_s: float = 3600.0,
        say: Callable[[str], object] = lambda line: None,
    ) -> None:
        """modules: what is run for each role. via: where others are to reach a process (a proxy), given its name and
        HOST:PORT. log_dir: None: a temporary folder. ready_s: for the services to load. say: is given a line for
        each that has. Raises InvalidField.
        """
        self.spec = spec
        self.settings = spec.settings()
        self.unclean: list[str] = []
        self.failover_s = self.settings.orchestrator.failover_s
        """how long a request waits for a verifier; once started, long enough for one that died to load again"""
        self.log_dir = log_dir
        self.processes: dict[str, ServiceProcess] = {}
        """every process by name, whether it runs or not, in the order of their start"""
        self.redis: LocalRedis | None = None  # its own, when signals need one
        self._modules, self._via, self._ready_s, self._say = modules, via, ready_s, say
        self._held = contextlib.ExitStack()  # log folder and Redis, and the ports of processes, while one is dead, too
        self._flags: dict[str, Any] = {}  # of every process
        self._deadline, self._kv_tokens = 0.0, -1

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as failed:
            failed.callback(self.stop)
            self.start()
            failed.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def prepare(self) -> None:
        """Begin to import what the services need. Raises InvalidField for what `preflight` finds."""
        self._kv_tokens = preflight(self.spec, self.settings)
        preload(IMPORTS)

    def start(self) -> None:
        """Start everything and wait until it is healthy. Raises as `prepare`, and ProcessFailed; then call `stop`."""
        spec = self.spec
        if self._kv_tokens < 0:
            self.prepare()
        if self.log_dir is None:
            self.log_dir = Path(self._held.enter_context(tempfile.TemporaryDirectory(prefix="coppice-")))
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self._deadline = time.monotonic() + self._ready_s
        self._flags = {"server.grace_s": ANSWERS_S, **spec.flags(self.settings)}
        if spec.adapted and not self.settings.adaptation.redis:  # which every process reads by itself
            self.redis = self._held.enter_context(LocalRedis())
            self._flags["adaptation.redis"] = f"redis://{self._via(REDIS, f'127.0.0.1:{self.redis.port}')}/0"
        flags: dict[str, Any] = {"verifier.kv_tokens": self._kv_tokens}
        if spec.one_process:
            flags |= {**spec.extra.get("drafter", {}), "verifier.drafters": [str(head) for head in spec.heads]}
        verifiers = [self._launch(name, "verifier", flags) for name in _names("verifier", spec.verifiers)]
        targets = [self._via(each.name, each.address) for each in verifiers]
        heads = [f"{head.name}={target}" for head in spec.heads for target in targets if spec.one_process]
        for head in () if spec.one_process else spec.heads:
            flags = {"drafter.name": head.name, "drafter.kind": head.kind}
            flags |= {"drafter.path": head.path} if head.path else {}
            if head.kind in FEATURE_KINDS:  # it may fetch them from these verifiers only
                flags["drafter.verifiers"] = [verifier.address for verifier in verifiers]
            pool = [self._launch(name, "drafter", flags) for name in _names(f"drafter-{head.name}", spec.replicas)]
            heads += [f"{head.name}={self._via(each.name, each.address)}" for each in pool]
        self._await_all()
        self.failover_s = max(self.failover_s, FAILOVER_LOADS * max(verifier.load_s for verifier in verifiers))
        if adapted := {head.name: str(head.path) for head in spec.adapted}:
            flags = {"adapter.heads": [f"{name}={path}" for name, path in adapted.items()]}
            flags |= {"adapter.drafters": [head for head in heads if head.partition("=")[0] in adapted]}
            self._launch(ADAPTER, "adapter", flags)
        flags = {"orchestrator.verifiers": targets, "orchestrator.heads": heads}
        flags |= {"orchestrator.failover_s": self.failover_s}
        first, *others = _names("orchestrator", spec.orchestrators)
        server, http_port = self.settings.server, self.settings.orchestrator.http_port
        public = {name: getattr(server, name.partition(".")[2]) for name in _LOOPBACK}
        self._launch(first, "orchestrator", {**flags, **public, HTTP_PORT: http_port})
        flags[HTTP_PORT] = min(0, http_port)
        for name in others:
            self._launch(name, "orchestrator", flags)
        self._await_all()

    def restart(self, name: str, flags: Mapping[str, Any] | None = None) -> bool:
        """Stop a process and start it on its ports with more flags; whether it had ended well. Raises ProcessFailed."""
        process = self.processes[name]
        ended_well = process.stop(STOP_GRACE_S)
        process.start(flags)
        process.wait_ready(time.monotonic() + self._ready_s)
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
        self._held.close()
        self.redis = None

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
        own = [self.redis.pid] if self.redis and self.redis.pid else []
        return [*(ready.pid for ready in self.services.values()), *own]

    @property
    def orchestrator(self) -> Ready:
        """The first one. Raises ProcessFailed while none runs."""
        return next(iter(self._orchestrators().values()))

    @property
    def address(self) -> str:
        """Where clients go: HOST:PORT of every orchestrator, with commas between. Raises ProcessFailed."""
        return ",".join(self._via(name, ready.address) for name, ready in self._orchestrators().items())

    def _orchestrators(self) -> dict[str, Ready]:
        orchestrators = {name: ready for name, ready in self.services.items() if ready.role == "orchestrator"}
        if not orchestrators:
            raise ProcessFailed("the stack is not running")
        return orchestrators

    def to_json(self) -> dict[str, Any]:
        """What `coppice up --ready-file` writes."""
        services = [{"name": name, **asdict(ready)} for name, ready in self.services.items()]
        first = self.orchestrator
        return {"address": first.address, "metrics": first.metrics, "http": first.http, "services": services}

    def _launch(self, name: str, role: str, flags: Mapping[str, Any]) -> ServiceProcess:
        """Start a process, whose ports are reserved for as long as the stack runs: it comes back on them."""
        assert self.log_dir
        flags = {**_LOOPBACK, **self._flags, **flags, **self.spec.extra.get(role, {})}
        for port in PORTS:
            if (number := int(flags.get(port, -1))) >= 0:
                with contextlib.suppress(OSError):  # the process says why it cannot listen
                    flags[port] = reserve(self._held, flags["server.host"], number)
        process = ServiceProcess(name, role, self._modules[role], flags, self.log_dir, forked=True)
        self.processes[name] = process
        process.log_file.unlink(missing_ok=True)  # of another stack
        process.start()
        return process

    def _await_all(self) -> None:
        """Wait until every process is ready. Raises ProcessFailed as soon as one of them has ended."""
        waiting = [process for process in self.processes.values() if not process.ready]
        while waiting:
            for process in self.processes.values():
                process.check()
            if time.monotonic() > self._deadline:
                waiting[0].wait_ready(self._deadline)
            for process in filter(ServiceProcess.find_ready, tuple(waiting)):
                waiting.remove(process)
                self._say(f"{process.name}: ready, {process.load_s:.1f} s")
            time.sleep(LOOK_S)


def _names(stem: str, count: int) -> list[str]:
    return [stem] if count == 1 else [f"{stem}-{number}" for number in range(count)]


class Supervisor:
    """Starts again what dies of a running stack, after a pause. Nothing in it waits for a process to load."""

    def __init__(self, stack: Stack, say: Callable[[str], object]) -> None:
        """`say` is given a line for every process that died or is back."""
        self._stack, self._say = stack, say
        self._deaths: dict[str, list[float]] = {name: [] for name in stack.processes}  # since it lived for WITHIN_S
        self._starts_at: dict[str, float] = {}  # when what is dead is started again

    def look(self) -> bool:
        """Start what died once its pause is over; whether all run again since this look. Raises ProcessFailed when an
        orchestrator has died too often.
        """
        back = [self._look(process) for process in self._stack.processes.values()]
        return any(back) and not self._starts_at and all(each.ready for each in self._stack.processes.values())

    def _look(self, process: ServiceProcess) -> bool:
        name, now = process.name, time.monotonic()
        if name in self._starts_at:
            if now >= self._starts_at[name]:
                del self._starts_at[name]
                process.start()
        elif process.ended:
            pause_s = self._pause(process, now)
            again = f"it is started again in {pause_s:g} s (log: {process.log_file})"
            loads = f"; loading took {process.load_s:.1f} s" if process.load_s else ""
            self._say(f"{name} {process.ended}; {again}{loads}")
            process.stop(0)  # how it ended is not held against it
            self._starts_at[name] = now + pause_s
        elif process.ready is None and process.find_ready():
            self._say(f"{name} is back, {now - self._deaths[name][-1]:.1f} s after it died")
            return True
        return False

    def _pause(self, process: ServiceProcess, now: float) -> float:
        """Seconds from a death to the next start: twice as many with each, few again after a quiet while."""
        deaths = self._deaths[process.name]
        if deaths and now - deaths[-1] > WITHIN_S:
            deaths.clear()
        deaths.append(now)
        if process.role == "orchestrator" and len(deaths) >= MOST_DEATHS and now - deaths[-MOST_DEATHS] < WITHIN_S:
            try:
                process.check()
            except ProcessFailed as error:
                raise ProcessFailed(f"{MOST_DEATHS} times in {WITHIN_S:g} s {error}") from None
        return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(len(deaths) - 1, 8))
