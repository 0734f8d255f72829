"""`bench run` and `bench coupling` against real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coppice.bench.paper.coupling import CouplingReport, coupled_heads, run_coupling
from coppice.bench.reference import Reference
from coppice.bench.run.methods import read_methods
from coppice.bench.run.peers import PEERS
from coppice.bench.run.questions import Question, read_questions
from coppice.bench.run.report import ALL, RunReport, RunRow
from coppice.bench.run.run import RunPlan, run
from coppice.client.client import Client
from coppice.errors import InvalidField
from coppice.stack.launch import Stack

PROMPTS = [tuple(range(30, 50)) * 2, tuple(range(100, 130)), (5, 6, 7, 8)]


QUESTIONS = [Question(ids, "abb"[at], question_id=str(at)) for at, ids in enumerate(PROMPTS)]


@pytest.mark.parametrize("sessions", [(1,), (2, 3)])
def test_every_method_is_timed_and_judged(
    stack: Stack, client: Client, reference: Reference, sessions: tuple[int, ...], tmp_path: Path
) -> None:
    peers = PEERS if sessions == (1,) else ()
    wanted = ["self,lookup", "route,merge", "self+pq,self+uncoupled,route:lookup/self", *peers]
    methods = read_methods(wanted, stack.spec.heads, sessions)
    rounds = 2 if peers else 1
    warm_up = () if peers else (Question((7, 8, 9), "a"),)
    plan = RunPlan(methods, (6,), (0.0, 1.0), 24, rounds, sessions, 3, tmp_path, warm_up)
    report = RunReport("bench run", "float32", 1)
    said: list[str] = []
    run(stack, client, reference, QUESTIONS, plan, {}, report, False, said.append)
    rows = {(row.method, row.temperature, row.sessions): row for row in report.rows if isinstance(row, RunRow)}
    assert list(rows) == [(method.name, t, count) for t in (0.0, 1.0) for count in sessions for method in methods]
    for (method, temperature, count), row in rows.items():
        answers = rounds * 3 if count != 2 else 3 + 1  # the last group is filled up
        every = row.figures[ALL]
        assert (row.prompts, row.tokens, every.answers) == (answers, 24 * answers, answers)
        assert sum(figures.answers for figures in row.benchmarks.values()) == answers
        assert list(row.benchmarks) == ["a", "b"]
        assert (row.wrong, row.ties) == (0, 0)
        assert every.over_plain is not None
        assert every.over_plain.low <= every.over_plain.value <= every.over_plain.high
        if method in PEERS:
            assert (every.efficiency, row.t_m_ms, row.draft_ms, row.parts_ms) == (None, 0, 0, {})
            assert (row.identical > 0) == (temperature == 0 and method != "hf-generate")
            assert bool(row.settings) == (method != "hf-generate")
        else:
            # p/q rejection draws on its own: its sampled text is plain decoding's in law only.
            assert row.identical == (0 if temperature and "+pq" in method else row.prompts)
            assert every.efficiency is not None
            assert row.t_m_ms > 0
        assert (row.t_d_ms > 0) == ("self" in row.heads)
        text = (tmp_path / "b" / f"{answer_file(method, temperature, count if not peers else 0)}.jsonl").read_text()
        assert [json.loads(line)["question_id"] for line in text.splitlines()] == [1, 2]
        assert len(json.loads(text.splitlines()[0])["choices"]) == rounds
    assert ("1 prompts answered before" in str(next(iter(report.tables())).title)) == bool(warm_up)
    one = sessions[0]
    assert list(rows["route", 0.0, one].figures[ALL].chosen) == ["self", "lookup"]
    assert rows["route", 0.0, one].figures[ALL].chosen["self"] > 0
    assert rows["route:lookup/self", 0.0, one].heads == ("lookup", "self")
    assert rows["single:self+pq", 1.0, one].tau > 1.5  # the target drafts a chain for itself
    assert rows["single:self", 1.0, one].tau > rows["single:self+uncoupled", 1.0, one].tau
    assert ("tokens/s of plain over hf-generate, T=1" in [check.name for check in report.checks]) == bool(peers)
    assert any("T=1, budget 6" in line for line in said)


def test_questions_to_warm_up_with_are_the_next_ones(client: Client, reference: Reference, tmp_path: Path) -> None:
    file = tmp_path / "some.jsonl"
    file.write_text("".join(f'{{"ids": [{at}]}}\n' for at in range(1, 6)))
    asked, warming = read_questions([file], 2, client, reference, None, False, warm_up=3)
    assert [question.ids for question in asked] == [(1,), (2,)]
    assert [question.ids for question in warming] == [(3,), (4,), (5,)]
    with pytest.raises(InvalidField, match="warm_up: there are 5 prompts in some, too few for 3 and 3"):
        read_questions([file], 3, client, reference, None, False, warm_up=3)


def answer_file(method: str, temperature: float, sessions: int) -> str:
    """The name of a method's file; `sessions` where there were several numbers of them."""
    name = f"{method}-temperature-{temperature:g}" + (f"-{sessions}-sessions" if sessions else "")
    return name.replace(":", "-").replace("/", "-").replace(" ", "-")


def test_a_head_that_does_not_sample_has_no_sampled_chain(stack: Stack, client: Client, reference: Reference) -> None:
    methods = read_methods(["lookup+pq"], stack.spec.heads, (1,))
    plan = RunPlan(methods, (6,), (1.0,), 24, 1, (1,), 3)
    report = RunReport("bench run", "float32", 1)
    with pytest.raises(InvalidField, match=r"single:lookup\+pq: this head does not sample"):
        run(stack, client, reference, QUESTIONS, plan, {}, report, False, lambda _: None)


def test_coupling_changes_drafts_and_no_text(
    stack: Stack, client: Client, reference: Reference, tmp_path: Path
) -> None:
    report = CouplingReport("bench coupling", "float32", 1)
    heads = coupled_heads(stack.spec.heads)
    assert [head.name for head in heads] == ["self"]
    run_coupling(client, reference, heads, PROMPTS[:2], (0.7, 1.0), 24, 3, report, lambda _: None)
    with_it, without = report.rows[2:]
    assert with_it.tau > 2 * without.tau  # the target itself drafts: with the same noise it is always right
    assert [(row.identical, row.wrong) for row in report.rows] == [(2, 0)] * 4
    assert [check.name for check in report.checks] == ["tau of self coupled over uncoupled, T=1", "wrong answers"]
    assert report.ok
    report.write(tmp_path / "coupling.json")
