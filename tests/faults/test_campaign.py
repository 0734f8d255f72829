"""The fault campaign's own parts: each violation is found, a bad result is refused, and a second run goes on."""

from __future__ import annotations

import asyncio
import time

import pytest
import typer

from coppice.speculation.sampling import SamplingParams
from lab.report import Check
from tests.fake_service import echo_server
from tests.faults.campaign.history import Event, History
from tests.faults.campaign.load import HistoryClient, Load, Question, Stream, ask
from tests.faults.campaign.report import FaultRow
from tests.faults.campaign.run import choose, every

PLAIN = (11, 12, 13, 14, 15)


def started(attempt: int = 1, held: int = 0) -> Event:
    return Event(attempt, "started", (), held)


def chunk(*ids: int, attempt: int = 1, held: int = 0) -> Event:
    return Event(attempt, "chunk", ids, held)


def finished(new_tokens: int, attempt: int = 1, held: int = 0) -> Event:
    return Event(attempt, "finished", (), held, new_tokens)


WHOLE = [started(), chunk(11), chunk(12, 13), chunk(14, 15), finished(5)]
RESUMED = [started(), chunk(11, 12), started(2, 2), chunk(13, 14, 15, attempt=2, held=2), finished(3, 2, 2)]
ONLY_ITS_END = [started(), chunk(*PLAIN), started(2, 5), finished(0, 2, 5)]


@pytest.mark.parametrize("events", [WHOLE, RESUMED, ONLY_ITS_END])
def test_a_good_history_breaks_no_rule(events: list[Event]) -> None:
    assert History(1, events=events).violations(PLAIN, complete=True) == []


@pytest.mark.parametrize("events", [[], [started()], WHOLE[:3], RESUMED[:-1]])
def test_an_answer_that_was_left_or_failed_may_end_anywhere(events: list[Event]) -> None:
    assert History(1, events=events).violations(PLAIN, complete=False) == []


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([started(), chunk(11), chunk(11, 12, 13, 14, 15), finished(6)], "the one before it came twice"),
        ([started(), chunk(11), chunk(13, 14, 15), finished(4)], "token 1 of plain's is 12, it was lost"),
        ([started(), chunk(*PLAIN, 16), finished(6)], "1 tokens too many"),
        ([started(), chunk(11, 12, 13), finished(3)], "2 tokens are missing at the end"),
        ([*WHOLE, chunk(16)], "chunk after the end"),
        ([chunk(11), started(), chunk(12, 13, 14, 15), finished(5)], "attempt 1: chunk before it started"),
        ([started(), started(), *WHOLE[1:]], "attempt 1: started twice"),
        (
            [started(), chunk(11, 12), chunk(13, 14, 15, attempt=2, held=2), finished(3, 2, 2)],
            "attempt 2: chunk before",
        ),
        (
            [started(), chunk(11, 12), started(2, 1), *RESUMED[3:]],
            "attempt 2: went on behind 1 tokens, 2 were received",
        ),
        ([started(), chunk(11), started(2, 2), *RESUMED[3:]], "attempt 2: went on behind 2 tokens, 1 were received"),
        ([*RESUMED[:3], chunk(13), *RESUMED[3:]], "attempt 1: chunk after attempt 2 began"),
        ([*WHOLE[:-1], finished(4)], "the end says 4 tokens, 5 were received"),
    ],
)
def test_every_violation_is_found(events: list[Event], said: str) -> None:
    found = History(7, events=events).violations(PLAIN, complete=True)
    assert any(said in what for what in found), found
    assert all(what.startswith("request 7: ") for what in found)


async def recorded(address: str, prompt: str) -> Stream:
    one = Stream(tuple(prompt.encode()), time.monotonic())
    async with HistoryClient(address) as client:
        await ask(client, Question(prompt, SamplingParams()), one)
    return one


async def test_a_campaign_fails_by_its_histories_alone() -> None:
    with echo_server() as (address, _):
        one = await recorded(address, "good")
    one.history.events.append(one.history.events[-1])
    row = FaultRow("none", 1)
    row.count([one])
    assert (row.failed, row.wrong, row.ok) == (0, 0, False)
    (broken,) = [check for check in row.to_checks() if not check.ok]
    assert broken.name == "none: broken histories"
    assert "finished after the end" in broken.note


async def test_a_load_ends_its_requests_and_compares_them() -> None:
    answers = {Question("one", SamplingParams()): tuple(b"one"), Question("two", SamplingParams()): tuple(b"TWO")}
    with echo_server() as (address, _):
        async with Load(address, answers, sessions=3) as load:
            while len(load.streams) < 12:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert not load.running
        made = FaultRow("none")
        made.count(load.streams)
    assert (made.failed, made.requests) == (0, len(load.streams))
    assert made.wrong == 3 * sum(one.expected == tuple(b"TWO") for one in load.streams) > 0


@pytest.mark.parametrize(
    ("changes", "failed"),
    [
        ({}, []),
        ({"failed": 1}, ["failed requests"]),
        ({"wrong": 1}, ["wrong tokens"]),
        ({"leaks": ["verifier holds a session"]}, ["left behind"]),
        ({"recoveries": [0.1, 5.2]}, ["recovery p99, s"]),
        ({"weak": ["3 of 16 sessions were being answered"]}, ["repetitions that prove nothing"]),
        ({"checks": [Check("throughput", 0.5, "0.9", False)]}, ["throughput"]),
    ],
)
def test_a_row_fails_by_each_of_its_promises(changes: dict[str, object], failed: list[str]) -> None:
    row = FaultRow("verifier-kill", 3, 48, **{"tokens": 2000, "recoveries": [0.1, 0.4], **changes})  # type: ignore[arg-type]
    assert [check.name.rpartition(": ")[2] for check in row.to_checks() if not check.ok] == failed


def test_scenarios_are_chosen_by_name_and_group() -> None:
    assert choose([]) == every()
    names = [scenario.name for scenario in choose(["verifier-kill,redis"])]
    assert names == ["verifier-kill", "redis-stop", "redis-cut", "redis-flush", "redis-slow"]
    with pytest.raises(typer.BadParameter, match="'verifier-melt' is none of"):
        choose(["verifier-melt"])
