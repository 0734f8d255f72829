"""Faults of clients: they cancel, vanish, read slowly, or are too many."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from itertools import cycle, islice

from coppice.client.completion import StreamEvent
from coppice.client.request import build_request
from coppice.errors import CoppiceError, Overloaded
from coppice.wire.generation import Started, request_to_wire
from lab.report import Check
from tests.faults.campaign.calls import Direct
from tests.faults.campaign.load import REQUEST_S, HistoryClient, Question, Stream, ask
from tests.faults.campaign.report import FaultRow, percentile
from tests.faults.campaign.rig import WINDOW_S, Rig, Run, Scenario
from tests.faults.campaign.watch import Watched, watching

CLIENTS, REQUESTS = 100, 1000
OVERLOADS = {"twice": 2, "five": 5, "ten": 10}  # times the load that there are seats for
REJECTED_S = {2: 0.05, 5: 0.2, 10: 0.4}  # clients, services and the clock share two cores
GOODPUT_SHARE, HEALTHY_S = 0.9, 0.100
SLOW_S = 0.05  # between two reads of a client that reads slowly

# Streams one answer and tells of its first token.
_VANISHING = """
import sys
from coppice import Chunk, Client
with Client(sys.argv[1]) as client:
    for event in client.stream([int(sign) for sign in sys.argv[2].split(",")], max_new_tokens=400, ignore_eos=True):
        if isinstance(event, Chunk):
            print("token", flush=True)
