"""`bench run` in process: methods, pairs, rows, tables; and bare loops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from coppice.client.completion import Accumulator, Completion
from coppice.errors import InvalidField
from coppice.stack.spec import COUNTED_HEADS, HeadSpec, StackSpec
from coppice.wire.generation import Chunk, Finished, Origin, Started, Timings
from lab.bare import Bare
from lab.questions import Question, benchmark_names
from lab.report import HF_GENERATE, Report
from lab.run import ALL, HF_ASSISTED, Cell, Pairs, add_tables, methods_of
from tests.tiny import make_target
from tests.unit.test_feature_heads import VOCAB, save_random

HEADS = (HeadSpec("a", "specblock"), HeadSpec("b", "specblock"), HeadSpec("e", "eagle3"), HeadSpec("s", "lm"))
KINDS = {head.name: head.kind for head in HEADS}
SEVERAL = ("a", "b", "e", "s")
ONE = Cell(0.0, 8, 1)


# --- methods ---


def test_methods_are_policies_heads_and_peers() -> None:
    def names(wanted: Sequence[str], heads: Sequence[HeadSpec] = HEADS, sessions: Sequence[int] = (1,)) -> list[str]:
        return list(methods_of(wanted, heads, sessions))

    default = ["plain", "single:a", "single:b", "single:e", "single:s", "route", "merge", HF_GENERATE]
    assert names(()) == names((), sessions=(1, 4)) == default
    assert names((), sessions=(2,)) == default[:-1]
    assert names((), HEADS[:1]) == ["plain", "single:a", HF_GENERATE]
    assert names(["s", "plain", "hf-assisted", "single:s"]) == ["plain", "single:s", HF_ASSISTED]
    assert names(["route:a/e", "merge"]) == ["plain", "route:a/e", "merge"]


@pytest.mark.parametrize(
    ("method", "heads", "sessions", "why"),
    [
        ("route", HEADS[:1], 1, "route needs at least two heads, there are 1"),
        ("merge", HEADS[:1], 1, "at least two heads"),
        (HF_ASSISTED, HEADS[:3], 1, "needs a head of kind lm"),
        (HF_GENERATE, HEADS, 2, "one prompt at a time"),
        ("best", HEADS, 1, "'best' is not one of"),
        ("single:x", HEADS, 1, "there is no head 'x'"),
        ("route:a/x", HEADS, 1, "'route:a/x': there is no head 'x'"),
        ("route:a", HEADS, 1, "two heads or more"),
        ("merge:a/a", HEADS, 1, "each once"),
        ("plain:a/b", HEADS, 1, "is not one of"),
        ("s+pq", HEADS, 1, r"'s\+pq' is not one of"),
    ],
)
def test_a_method_this_stack_cannot_run_is_named(
    method: str, heads: Sequence[HeadSpec], sessions: int, why: str
) -> None:
    with pytest.raises(InvalidField, match=why):
        methods_of([method], heads, (sessions,))


# --- pairs ---


def _answer(
    heads: tuple[str, ...], lengths: Sequence[int], seconds: float, routed: Sequence[int] = (), loops: bool = False
) -> Completion:
    new, steps = 1 + sum(lengths), len(lengths)
    answer = Accumulator()
    answer.add(Started(3, "route" if heads else "plain", heads, 8))
    ids = (7,) * new if loops else tuple(range(new))
    answer.add(Chunk("", ids, (Origin.ROOT,) * new, ("",) * new))
    timings = Timings(
        decode_ns=int(seconds * 1e9), draft_ns=int(1e6 * steps), step_ns=[10**7] * steps, split_ns=[10**6] * steps
    )
    routed = list(routed) or [0] * steps
    answer.add(Finished("length", 3, new, list(lengths), routed, [7] * steps, 0, 0, timings))
    return answer.completion()


def _peer(tokens: int, seconds: float) -> Completion:
    answer = _answer((), [1] * tokens, seconds)
    return replace(answer, policy="", timings=Timings())


def _pairs(count: int = 16, sampled: bool = False) -> Pairs:
    """`count` pairs of 24 tokens, of which the last loops."""
    slower = [1.0 + 0.1 * (at % 3) for at in range(count)]
    loops = [at == count - 1 for at in range(count)]

    def ours(heads: tuple[str, ...], step: int, seconds: float, routed: Sequence[int] = ()) -> list[Completion]:
        lengths = [step] * (24 // step)
        return [
            _answer(heads, lengths, seconds * factor, routed, loop) for factor, loop in zip(slower, loops, strict=True)
        ]

    answers = {
        "plain": ours((), 1, 1.0),
        "single:a": ours(("a",), 4, 0.5),
        "single:b": ours(("b",), 3, 0.6),
        "single:e": ours(("e",), 4, 0.7),
        "single:s": ours(("s",), 2, 0.8),
        "route": ours(SEVERAL, 4, 0.45, [0, 0, 0, 0, 1, -1]),
        "merge": ours(SEVERAL, 6, 0.45),
        "auto": ours(SEVERAL, 4, 0.46),
        HF_GENERATE: [_peer(24, 1.02 * factor) for factor in slower],
        HF_ASSISTED: [_peer(24, 0.9 * factor) for factor in slower],
    }
    questions = [Question((1, 2), "ab"[at % 2]) for at in range(count)]
    return Pairs(Cell(1.0 if sampled else 0.0, 8, 1), answers, questions)


def test_a_ratio_is_paired_seeded_and_bounded() -> None:
    pairs = _pairs()
    same = pairs.ratio("single:a", "plain")
    assert same == pairs.ratio("single:a", "plain")
    assert same is not None
    assert (same.value, same.low, same.high) == pytest.approx((2.0, 2.0, 2.0))  # prompts' own speed cancels out
    assert pairs.ratio("single:a", "nothing") is None
    quick, slow = [_answer((), [1] * 10, 1.0)], [_answer((), [1] * 10, 3.0)]
    mixed = Pairs(ONE, {"x": 5 * quick + 5 * slow, "plain": 10 * quick}, ()).ratio("x", "plain")
    assert mixed is not None
    assert mixed.value == pytest.approx(0.5)
    assert 0.34 < mixed.low < 0.45 < 0.55 < mixed.high < 0.8


# --- rows, tables, checks ---


def test_rows_and_tables_hold_every_figure() -> None:
    pairs = _pairs()
    rows = {name: pairs.row(name, ["identical"] * len(pairs.questions)) for name in pairs.answers}
    fast = rows["single:a"]
    assert (fast["temperature"], fast["cell_budget"], fast["identical"], fast["tau"]) == (0.0, 8, 16, 4.0)
    assert fast["speedup"] == pytest.approx(2.0)
    assert fast["draft_share"] == pytest.approx(0.1)
    assert sum(fast["parts_ms"].values()) == pytest.approx(1.0)  # only waiting for drafts is timed here
    assert 500 < fast["ttft_ms"] + 500 < fast["answer_ms"] < 650
    sets = {name: figures["answers"] for name, figures in fast["figures"].items()}
    assert sets == {ALL: 16, "a": 8, "b": 8}
    assert fast["figures"][ALL]["over_hf"].value == pytest.approx(2.04)
    assert rows[HF_GENERATE]["parts_ms"] == {}
    report, more = Report("bench run", "float32", 2), [row | {"sessions": 4} for row in rows.values()]
    add_tables(report, [*rows.values(), *more])
    assert len(report.tables) == 2 * 4 + 1  # by cell speed, sets, parts and alpha; then sessions
    assert len(report.tables[-1].splitlines()) == 3 + 10


def test_alpha_is_of_the_steps_that_came_so_far() -> None:
    answers = {"x": [_answer(("x",), [3, 2, 1, 1, 3, 1], 1.0)], "plain": [_answer((), [1] * 11, 1.0)]}
    pairs = Pairs(ONE, answers, ())
    assert pairs.accepted("x") == pytest.approx([3 / 5, 2 / 3, 0.0])  # the last step was cut
    assert pairs.accepted("plain") == []


def test_files_of_one_name_are_told_apart_by_their_folders() -> None:
    gsm8k, humaneval = Path("a/gsm8k/question.jsonl"), Path("a/humaneval/question.jsonl")
    assert benchmark_names([gsm8k, Path("b/mine.jsonl")]) == ["question", "mine"]
    assert benchmark_names([gsm8k, humaneval]) == ["gsm8k", "humaneval"]
    assert benchmark_names([gsm8k, gsm8k]) == ["question", "question"]
    assert len(set(benchmark_names([gsm8k, humaneval, Path("b/gsm8k/question.jsonl")]))) == 3


# --- peers and bare loops ---


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose features the random heads of test_feature_heads read."""
    return make_target(tmp_path_factory.mktemp("target"), VOCAB, layers=8, tokenizer=False)


def test_bare_loops_time_what_the_services_would_run(target: Path, tmp_path: Path) -> None:
    small = make_target(tmp_path / "small", VOCAB, tokenizer=False)
    heads = (
        HeadSpec("block", "specblock", save_random(tmp_path / "block", "specblock")),
        HeadSpec("eagle", "eagle3", save_random(tmp_path / "eagle", "eagle3")),
        HeadSpec("small", "lm", small),
        *COUNTED_HEADS,
    )
    spec = StackSpec(target=target, heads=heads, dtype="float32", verifier_threads=1, drafter_threads=1)
    bare = Bare(spec, sessions=2, longest=32)
    assert bare.forward_ms(9, 20) > 0
    for head in heads:
        forward_ms, draft_ms = bare.draft_ms(head.name, range(12), range(20, 40), 8)
        assert (forward_ms, draft_ms) == (0, 0) if head in COUNTED_HEADS else 0 < forward_ms < draft_ms
