"""Faults of the adapter and of Redis, and weights that must not get through: texts do not depend on any of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, islice
from typing import Any

import torch
from redis import Redis

from coppice.client.adapter import AdapterClient
from coppice.config.sections import ADAPTED_KINDS
from coppice.errors import CoppiceError
from coppice.heads.checkpoints import load_head, public_weights
from coppice.stack.launch import ADAPTER, REDIS
from coppice.stack.process import ProcessFailed
from coppice.stack.spec import HeadSpec
from coppice.telemetry import metric
from coppice.weights.versions import Weights, pack_update
from coppice.wire.drafter import WeightsHeader, WeightsPart
from lab.report import Check
from services.adapter.push import DrafterLink
from tests.faults.campaign.report import FaultRow
from tests.faults.campaign.rig import Rig, Run, Scenario
from tests.pushes import CORRUPTIONS, Case, Push, altered

QUICK: Mapping[str, Any] = {
    "adapter.policy": "always",
    "adapter.interval": 2,
    "adapter.cpu_share": 1.0,
}
"""Settings under which updates come every few queries"""
COMES_S = 60.0  # in which an adapter has to come to its failpoint
BACK_S = 30.0  # in which signals and weights have to flow again
SLOW_S = 0.3
FAULT_S = 3.0  # how long Redis stays away


def killed_at(point: str) -> Run:
    """The adapter kills itself at a failpoint, and a new one goes on."""

    async def run(rig: Rig, row: FaultRow) -> None:
        for _ in range(rig.plan.repeat):
            async with rig.watched(row):
                with contextlib.suppress(ProcessFailed):  # it comes there before it is ready: what it finds, it reads
                    await rig.restart(ADAPTER, flags={"server.failpoints": f"{point}=1"})
                if not await rig.until(lambda: not rig.runs(ADAPTER), COMES_S):
                    row.weak.append(f"the adapter never came to {point}")
            await rig.restart(ADAPTER)
            await _flows_again(rig, row)

    return run


def redis_fault(begin: Callable[[Rig], object], end: Callable[[Rig], object]) -> Run:
    """Something happens to Redis, and is over after a while."""

    async def run(rig: Rig, row: FaultRow) -> None:
        for _ in range(rig.plan.repeat):
            async with rig.watched(row):
                await asyncio.to_thread(begin, rig)
                try:
                    await asyncio.sleep(FAULT_S)
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
    """Queries reach the adapter, replicas use its weights, every signal is accounted for: a repetition's end."""
    began, queries, current = time.monotonic(), 0, False
    async with rig.load() as load:
        first = await _status(rig)
        while time.monotonic() < began + BACK_S:
            await asyncio.sleep(0.2)
            now = await _status(rig)
            if first is None or now is None:
                first = first or now
                continue
            queries = min(new.queries - old.queries for new, old in zip(now, first, strict=True))
            current = all(replica.current for head in now for replica in head.replicas)
            if queries > 0 and current:
                break
    row.count(load.streams)
    if queries <= 0:
        row.leaks.append(f"no query reached the adapter in {BACK_S:g} s")
    if not current:
        row.leaks.append(f"a replica did not use the adapter's weights in {BACK_S:g} s")
    row.leaks += await _unaccounted(rig)


async def _status(rig: Rig) -> Any:
    def ask() -> Any:
        with AdapterClient(rig.stack.services[ADAPTER].address, dialer=rig.plan.dialer("operator")) as client:
            return client.status()

    with contextlib.suppress(CoppiceError):
        return await asyncio.to_thread(ask)
    return None


async def _unaccounted(rig: Rig) -> list[str]:
    """Signals that were made and neither sent nor dropped once everything is idle."""
    names = [*rig.names("orchestrator"), *rig.names("drafter")]
    until = time.monotonic() + 10.0
    while True:
        waiting = {name: await asyncio.to_thread(_waiting, rig, name) for name in names}
        if not any(waiting.values()) or time.monotonic() > until:
            return [f"{name}: {count:g} signals unaccounted for" for name, count in waiting.items() if count]
        await asyncio.sleep(0.2)


def _waiting(rig: Rig, name: str) -> float:
    ready, signals = rig.stack.services[name], "coppice_signals"
    ended = metric(ready.metrics, f"{signals}_sent_total") + metric(ready.metrics, f"{signals}_dropped_total")
    return metric(ready.metrics, f"{signals}_produced_total") - ended