"""


async def cancelled(rig: Rig, row: FaultRow) -> None:
    """Clients that leave before the first event, behind it, behind the first tokens, and in the middle."""
    phases = {"called": 0, "started": 1, "answering": 2, "half": rig.plan.new_tokens // 2}
    for _ in range(rig.plan.repeat):
        async with rig.watched(row) as load, HistoryClient(rig.stack.address) as client:
            left = [
                asyncio.create_task(_leave(client, question, expected, behind))
                for behind in phases.values()
                for question, expected in rig.answers.items()
            ]
            load.streams += await asyncio.gather(*left)


async def _leave(client: HistoryClient, question: Question, expected: tuple[int, ...], behind: int) -> Stream:
    """Cancel a request: 0 before its first event, 1 behind Started, else behind so many tokens."""
    stream = Stream(expected, time.monotonic(), left=True)

    def leaves(event: StreamEvent) -> bool:
        return (behind == 1 and isinstance(event, Started)) or len(stream.ids) >= max(behind, 2)

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(None if behind else 0.001):
            await ask(client, question, stream, leaves=leaves)
    return stream


async def vanished(rig: Rig, row: FaultRow) -> None:
    """A client process that is killed in the middle of its answer: its session is freed all the same."""
    for _ in range(rig.plan.repeat):
        async with rig.watched(row):
            command = [sys.executable, "-c", _VANISHING, rig.stack.address.split(",")[0], "5,6,7"]
            process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
            assert process.stdout
            if await process.stdout.readline() != b"token\n":
                row.weak.append("the client ended before its first token")
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def slow_reader(rig: Rig, row: FaultRow) -> None:
    """A client that takes its time over every event gets the same text, and keeps nobody waiting."""
    for (question, expected), _ in zip(cycle(rig.answers.items()), range(rig.plan.repeat), strict=False):
        async with rig.watched(row) as load, HistoryClient(rig.stack.address) as client:
            stream = Stream(expected, time.monotonic())
            await ask(client, question, stream, pause_s=SLOW_S)
            load.streams.append(stream)


async def hundred(rig: Rig, row: FaultRow) -> None:
    """A hundred clients at once, none refused, and health answers all the while."""
    row.repetitions += 1
    async with watching(rig.stack.services.values()) as seen:
        await _asked(rig, row, REQUESTS)
    row.checks += _healthy(row, seen)
    row.leaks += await rig.leaks()


async def _asked(rig: Rig, row: FaultRow, requests: int) -> None:
    left = iter(list(islice(cycle(rig.answers.items()), requests)))
    streams: list[Stream] = []

    async def client() -> None:
        async with HistoryClient(rig.stack.address) as connected:
            for question, expected in left:
                stream = Stream(expected, time.monotonic())
                streams.append(stream)
                await ask(connected, question, stream)

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    row.count(streams)


def overload(times: int) -> Run:
    """One orchestrator with as many seats as there are sessions: as many clients, then `times` as many.

    A client that is refused waits as long as it was told, as the SDK does.
    """

    async def run(rig: Rig, row: FaultRow) -> None:
        await _overloaded(rig, row, times)

    return run


async def _overloaded(rig: Rig, row: FaultRow, times: int) -> None:
    name, seats = rig.names("orchestrator")[0], rig.plan.sessions
    await rig.restart(name, flags={"limits.sessions": seats, "limits.queued": 0})
    row.repetitions += 1
    refusals = 0
    rates: dict[int, list[float]] = {seats: [], times * seats: []}
    try:
        await _goodput(rig, row, name, seats)  # channels and heads find each other
        async with watching(rig.stack.services.values(), rig.stack.services[name].address) as seen:
            for clients in (seats, times * seats, times * seats, seats):
                rate, refused = await _goodput(rig, row, name, clients)
                rates[clients].append(rate)
                refusals += refused
    finally:
        await rig.restart(name)
    share = percentile(rates[times * seats], 1.0) / max(1e-9, percentile(rates[seats], 1.0))
    row.checks.append(Check.at_least(f"{row.fault}: goodput over the peak", share, GOODPUT_SHARE))
    if min(refusals, len(seen.refused)) < seats:
        row.weak.append(f"{refusals} requests were refused, {len(seen.refused)} of those that were timed")
    row.checks.append(
        Check.at_most(f"{row.fault}: rejection p99, s", percentile(seen.refused, 0.99), REJECTED_S[times])
    )
    row.checks += _healthy(row, seen)
    row.leaks += await rig.leaks()


async def _goodput(rig: Rig, row: FaultRow, name: str, clients: int) -> tuple[float, int]:
    """Tokens a second of the requests that were answered, and how many were refused."""
    streams: list[Stream] = []
    refused = 0
    until = time.monotonic() + WINDOW_S

    async def client(number: int) -> None:
        nonlocal refused
        direct = Direct(rig.stack.services[name].address)
        asked = list(rig.answers.items())
        while time.monotonic() < until:
            question, expected = asked[number % len(asked)]
            number += 1
            request = build_request(
                question.prompt, sampling=question.sampling, max_new_tokens=len(expected), ignore_eos=True
            )
            stream = Stream(expected, time.monotonic())
            try:
                stream.ids = await direct.ask(request_to_wire(request), REQUEST_S, stream.history.note)
            except Overloaded as error:
                refused += 1
                await asyncio.sleep(min(error.retry_after_s, max(0.0, until - time.monotonic())))
                continue
            except CoppiceError as error:
                stream.failure = f"{error.status.name}: {error}"
            stream.ended = time.monotonic()
            streams.append(stream)
        await direct.close()

    began = time.monotonic()
    await asyncio.gather(*(client(number) for number in range(clients)))
    row.count(streams)
    return sum(len(stream.ids) for stream in streams) / (time.monotonic() - began), refused  # to the last one's end


def _healthy(row: FaultRow, seen: Watched) -> list[Check]:
    """Health was always given, and in time."""
    took = seen.took or [float("inf")]
    note = f"{len(seen.took)} answers, the slowest {max(took):.3f}"
    return [
        Check.at_most(f"{row.fault}: health p99, s", percentile(took, 0.99), HEALTHY_S, note),
        Check.at_most(f"{row.fault}: questions about health without an answer", seen.missed, 0),
    ]


SCENARIOS = [
    Scenario("client-cancel", "client", "a request that is cancelled in any phase frees everything", cancelled),
    Scenario("client-vanish", "client", "a client that is gone without a word frees everything", vanished),
    Scenario("client-slow", "client", "a client that reads slowly gets its text and delays nobody", slow_reader),
    Scenario("overload-clients", "overload", "a hundred clients at once: none fails", hundred),
    *(
        Scenario(
            f"overload-{name}",
            "overload",
            "what is too much is refused at once; the rest keeps its speed",
            overload(times),
        )
        for name, times in OVERLOADS.items()
    ),
]
