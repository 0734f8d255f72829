"""Reports, prompt files and the verdict on an answer."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from coppice.client.completion import Accumulator, Completion
from coppice.errors import InvalidField
from coppice.prompts.files import read_prompts
from coppice.speculation.sampling import SamplingParams, decode_row, draw
from coppice.testing.reference import EPS, Reference, judge_token
from coppice.wire.generation import Chunk, Finished, Origin, Started, Timings
from lab.report import Report, Row, exactness_checks, make_row, repeat_share, table, verdicts_of
from tests.tiny import make_target


def _answer(heads: tuple[str, ...], lengths: list[int], seconds: float) -> Completion:
    new = 1 + sum(lengths)
    answer = Accumulator()
    answer.add(Started(3, "route" if heads else "plain", heads, 31))
    answer.add(Chunk("", tuple(range(new)), (Origin.ROOT,) * new, ("",) * new))
    steps = len(lengths)
    timings = Timings(decode_ns=int(seconds * 1e9), draft_ns=250 * steps, step_ns=[1000] * steps)
    answer.add(Finished("length", 3, new, lengths, [0] * steps, [4] * steps, 1, 0, timings))
    return answer.completion()


# --- rows and checks ---


def test_a_row_sums_its_answers_and_its_speedup_is_over_plain() -> None:
    plain = make_row("plain", [_answer((), [1] * 6, 3.0)], ["identical"], 0)
    fast = make_row("route", [_answer(("a",), [3, 3], 1.0), _answer(("a",), [2], 1.0)], ["identical", "tie"], 31)
    assert [(row["tau"], row["tokens_per_s"]) for row in (plain, fast)] == [(1.0, 2.0), (8 / 3, 4.0)]
    assert (fast["prompts"], fast["tokens"], fast["late_drafts"], verdicts_of(fast)) == (2, 10, 2, "1/1/0")
    assert (fast["draft_share"], fast["verified_nodes"], fast["repeat_share"]) == (0.25, 4.0, 0.0)
    report = Report("demo", "float32", 1)
    report.add_methods([plain, fast])
    assert [row["speedup"] for row in report.rows] == [1.0, 2.0]


def test_checks_fail_on_wrong_answers_and_on_ties_in_float32_and_weak_evidence_is_a_note() -> None:
    row = make_row("route", [_answer(("a",), [2, 2], 1.0)], ["identical"], 31)

    def signs(row_: Row, dtype: str, tokens: int) -> list[str]:
        report = Report("demo", dtype, 2, checks=exactness_checks([row_], dtype, tokens))
        lines = [line.split()[0] for line in printed(report, 80)]
        assert report.ok == ("FAILED" not in lines)
        return lines

    assert signs(row, "float32", 64) == ["ok", "ok", "ok"]
    assert signs(row | {"wrong": 1}, "float32", 64) == ["FAILED", "ok", "ok"]
    assert signs(row | {"ties": 1}, "float32", 64) == ["ok", "FAILED", "ok"]
    assert signs(row | {"ties": 1}, "bfloat16", 64) == ["ok", "ok"]
    assert signs(row, "float32", 63) == ["ok", "ok", "weak"]
    assert signs(row | {"tau": 1.3}, "float32", 64) == ["ok", "ok", "weak"]


def test_repeat_share_counts_four_grams_seen_before() -> None:
    assert repeat_share([1, 2, 3]) == 0.0
    assert repeat_share(range(10)) == 0.0
    assert repeat_share([1] * 8) == 0.8


def test_a_table_has_the_rows_keys_and_dashes_where_one_has_no_value() -> None:
    lines = [{"name": "a", "tau": 1.234}, {"name": "b", "tau": None, "share": 0.5}]
    assert table("x", lines, {"share": ".0%"}).splitlines() == [
        "x",
        "name   tau  share",
        "----  ----  -----",
        "a     1.23      -",
        "b        -    50%",
    ]


def printed(report: Report, width: int) -> list[str]:
    """What a report says on a terminal of so many columns."""
    console = Console(width=width, file=io.StringIO())
    report.print(console)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


# --- prompt files ---


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


@pytest.mark.parametrize("line", ["{", "[]", "{}", '{"ids": []}', '{"ids": [1.5]}', '{"turns": "x"}', '{"text": 3}'])
def test_a_bad_line_is_named(line: str, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "good"}\n' + line)
    with pytest.raises(InvalidField, match=r"a\.jsonl line 2"):
        read_prompts(file)


# --- verdicts ---


def test_a_greedy_token_may_lie_eps_below_the_best() -> None:
    row, greedy = np.array([-1.0, 1.0, 1.01 - EPS, 0.99 - EPS], np.float32), SamplingParams()
    assert [judge_token(row, token, greedy, 0) for token in range(4)] == ["wrong", "identical", "tie", "wrong"]


def test_a_sampled_token_is_judged_with_its_noise() -> None:
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


def test_the_reference_answers_as_generate_does_and_judges_others(tmp_path: Path) -> None:
    reference = Reference(make_target(tmp_path), "float32", threads=1)
    prompt, greedy = reference.text.encode("def f(x):"), SamplingParams()
    answer = reference.greedy(prompt, 24)
    assert len(answer.ids) == 24
    assert answer.ttft_s > 0
    assert answer.decode_s > 0
    assert (answer.tau, answer.steps, answer.new_tokens) == (1.0, 23, 24)
    assert reference.greedy(prompt, 1).ids == answer.ids[:1]
    assert reference.judge(prompt, answer.ids, greedy, answer.ids) == "identical"
    assert reference.judge(prompt, answer.ids, greedy) == "identical"
    wrong = (*answer.ids[:-1], (answer.ids[-1] + 1) % 256)
    assert reference.judge(prompt, wrong, greedy, answer.ids) == "wrong"
    assert reference.judge(prompt, wrong, greedy) == "wrong"
