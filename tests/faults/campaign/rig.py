"""A stack under faults: its load, what is done to its processes, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import psutil

from coppice.errors import CoppiceError
from coppice.rpc.channels import Dialer
from coppice.stack.launch import MODULES, Stack
from coppice.stack.spec import StackSpec
from tests.certificates import Authority
from tests.faults.campaign.calls import Held, held
from tests.faults.campaign.load import Answers, Load, plain_answers, questions
from tests.faults.campaign.proxy import Proxies
from tests.faults.campaign.report import LIMIT_S, FaultRow

Fault = Literal["kill", "stop", "cut", "term"]
Run = Callable[["Rig", FaultRow], Awaitable[None]]

PROMPTS = 6
START_S = 20.0  # in which a load has to be under way
SETTLE_S = 10.0  # in which everything has to be let go of
MORE_FILES, MORE_THREADS = 8, 4  # a channel that reconnects just now; a leak grows with every repetition
WINDOW_S = 5.0  # for which a throughput is measured
_POLL_S = 0.02
_HOLD_S = LIMIT_S + 1.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is asked for."""

    repeat: int = 3
    sessions: int = 16
    new_tokens: int = 48
    tls: Authority | None = None
    """whose certificates all of it talks under; None: in clear"""

    def dialer(self, role: str) -> Dialer:
        """What opens channels as that role may."""
        return self.tls.dialer(role) if self.tls else Dialer()


@dataclass(frozen=True)
class Scenario:
    """One fault, done `repeat` times."""

    name: str
    group: str
    proves: str
    run: Run
    adapts: bool = False
    """whether it needs an adapter for them, and Redis"""


