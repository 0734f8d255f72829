"""A stack under faults: its load, what is done to its processes, what came of it, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import grpc
import numpy as np
import psutil

from coppice.client.client import AsyncClient
from coppice.errors import CoppiceError, from_rpc_error
from coppice.rpc.channels import Dialer, Stub
from coppice.stack.launch import MODULES, Stack
from coppice.stack.process import Ready
from coppice.stack.spec import StackSpec
from coppice.v1 import verifier_pb2
from coppice.wire.verifier import read_target
from lab.measuring import Check
from services.adapter.loop import DrafterLink
from tests.certificates import Authority
from tests.faults.campaign.load import Answers, Load, Stream, plain_answers, questions

Fault = Literal["kill", "stop", "cut", "term"]
Run = Callable[["Rig", "FaultRow", int], Awaitable[None]]
"""one repetition, by its number"""

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}
LIMIT_S = 5.0  # recovery p99 may take as long
PROMPTS = 6
START_S = 20.0  # in which a load has to be under way
SETTLE_S = 10.0  # in which everything has to be let go of
MORE_FILES, MORE_THREADS = 8, 4  # a channel that reconnects just now; a leak grows with every repetition
POLL_S = 0.02


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest-rank percentile; 0 of nothing."""
    return float(np.quantile(values, share, method="inverted_cdf")) if values else 0.0


@dataclass(slots=True)
class FaultRow:
    """What one fault did, over all its repetitions."""

    fault: str
    repetitions: int = 0
    requests: int = 0
    failed: int = 0
    wrong: int = 0
    """tokens that are not plain's"""
    tokens: int = 0
    drafted: int = 0
    """tokens that were accepted drafts"""
    recoveries: list[float] = field(default_factory=list)
    """of every affected stream, the longest it went without a new token from the fault on, seconds"""
    leaks: list[str] = field(default_factory=list)
    weak: list[str] = field(default_factory=list)
    """why a repetition proves nothing"""
    failures: list[str] = field(default_factory=list)
    """what requests failed with, each said once"""
    checks: list[Check] = field(default_factory=list)
    """what this fault promises besides"""

    def count(self, streams: Sequence[Stream]) -> None:
        """Take in requests that ended."""
        self.requests += sum(not stream.left for stream in streams)
        self.failed += sum(bool(stream.failure) for stream in streams)
        self.wrong += sum(stream.wrong for stream in streams)
        self.tokens += sum(len(stream.ids) for stream in streams)
        self.drafted += sum(stream.drafted for stream in streams)
        self.failures += sorted({stream.failure for stream in streams if stream.failure} - {*self.failures})

    def recovered(self, streams: Iterable[Stream], since: float, until: float) -> None:
        """Note how long the streams that were under way between two times were silent."""
        affected = [stream for stream in streams if (stream.ended or until) > since and stream.began < until]
        self.recoveries += [stream.silence(since, until) for stream in affected]

    def to_checks(self) -> list[Check]:
        """Nothing failed, nothing wrong, back in time, nothing left behind, and the load was worth the name."""
        promises = {
            "failed requests": (self.failed, self.failures),
            "wrong tokens": (self.wrong, []),
            "left behind": (len(self.leaks), self.leaks),
            "repetitions that prove nothing": (len(self.weak), self.weak),
        }
        checks = [
            Check(f"{self.fault}: {name}", count, "0", count == 0, "; ".join(reasons[:3]))
            for name, (count, reasons) in promises.items()
        ]
        p99, name = percentile(self.recoveries, 0.99), f"{self.fault}: recovery p99, s"
        return [*checks, Check(name, round(p99, 3), f"<= {LIMIT_S:g}", p99 <= LIMIT_S), *self.checks]

    @property
    def ok(self) -> bool:
        """Whether all of it held."""
        return all(check.ok for check in self.to_checks())

    @property
    def line(self) -> str:
        """What came of it, and which checks failed."""
        failed = [check for check in self.to_checks() if not check.ok]
        reasons = "".join(f"; {check.name}: {check.value:g} ({check.note or check.bound})" for check in failed)
        figures = f"{self.requests} requests, {self.failed} failed, {self.wrong} wrong"
        recovery = f"recovery p99 {percentile(self.recoveries, 0.99):.2f} s"
        return f"{self.fault} {'FAILED' if failed else 'ok'}, {self.repetitions} times: {figures}, {recovery}{reasons}"

    def to_json(self) -> dict[str, Any]:
        """One entry of a report's rows."""
        recovery = {f"recovery_p{number}_s": percentile(self.recoveries, number / 100) for number in (50, 99)}
        return asdict(self) | recovery | {"ok": self.ok}


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
    """One fault."""

    name: str
    group: str
    proves: str
    run: Run
    adapts: bool = False
    """whether it needs an adapter, and Redis"""
    every: int = 1
    """it is done once for so many of the planned repetitions"""


