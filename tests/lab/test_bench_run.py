"""`bench run` in process: methods, pairs, peers, bare loops, rows, checks, pictures."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from coppice.cli import main
from coppice.client.completion import Accumulator, Completion
from coppice.config.sections import HEAD_KINDS, DrafterSettings
from coppice.errors import InvalidField
from coppice.heads.base import with_tree_shape
from coppice.pictures.style import looks
from coppice.speculation.sampling import SamplingParams
from coppice.stack.spec import COUNTED_HEADS, HeadSpec, StackSpec
from coppice.testing.reference import Reference
from coppice.wire.generation import Chunk, Finished, Origin, Started, Timings
from lab.bare import NO_DRAFT, Bare, BareDraft
from lab.questions import Question, benchmark_names
from lab.report import HF_GENERATE, Report
from lab.run.measure import kept_goals, speed_goals
from lab.run.pairs import Cell, Pairs
from lab.run.peers import CHOICES, HF_ASSISTED, HF_LOOKUP, Peers, methods_of
from lab.run.plots import draw_all
from lab.run.report import ALL, FEW_REPEATS, RunRow, crossover, run_row, tables
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


def test_a_chain_has_no_branches_whatever_the_kind() -> None:
    chain = with_tree_shape(DrafterSettings(kind="eagle3", chain=True))
    assert (chain.top_k, chain.depth) == (1, 8)
    assert with_tree_shape(DrafterSettings(kind="eagle3")).top_k == 10


@pytest.mark.parametrize(
    ("method", "heads", "sessions", "why"),
    [
        ("route", HEADS[:1], 1, "route needs at least two heads, there are 1"),
        ("merge-full", HEADS[:1], 1, "at least two heads"),
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


def test_too_few_heads_are_a_usage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    arguments = ["bench", "run", "--target", str(tmp_path), "--head", "l=lookup", "--methods", "route"]
    monkeypatch.setattr(sys, "argv", ["coppice", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "route needs at least two heads" in capsys.readouterr().err


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
    return Pairs(Cell(1.0 if sampled else 0.0, 8, 1), answers, 5, questions)


def test_pairs_pool_tokens_and_seconds() -> None:
    pairs = _pairs()
    assert (len(pairs), len(pairs.few_repeats())) == (16, 15)
    assert pairs.row("single:a").tau == 4
    assert pairs.tokens_per_s("plain") == pytest.approx(24 * 16 / sum(1.0 + 0.1 * (at % 3) for at in range(16)))
    assert replace(pairs, cell=Cell(0.0, 8, 2)).tokens_per_s("plain") == 2 * pairs.tokens_per_s("plain")
    assert pairs.chosen("route") == pytest.approx({"a": 4 / 6, "b": 1 / 6, "e": 0.0, "s": 0.0})
    assert pairs.chosen("merge") == pairs.chosen(HF_GENERATE) == {}


def test_a_ratio_is_paired_seeded_and_bounded() -> None:
    pairs = _pairs()
    same = pairs.ratio("single:a", "plain")
    assert same == pairs.ratio("single:a", "plain")
    assert same is not None
    assert (same.value, same.low, same.high) == pytest.approx((2.0, 2.0, 2.0))  # prompts' own speed cancels out
    assert pairs.ratio("single:a", "nothing") is None
    quick, slow = [_answer((), [1] * 10, 1.0)], [_answer((), [1] * 10, 3.0)]
    mixed = Pairs(ONE, {"x": 5 * quick + 5 * slow, "plain": 10 * quick}, 0).ratio("x", "plain")
    assert mixed is not None
    assert mixed.value == pytest.approx(0.5)
    assert 0.34 < mixed.low < 0.45 < 0.55 < mixed.high < 0.8


# --- rows, tables, checks ---


def _rows(pairs: Pairs) -> list[RunRow]:
    rows = []
    for method, answers in pairs.answers.items():
        peer = not answers[0].policy
        row = pairs.row(method, [] if peer else ["identical"] * len(pairs))
        draft = BareDraft(3.0, 4.0) if method == "single:a" else BareDraft(6.0, 7.0) if row.heads else NO_DRAFT
        rows.append(run_row(row, pairs, "4 tokens" if method == HF_ASSISTED else "", 0.0 if peer else 40.0, draft))
    return rows


def test_rows_hold_every_figure() -> None:
    rows = {row.row.method: row for row in _rows(_pairs())}
    fast = rows["single:a"]
    every, few = fast.figures[ALL], fast.figures[FEW_REPEATS]
    assert (fast.cell.temperature, fast.row.speedup, fast.draft_ms) == (0.0, pytest.approx(2.0), 1.0)
    assert (every.answers, few.answers, every.tau) == (16, 15, 4.0)
    assert every.efficiency == pytest.approx(every.tokens_per_s / (4 / 0.043))
    assert every.over_hf is not None
    assert every.over_hf.value == pytest.approx(2.04)
    assert rows[HF_GENERATE].figures[ALL].efficiency is None
    assert rows["route"].figures[ALL].chosen["a"] == pytest.approx(4 / 6)


def test_the_json_of_a_row_is_flat() -> None:
    told = _rows(_pairs())[1].to_json()
    assert told["figures"][FEW_REPEATS]["over_plain"]["low"] == pytest.approx(2.0)
    assert (told["method"], told["t_d_ms"], told["t_d_total_ms"], told["t_m_ms"]) == ("single:a", 3.0, 4.0, 40.0)
    assert (told["temperature"], told["cell_budget"], told["identical"], told["wrong"]) == (0.0, 8, 16, 0)
    assert json.loads(json.dumps(told)) == {**told, "heads": ["a"]}


def test_figures_by_benchmark_share_answers_out() -> None:
    pairs = _pairs()
    assert {name: len(some) for name, some in pairs.by_benchmark().items()} == {"a": 8, "b": 8}
    assert pairs.row("single:a").draft_share == pytest.approx(0.1)
    row = next(row for row in _rows(pairs) if row.row.method == "single:a")
    assert {name: (row.figures[name].answers, row.figures[name].tau) for name in "ab"} == {"a": (8, 4.0), "b": (8, 4.0)}
    assert sum(row.parts_ms.values()) == pytest.approx(1.0)  # only waiting for drafts is timed here
    assert 500 < row.ttft_ms + 500 < row.answer_ms < 650


def test_alpha_is_of_the_steps_that_came_so_far() -> None:
    answers = {"x": [_answer(("x",), [3, 2, 1, 1, 3, 1], 1.0)], "plain": [_answer((), [1] * 11, 1.0)]}
    pairs = Pairs(ONE, answers, 0)
    assert pairs.accepted("x") == pytest.approx([3 / 5, 2 / 3, 0.0])  # the last step was cut
    assert pairs.accepted("plain") == []


def at(row: RunRow, speedup: float, **changed: int) -> RunRow:
    """The row in another cell, with another speedup."""
    return replace(row, cell=replace(row.cell, **changed), row=replace(row.row, speedup=speedup))


def test_plain_overtakes_where_the_speedup_falls_below_one() -> None:
    row = _rows(_pairs())[1]
    some = [at(row, speedup, sessions=count) for count, speedup in ((8, 0.8), (1, 1.6), (4, 1.2))]
    assert crossover(some) == pytest.approx(6.0)
    assert crossover(some[1:]) is None
    assert crossover(some[:1]) == 8.0


def _several() -> list[RunRow]:
    """Two temperatures, and for the first also another budget and more sessions."""
    rows = _rows(_pairs())
    more = [at(row, 0.5, sessions=4) for row in rows]
    wider = [at(row, row.row.speedup, budget=16) for row in rows]
    return [*rows, *more, *wider, *_rows(_pairs(sampled=True))]


def test_pictures_show_every_question(tmp_path: Path) -> None:
    files = draw_all(_several(), tmp_path / "plots")
    assert {file.stem for file in files} == {"speedup", "alpha", "step", "sessions"}
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)
    assert "sessions" not in {file.stem for file in draw_all(_rows(_pairs()), tmp_path / "few")}


def test_tables_have_a_line_for_each_method_of_a_cell() -> None:
    several, report = _several(), Report("bench run", "float32", 2)
    made = list(tables(several, report, 24))
    assert [each.row_count for each in made[:3]] == [10, 10, 8]  # peers have no steps of ours
    assert len(made) == 4 * 3 + 1  # by cell speed, sets of answers and time; then sessions
    assert made[-1].row_count == 3 * 10  # by temperature, budget and method


def test_files_of_one_name_are_told_apart_by_their_folders() -> None:
    gsm8k, humaneval = Path("a/gsm8k/question.jsonl"), Path("a/humaneval/question.jsonl")
    assert benchmark_names([gsm8k, Path("b/mine.jsonl")]) == ["question", "mine"]
    assert benchmark_names([gsm8k, humaneval]) == ["gsm8k", "humaneval"]
    assert benchmark_names([gsm8k, gsm8k]) == ["question", "question"]
    assert len(set(benchmark_names([gsm8k, humaneval, Path("b/gsm8k/question.jsonl")]))) == 3


def test_checks_go_by_kind_for_all_answers_and_few_repeats() -> None:
    pairs = _pairs()
    checks = {check.name: check for check in speed_goals(pairs, _rows(pairs), KINDS)}
    assert checks["drafting time of single:a over single:e, T=0"].value == 0.5
    assert checks["efficiency of single:a, T=0, few repeats"].value < 0.85
    for other, value in (("single:e", 1.4), ("single:s", 1.6), (HF_ASSISTED, 1.8), (HF_GENERATE, 2.04)):
        for which in ("", ", few repeats"):
            check = checks[f"tokens/s of single:a over {other}, T=0{which}"]
            assert (check.value, check.ok) == (pytest.approx(value), True)
    assert checks["tokens/s of plain over hf-generate, T=0"].value == 1.02
    assert checks["tokens/s of route over single:a, T=0"].value == pytest.approx(1.111)
    for benchmark in "ab":
        auto = checks[f"tokens/s of auto over route on {benchmark}, T=0"]
        assert (auto.value, auto.ok) == (pytest.approx(0.978, abs=1e-3), True)
        assert auto.note.startswith("the best fixed method there; weak: 8 pairs; 95%: ")
    assert checks["tokens/s of auto over plain, T=0"].value == pytest.approx(2.174, abs=1e-3)
    assert not any("weak" in check.note for name, check in checks.items() if " on " not in name)


def test_what_a_block_head_keeps_when_sampled_is_checked_by_budget() -> None:
    greedy, sampled = _rows(_pairs()), [at(row, 0.8 * row.row.speedup) for row in _rows(_pairs(sampled=True))]
    told = [(check.name, check.value, check.ok) for check in kept_goals([*greedy, *sampled], KINDS)]
    assert told == [(f"speedup of single:{head} at T=1 over T=0", pytest.approx(0.8), False) for head in "ab"]
    wider = [at(row, row.row.speedup * (1 + row.cell.temperature / 4), budget=16) for row in [*greedy, *sampled]]
    told = [(check.name, check.ok) for check in kept_goals([*greedy, *sampled, *wider], KINDS)]
    assert ("speedup of single:a at T=1 over T=0, budget 16", True) in told
    assert len(told) == 4
    assert list(kept_goals([*greedy, *(at(row, row.row.speedup, sessions=4) for row in sampled)], KINDS)) == []


def test_few_pairs_are_called_weak_and_missing_methods_have_no_checks() -> None:
    pairs = _pairs(14)
    goals = speed_goals(pairs, _rows(pairs), KINDS)
    few = [check for check in goals if "tokens/s" in check.name]
    assert few
    assert all("weak: " in check.note for check in few)
    assert any(not check.ok for check in goals)
    assert not any(check.failed for check in goals)
    some = Pairs(ONE, {"plain": pairs.answers["plain"], "single:s": pairs.answers["single:s"]}, 0)
    assert speed_goals(some, _rows(some), KINDS) == []
    looping = Pairs(ONE, {"plain": pairs.answers["plain"][-1:]}, 0)
    assert list(_rows(looping)[0].figures) == [ALL]


# --- peers and bare loops ---


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose features the random heads of test_feature_heads read."""
    return make_target(tmp_path_factory.mktemp("target"), VOCAB, layers=8, tokenizer=False)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_peers_say_what_generate_says_and_count_their_forwards(target: Path, temperature: float) -> None:
    reference = Reference(target, "float32", threads=1)
    peers, prompt = Peers(reference, target), tuple(range(20)) * 2
    sampling, forwards = SamplingParams(temperature=temperature, seed=3), []
    hook = reference._model.register_forward_hook(lambda *_: forwards.append(1))
    for name in (HF_ASSISTED, HF_LOOKUP):
        if name == HF_ASSISTED:
            peers.settings[name] = CHOICES[name][2]
            assert peers.told(name) == "num_assistant_tokens 4, assistant_confidence_threshold 0"
        else:
            peers.tune(name, [prompt], 16, sampling)
            assert peers.settings[name] in CHOICES[name]
        forwards.clear()
        answer = peers.answer(name, prompt, 40, sampling)
        assert (answer.new_tokens, len(answer.ids)) == (40, 40)
        assert answer.steps == len(forwards) - 1  # behind the prefill
        assert 40 - 9 <= sum(answer.accept_lengths) <= 39
        if temperature == 0:
            assert answer.ids == reference.greedy(prompt, 40).ids
        if name == HF_ASSISTED:  # it drafts with the target itself
            assert max(answer.accept_lengths) == 5
            assert answer.steps < 12
    hook.remove()
    assert peers.answer(HF_GENERATE, prompt, 16, sampling).accept_lengths == [1] * 15


