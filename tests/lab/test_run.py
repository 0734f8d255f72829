"""`bench run`, `exact`, `peers` and `adapt`: methods, questions, pairs, rows, tables, verdicts, on real processes."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import lab.run
from coppice.client.client import Client
from coppice.client.completion import Completion
from coppice.config.model import read_tokenizer
from coppice.engine.engine import Context
from coppice.errors import InvalidField
from coppice.prompts import read_prompts
from coppice.speculation.sampling import SamplingParams, decode_row, draw
from coppice.stack.launch import Stack
from coppice.stack.spec import COUNTED_HEADS, DEMO_HEADS, HeadSpec, StackSpec
from coppice.testing.reference import EPS, Reference, TargetText, judge_token
from coppice.v1 import adapter_pb2 as pb
from coppice.wire.generation import Timings
from lab.adapt import Lane, adapt_line, report_lanes, stream_of
from lab.measuring import (
    Bench,
    Report,
    Row,
    exactness,
    in_turn,
    make_row,
    reference_of,
)
from lab.options import Options, Question, own_prompts, read_questions
from lab.peers import NGRAMS, check_peers
from lab.run import (
    ALL,
    HF_GENERATE,
    LLAMA,
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
from tests.tiny import make_target

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
    named = ["s", "plain", "hf-generate", "single:s", "route:a/e"]
    assert methods_of(named, HEADS, (1,)) == ("plain", "single:s", "hf-generate", "route:a/e")
    for method, heads, sessions, reason in (
        ("route", HEADS[:1], 1, "route needs at least two heads, there are 1"),
        (HF_GENERATE, HEADS, 2, "one prompt at a time"),
        ("best", HEADS, 1, "'best' is not one of"),
        ("route:a/x", HEADS, 1, "there is no head 'x'; heads are a, b"),
    ):
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


def bench_of(stack: Stack, client: Client, reference: Reference, new_tokens: int = NEW) -> Bench:
    bench = Bench(stack, client, Report("bench run", "float32", 1), Options(max_new_tokens=new_tokens))
    bench.reference = reference
    return bench


@pytest.mark.parametrize("sessions", [(1,), (2,)])
def test_all_are_timed_and_judged(
    stack: Stack, client: Client, reference: Reference, sessions: tuple[int, ...]
) -> None:
    peers = (HF_GENERATE,) if sessions == (1,) else ()
    methods = methods_of(["self", "lookup", "route:lookup/self", *peers], stack.spec.heads, sessions)
    warm_up = () if peers else (Question((7, 8, 9), "a"),)
    bench = bench_of(stack, client, reference)
    run_methods(bench, methods, [Cell(*each) for each in product((0.0, 1.0), (6,), sessions)], QUESTIONS, warm_up)
    rows = {(row["method"], row["temperature"], row["sessions"]): row for row in bench.report.rows}
    assert list(rows) == [(method, t, count) for t in (0.0, 1.0) for count in sessions for method in methods]
    for (method, _, count), row in rows.items():
        answers = 3 if count != 2 else 3 + 1  # the last group is filled up
        assert (row["prompts"], row["tokens"], row["figures"][ALL]["prompts"]) == (answers, NEW * answers, answers)
        assert (row["wrong"], row["ties"], bool(row["parts_ms"])) == (0, 0, method not in peers)
        assert row["identical"] == (0 if method in peers else row["prompts"])
    assert bench.report.figures.get("warm_up", 0) == len(warm_up)
    assert rows["route:lookup/self", 0.0, sessions[0]]["heads"] == ("lookup", "self")
    assert bench.report.ok
    assert len(bench.report.tables) >= 2 * len(sessions) * 3


def test_a_run_that_is_broken_off_has_the_rows_of_the_cells_before(
    stack: Stack, client: Client, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups, bench = list[int](), bench_of(stack, client, reference)

    def breaking(*arguments: Any) -> Any:
        groups.append(1)
        if len(groups) == 5:
            raise KeyboardInterrupt
        return in_turn(*arguments)

    monkeypatch.setattr(lab.run, "in_turn", breaking)
    with pytest.raises(KeyboardInterrupt):
        run_methods(bench, ("plain", "single:self"), [Cell(0.0, 6, 1), Cell(1.0, 6, 1)], QUESTIONS)
    assert [(row["method"], row["prompts"]) for row in bench.report.rows] == [("plain", 3), ("single:self", 3)]
    assert bench.report.tables


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


def test_exact_judges_and_every_turn_is_asked_behind_the_earlier_answers(
    stack: Stack, client: Client, reference: Reference
) -> None:
    bench = bench_of(stack, client, reference)
    run_exact(bench, QUESTIONS, ("plain", "single:self"), [Cell(1.0, 6, 3)])
    assert [(row["method"], row["identical"]) for row in bench.report.rows] == [("plain", 3), ("single:self", 3)]
    assert bench.report.ok


def test_modes_are_of_n_grams() -> None:
    assert check_peers(()) == tuple(NGRAMS)
    assert check_peers(("ngram-mod",)) == (LLAMA, "ngram-mod")
    with pytest.raises(InvalidField, match=r"'draft-eagle3' is not one of llama.cpp, ngram-simple"):
        check_peers(("draft-eagle3",))


# Prompt files and questions, reports and checks, verdicts on answers, and what bench adapt shows.

CONTEXT = 100


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte a token, and room for a hundred."""
    return make_target(tmp_path_factory.mktemp("target"), max_len=CONTEXT)