@dataclass(frozen=True, slots=True)
class Held:
    """What a process holds for its clients."""

    sessions: int
    opened: int = 0
    """sessions that were opened and not closed"""
    kv_tokens: int = 0


async def held(ready: Ready, dialer: Dialer) -> Held:
    """What a process holds now; the dialer's certificate is an orchestrator's. Raises CoppiceError."""
    if ready.role == "drafter":
        async with DrafterLink(ready.address, dialer) as link:
            head = await link.describe()
        return Held(head.sessions, head.sessions_opened - head.sessions_closed)
    if ready.role == "orchestrator":
        async with AsyncClient(ready.address) as client:
            return Held((await client.describe(LIMIT_S)).running)
    if ready.role == "adapter":
        return Held(0)
    async with dialer.open(ready.address) as channel:
        request = verifier_pb2.DescribeTargetRequest()
        try:
            target = read_target(await Stub(channel, verifier_pb2).DescribeTarget(request, timeout=LIMIT_S))
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
    return Held(target.sessions, target.sessions_opened - target.sessions_closed, target.kv_tokens_used)


@dataclass
class Rig:
    """A running stack with proxies before its processes, and what plain decoding answers through it."""

    stack: Stack
    proxies: Proxies
    plan: Plan
    answers: Answers
    idle: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """open files and threads of each process whenever it was idle, by pid"""

    @classmethod
    async def on(cls, stack: Stack, proxies: Proxies, plan: Plan) -> Rig:
        """Ask plain decoding everything once, and see what an idle stack looks like."""
        asked = await asyncio.to_thread(questions, stack.address.split(",")[0], PROMPTS)
        answers = await plain_answers(stack.address.split(",")[0], asked, plan.new_tokens)
        rig = cls(stack, proxies, plan, answers)
        async with rig.load() as load:  # every path has been used once before files and threads are counted
            await rig.until(lambda: load.tokens >= plan.sessions * plan.new_tokens, START_S)
        await rig.leaks()
        return rig

    def names(self, role: str) -> list[str]:
        """The processes of a role."""
        return [name for name, process in self.stack.processes.items() if process.role == role]

    def runs(self, name: str) -> bool:
        """Whether a process has not ended; a child that ended stays a zombie until it is waited for."""
        with contextlib.suppress(psutil.NoSuchProcess, KeyError):
            return psutil.Process(self.stack.services[name].pid).status() != psutil.STATUS_ZOMBIE
        return False

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
            await asyncio.sleep(POLL_S)
        return True

    async def run(self, scenario: Scenario) -> FaultRow:
        """All repetitions of one scenario; what breaks it off counts as a failed check, and all processes are back."""
        row = FaultRow(scenario.name)
        try:
            for number in range(max(1, self.plan.repeat // scenario.every)):
                row.repetitions += 1
                await scenario.run(self, row, number)
                row.leaks += await self.leaks()
        except (CoppiceError, OSError, psutil.Error) as error:
            row.leaks.append(f"broken off: {' '.join(str(error).split())[:300]}")
            for name in self.stack.processes:
                with contextlib.suppress(KeyError):  # nobody reaches an adapter by a proxy
                    self.proxies.heal(name)
                if self.runs(name):
                    os.kill(self.stack.services[name].pid, signal.SIGCONT)
                else:
                    await self.restart(name)
        return row

    # --- faults ---

    async def begin(self, fault: Fault, name: str) -> None:
        """Do it to a process."""
        if fault == "cut":
            await asyncio.to_thread(self.proxies.cut, name)
        else:
            os.kill(self.stack.services[name].pid, SIGNALS[fault])

    async def undo(self, fault: Fault, name: str) -> bool:
        """Bring the process back; whether it had ended well, if it was to."""
        if fault in ("kill", "term"):
            return await self.restart(name) or fault == "kill"
        if fault == "cut":
            await asyncio.to_thread(self.proxies.heal, name)
        else:
            os.kill(self.stack.services[name].pid, signal.SIGCONT)
        return True

    async def strike(self, row: FaultRow, fault: Fault, *names: str) -> None:
        """A load, the fault in its midst, every stream it met to its end, and the processes as before."""
        async with self.watched(row, names) as load:
            met = load.answering
            if len(met) < self.plan.sessions / 2:
                row.weak.append(f"{len(met)} of {self.plan.sessions} sessions were being answered")
            await asyncio.gather(*(self.begin(fault, name) for name in names))
            # A process that is only stopped stays so until all it held up went on without it, or the limit is over.
            await self.until(lambda: all(stream.ended for stream in met), LIMIT_S + 1)
            if fault in ("stop", "cut"):
                await asyncio.gather(*(self.undo(fault, name) for name in names))
        if fault in ("kill", "term"):
            ended = await asyncio.gather(*(self.undo(fault, name) for name in names))
            row.leaks += [f"{name} did not end well" for name, well in zip(names, ended, strict=True) if not well]

    async def under_way(self, row: FaultRow, load: Load, names: Iterable[str]) -> None:
        """Wait until the load is worth the name and these processes take part in it; else the repetition is weak."""
        sessions, until = self.plan.sessions, time.monotonic() + 2 * START_S
        if not await self.until(lambda: load.tokens >= 4 * sessions and 2 * len(load.answering) >= sessions, START_S):
            row.weak.append(f"no load worth the name in {START_S:g} s")
        for name in names:
            while not (await self.held(name)).sessions:
                if time.monotonic() > until:
                    row.weak.append(f"{name} held no session in {START_S:g} s")
                    return
                await asyncio.sleep(POLL_S)
        await self.until(lambda: 2 * len(load.answering) >= sessions, 1.0)

    @contextlib.asynccontextmanager
    async def watched(self, row: FaultRow, names: Iterable[str] = ()) -> AsyncIterator[Load]:
        """A load around it, in which these processes take part; what it met goes into the row."""
        async with self.load() as load:
            await self.under_way(row, load, names)
            began = time.monotonic()
            yield load
            ended = time.monotonic()
        row.recovered(load.streams, began, ended)
        row.count(load.streams)

    # --- what is left behind ---

    async def held(self, name: str) -> Held:
        """What a process holds for its clients."""
        try:
            return await held(self.stack.services[name], self.plan.dialer("orchestrator"))
        except (CoppiceError, KeyError):
            return Held(0, opened=1)  # not known: to be asked again

    async def leaks(self) -> list[str]:
        """What has not been let go of in time, and which process has grown since it was first idle."""
        until = time.monotonic() + SETTLE_S
        while (left := await self._unfreed() or self._growth()) and time.monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(5 * POLL_S)
        for pid, size in self._sizes().values():
            self.idle.setdefault(pid, []).append(size)
        return left

    async def _unfreed(self) -> list[str]:
        return [f"{name} holds {holds}" for name in self.stack.services if (holds := await self.held(name)) != Held(0)]

    def _sizes(self) -> dict[str, tuple[int, tuple[int, int]]]:
        """Pid, open files and threads of each process, by name."""
        running = [name for name in self.stack.services if self.runs(name)]
        processes = {name: psutil.Process(self.stack.services[name].pid) for name in running}
        return {name: (one.pid, (one.num_fds(), one.num_threads())) for name, one in processes.items()}

    def _growth(self) -> list[str]:
        """Channels and pools are complete by the second time that a process is idle."""
        grown = []
        for name, (pid, sizes) in self._sizes().items():
            before = self.idle.get(pid, [])[:2]
            if len(before) == 2:
                most = tuple(map(max, zip(*before, strict=True)))
                if sizes[0] > most[0] + MORE_FILES or sizes[1] > most[1] + MORE_THREADS:
                    grown.append(f"{name} has (files, threads) {sizes}, {most} before")
        return grown


class _Proxy:
    """One listening port whose connections go on to an upstream address."""

    def __init__(self, upstream: str) -> None:
        self._upstream = upstream.rpartition(":")
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self.port, self.delay_s = 0, 0.0

    async def listen(self) -> None:
        if self._server is None:
            self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)
            self.port = self._server.sockets[0].getsockname()[1]

    async def cut(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in tuple(self._open):
            writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        try:
            self._open.add(writer)
            with contextlib.suppress(OSError):
                onward_reader, onward = await asyncio.open_connection(self._upstream[0], int(self._upstream[2]))
                writers.append(onward)
                self._open.add(onward)
                pumps = [self._pump(reader, onward), self._pump(onward_reader, writer)]
                await asyncio.wait([asyncio.create_task(pump) for pump in pumps])
        finally:
            self._open.difference_update(writers)
            for end in writers:
                end.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on what comes until one side ends; then the other ends too."""
        try:
            while data := await reader.read(64 << 10):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                writer.write(data)
                await writer.drain()
        except OSError:
            writer.transport.abort()
        finally:
            writer.close()


class Proxies(contextlib.AbstractContextManager["Proxies"]):
    """A proxy before each process, all on one thread of their own.

    Called with a process's name and HOST:PORT it gives the address to reach it by (`via` of a Stack).
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxies", daemon=True)
        self._proxies: dict[str, _Proxy] = {}
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        for name in self._proxies:
            self.cut(name)
        self._do(asyncio.sleep(0.05))  # the connections' tasks end
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __call__(self, name: str, address: str) -> str:
        if name not in self._proxies:
            self._proxies[name] = _Proxy(address)
            self._do(self._proxies[name].listen())
        return f"127.0.0.1:{self._proxies[name].port}"

    def cut(self, name: str) -> None:
        """End every connection to a process and refuse new ones."""
        self._do(self._proxies[name].cut())

    def heal(self, name: str) -> None:
        """Take connections again, without a delay."""
        self._proxies[name].delay_s = 0.0
        self._do(self._proxies[name].listen())

    def slow(self, name: str, seconds: float) -> None:
        """Hold back whatever passes, each way, by as much."""
        self._proxies[name].delay_s = seconds

    def _do(self, work: Coroutine[Any, Any, Any]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)


@contextlib.contextmanager
def proxied(spec: StackSpec, tls: Authority | None = None) -> Iterator[tuple[Stack, Proxies]]:
    """A stack of two of everything at least, and the proxies it runs behind. `tls`: as Plan's."""
    spec = replace(
        spec,
        verifiers=max(2, spec.verifiers),
        replicas=max(2, spec.replicas),
        orchestrators=max(2, spec.orchestrators),
        extra={role: {**spec.extra.get(role, {}), **(tls.flags(role) if tls else {})} for role in MODULES},
    )
    with Proxies() as proxies, Stack(spec, via=proxies) as stack:
        yield stack, proxies
