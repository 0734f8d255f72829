"""Questions of `bench run`: checked against the target's context before a start, all turns, answers as files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer

from coppice.engine.engine import Context
from coppice.errors import InvalidField, Unavailable
from coppice.prompts.files import read_prompts
from coppice.testing.reference import TargetText
from lab import measuring
from lab.options import Options
from lab.questions import Question, own_prompts, read_questions
from tests.tiny import make_target

CONTEXT = 100


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte a token, and room for a hundred."""
    return make_target(tmp_path_factory.mktemp("target"), max_len=CONTEXT)


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
    assert lines_of(read(target, file, 1)[0]) == ["1 (question 81)"]
    assert not capsys.readouterr().err  # what is not asked may be long
    with pytest.raises(InvalidField, match="3 in question fit the category and the context, too few for 3 and 2"):
        read(target, file, 3, warm_up=2)
    with pytest.raises(InvalidField, match=r"0 in question fit .*, too few for any"):
        read(target, file, 1, category=["maths"])


@pytest.mark.parametrize("chat", [False, True])
def test_a_conversation_goes_on_behind_its_answers(target: Path, file: Path, chat: bool) -> None:
    text = TargetText(target)
    last = read(target, file, 5, chat=chat)[0][-1]
    assert len(last.later) == 1
    answer = text.encode("why")
    on = last.next(answer)
    said = "user: f\nassistant:why\nuser: g\nassistant:" if chat else "fwhy\n\ng\n"
    assert (Tokenizer.from_file(str(target / "tokenizer.json")).decode(on.ids), on.later) == (said, ())
    assert on.longest(30) == last.longest(30) - 30 + len(answer)


def test_figures_that_were_measured_survive_what_comes_later(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextmanager
    def running(*told: object) -> Iterator[Any]:
        yield SimpleNamespace(address="127.0.0.1:1")

    monkeypatch.setattr(measuring, "running", running)
    options = Options(target=target, dtype="float32", json_file=tmp_path / "run.json")

    def broken_off() -> None:
        with measuring.measuring("bench run", options.spec(), options) as bench:
            bench.report.add_figures("speed", "what was measured", [{"method": "plain", "tokens/s": 7.0}])
            raise Unavailable("the verifier is gone")

    with pytest.raises(Unavailable):
        broken_off()
    told = json.loads((tmp_path / "run.json").read_text())
    assert told["figures"] == {"speed": [{"method": "plain", "tokens/s": 7.0}]}
    assert told["ok"] is False
    out = capsys.readouterr().out
    assert "plain" in out
    assert "broken off" in out


def test_speed_benchs_placeholders_and_parquet_are_refused_with_a_way_out(tmp_path: Path) -> None:
    line = {
        "question_id": "ab12",
        "category": "coding",
        "sub_category": "x",
        "multiturn": True,
        "turns": ["one", "two"],
    }
    file = tmp_path / "speed.jsonl"
    file.write_text(json.dumps(line))
    (one,) = read_prompts(file)
    assert (one.question_id, one.category, one.prompt, one.later) == ("ab12", "coding", "one", ("two",))
    file.write_text(json.dumps(line | {"turns": ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING X\n"]}))
    with pytest.raises(InvalidField, match=r"line 1: a placeholder; SPEED-Bench's prepare_data.py"):
        read_prompts(file)
    with pytest.raises(InvalidField, match="to_json"):
        read_prompts(tmp_path / "test.parquet")


def test_own_prompts_are_of_all_categories_in_turn(target: Path) -> None:
    text = TargetText(target)
    assert [prompt.category for prompt in own_prompts(text, 4, ["story", "code"])] == ["code", "story"] * 2


def rope(kind: str, first: int | None) -> dict[str, Any]:
    return {"rope_type": kind, "original_max_position_embeddings": first}


@pytest.mark.parametrize(
    ("parameters", "tokens", "why"),
    [
        ({}, 131072, ""),
        (rope("yarn", 4096), 131072, ""),
        (rope("longrope", 4096), 4096, "rope kind longrope"),
        (rope("dynamic", None), 131072, ""),
        ({"full": rope("default", None), "sliding": rope("dynamic", 8192)}, 8192, "rope kind dynamic"),
    ],
)
def test_a_rope_kind_that_cuts_the_context_says_so(parameters: dict[str, Any], tokens: int, why: str) -> None:
    context = Context.of(SimpleNamespace(max_position_embeddings=131072, rope_parameters=parameters), 7)
    assert (context.tokens, why in context.cut_by, why in str(context)) == (tokens, True, True)
    assert context.served(1 << 20) == context
    assert str(context.served(1000)) == "992 tokens (verifier.kv_tokens is 1000)"
