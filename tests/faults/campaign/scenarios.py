"""The faults of the campaign: of drafters, verifiers, orchestrators, clients, the adapter, Redis and weights."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import grpc
import torch
import typer
from grpc_health.v1 import health_pb2, health_pb2_grpc
from redis import Redis

from coppice.adaptation.weights import Weights
from coppice.client.adapter import AdapterClient
from coppice.client.client import AsyncClient
from coppice.client.completion import StreamEvent
from coppice.config.sections import ADAPTED_KINDS
from coppice.errors import CoppiceError
from coppice.heads.checkpoints import load_head, public_weights
from coppice.stack.launch import ADAPTER, REDIS
from coppice.stack.process import ProcessFailed, Ready
from coppice.stack.spec import HeadSpec
from coppice.telemetry import metric
from coppice.wire.generation import Started
from lab.measuring import Check
from services.adapter.loop import DrafterLink
from tests.faults.campaign.load import Load, Stream, ask
from tests.faults.campaign.rig import Fault, FaultRow, Rig, Run, Scenario, percentile
from tests.pushes import CORRUPTIONS, Case, Push, altered
from tests.signals import holds

QUICK: Mapping[str, Any] = {"adapter.policy": "always", "adapter.interval": 2, "adapter.cpu_share": 1.0}
"""Settings under which updates come every few queries"""
ONCE = 1000
"""the repetitions for which a scenario that takes minutes is done once"""
SLOWER = 10.0  # times
CLIENTS, REQUESTS = 100, 1000
OVERLOADS = {"twice": 2, "five": 5, "ten": 10}  # times the load that there are seats for
LEAST_SHARE = 0.9  # of a throughput that must be left beside another one in the same minutes
REFUSED_S, HEALTHY_S = 1.0, 0.25  # for refusals and health checks; all clients ask at once, and share the cores
HEALTH_EVERY_S = 0.1
WINDOW_S = 5.0  # for which a throughput is measured
LONG_S = 60.0  # in which what was asked for comes
BACK_S = 30.0  # in which signals and weights have to flow again
SLOW_S = 0.3  # by which a proxy holds back what passes
AWAY_S = 3.0  # how long Redis stays away
READS_EVERY_S = 0.05  # a client that reads slowly
FELT = ("coppice_bad_drafts_total", "coppice_late_drafts_total", "coppice_heads_benched_total")

# Streams one answer and tells of its first token.
_VANISHING = """
import sys
from coppice import Chunk, Client
with Client(sys.argv[1]) as client:
    for event in client.stream([int(sign) for sign in sys.argv[2].split(",")], max_new_tokens=400, ignore_eos=True):
        if isinstance(event, Chunk):
            print("token", flush=True)
"""


def of_role(rig: Rig, role: str, number: int) -> str:
    """The process of a role whose turn it is."""
    names = rig.names(role)
    return names[number % len(names)]


async def total(rig: Rig, role: str, *counters: str) -> float:
    """The sum of counters over all processes of a role."""
    ready = [rig.stack.services[name] for name in rig.names(role)]
    return sum([await asyncio.to_thread(metric, one.metrics, counter) for one in ready for counter in counters])


async def rounds(rig: Rig, load: Load, count: int) -> bool:
    """Wait until every session has asked so often more."""
    streams = len(load.streams) + count * rig.plan.sessions
    return await rig.until(lambda: len(load.streams) >= streams, LONG_S)


async def ended(rig: Rig, streams: Sequence[Stream]) -> None:
    """Wait until these requests have ended."""
    await rig.until(lambda: all(stream.ended for stream in streams), LONG_S)


async def compare_throughput(
    row: FaultRow, share: str, base: Callable[[], Load], other: Callable[[], Load]
) -> list[float]:
    """Check the share of a base's median of tokens a second that another load has, in turns; how long refusals took."""
    rates: dict[Callable[[], Load], list[float]] = {base: [], other: []}
    refusals: list[float] = []
    for make in 2 * (base, other, other, base):
        async with make() as load:
            await asyncio.sleep(WINDOW_S)
            rates[make].append(load.tokens / WINDOW_S)
        row.count(load.streams)
        refusals += load.refusals
    value = round(percentile(rates[other], 0.5) / max(1e-9, percentile(rates[base], 0.5)), 3)
    row.checks.append(Check(f"{row.fault}: {share}", value, f">= {LEAST_SHARE}", value >= LEAST_SHARE))
    return refusals


# --- drafters, verifiers, orchestrators ---


