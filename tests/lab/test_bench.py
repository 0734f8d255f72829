"""`bench run` against real processes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from coppice.client.client import Client
from coppice.config.model_size import Context
from coppice.errors import InvalidField, Unavailable
from coppice.prompts.files import FilePrompt
from coppice.stack.launch import Stack
from coppice.testing.reference import Reference
from coppice.training import progress
from lab.measuring import Bench
from lab.options import Options
from lab.questions import Question, read_questions
from lab.report import Report
from lab.run.measure import RunPlan, run_methods
from lab.run.peers import PEERS, methods_of
from lab.run.report import ALL

NEW = 12
PROMPTS = [tuple(range(30, 50)) * 2, tuple(range(100, 130)), (5, 6, 7, 8)]
QUESTIONS = tuple(Question(ids, "abb"[at]) for at, ids in enumerate(PROMPTS))


@pytest.mark.parametrize("sessions", [(1,), (2, 3)])
def test_every_method_is_timed_and_judged(
    stack: Stack,
    client: Client,
    reference: Reference,
    sessions: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(progress, "LINE_S", 0.05)
    peers = PEERS if sessions == (1,) else ()
    methods = methods_of(["self", "lookup", "route", "merge", "route:lookup/self", *peers], stack.spec.heads, sessions)
    warm_up = () if peers else (Question((7, 8, 9), "a"),)
    plan = RunPlan(methods, (6,), (0.0, 1.0), sessions, NEW, QUESTIONS, warm_up)
    report = Report("bench run", "float32", 1)
    measured = run_methods(Bench(stack, client, report, Options(), reference), plan)
    rows = {(row.row.method, row.cell.temperature, row.cell.sessions): row for row in measured}
    assert list(rows) == [(method, t, count) for t in (0.0, 1.0) for count in sessions for method in methods]
    assert [row["method"] for row in report.rows] == [row.row.method for row in measured]
    for (method, temperature, count), measured_row in rows.items():
        row, every = measured_row.row, measured_row.figures[ALL]
        answers = 3 if count != 2 else 3 + 1  # the last group is filled up
        assert (row.prompts, row.tokens, every.answers) == (answers, NEW * answers, answers)
        assert sum(measured_row.figures[name].answers for name in "ab") == answers
        assert (row.verdicts.wrong, row.verdicts.ties) == (0, 0)
        assert every.over_plain is not None
        assert every.over_plain.low <= every.over_plain.value <= every.over_plain.high
        if method in PEERS:
            assert (every.efficiency, measured_row.draft_ms, measured_row.parts_ms) == (None, 0, {})
            assert (row.verdicts.identical > 0) == (temperature == 0 and method != "hf-generate")
            assert bool(measured_row.settings) == (method != "hf-generate")
        else:
            assert row.verdicts.identical == row.prompts
            assert every.efficiency is not None
        assert (measured_row.t_m_ms > 0) == (method not in PEERS)
        assert (measured_row.t_d_ms > 0) == ("self" in row.heads)
    assert report.figures.get("warm_up", 0) == len(warm_up)
    one = sessions[0]
    assert list(rows["route", 0.0, one].figures[ALL].chosen) == ["self", "lookup"]
    assert rows["route", 0.0, one].figures[ALL].chosen["self"] > 0
    assert rows["route:lookup/self", 0.0, one].row.heads == ("lookup", "self")
    assert ("tokens/s of plain over hf-generate, T=1" in [goal.name for goal in report.goals]) == bool(peers)
    said, total = capsys.readouterr().out, len(methods) * len(sessions) * 2 * (3 + len(warm_up))
    assert re.search(rf"T=1, budget 6, {one} sessions?: \d+ of {total} answers, \d+ s left\n", said)


def test_what_was_answered_before_a_failure_is_reported(
    stack: Stack, client: Client, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate, calls = client.generate, 0

    def failing(*told: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 2 + 2 * 2:  # warming up, and two questions, by two methods each
            raise Unavailable("the verifier is gone")
        return generate(*told, **options)

    monkeypatch.setattr(client, "generate", failing)
    plan = RunPlan(methods_of(["lookup"], stack.spec.heads, (1,)), (6,), (0.0, 1.0), (1,), 16, QUESTIONS)
    report = Report("bench run", "float32", 1)
    with pytest.raises(Unavailable):
        run_methods(Bench(stack, client, report, Options(), reference), plan)
    assert [(row["method"], row["prompts"]) for row in report.rows] == [("plain", 2), ("single:lookup", 2)]
    assert report.tables


def test_every_turn_of_a_conversation_is_asked_behind_the_earlier_answers(
    stack: Stack, client: Client, reference: Reference, tmp_path: Path
) -> None:
    talk = Question(PROMPTS[2], "a", FilePrompt(PROMPTS[2], "a", 1), ((40, 41), (42,)))
    plan = RunPlan(
        methods_of(["lookup"], stack.spec.heads, (2,)),
        (6,),
        (0.0,),
        (2,),
        16,
        (talk, QUESTIONS[1], QUESTIONS[2]),
        answers=tmp_path,
    )
    report = Report("bench run", "float32", 1)
    rows = run_methods(Bench(stack, client, report, Options(), reference), plan)
    assert [(row.row.prompts, row.row.verdicts.wrong, row.row.verdicts.ties) for row in rows] == [
        (12, 0, 0)
    ] * 2  # the last group is filled up
    texts = []
    for file in sorted(tmp_path.iterdir()):
        first = json.loads(file.read_text().splitlines()[0])
        assert len(first["choices"][0]["turns"]) == 3
        texts.append(first["choices"][0]["turns"])
    assert texts[0] == texts[1]


def test_the_server_counts_a_prompt_without_a_forward(stack: Stack, client: Client) -> None:
    before = client.describe()
    assert client.prompt_tokens("hello") == 5
    assert client.prompt_tokens(PROMPTS[0]) == len(PROMPTS[0])
    with pytest.raises(InvalidField, match=f"tokens leave no room in a context of {before.max_len}"):
        client.prompt_tokens([5] * before.max_len)


def test_questions_to_warm_up_with_are_the_next_ones(reference: Reference, tmp_path: Path) -> None:
    def read(count: int) -> tuple[list[Question], list[Question], list[str]]:
        return read_questions(Options(prompts=[file], n=count, warm_up=3), reference.text, Context(512))

    file = tmp_path / "some.jsonl"
    file.write_text("".join(f'{{"ids": [{at}]}}\n' for at in range(1, 6)))
    asked, warming, _ = read(2)
    assert [question.ids for question in asked] == [(1,), (2,)]
    assert [question.ids for question in warming] == [(3,), (4,), (5,)]
    with pytest.raises(InvalidField, match="warm_up: there are 5 prompts in some, too few for 3 and 3"):
        read(3)
