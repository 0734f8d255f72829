"""Faults of drafters, verifiers and orchestrators."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from itertools import cycle, islice

from coppice.telemetry import metric
from lab.report import Check
from tests.faults.campaign.report import FaultRow, percentile
from tests.faults.campaign.rig import WINDOW_S, Fault, Rig, Run, Scenario

SLOWER = 10.0  # times
GONE_SHARE = 0.9  # of plain's throughput that must be left without a drafter
FELT = ("coppice_bad_drafts_total", "coppice_late_drafts_total", "coppice_heads_benched_total")


def struck(role: str, fault: Fault) -> Run:
    """A blow to the processes of a role, one after another."""

    async def run(rig: Rig, row: FaultRow) -> None:
        for name in islice(cycle(rig.names(role)), rig.plan.repeat):
            await rig.strike(row, fault, name)
        if role == "drafter" and not row.drafted:
            row.weak.append("no draft was ever accepted")

    return run


def misbehaving(failpoint: str) -> Run:
    """All drafters with a failpoint, for two rounds of requests."""

    async def run(rig: Rig, row: FaultRow) -> None:
        names = rig.names("drafter")
        misbehaviour = failpoint or f"drafter.slow={SLOWER * await _draft_s(rig):.3f}"
        await rig.restart(*names, flags={"server.failpoints": misbehaviour})
        felt = await _felt(rig)
        try:
            for _ in range(rig.plan.repeat):
                await _rounds(rig, row, 2)
        finally:
            await rig.restart(*names)
        if await _felt(rig) <= felt:
            row.weak.append(f"{misbehaviour} was never felt")

    return run


async def _rounds(rig: Rig, row: FaultRow, rounds: int) -> None:
    """A repetition in which every session asks so often."""
    async with rig.watched(row) as load:
        wanted = len(load.streams) + rounds * rig.plan.sessions
        await rig.until(lambda: len(load.streams) >= wanted, 60)


async def _draft_s(rig: Rig) -> float:
    """How long a batch is drafted, on average, since the drafters started."""
    stem = "coppice_drafter_forward_seconds"
    seconds, count = [await _total(rig, "drafter", f"{stem}_{part}") for part in ("sum", "count")]
    return max(0.005, seconds / max(1.0, count))


async def _felt(rig: Rig) -> float:
    """Drafts that orchestrators dropped or did not get in time, and heads they left alone."""
    return await _total(rig, "orchestrator", *FELT)


async def _total(rig: Rig, role: str, *counters: str) -> float:
    """The sum of counters over all processes of a role."""
    ready = [rig.stack.services[name] for name in rig.names(role)]
    return sum([await asyncio.to_thread(metric, one.metrics, counter) for one in ready for counter in counters])


async def drafters_gone(rig: Rig, row: FaultRow) -> None:
    """All of them killed; then rounds of plain decoding and of the default policy in turn."""
    names = rig.names("drafter")
    async with rig.load() as load:
        row.repetitions += 1
        await rig.under_way(row, load, names)
        began = time.monotonic()
        for name in names:
            await rig.begin("kill", name)
        met = load.answering
        await rig.until(lambda: all(stream.ended for stream in met), 60)
        ended = time.monotonic()
    row.count(load.streams)
    row.recovered(met, began, ended)
    rates: dict[str, list[float]] = {"plain": [], "": []}
    for number in range(2 * max(3, rig.plan.repeat)):
        policy = "plain" if number % 4 in (0, 3) else ""
        async with rig.load(policy) as load:
            await asyncio.sleep(WINDOW_S)
            rates[policy].append(load.tokens / WINDOW_S)
        row.count(load.streams)
    await rig.restart(*names)
    share = percentile(rates[""], 0.5) / max(1e-9, percentile(rates["plain"], 0.5))
    row.checks.append(Check.at_least(f"{row.fault}: throughput over plain's", share, GONE_SHARE))
    row.leaks += await rig.leaks()


async def verdict_lost(rig: Rig, row: FaultRow) -> None:
    """A verifier that kills itself between committing a step and saying so: no token twice, none lost."""
    for number, name in enumerate(islice(cycle(rig.names("verifier")), rig.plan.repeat)):
        await rig.restart(name, flags={"server.failpoints": f"verifier.verdict={50 + number}"})
        row.repetitions += 1
        async with rig.load() as load:
            died = await rig.until(lambda name=name: not rig.runs(name), 60)  # type: ignore[misc]
            met, began = load.answering, time.monotonic()
            await rig.until(lambda met=met: all(stream.ended for stream in met), 60)  # type: ignore[misc]
            ended = time.monotonic()
        if not died or len(met) < rig.plan.sessions / 2:
            row.weak.append(f"{name} did not come to its verdict under load")
        row.count(load.streams)
        row.recovered(met, began, ended)
        await rig.restart(name)
        row.leaks += await rig.leaks()


async def kv_exhausted(rig: Rig, row: FaultRow) -> None:
    """Verifiers with room for a quarter of the sessions: the others wait for their turn, which is no recovery."""
    names, most = rig.names("verifier"), 0
    each = max(len(asked.prompt) for asked in rig.answers) + rig.plan.new_tokens
    room = max(2 * each, each * rig.plan.sessions // (4 * len(names)))
    await rig.restart(*names, flags={"verifier.kv_tokens": -(-room // 32) * 32})
    try:
        for _ in range(rig.plan.repeat):
            row.repetitions += 1
            async with rig.load() as load:
                while len(load.streams) < 2 * rig.plan.sessions:
                    most = max([most, *[(await rig.held(name)).kv_tokens for name in names]])
                    await asyncio.sleep(0.02)
            row.count(load.streams)
            row.leaks += await rig.leaks()
    finally:
        await rig.restart(*names)
    if most < room / 2:
        row.weak.append(f"at most {most} of {room} KV tokens were in use")


async def rolling_restart(rig: Rig, row: FaultRow) -> None:
    """Every process in turn is told to end, and starts anew, under one load."""
    for _ in range(max(1, rig.plan.repeat // 3)):
        async with rig.watched(row) as load:
            for name in tuple(rig.stack.services):
                await rig.under_way(row, load, [name] if name != "adapter" else [])
                if not await rig.restart(name):
                    row.leaks.append(f"{name} did not end well")


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

SCENARIOS = [
    *(
        Scenario(f"{role}-{fault}", role, proves, struck(role, fault))
        for role, of_role in _STRUCK.items()
        for fault, proves in of_role.items()
    ),
    Scenario("drafter-slow", "drafter", "a drafter ten times slower is not waited for", misbehaving("")),
    Scenario("drafter-stale", "drafter", "answers for another step are ignored", misbehaving("drafter.stale=0.5")),
    Scenario("drafter-garbage", "drafter", "malformed trees are dropped", misbehaving("drafter.garbage=0.5")),
    Scenario("drafter-gone", "drafter", "without any drafter it is plain decoding, as fast", drafters_gone),
    Scenario("verifier-verdict", "verifier", "a step whose verdict is lost is not committed twice", verdict_lost),
    Scenario("verifier-kv", "verifier", "sessions wait for KV, none fails", kv_exhausted),
    Scenario("rolling-restart", "restart", "every service can be replaced under load", rolling_restart),
]
