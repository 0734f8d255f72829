"""`bench run`, `exact` and `peers`: which methods there are, pairs, rows and tables, all on real processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import lab.run
from coppice.client.client import Client
from coppice.client.completion import Completion
from coppice.errors import InvalidField
from coppice.stack.launch import Stack
from coppice.stack.spec import COUNTED_HEADS, DEMO_HEADS, HeadSpec
from coppice.testing.reference import Reference
from coppice.wire.generation import Timings
from lab.measuring import Bench, Journal, Report, in_turn
from lab.options import Options, Question
from lab.peers import NGRAMS, check_peers
from lab.run import (
    ALL,
    HF_GENERATE,
    LLAMA,
    PEERS,
    STEADY,
    Cell,
    Pairs,
    add_tables,
    loops,
    methods_of,
    run_exact,
    run_methods,
)
from tests.lab.conftest import completion

HEADS = (HeadSpec("a", "specblock"), HeadSpec("b", "specblock"), HeadSpec("e", "eagle3"), HeadSpec("s", "lm"))
ONE = Cell(0.0, 8, 1)
NEW = 12
PROMPTS = [tuple(range(30, 50)) * 2, tuple(range(100, 130)), (5, 6, 7, 8)]
QUESTIONS = tuple(Question(ids, "abb"[at]) for at, ids in enumerate(PROMPTS))


def test_methods_are_policies_heads_and_peers() -> None:
    default = ("plain", "single:a", "single:b", "single:e", "single:s", "route", "merge", HF_GENERATE)
    assert methods_of((), HEADS, (1, 4)) == default
    assert methods_of((), HEADS, (2,)) == default[:-1]
    assert methods_of((), HEADS[:1], (1,)) == ("plain", "single:a", HF_GENERATE)
    named = ["s", "plain", "hf-lookup", "single:s", "route:a/e"]
    assert methods_of(named, HEADS, (1,)) == ("plain", "single:s", "hf-lookup", "route:a/e")


@pytest.mark.parametrize(
    ("method", "heads", "sessions", "reason"),
    [
        ("route", HEADS[:1], 1, "route needs at least two heads, there are 1"),
        (HF_GENERATE, HEADS, 2, "one prompt at a time"),
        ("best", HEADS, 1, "'best' is not one of"),
        ("route:a/x", HEADS, 1, "there is no head 'x'; heads are a, b"),
    ],
)
def test_a_method_that_cannot_run_is_named(method: str, heads: Sequence[HeadSpec], sessions: int, reason: str) -> None:
    with pytest.raises(InvalidField, match=reason):
        methods_of([method], heads, (sessions,))


def test_options_choose_the_heads(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert [head.name for head in Options().spec(["lookup"]).heads] == ["lookup"]
    assert [head.name for head in Options().spec().heads] == list(DEMO_HEADS)
    named = Options(methods=["route:eagle3-code/lookup", "plain"]).spec(["bigram"])
    assert [head.name for head in named.heads] == ["eagle3-code", "lookup"]
    assert Options(target=tmp_path).spec(["lookup"]).heads == COUNTED_HEADS


def _pairs(count: int = 16) -> Pairs:
    """`count` pairs of 24 tokens, a third of them slower than another."""
    slower = [1.0 + 0.1 * (at % 3) for at in range(count)]

    def ours(head: str, step: int, seconds: float) -> list[Completion]:
        return [completion([step] * (24 // step), seconds * factor, head) for factor in slower]

    peers = [replace(completion([1] * 24, 1.02 * factor), policy="", timings=Timings()) for factor in slower]
    answers = {"plain": ours("", 1, 1.0), "single:a": ours("a", 4, 0.5), "route": ours("b", 3, 0.6), HF_GENERATE: peers}
    return Pairs(ONE, answers, [Question((1, 2), "ab"[at % 2]) for at in range(count)])


def test_a_ratio_is_paired_seeded_and_bounded() -> None:
    pairs = _pairs()
    same = pairs.ratio("single:a", "plain")
    assert same == pairs.ratio("single:a", "plain")
    assert (same.value, same.low, same.high) == pytest.approx((2.0, 2.0, 2.0))  # prompts' own speed cancels out
    quick, slow = [completion([1] * 10, 1.0)], [completion([1] * 10, 3.0)]
    mixed = Pairs(ONE, {"x": 5 * quick + 5 * slow, "plain": 10 * quick}, ()).ratio("x", "plain")
    assert mixed.value == pytest.approx(0.5)
    assert 0.34 < mixed.low < 0.45 < 0.55 < mixed.high < 0.8


def test_rows_and_tables_hold_every_figure() -> None:
    pairs = _pairs()
    rows = {name: pairs.row(name, ["identical"] * len(pairs.questions)) for name in pairs.answers}
    fast = rows["single:a"]
    assert (fast["temperature"], fast["cell_budget"], fast["identical"], fast["tau"]) == (0.0, 8, 16, 4.0)
    assert fast["speedup"] == pytest.approx(2.0)
    assert fast["draft_share"] == pytest.approx(0.1)
    assert sum(fast["parts_ms"].values()) == pytest.approx(1.0)  # only waiting for drafts is timed here
    assert fast["split_ms"] == pytest.approx(1.0)
    assert {name: figures["prompts"] for name, figures in fast["figures"].items()} == {ALL: 16, "a": 8, "b": 8}
    assert fast["figures"][ALL]["over_hf-generate"].value == pytest.approx(2.04)
    assert rows[HF_GENERATE]["parts_ms"] == {}
    report, more = Report("bench run", "float32", 2), [row | {"sessions": 4} for row in rows.values()]
    add_tables(report, [*rows.values(), *more])
    assert len(report.tables) == 1 + 2 * 3  # speed; by cell sets, parts and alpha
    assert len(report.tables[0].splitlines()) == 4 + 2 * len(rows)


def test_alpha_is_of_the_steps_that_came_so_far() -> None:
    answers = {"x": [completion([3, 2, 1, 1, 3, 1], 1.0, "x")], "plain": [completion([1] * 11, 1.0)]}
    pairs = Pairs(ONE, answers, ())
    assert pairs.accepted("x") == pytest.approx([3 / 5, 2 / 3, 0.0])  # the last step was cut
    assert pairs.accepted("plain") == []


def bench_of(stack: Stack, client: Client, reference: Reference, new_tokens: int = NEW) -> Bench:
    bench = Bench(stack, client, Report("bench run", "float32", 1), Options(max_new_tokens=new_tokens))
    bench.reference = reference
    return bench


@pytest.mark.parametrize("sessions", [(1,), (2,)])
def test_all_are_timed_and_judged(
    stack: Stack, client: Client, reference: Reference, sessions: tuple[int, ...]
) -> None:
    peers = PEERS if sessions == (1,) else ()
    methods = methods_of(["self", "lookup", "route:lookup/self", *peers], stack.spec.heads, sessions)
    warm_up = () if peers else (Question((7, 8, 9), "a"),)
    bench = bench_of(stack, client, reference)
    run_methods(bench, methods, [Cell(*each) for each in product((0.0, 1.0), (6,), sessions)], QUESTIONS, warm_up)
    rows = {(row["method"], row["temperature"], row["sessions"]): row for row in bench.report.rows}
    assert list(rows) == [(method, t, count) for t in (0.0, 1.0) for count in sessions for method in methods]
    for (method, temperature, count), row in rows.items():
        answers = 3 if count != 2 else 3 + 1  # the last group is filled up
        assert (row["prompts"], row["tokens"], row["figures"][ALL]["prompts"]) == (answers, NEW * answers, answers)
        assert (row["wrong"], row["ties"], bool(row["parts_ms"])) == (0, 0, method not in PEERS)
        if method in PEERS:
            assert (row["identical"] > 0) == (temperature == 0 and method != "hf-generate")
        else:
            assert row["identical"] == row["prompts"]
    assert bench.report.figures.get("warm_up", 0) == len(warm_up)
    assert rows["route:lookup/self", 0.0, sessions[0]]["heads"] == ("lookup", "self")
    assert bench.report.ok
    assert len(bench.report.tables) >= 2 * len(sessions) * 3


def test_a_run_that_was_broken_off_goes_on_and_another_one_does_not_take_its_answers(
    stack: Stack, client: Client, reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups, bench = list[int](), bench_of(stack, client, reference)
    options = replace(bench.options, json_file=tmp_path / "run.json")
    cells = [Cell(0.0, 6, 1), Cell(1.0, 6, 1)]

    def breaking(*arguments: Any) -> Any:
        groups.append(1)
        if len(groups) == 5:
            raise KeyboardInterrupt
        return in_turn(*arguments)

    monkeypatch.setattr(lab.run, "in_turn", breaking)
    with pytest.raises(KeyboardInterrupt):
        run_methods(bench, ("plain", "single:self"), cells, QUESTIONS, (), Journal(options))
    assert [(row["method"], row["prompts"]) for row in bench.report.rows] == [("plain", 3), ("single:self", 3)]
    assert bench.report.tables  # of the cell that was measured
    with pytest.raises(InvalidField, match="partial has answers of another run"):
        Journal(replace(options, n=99))
    with (tmp_path / "run.json.partial").open("a") as cut:
        cut.write('{"plain": [{"te')
    again = bench_of(stack, client, reference)
    run_methods(again, ("plain", "single:self"), cells, QUESTIONS, (), Journal(options))
    assert len(groups) == 5 + 2  # of six
    assert [row["identical"] for row in again.report.rows] == [len(QUESTIONS)] * 4
    assert again.report.rows[:2] == bench.report.rows
    assert not (tmp_path / "run.json.partial").exists()


def test_an_answer_loops_when_its_second_half_repeats_itself() -> None:
    steady, period = list(range(64)), list(range(8))
    assert [loops(ids) for ids in ((), steady, steady[:32] + 4 * period, steady[:40] + 3 * period)] == [
        *(False, False, True, False)
    ]
    numbered = [token for at in range(8) for token in (*period[:7], 100 + at)]
    assert not loops(numbered)
    assert loops([token for at in range(4) for token in (*range(15), 100 + at)])
    answers = [completion([1] * 63, 1.0, ids=ids) for ids in (steady, [1] * 64)]
    sets = Pairs(ONE, {"plain": answers}, QUESTIONS[:2]).sets()
    assert list(sets) == [ALL, STEADY, "a", "b"]
    assert sets[STEADY].answers["plain"] == answers[:1]


def test_exact_judges_every_method_and_budget(stack: Stack, client: Client, reference: Reference) -> None:
    bench = bench_of(stack, client, reference)
    run_exact(bench, QUESTIONS, ("plain", "single:self"), [Cell(t, b, 3) for t in (0.0, 1.0) for b in (0, 6)])
    expected = [(method, t, b, 3) for t in (0, 1) for b in (0, 6) for method in ("plain", "single:self")]
    rows = bench.report.rows
    assert [(row["method"], row["temperature"], row["cell_budget"], row["identical"]) for row in rows] == expected
    assert bench.report.ok


def test_every_turn_is_asked_behind_the_earlier_answers(stack: Stack, client: Client, reference: Reference) -> None:
    talk, bench = Question(PROMPTS[2], "a", later=((40, 41), (42,))), bench_of(stack, client, reference, 16)
    run_methods(bench, ("plain", "single:lookup"), [Cell(0.0, 6, 2)], (talk, QUESTIONS[1], QUESTIONS[2]))
    rows = [(row["prompts"], row["identical"]) for row in bench.report.rows]
    assert rows == [(12, 12)] * 2  # the last group is filled up


def test_modes_are_of_n_grams_or_name_a_models_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    drafting = f"draft-eagle3:{tmp_path}"
    assert check_peers(()) == tuple(NGRAMS)
    assert check_peers((drafting,)) == (LLAMA, drafting)
    for mode in ("x", "ngram-mod:x", "draft-eagle3", "draft-eagle3:none"):
        with pytest.raises(InvalidField, match=f"'{mode}' is not one of llama.cpp, ngram-simple"):
            check_peers((mode,))