def test_bare_loops_time_what_the_services_would_run(target: Path, tmp_path: Path) -> None:
    small = make_target(tmp_path / "small", VOCAB, tokenizer=False)
    heads = (
        HeadSpec("block", "specblock", save_random(tmp_path / "block", "specblock")),
        HeadSpec("eagle", "eagle3", save_random(tmp_path / "eagle", "eagle3")),
        HeadSpec("small", "lm", small),
        *COUNTED_HEADS,
    )
    spec = StackSpec(target=target, heads=heads, dtype="float32", verifier_threads=1, drafter_threads=1)
    bare = Bare(spec, spec.settings(), sessions=2, longest=32)
    assert bare.forward_ms(9, 20) > 0
    for head in heads:
        for sampling in (SamplingParams(), SamplingParams(temperature=1.0)):
            drafted = bare.draft(head.name, range(12), range(20, 40), sampling, 8)
            if head in COUNTED_HEADS:
                assert drafted == BareDraft()
            else:
                assert 0 < drafted.forward_ms < drafted.total_ms


def test_every_kind_of_head_has_a_colour_of_its_own() -> None:
    assert len({look.colour for look in looks(HEAD_KINDS).values()}) == len(HEAD_KINDS)


def test_a_method_looks_the_same_in_every_picture() -> None:
    few = looks(["plain", "specblock-code"])
    many = looks(["lookup", "specblock-2", "specblock-code", "lm, p/q", "mine"])
    assert few["specblock-code"].colour == many["specblock-code"].colour == looks(["specblock"])["specblock"].colour
    assert many["specblock-code"].drawn != many["specblock-2"].drawn
    assert many["lm, p/q"].colour == looks(["lm"])["lm"].colour
    assert many["mine"].colour not in {many[name].colour for name in ("lookup", "specblock-code", "lm, p/q")}
