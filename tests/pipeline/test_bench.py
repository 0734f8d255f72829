"""`bench run` and `bench coupling` against real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from coppice.bench.coupling import CouplingReport, coupled_heads, run_coupling
from coppice.bench.peers import PEERS
from coppice.bench.reference import Reference
from coppice.bench.run import RunPlan, read_methods, run
from coppice.bench.run_report import ALL, RunReport, RunRow
from coppice.client import Client
from coppice.launch import Stack

PROMPTS = [tuple(range(30, 50)) * 2, tuple(range(100, 130)), (5, 6, 7, 8)]


@pytest.mark.parametrize("sessions", [1, 2])
def test_every_method_is_timed_and_judged(stack: Stack, client: Client, reference: Reference, sessions: int) -> None:
    peers = PEERS if sessions == 1 else ()
    methods = read_methods(["self,lookup", "route,merge", *peers], stack.spec.heads, sessions)
    plan = RunPlan(methods, 6, (0.0, 1.0), 24, 2 if sessions == 1 else 1, sessions, seed=3)
    report = RunReport("bench run", "float32", 1)
    said: list[str] = []
    run(stack, client, reference, PROMPTS, plan, report, False, said.append)
    rows = [row for row in report.rows if isinstance(row, RunRow)]
    assert [(row.method, row.temperature) for row in rows] == [(name, t) for t in (0.0, 1.0) for name in methods]
    answers = {1: 2 * 3, 2: 3 + 1}[sessions]
    for row in rows:
        every = row.figures[ALL]
        assert (row.prompts, row.tokens, every.answers) == (answers, 24 * answers, answers)
        assert (row.wrong, row.ties) == (0, 0)
        assert every.over_plain is not None
        assert every.over_plain.low <= every.over_plain.value <= every.over_plain.high
        if row.method in PEERS:
            assert (every.efficiency, row.t_m_ms, row.draft_ms) == (None, 0, 0)
            assert (row.identical > 0) == (row.temperature == 0 and row.method != "hf-generate")
            assert bool(row.settings) == (row.method != "hf-generate")
        else:
            assert row.identical == row.prompts
            assert every.efficiency is not None
            assert row.t_m_ms > 0
        assert (row.t_d_ms > 0) == ("self" in row.heads)
    chosen = next(row for row in rows if row.method == "route").figures[ALL].chosen
    assert list(chosen) == ["self", "lookup"]
    assert chosen["self"] > 0
    assert ("tokens/s of plain over hf-generate, T=1" in [check.name for check in report.checks]) == (sessions == 1)
    assert any("round 1 of" in line for line in said)


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