async def random_weights(rig: Rig, row: FaultRow) -> None:
    """Valid updates to random weights, pushed past the adapter: texts stay, and the adapter puts its own back."""
    heads = {head.name: _checkpoint(rig, head) for head in rig.stack.spec.adapted}
    for _ in range(rig.plan.repeat):
        async with rig.watched(row) as load:
            for head, checkpoint in heads.items():
                for name in _drafters(rig, head):
                    async with _link(rig, name) as link:
                        await link.push(*_random(head, checkpoint, (await link.describe()).weights_version + 1))
            wanted = len(load.streams) + rig.plan.sessions
            await rig.until(lambda load=load, wanted=wanted: len(load.streams) >= wanted, 30)  # type: ignore[misc]
        await _flows_again(rig, row)


def _checkpoint(rig: Rig, head: HeadSpec) -> Weights:
    """A head's version 0."""
    assert head.path
    loaded = load_head(head.kind, head.path, rig.stack.spec.target)
    return Weights.of(public_weights(loaded.model, loaded.config))


def _random(head: str, checkpoint: Weights, version: int) -> tuple[WeightsHeader, Sequence[WeightsPart]]:
    """A valid update to random weights."""
    generator = torch.Generator().manual_seed(version)
    drawn = {name: torch.randn(tensor.shape, generator=generator) for name, tensor in checkpoint.tensors.items()}
    return pack_update(head, checkpoint, checkpoint.changed(drawn, version))


def _drafters(rig: Rig, head: str) -> list[str]:
    """The replicas of a head."""
    return [name for name in rig.names("drafter") if name.rpartition("-")[0] == f"drafter-{head}"]


def _link(rig: Rig, drafter: str) -> DrafterLink:
    """What an adapter reaches a drafter by."""
    return DrafterLink(rig.stack.services[drafter].address, rig.plan.dialer("adapter"))


async def corrupted(rig: Rig, row: FaultRow) -> None:
    """Every corruption pushed to every replica of every head that can be replaced, while it drafts."""
    cases = []
    for head in (head for head in rig.stack.spec.heads if head.kind in ADAPTED_KINDS):
        first = _checkpoint(rig, head)
        cases.append(Case(head.name, first, altered(first, 1, version=2)))
        for name in _drafters(rig, head.name):
            await _push(rig, name, Push.of(head.name, first, cases[-1].live))
    taken: list[str] = []
    for case in islice(cycle(cases), rig.plan.repeat):
        names = _drafters(rig, case.head)
        async with rig.watched(row, names):
            for name in names:
                for what, (spoil, *_) in CORRUPTIONS.items():
                    with contextlib.suppress(CoppiceError):
                        await _push(rig, name, await asyncio.to_thread(spoil, case))
                        taken.append(f"{name} took {what}")
                async with _link(rig, name) as link:
                    uses = await link.describe()
                if (uses.weights_hash, uses.weights_version) != (case.live.hash, case.live.version):
                    taken.append(f"the weights of {name} have changed")
    note = "; ".join(taken[:3])
    row.checks.append(Check(f"{row.fault}: corruptions that got through", len(taken), "0", not taken, note))


async def _push(rig: Rig, drafter: str, push: Push) -> None:
    async with _link(rig, drafter) as link:
        await link.push(push.header, push.parts)


SCENARIOS = [
    *(
        Scenario(f"adapter-{point}", "adapter", proves, killed_at(f"adapter.{point}"), adapts=True)
        for point, proves in {
            "read": "records that were read and lost cost samples, never a text; none stays pending",
            "step": "an update that nobody has is forgotten",
            "push": "a push that never began leaves the replicas as they were",
            "acknowledge": "weights that a replica uses and the adapter has not heard of are found by the next one",
        }.items()
    ),
    *(
        Scenario(f"redis-{name}", "redis", proves, redis_fault(begin, end), adapts=True)
        for name, proves, begin, end in (
            ("stop", "a Redis that hangs costs signals only", _signalled(signal.SIGSTOP), _signalled(signal.SIGCONT)),
            ("cut", "a Redis that is away costs signals only", lambda rig: rig.proxies.cut(REDIS), _healed),
            ("flush", "streams that are gone are made again", _flushed, _flushed),
            ("slow", "a slow Redis costs signals only", lambda rig: rig.proxies.slow(REDIS, SLOW_S), _healed),
        )
    ),
    Scenario("weights-random", "weights", "random weights cost drafts, and are replaced", random_weights, adapts=True),
    Scenario("weights-corrupt", "weights", "no corruption of new weights gets through", corrupted),
]