def struck(role: str, fault: Fault) -> Run:
    """A blow to one process of a role."""

    async def run(rig: Rig, row: FaultRow, number: int) -> None:
        await rig.strike(row, fault, of_role(rig, role, number))
        if role == "drafter" and not row.drafted:
            row.weak.append("no draft was ever accepted")

    return run


def misbehaving(failpoint: str) -> Run:
    """All drafters with a failpoint, for two rounds of requests and until it is felt."""

    async def run(rig: Rig, row: FaultRow, number: int) -> None:
        names, failpoints = rig.names("drafter"), failpoint
        if not failpoint:
            took, drafts = [
                await total(rig, "drafter", f"coppice_drafter_forward_seconds_{part}") for part in ("sum", "count")
            ]
            failpoints = f"drafter.slow={SLOWER * max(0.005, took / max(1.0, drafts)):.3f}"
        await rig.restart(*names, flags={"server.failpoints": failpoints})
        felt = await total(rig, "orchestrator", *FELT)
        try:
            async with rig.watched(row) as load:
                for _ in range(5):  # a replica that failed before is asked again after a pause
                    await rounds(rig, load, 2)
                    if await total(rig, "orchestrator", *FELT) > felt:
                        break
                else:
                    row.weak.append(f"{failpoints} was never felt")
        finally:
            await rig.restart(*names)

    return run


async def drafters_gone(rig: Rig, row: FaultRow, number: int) -> None:
    """All of them killed; then rounds of plain decoding and of the default policy in turn."""
    names = rig.names("drafter")
    async with rig.watched(row, names) as load:
        for name in names:
            await rig.begin("kill", name)
        await ended(rig, load.answering)
    await compare_throughput(row, "throughput over plain's", lambda: rig.load("plain"), rig.load)
    await rig.restart(*names)


async def verdict_lost(rig: Rig, row: FaultRow, number: int) -> None:
    """A verifier that kills itself between committing a step and saying so: no token twice, none lost."""
    name = of_role(rig, "verifier", number)
    await rig.restart(name, flags={"server.failpoints": f"verifier.verdict={50 + number}"})
    async with rig.load() as load:
        died = await rig.until(lambda: not rig.runs(name), LONG_S)
        met, began = load.answering, time.monotonic()
        await ended(rig, met)
        row.recovered(met, began, time.monotonic())
    if not died or len(met) < rig.plan.sessions / 2:
        row.weak.append(f"{name} did not come to its verdict under load")
    row.count(load.streams)
    await rig.restart(name)