# --- rows and checks ---


def test_checks_fail_on_wrong_answers_and_on_ties_in_float32_and_weak_evidence_is_a_note(
    capsys: pytest.CaptureFixture[str],
) -> None:
    usual: Row = make_row("route", [completion([2, 2], 1.0, "a")], ["identical"], 31)
    for changes, dtype, tokens, signs in (
        ({}, "float32", 64, "ok ok ok"),
        ({"wrong": 1}, "float32", 64, "FAILED ok ok"),
        ({"ties": 1}, "float32", 64, "ok FAILED ok"),
        ({"ties": 1}, "bfloat16", 64, "ok ok"),
        ({}, "float32", 63, "ok ok weak"),
        ({"tau": 1.3}, "float32", 64, "ok ok weak"),
    ):
        report = Report("demo", dtype, 2, checks=exactness([usual | changes], dtype, tokens))
        report.print(Console())
        assert " ".join(line.split()[0] for line in capsys.readouterr().out.splitlines()) == signs
        assert report.ok == ("FAILED" not in signs)


# --- prompt files and questions ---


def test_prompt_files_are_json_lines_or_plain_lines(tmp_path: Path) -> None:
    lines = [
        {"question_id": 81, "category": "code", "turns": ["first", "second"], "text": "no"},
        {"ids": [1, 2], "prompt": "no"},
        *({key: key} for key in ("prompt", "question", "problem", "text")),
    ]
    file = tmp_path / "a.jsonl"
    file.write_text("\n\n".join(json.dumps(line) for line in lines))
    prompts = read_prompts(file)
    assert [line.prompt for line in prompts] == ["first", (1, 2), "prompt", "question", "problem", "text"]
    assert (prompts[0].category, prompts[0].question_id) == ("code", 81)
    plain = tmp_path / "a.txt"
    plain.write_text("one\n\ntwo {\n")
    assert [line.prompt for line in read_prompts(plain)] == ["one", "two {"]


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    for line in ("{", "[]", "{}", '{"ids": []}', '{"ids": [1.5]}', '{"turns": "x"}', '{"turns": []}', '{"text": 3}'):
        file.write_text('{"text": "good"}\n' + line)
        with pytest.raises(InvalidField, match=r"a\.jsonl line 2"):
            read_prompts(file)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Five questions of which the second and the fourth are too long."""
    made = tmp_path / "question.jsonl"
    turns = [["a"], ["b" * 90], ["c"], ["d" * 73, "e"], ["f", "g"]]
    lines = [{"question_id": 81 + at, "category": "qa", "turns": each} for at, each in enumerate(turns)]
    made.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return made


def read(small: Path, file: Path, count: int, **changes: Any) -> tuple[list[Question], list[Question]]:
    options = Options(target=small, prompts=[file], n=count, max_new_tokens=30, dtype="float32", **changes)
    return read_questions(options, options.spec())


def lines_of(questions: list[Question]) -> list[str]:
    return [question.name.rpartition("line ")[2] for question in questions]


def test_what_does_not_fit_is_left_out_and_named_and_the_next_ones_take_their_places(
    small: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked, warming = read(small, file, 2, warm_up=1)
    assert lines_of(asked) == ["1 (question 81)", "3 (question 83)"]
    assert lines_of(warming) == ["5 (question 85)"]
    errors = capsys.readouterr().err.splitlines()
    assert [error.partition("line ")[2] for error in errors] == [
        "2 (question 82): 120 tokens of 100 tokens",
        "4 (question 84): 103 tokens of 100 tokens",
    ]
    with pytest.raises(InvalidField, match="3 in question fit the category and the context, too few for 3 and 2"):
        read(small, file, 3, warm_up=2)
    with pytest.raises(InvalidField, match=r"0 in question fit .*, too few for any"):
        read(small, file, 1, category=["maths"])
    own = own_prompts(TargetText(small), 4, ["story", "code"])
    assert [prompt.category for prompt in own] == ["code", "story"] * 2


def test_a_chat_is_a_users_message_in_the_template(small: Path, file: Path) -> None:
    last = read(small, file, 5, chat=True)[0][-1]
    assert read_tokenizer(small).decode(last.ids) == "user: f\nassistant:"


def rope(kind: str, first: int | None) -> dict[str, Any]:
    return {"rope_type": kind, "original_max_position_embeddings": first}


def test_a_rope_kind_that_cuts_the_context_says_so() -> None:
    for parameters, tokens, reason in (
        ({}, 131072, ""),
        (rope("yarn", 4096), 131072, ""),
        (rope("longrope", 4096), 4096, "rope kind longrope"),
        ({"full": rope("default", None), "sliding": rope("dynamic", 8192)}, 8192, "rope kind dynamic"),
    ):
        context = Context.of(SimpleNamespace(max_position_embeddings=131072, rope_parameters=parameters), 7)
        assert (context.tokens, reason in context.cut_by, reason in str(context)) == (tokens, True, True)
        assert context.served(1 << 20) == context
        assert str(context.served(1000)) == "992 tokens (verifier.kv_tokens is 1000)"


# --- verdicts ---


def test_a_greedy_token_may_lie_eps_below_the_best_and_a_sampled_one_is_judged_with_its_noise() -> None:
    row, greedy = np.array([-1.0, 1.0, 1.01 - EPS, 0.99 - EPS], np.float32), SamplingParams()
    assert [judge_token(row, token, greedy, 0) for token in range(4)] == ["wrong", "identical", "tie", "wrong"]
    random = np.random.default_rng(0)
    for position in range(200):
        row = (3 * random.standard_normal(50)).astype(np.float32)
        for params in (
            SamplingParams(temperature=0.8, seed=position),
            SamplingParams(temperature=1, top_k=5, top_p=0.9),
        ):
            token = draw(*decode_row(row, params), params.seed, position)
            assert judge_token(row, token, params, position) == "identical"
            assert judge_token(row, int(row.argmin()), params, position) == "wrong"


def test_the_reference_answers_and_judges(small: Path) -> None:
    reference = reference_of(StackSpec(target=small, dtype="float32", verifier_threads=1))
    prompt, new, greedy = reference.text.encode("def f(x):"), 24, SamplingParams()
    for sampling in (greedy, SamplingParams(temperature=0.8, top_k=40, seed=5)):
        own = reference.generate(prompt, new, sampling)
        assert (len(own.ids), own.tau, own.steps, min(own.ttft_s, own.decode_s) > 0) == (new, 1.0, new - 1, True)
        assert reference.judge(prompt, own.ids, sampling, own.ids) == "identical"
    answer = reference.greedy(prompt, new).ids
    wrong = (*answer[:-1], (answer[-1] + 1) % 256)
    assert [reference.judge(prompt, ids, greedy) for ids in (answer, wrong)] == ["identical", "wrong"]
    assert reference.judge(prompt, wrong, greedy, answer) == "wrong"
    assert reference.redraw(prompt, answer, greedy)[0] == list(answer)


# --- what bench adapt asks, judges and shows ---


def test_a_row_has_its_verdicts_parts_and_updates(tmp_path: Path) -> None:
    reference = Reference(make_target(tmp_path), "float32", threads=1)
    stream = stream_of("shift", 5, reference.text.encode)
    own = [reference.greedy(question.ids, 8).ids for question in stream]
    lanes = [Lane(name, StackSpec.demo()) for name in ("never", "bandit")]
    lanes[0].answers = [completion([1] * 7, 1.0, "a", ids) for ids in own]
    other = (own[0][0] + 1) % 300
    changed = [(other, *own[0][1:]), *own[1:]]
    lanes[1].answers = [completion([1] * 7, 1.0, "a", ids) for ids in changed]
    change = pb.Change(query=3, what="full", version=1, train_s=2.0)
    lanes[1].status = pb.HeadStatus(changes=[change], reverts=1)
    report = Report("bench adapt", "float32", 1)
    report_lanes(lanes, stream, reference, report)
    rows = report.rows
    lines = [adapt_line(row) for row in rows]
    assert [line["same/tie/wrong"] for line in lines] == ["5/0/0", "4/0/1"]
    assert [line["all"] for line in lines] == ["1.00 (7.0)"] * 2
    assert [(line["updates"], line["reverts"], line["training s"]) for line in lines] == [(0, 0, 0.0), (1, 1, 2.0)]
    assert [part["updates"] for part in rows[1]["parts"]] == [1, 1, 0]
    assert json.loads(json.dumps(rows[1]["changes"]))[0]["query"] == 3
