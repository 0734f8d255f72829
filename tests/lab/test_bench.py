"""`bench run` against real processes."""

from __future__ import annotations

from typing import Any

import pytest

from coppice.client.client import Client
from coppice.errors import Unavailable
from coppice.stack.launch import Stack
from coppice.testing.reference import Reference
from lab.measuring import Bench
from lab.options import Options
from lab.questions import Question
from lab.report import Report
from lab.run import ALL, PEERS, RunPlan, methods_of, run_methods

NEW = 12
PROMPTS = [tuple(range(30, 50)) * 2, tuple(range(100, 130)), (5, 6, 7, 8)]
QUESTIONS = tuple(Question(ids, "abb"[at]) for at, ids in enumerate(PROMPTS))


@pytest.mark.parametrize("sessions", [(1,), (2, 3)])
def test_every_method_is_timed_and_judged(
    stack: Stack, client: Client, reference: Reference, sessions: tuple[int, ...]
) -> None:
    peers = PEERS if sessions == (1,) else ()
    methods = methods_of(["self", "lookup", "route", "route:lookup/self", *peers], stack.spec.heads, sessions)
    warm_up = () if peers else (Question((7, 8, 9), "a"),)
    plan = RunPlan(methods, (6,), (0.0, 1.0), sessions, NEW, QUESTIONS, warm_up)
    report = Report("bench run", "float32", 1)
    run_methods(Bench(stack, client, report, Options(), reference), plan)
    rows = {(row["method"], row["temperature"], row["sessions"]): row for row in report.rows}
    assert list(rows) == [(method, t, count) for t in (0.0, 1.0) for count in sessions for method in methods]
    for (method, temperature, count), row in rows.items():
        answers = 3 if count != 2 else 3 + 1  # the last group is filled up
        assert (row["prompts"], row["tokens"], row["figures"][ALL]["answers"]) == (answers, NEW * answers, answers)
        assert sum(row["figures"][name]["answers"] for name in "ab") == answers
        assert (row["wrong"], row["ties"]) == (0, 0)
        if method in PEERS:
            assert (row["identical"] > 0) == (temperature == 0 and method != "hf-generate")
        else:
            assert row["identical"] == row["prompts"]
        assert bool(row["parts_ms"]) == (method not in PEERS)
    assert report.figures.get("warm_up", 0) == len(warm_up)
    assert rows["route:lookup/self", 0.0, sessions[0]]["heads"] == ("lookup", "self")
    assert report.ok
    assert len(report.tables) >= 2 * len(sessions) * 3


def test_cells_that_were_measured_before_a_failure_are_reported(
    stack: Stack, client: Client, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate, calls = client.generate, 0

    def failing(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 2 + 3 * 2:  # warming up, and three questions, by two methods each
            raise Unavailable("the verifier is gone")
        return generate(*arguments, **options)

    monkeypatch.setattr(client, "generate", failing)
    plan = RunPlan(methods_of(["lookup"], stack.spec.heads, (1,)), (6,), (0.0, 1.0), (1,), 16, QUESTIONS)
    report = Report("bench run", "float32", 1)
    with pytest.raises(Unavailable):
        run_methods(Bench(stack, client, report, Options(), reference), plan)
    assert [(row["method"], row["prompts"]) for row in report.rows] == [("plain", 3), ("single:lookup", 3)]
    assert report.tables


def test_every_turn_of_a_conversation_is_asked_behind_the_earlier_answers(
    stack: Stack, client: Client, reference: Reference
) -> None:
    talk = Question(PROMPTS[2], "a", later=((40, 41), (42,)))
    methods = methods_of(["lookup"], stack.spec.heads, (2,))
    plan = RunPlan(methods, (6,), (0.0,), (2,), 16, (talk, QUESTIONS[1], QUESTIONS[2]))
    report = Report("bench run", "float32", 1)
    run_methods(Bench(stack, client, report, Options(), reference), plan)
    assert [(row["prompts"], row["identical"]) for row in report.rows] == [(12, 12)] * 2  # the last group is filled up