@dataclass
class Rig:
    """A running stack with proxies before its processes, and what plain decoding answers through it."""

    stack: Stack
    proxies: Proxies
    plan: Plan
    answers: Answers
    _all: tuple[str, ...] = ()
    _idle: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """open files and threads of each process whenever it was idle, by pid"""

    @classmethod
    async def on(cls, stack: Stack, proxies: Proxies, plan: Plan) -> Rig:
        """Ask plain decoding everything once, and see what an idle stack looks like."""
        asked = await asyncio.to_thread(questions, stack.address.split(",")[0], PROMPTS)
        answers = await plain_answers(stack.address.split(",")[0], asked, plan.new_tokens)
        rig = cls(stack, proxies, plan, answers, tuple(stack.services))
        async with rig.load() as load:  # every path has been used once before files and threads are counted
            await rig.until(lambda: load.tokens >= plan.sessions * plan.new_tokens, START_S)
        await rig.leaks()
        return rig

    def names(self, role: str) -> list[str]:
        """The processes of a role."""
        return [name for name, ready in self.stack.services.items() if ready.role == role]

    def pid(self, name: str) -> int:
        """Of a process."""
        return self.stack.services[name].pid

    def runs(self, name: str) -> bool:
        """Whether a process has not ended."""
        return name in self.stack.services and runs(self.pid(name))

    def load(self, policy: str = "") -> Load:
        """As many sessions as planned; by default under the policy that the stack was told."""
        return Load(self.stack.address, self.answers, self.plan.sessions, policy)

    async def restart(self, *names: str, flags: Mapping[str, Any] | None = None) -> bool:
        """Processes anew where they were, all at once; whether they ended well before. Raises ProcessFailed."""
        ended = await asyncio.gather(*(asyncio.to_thread(self.stack.restart, name, flags) for name in names))
        return all(ended)

    async def until(self, holds: Callable[[], bool], within_s: float) -> bool:
        """Whether it came to hold in time."""
        until = time.monotonic() + within_s
        while not holds():
            if time.monotonic() > until:
                return False
            await asyncio.sleep(_POLL_S)
        return True

    async def run(self, scenario: Scenario) -> FaultRow:
        """All repetitions of one scenario; what breaks it off counts as a failed check, and all processes are back."""
        row = FaultRow(scenario.name)
        try:
            await scenario.run(self, row)
        except (CoppiceError, OSError, psutil.Error) as error:
            row.leaks.append(f"broken off: {' '.join(str(error).split())[:300]}")
            await self.repair()
        return row

    async def repair(self) -> None:
        """Every process runs, answers and is connected again. Raises ProcessFailed."""
        for name in self._all:
            with contextlib.suppress(KeyError):  # nobody reaches an adapter by a proxy
                await asyncio.to_thread(self.proxies.heal, name)
            if self.runs(name):
                os.kill(self.pid(name), signal.SIGCONT)
            else:
                await self.restart(name)

    # --- faults ---

    async def begin(self, fault: Fault, name: str) -> None:
        """Do it to a process."""
        if fault == "cut":
            await asyncio.to_thread(self.proxies.cut, name)
        else:
            numbers = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}
            os.kill(self.pid(name), numbers[fault])

    async def undo(self, fault: Fault, name: str) -> bool:
        """Bring the process back; whether it had ended well, if it was to."""
        if fault == "cut":
            await asyncio.to_thread(self.proxies.heal, name)
        elif fault == "stop":
            os.kill(self.pid(name), signal.SIGCONT)
        else:
            return await self.restart(name) or fault == "kill"
        return True

    async def strike(self, row: FaultRow, fault: Fault, name: str) -> None:
        """One repetition: a load, the fault in its midst, every stream it met to its end, everything as before."""
        row.repetitions += 1
        async with self.load() as load:
            await self.under_way(row, load, [name])
            met, began = load.answering, time.monotonic()
            if len(met) < self.plan.sessions / 2:
                row.weak.append(f"{len(met)} of {self.plan.sessions} sessions were being answered")
            await self.begin(fault, name)
            # A process that is only stopped stays so until all it held up went on without it, or the limit is over.
            await self.until(lambda: all(stream.ended for stream in met), _HOLD_S)
            ended = time.monotonic()
            if fault in ("stop", "cut"):
                await self.undo(fault, name)
        affected = [stream for stream in load.streams if (stream.ended or ended) > began and stream.began < ended]
        row.recovered(affected, began, ended)
        row.count(load.streams)
        if fault in ("kill", "term") and not await self.undo(fault, name):
            row.leaks.append(f"{name} did not end well")
        row.leaks += await self.leaks()

    async def under_way(self, row: FaultRow, load: Load, names: Iterable[str]) -> None:
        """Wait until the load is worth the name and these processes take part in it; else the repetition is weak."""
        wanted = self.plan.sessions
        if not await self.until(lambda: load.tokens >= 4 * wanted and 2 * len(load.answering) >= wanted, START_S):
            row.weak.append(f"no load worth the name in {START_S:g} s")
        until = time.monotonic() + START_S
        for name in names:
            while not (await self.held(name)).sessions:
                if time.monotonic() > until:
                    row.weak.append(f"{name} held no session in {START_S:g} s")
                    return
                await asyncio.sleep(_POLL_S)
        await self.until(lambda: 2 * len(load.answering) >= wanted, 1.0)

    @contextlib.asynccontextmanager
    async def watched(self, row: FaultRow, names: Iterable[str] = ()) -> AsyncIterator[Load]:
        """One repetition of something else than a blow: a load around it, then everything as before."""
        row.repetitions += 1
        async with self.load() as load:
            await self.under_way(row, load, names)
            began = time.monotonic()
            yield load
            ended = time.monotonic()
        row.recovered([stream for stream in load.streams if (stream.ended or ended) > began], began, ended)
        row.count(load.streams)
        row.leaks += await self.leaks()

    # --- what is left behind ---

    async def held(self, name: str) -> Held:
        """What a process holds for its clients."""
        try:
            return await held(self.stack.services[name], self.plan.dialer("orchestrator"))
        except CoppiceError:
            return Held(0, opened=1)  # not known: to be asked again

    async def leaks(self) -> list[str]:
        """What has not been let go of in time, and which process has grown since it was first idle."""
        until = time.monotonic() + SETTLE_S
        while (left := await self._unfreed() or self._growth()) and time.monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(5 * _POLL_S)
        for pid, size in self._sizes().values():
            self._idle.setdefault(pid, []).append(size)
        return left

    async def _unfreed(self) -> list[str]:
        names = [name for name, ready in self.stack.services.items() if ready.role != "adapter"]
        return [f"{name} holds {holds}" for name in names if not (holds := await self.held(name)).nothing]

    def _sizes(self) -> dict[str, tuple[int, tuple[int, int]]]:
        """Pid, open files and threads of each process, by name."""
        running = [name for name in self.stack.services if self.runs(name)]
        processes = {name: psutil.Process(self.pid(name)) for name in running}
        return {name: (one.pid, (one.num_fds(), one.num_threads())) for name, one in processes.items()}

    def _growth(self) -> list[str]:
        """Channels and pools are complete by the second time that a process is idle."""
        grown = []
        for name, (pid, (files, threads)) in self._sizes().items():
            known = self._idle.get(pid, [])[:2]
            if len(known) == 2:
                most_files, most_threads = (max(sizes) for sizes in zip(*known, strict=True))
                if files > most_files + MORE_FILES:
                    grown.append(f"{name} has {files} files open, {most_files} before")
                if threads > most_threads + MORE_THREADS:
                    grown.append(f"{name} has {threads} threads, {most_threads} before")
        return grown


def runs(pid: int) -> bool:
    """Whether a child of ours still runs; one that ended stays there until it is waited for."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def twofold(spec: StackSpec, tls: Authority | None = None) -> StackSpec:
    """The same with two of everything at least, whose processes show their roles' certificates if there are any."""
    return replace(
        spec,
        verifiers=max(2, spec.verifiers),
        replicas=max(2, spec.replicas),
        orchestrators=max(2, spec.orchestrators),
        extra={role: {**spec.extra.get(role, {}), **(tls.flags(role) if tls else {})} for role in MODULES},
    )


@contextlib.contextmanager
def proxied(spec: StackSpec, tls: Authority | None = None) -> Iterator[tuple[Stack, Proxies]]:
    """A stack of two of everything at least, and the proxies it runs behind. `tls`: as Plan's."""
    with Proxies() as proxies, Stack(twofold(spec, tls), via=proxies) as stack:
        yield stack, proxies