async def kv_exhausted(rig: Rig, row: FaultRow, number: int) -> None:
    """Verifiers with room for a quarter of the sessions: the others wait for their turn, which is no recovery."""
    names, most = rig.names("verifier"), 0
    each = max(len(prompt) for prompt, _ in rig.answers) + rig.plan.new_tokens
    room = max(2 * each, each * rig.plan.sessions // (4 * len(names)))
    await rig.restart(*names, flags={"verifier.kv_tokens": -(-room // 32) * 32})
    try:
        async with rig.load() as load:
            while len(load.streams) < 2 * rig.plan.sessions:
                most = max([most, *[(await rig.held(name)).kv_tokens for name in names]])
                await asyncio.sleep(0.02)
        row.count(load.streams)
    finally:
        await rig.restart(*names)
    if most < room / 2:
        row.weak.append(f"at most {most} of {room} KV tokens were in use")


async def rolling_restart(rig: Rig, row: FaultRow, number: int) -> None:
    """Every process in turn is told to end, and starts anew, under one load."""
    async with rig.watched(row) as load:
        for name in rig.stack.processes:
            await rig.under_way(row, load, [name] if name != ADAPTER else [])
            if not await rig.restart(name):
                row.leaks.append(f"{name} did not end well")


# --- clients ---


async def cancelled(rig: Rig, row: FaultRow, number: int) -> None:
    """Clients that leave before the first event, behind it, behind the first tokens, and in the middle."""
    async with rig.watched(row) as load, AsyncClient(rig.stack.address) as client:

        async def leave(question: Any, expected: tuple[int, ...], behind: int) -> None:
            """Cancel a request: 0 before its first event, 1 behind Started, else behind so many tokens."""
            stream = Stream(expected, left=True)
            load.streams.append(stream)

            def leaves(event: StreamEvent) -> bool:
                return (behind == 1 and isinstance(event, Started)) or len(stream.ids) >= max(behind, 2)

            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if behind else 0.001):
                    await ask(client, question, stream, leaves=leaves)

        phases = (0, 1, 2, rig.plan.new_tokens // 2)
        await asyncio.gather(*(leave(*item, behind) for behind in phases for item in rig.answers.items()))


async def vanished(rig: Rig, row: FaultRow, number: int) -> None:
    """A client process that is killed in the middle of its answer: its session is freed all the same."""
    async with rig.watched(row):
        command = [sys.executable, "-c", _VANISHING, rig.stack.address.split(",")[0], "5,6,7"]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        assert process.stdout
        if await process.stdout.readline() != b"token\n":
            row.weak.append("the client ended before its first token")
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def slow_reader(rig: Rig, row: FaultRow, number: int) -> None:
    """A client that takes its time over every event gets the same text, and keeps nobody waiting."""
    async with rig.watched(row), AsyncClient(rig.stack.address) as client:
        question, expected = list(rig.answers.items())[number % len(rig.answers)]
        stream = Stream(expected)
        await ask(client, question, stream, pause_s=READS_EVERY_S)
    row.count([stream])


async def hundred(rig: Rig, row: FaultRow, number: int) -> None:
    """A hundred clients at once, none refused."""
    async with Load(rig.stack.address, rig.answers, CLIENTS, most=REQUESTS) as load:
        await load.done()
    row.count(load.streams)
    if load.refusals:
        row.failures.append(f"{len(load.refusals)} were refused")
        row.failed += len(load.refusals)


@contextlib.asynccontextmanager
async def healthy(ready: Ready) -> AsyncIterator[list[float]]:
    """How long each check of a process's health took, seconds, as long as this is open; infinity if it was not well."""
    waits: list[float] = []

    async def check() -> None:
        async with grpc.aio.insecure_channel(ready.health) as channel:
            while True:
                began = time.monotonic()
                answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
                well = answer.status == health_pb2.HealthCheckResponse.SERVING
                waits.append(time.monotonic() - began if well else math.inf)
                await asyncio.sleep(HEALTH_EVERY_S)

    checking = asyncio.create_task(check())
    yield waits
    checking.cancel()


def overload(times: int) -> Run:
    """One orchestrator with as many seats as there are sessions: as many clients, then `times` as many."""

    async def run(rig: Rig, row: FaultRow, number: int) -> None:
        name, seats = of_role(rig, "orchestrator", 0), rig.plan.sessions
        await rig.restart(name, flags={"limits.sessions": seats, "limits.queued": 0})
        address = rig.stack.services[name].address
        try:
            loads = (lambda: Load(address, rig.answers, seats), lambda: Load(address, rig.answers, times * seats))
            async with healthy(rig.stack.services[name]) as checks:
                refusals = await compare_throughput(row, "goodput over the peak", *loads)
        finally:
            await rig.restart(name)
        for what, waits, bound in (("refusals", refusals, REFUSED_S), ("health checks", checks, HEALTHY_S)):
            p99 = round(percentile(waits, 0.99), 3)
            row.checks.append(Check(f"{row.fault}: {what}' p99, s", p99, f"<= {bound}", p99 <= bound))
        if len(refusals) < seats:
            row.weak.append(f"{len(refusals)} requests were refused")

    return run


# --- the adapter, Redis and weights ---


def adapter_killed_at(point: str) -> Run:
    """The adapter kills itself at a failpoint, and a new one goes on."""

    async def run(rig: Rig, row: FaultRow, number: int) -> None:
        async with rig.watched(row):
            with contextlib.suppress(ProcessFailed):  # it comes there before it is ready: what it finds, it reads
                await rig.restart(ADAPTER, flags={"server.failpoints": f"{point}=1"})
            if not await rig.until(lambda: not rig.runs(ADAPTER), LONG_S):
                row.weak.append(f"the adapter never came to {point}")
        await rig.restart(ADAPTER)
        await _flows_again(rig, row)

    return run


def redis_fault(begin: Callable[[Rig], object], end: Callable[[Rig], object]) -> Run:
    """Something happens to Redis, and is over after a while."""

    async def run(rig: Rig, row: FaultRow, number: int) -> None:
        async with rig.watched(row):
            await asyncio.to_thread(begin, rig)
            try:
                await asyncio.sleep(AWAY_S)
            finally:
                await asyncio.to_thread(end, rig)
        await _flows_again(rig, row)

    return run


def _signalled(number: signal.Signals) -> Callable[[Rig], None]:
    def send(rig: Rig) -> None:
        assert rig.stack.redis
        assert rig.stack.redis.pid
        os.kill(rig.stack.redis.pid, number)

    return send


def _healed(rig: Rig) -> None:
    rig.proxies.heal(REDIS)


def _flushed(rig: Rig) -> None:
    assert rig.stack.redis
    with Redis.from_url(rig.stack.redis.url, socket_timeout=5.0) as client:
        client.flushall()


async def _flows_again(rig: Rig, row: FaultRow) -> None:
    """Queries reach the adapter, replicas use its weights, every signal is accounted for."""
    first: Any = None

    def ask_status() -> Any:
        with (
            contextlib.suppress(CoppiceError),
            AdapterClient(rig.stack.services[ADAPTER].address, dialer=rig.plan.dialer("operator")) as client,
        ):
            return client.status()
        return None

    def flow() -> bool:
        """Whether every head heard of queries since the first status, and its replicas are current."""
        nonlocal first
        heads = ask_status()
        first = first or heads
        return bool(heads) and all(
            head.queries > before.queries and all(replica.current for replica in head.replicas)
            for head, before in zip(heads, first, strict=True)
        )

    def waiting() -> dict[str, float]:
        """Signals that were made and neither sent nor dropped yet, by process."""
        counters = {"produced": 1, "sent": -1, "dropped": -1}
        return {
            name: sum(
                sign * metric(rig.stack.services[name].metrics, f"coppice_signals_{counter}_total")
                for counter, sign in counters.items()
            )
            for name in (*rig.names("orchestrator"), *rig.names("drafter"))
        }

    async with rig.load() as load:
        if not await holds(flow, BACK_S):
            row.leaks.append(f"in {BACK_S:g} s no query reached the adapter, or a replica did not use its weights")
    row.count(load.streams)
    if not await holds(lambda: not any(waiting().values()), 10.0):
        row.leaks.append(f"signals unaccounted for: {waiting()}")


def _checkpoint(rig: Rig, head: HeadSpec) -> Weights:
    """A head's version 0."""
    assert head.path
    loaded = load_head(head.kind, head.path, rig.stack.spec.target)
    return Weights.of(public_weights(loaded.model, loaded.config))


def _links(rig: Rig, head: str) -> list[DrafterLink]:
    """What an adapter reaches the replicas of a head by."""
    names = [name for name in rig.names("drafter") if name.rpartition("-")[0] == f"drafter-{head}"]
    return [DrafterLink(rig.stack.services[name].address, rig.plan.dialer("adapter")) for name in names]


async def random_weights(rig: Rig, row: FaultRow, number: int) -> None:
    """Valid updates to random weights, pushed past the adapter: texts stay, and the adapter puts its own back."""
    async with rig.watched(row) as load:
        for head in rig.stack.spec.adapted:
            checkpoint, generator = _checkpoint(rig, head), torch.Generator().manual_seed(number)
            drawn = {name: torch.randn(one.shape, generator=generator) for name, one in checkpoint.tensors.items()}
            for link in _links(rig, head.name):
                async with link:
                    version = (await link.describe()).weights_version + 1
                    push = Push.of(head.name, checkpoint, checkpoint.changed(drawn, version))
                    await link.push(push.header, push.parts)
        await rounds(rig, load, 1)
    await _flows_again(rig, row)


async def corrupted(rig: Rig, row: FaultRow, number: int) -> None:
    """Every corruption pushed to every replica of a head that can be replaced, while it drafts."""
    heads = [head for head in rig.stack.spec.heads if head.kind in ADAPTED_KINDS]
    head = heads[number % len(heads)]
    first, taken = _checkpoint(rig, head), list[str]()
    case = Case(head.name, first, altered(first, 1, version=2))
    async with rig.watched(row, [name for name in rig.names("drafter") if name.startswith(f"drafter-{head.name}-")]):
        for link in _links(rig, head.name):
            async with link:
                good = Push.of(head.name, first, case.live)
                await link.push(good.header, good.parts)
                for corruption, (spoil, *_) in CORRUPTIONS.items():
                    with contextlib.suppress(CoppiceError):
                        push = await asyncio.to_thread(spoil, case)
                        await link.push(push.header, push.parts)
                        taken.append(f"{link.address} took {corruption}")
                uses = await link.describe()
                if (uses.weights_hash, uses.weights_version) != (case.live.hash, case.live.version):
                    taken.append(f"the weights of {link.address} have changed")
    note = "; ".join(taken[:3])
    row.checks.append(Check(f"{row.fault}: corruptions that got through", len(taken), "0", not taken, note))


_STRUCK: Mapping[str, Mapping[Fault, str]] = {
    "drafter": {
        "kill": "a drafter's death costs its drafts only",
        "stop": "a drafter that hangs is not waited for",
        "cut": "a lost connection is a lost drafter",
    },
    "verifier": {
        "kill": "its sessions go on elsewhere, no token twice, none lost",
        "stop": "a verifier that hangs is left like a dead one",
        "cut": "a lost connection is a lost verifier",
        "term": "a verifier that is told to end hands its sessions over and ends well",
    },
    "orchestrator": {
        "kill": "the SDK resumes on another one from the tokens it holds",
        "stop": "an orchestrator that hangs is left like a dead one",
        "cut": "a lost connection is a lost orchestrator",
        "term": "an orchestrator that is told to end finishes or hands over its requests and ends well",
    },
}
_KILLED_AT = {
    "read": "records that were read and lost cost samples, never a text; none stays pending",
    "step": "an update that nobody has is forgotten",
    "push": "a push that never began leaves the replicas as they were",
    "acknowledge": "weights that a replica uses and the adapter has not heard of are found by the next one",
}
_REDIS: Mapping[str, tuple[str, Callable[[Rig], object], Callable[[Rig], object]]] = {
    "stop": ("a Redis that hangs costs signals only", _signalled(signal.SIGSTOP), _signalled(signal.SIGCONT)),
    "cut": ("a Redis that is away costs signals only", lambda rig: rig.proxies.cut(REDIS), _healed),
    "flush": ("streams that are gone are made again", _flushed, _flushed),
    "slow": ("a slow Redis costs signals only", lambda rig: rig.proxies.slow(REDIS, SLOW_S), _healed),
}

SCENARIOS = [
    *(
        Scenario(f"{role}-{fault}", role, proves, struck(role, fault))
        for role, of_faults in _STRUCK.items()
        for fault, proves in of_faults.items()
    ),
    Scenario("drafter-slow", "drafter", "a drafter ten times slower is not waited for", misbehaving("")),
    Scenario("drafter-stale", "drafter", "answers for another step are ignored", misbehaving("drafter.stale=0.5")),
    Scenario("drafter-garbage", "drafter", "malformed trees are dropped", misbehaving("drafter.garbage=0.5")),
    Scenario("drafter-gone", "drafter", "without any drafter it is plain decoding, as fast", drafters_gone, every=ONCE),
    Scenario("verifier-verdict", "verifier", "a step whose verdict is lost is not committed twice", verdict_lost),
    Scenario("verifier-kv", "verifier", "sessions wait for KV, none fails", kv_exhausted),
    Scenario("rolling-restart", "restart", "every service can be replaced under load", rolling_restart, every=3),
    Scenario("client-cancel", "client", "a request that is cancelled in any phase frees everything", cancelled),
    Scenario("client-vanish", "client", "a client that is gone without a word frees everything", vanished),
    Scenario("client-slow", "client", "a client that reads slowly gets its text and delays nobody", slow_reader),
    Scenario("overload-clients", "overload", "a hundred clients at once: none fails", hundred, every=ONCE),
    *(
        Scenario(
            f"overload-{name}", "overload", "what is too much is refused; the rest keeps its speed", run, every=ONCE
        )
        for name, run in ((name, overload(times)) for name, times in OVERLOADS.items())
    ),
    *(
        Scenario(f"adapter-{point}", "adapter", proves, adapter_killed_at(f"adapter.{point}"), adapts=True)
        for point, proves in _KILLED_AT.items()
    ),
    *(
        Scenario(f"redis-{name}", "redis", proves, redis_fault(begin, end), adapts=True)
        for name, (proves, begin, end) in _REDIS.items()
    ),
    Scenario("weights-random", "weights", "random weights cost drafts, and are replaced", random_weights, adapts=True),
    Scenario("weights-corrupt", "weights", "no corruption of new weights gets through", corrupted),
]


def choose(kinds: Sequence[str]) -> list[Scenario]:
    """The scenarios of names and groups, none meaning all. Raises BadParameter for what is neither."""
    asked = {part for kind in kinds for part in kind.split(",") if part}
    names = {name for scenario in SCENARIOS for name in (scenario.name, scenario.group)}
    if unknown := sorted(asked - names):
        raise typer.BadParameter(f"{unknown[0]!r} is none of {', '.join(sorted(names))}", param_hint="--kinds")
    return [scenario for scenario in SCENARIOS if not asked or {scenario.name, scenario.group} & asked]
