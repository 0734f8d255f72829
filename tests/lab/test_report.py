"""Prompt files and questions, reports and checks, verdicts on answers, and what `bench adapt` shows."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from coppice.config.model import read_tokenizer
from coppice.engine.engine import Context
from coppice.errors import InvalidField, Unavailable
from coppice.prompts import read_prompts
from coppice.speculation.sampling import SamplingParams, decode_row, draw
from coppice.stack.spec import StackSpec
from coppice.testing.reference import EPS, Reference, TargetText, judge_token
from coppice.v1 import adapter_pb2 as pb
from lab.adapt import Lane, adapt_line, report_lanes, stream_of
from lab.measuring import Report, Row, exactness, make_row, reference_of, reporting, verdicts_of
from lab.options import Options, Question, own_prompts, read_questions
from tests.lab.conftest import completion
from tests.tiny import make_target

CONTEXT = 100


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte a token, and room for a hundred."""
    return make_target(tmp_path_factory.mktemp("target"), max_len=CONTEXT)


# --- rows and checks ---


def test_a_row_sums_its_answers() -> None:
    plain = make_row("plain", [completion([1] * 6, 3.0)], ["identical"], 0)
    answers = [completion([3, 3], 1.0, "a"), completion([2], 1.0, "a")]
    fast = make_row("route", answers, ["identical", "tie"], 31)
    assert [(row["tau"], row["tokens_per_s"]) for row in (plain, fast)] == [(1.0, 2.0), (8 / 3, 4.0)]
    assert (fast["prompts"], fast["tokens"], fast["late_drafts"], verdicts_of(fast)) == (2, 10, 2, "1/1/0")
    assert (fast["draft_share"], fast["verified_nodes"]) == (0.1, 4.0)


@pytest.mark.parametrize(
    ("changes", "dtype", "tokens", "signs"),
    [
        ({}, "float32", 64, ["ok", "ok", "ok"]),
        ({"wrong": 1}, "float32", 64, ["FAILED", "ok", "ok"]),
        ({"ties": 1}, "float32", 64, ["ok", "FAILED", "ok"]),
        ({"ties": 1}, "bfloat16", 64, ["ok", "ok"]),
        ({}, "float32", 63, ["ok", "ok", "weak"]),
        ({"tau": 1.3}, "float32", 64, ["ok", "ok", "weak"]),
    ],
)
def test_checks_fail_on_wrong_answers_and_on_ties_in_float32_and_weak_evidence_is_a_note(
    changes: Row, dtype: str, tokens: int, signs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    row = make_row("route", [completion([2, 2], 1.0, "a")], ["identical"], 31) | changes
    report = Report("demo", dtype, 2, checks=exactness([row], dtype, tokens))
    report.print(Console())
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == signs
    assert report.ok == ("FAILED" not in signs)


def test_figures_that_were_measured_survive_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = Options(dtype="float32", json_file=tmp_path / "run.json")

    def broken_off() -> None:
        with reporting("bench run", options.spec(), options) as report:
            report.add_figures("speed", "what was measured", [{"method": "plain", "tokens/s": 7.0}])
            raise Unavailable("the verifier is gone")

    with pytest.raises(Unavailable):
        broken_off()
    written = json.loads((tmp_path / "run.json").read_text())
    assert (written["figures"], written["ok"]) == ({"speed": [{"method": "plain", "tokens/s": 7.0}]}, False)
    assert "broken off" in capsys.readouterr().out


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
    assert (prompts[0].category, prompts[0].question_id, prompts[0].later) == ("code", 81, ("second",))
    plain = tmp_path / "a.txt"
    plain.write_text("one\n\ntwo {\n")
    assert [line.prompt for line in read_prompts(plain)] == ["one", "two {"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        *((line, "") for line in ("{", "[]", "{}", '{"ids": []}', '{"ids": [1.5]}', '{"turns": "x"}', '{"text": 3}')),
        (
            '{"turns": ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING X"]}',
            ": a placeholder; SPEED-Bench's prepare_data.py",
        ),
    ],
)
def test_a_bad_line_is_named(line: str, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "good"}\n' + line)
    with pytest.raises(InvalidField, match=rf"a\.jsonl line 2{reason}"):
        read_prompts(file)
    with pytest.raises(InvalidField, match="to_json"):
        read_prompts(tmp_path / "test.parquet")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Five questions of which the second and, for its turns, the fourth are too long."""
    made = tmp_path / "question.jsonl"
    turns = [["a"], ["b" * 90], ["c"], ["d" * 20, "e" * 20], ["f", "g"]]
    lines = [{"question_id": 81 + at, "category": "qa", "turns": each} for at, each in enumerate(turns)]
    made.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return made


def read(target: Path, file: Path, count: int, **changes: Any) -> tuple[list[Question], list[Question]]:
    options = Options(target=target, prompts=[file], n=count, max_new_tokens=30, dtype="float32", **changes)
    return read_questions(options, options.spec())


def lines_of(questions: list[Question]) -> list[str]:
    return [question.name.rpartition("line ")[2] for question in questions]


def test_what_does_not_fit_is_left_out_and_named_and_the_next_ones_take_their_places(
    target: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked, warming = read(target, file, 2, warm_up=1)
    assert lines_of(asked) == ["1 (question 81)", "3 (question 83)"]
    assert lines_of(warming) == ["5 (question 85)"]
    errors = capsys.readouterr().err.splitlines()
    assert [error.partition("line ")[2] for error in errors] == [
        "2 (question 82): 120 tokens of 100 tokens",
        "4 (question 84): 103 tokens of 100 tokens",
    ]
    with pytest.raises(InvalidField, match="3 in question fit the category and the context, too few for 3 and 2"):
        read(target, file, 3, warm_up=2)
    with pytest.raises(InvalidField, match=r"0 in question fit .*, too few for any"):
        read(target, file, 1, category=["maths"])
    own = own_prompts(TargetText(target), 4, ["story", "code"])
    assert [prompt.category for prompt in own] == ["code", "story"] * 2


@pytest.mark.parametrize("chat", [False, True])
def test_a_conversation_goes_on_behind_its_answers(target: Path, file: Path, chat: bool) -> None:
    text, tokenizer = TargetText(target), read_tokenizer(target)
    last = read(target, file, 5, chat=chat)[0][-1]
    answer = text.encode("why")
    following = last.next(answer)
    spoken = "user: f\nassistant:why\nuser: g\nassistant:" if chat else "fwhy\n\ng\n"
    assert (len(last.later), tokenizer.decode(following.ids), following.later) == (1, spoken, ())
    assert following.longest(30) == last.longest(30) - 30 + len(answer)


def rope(kind: str, first: int | None) -> dict[str, Any]:
    return {"rope_type": kind, "original_max_position_embeddings": first}


@pytest.mark.parametrize(
    ("parameters", "tokens", "reason"),
    [
        ({}, 131072, ""),
        (rope("yarn", 4096), 131072, ""),
        (rope("longrope", 4096), 4096, "rope kind longrope"),
        ({"full": rope("default", None), "sliding": rope("dynamic", 8192)}, 8192, "rope kind dynamic"),
    ],
)
def test_a_rope_kind_that_cuts_the_context_says_so(parameters: dict[str, Any], tokens: int, reason: str) -> None:
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


def test_the_reference_answers_and_judges(target: Path) -> None:
    reference = reference_of(StackSpec(target=target, dtype="float32", verifier_threads=1))
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
