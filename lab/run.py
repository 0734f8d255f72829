"""`coppice bench run`: methods side by side on the same prompts, in alternating order, against transformers; and
`coppice bench exact`, which judges the answers of all budgets.

Methods are policies, heads and transformers' own decoding. Each temperature, budget and number of sessions is a cell;
methods are compared within their cell, prompt by prompt.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from operator import eq
from typing import Any

import numpy as np

from coppice.client.completion import Completion
from coppice.errors import InvalidField
from coppice.speculation.sampling import SamplingParams
from coppice.stack.spec import HeadSpec
from coppice.testing.reference import EPS, Asked, Verdict
from coppice.training.progress import Progress
from lab.measuring import Ask, Bench, Ids, Report, asking, costs, exactness, in_turn, make_row, verdicts_of
from lab.options import Question, read_methods

HF_GENERATE, LLAMA = "hf-generate", "llama.cpp"
BASELINES = (HF_GENERATE, LLAMA)  # others' plain decoding
ALL, STEADY = "all", "not looping"
"""the sets of all answers and of those that do not repeat themselves, beside the benchmarks"""
ALIKE = 0.9  # share of the tokens of an answer's second half that are those a period before: from there on it loops
RESAMPLES = 2000
SEED = 1  # of the keyed noise, and of the bootstrap


def methods_of(names: Sequence[str] | None, heads: Sequence[HeadSpec], sessions: Sequence[int]) -> tuple[str, ...]:
    """The methods to run, plain first.

    Without any: all heads, route and merge if there are several, and transformers' `generate`. Raises InvalidField for
    what this stack cannot run.
    """
    own = [head.name for head in heads]
    default = [*own, *(["route", "merge"] if len(own) > 1 else []), *([HF_GENERATE] if 1 in sessions else [])]
    methods = read_methods(names or default, heads, (HF_GENERATE,))
    if HF_GENERATE in methods and 1 not in sessions:
        raise InvalidField("methods", f"{HF_GENERATE} answers one prompt at a time, not {sessions[0]} sessions")
    return methods


@dataclass(frozen=True, slots=True)
class Cell:
    """One temperature, budget and number of sessions."""

    temperature: float
    budget: int
    sessions: int

    def __str__(self) -> str:
        return f"T={self.temperature:g}, budget {self.budget}, {self.sessions} session{'s' * (self.sessions != 1)}"


@dataclass(frozen=True, slots=True)
class Ratio:
    """Tokens/s over other tokens/s: of all answers, with the bounds of its 95% interval, and of the median pair."""

    value: float
    low: float
    high: float
    median: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f}-{self.high:.2f})"


def loops(text: Sequence[object]) -> bool:
    """Whether the second half of an answer's ids repeats itself, with a period of at most a quarter of the answer."""
    tail = text[len(text) // 2 :]
    periods = range(1, len(tail) // 2 + 1)
    return any(sum(map(eq, tail, tail[at:])) >= ALIKE * (len(tail) - at) for at in periods)


@dataclass(frozen=True)
class Pairs:
    """Answers of a cell by method, one entry a question, in the same order for all methods."""

    cell: Cell
    answers: Mapping[str, Sequence[Completion]]
    questions: Sequence[Question]
    asked: Asked = ()  # what each question was asked with

    def sets(self) -> dict[str, "Pairs"]:
        """All answers, the benchmarks where there are several, and those that plain decoding did not loop on."""
        places = {ALL: list(range(len(self.questions)))}
        steady = [at for at, answer in enumerate(self.answers["plain"]) if not loops(answer.ids or answer.text)]
        if 0 < len(steady) < len(self.questions):
            places[STEADY] = steady
        benchmarks = dict.fromkeys(question.benchmark for question in self.questions)
        for name in benchmarks if len(benchmarks) > 1 else ():
            places[name] = [at for at, question in enumerate(self.questions) if question.benchmark == name]
        return {
            name: Pairs(
                self.cell,
                {method: [its[at] for at in some] for method, its in self.answers.items()},
                [self.questions[at] for at in some],
            )
            for name, some in places.items()
        }

    @property
    def peers(self) -> list[str]:
        return [method for method, (first, *_) in self.answers.items() if not first.policy]

    def ratio(self, method: str, over: str) -> Ratio:
        """How much faster one method is than another, with a paired bootstrap."""
        figures = np.array(
            [
                (sum(mine.accept_lengths), mine.decode_s, sum(theirs.accept_lengths), theirs.decode_s)
                for mine, theirs in zip(self.answers[method], self.answers[over], strict=True)
            ]
        )
        drawn = np.random.default_rng(SEED).integers(len(figures), size=(RESAMPLES, len(figures)))
        sums = np.vstack((figures.sum(0), figures[drawn].sum(1)))  # (1 + RESAMPLES, 4), the pairs themselves first
        ratios, pairs = (each[:, 0] / each[:, 1] * each[:, 3] / each[:, 2] for each in (sums, figures))
        value, (low, high) = float(ratios[0]), np.quantile(ratios[1:], (0.025, 0.975))
        # Rounding may move equal bounds apart.
        return Ratio(value, min(value, float(low)), max(value, float(high)), float(np.median(pairs)))

    def accepted(self, method: str) -> list[float]:
        """alpha_k: of the steps that accepted k - 1 drafts, the share that accepted one more (k = 1, 2, ...).

        An answer's last step is left out, for the limit of tokens cuts it. Unlike in SpecBlock's figure 5 it is the
        verified tree that is followed, not a greedy chain: it ends where trees do.
        """
        depths = [length - 1 for answer in self.answers[method] for length in answer.accept_lengths[:-1]]
        reached = [sum(depth >= k for depth in depths) for k in range(max(depths, default=0) + 2)]
        return [more / some for some, more in pairwise(reached) if some] if reached[1] else []

    def row(self, method: str, verdicts: Sequence[Verdict]) -> dict[str, Any]:
        answers, cell = self.answers[method], self.cell
        ttft_ms = 1e3 * statistics.fmean(answer.ttft_s for answer in answers)
        figures = {name: some.figures(method) for name, some in self.sets().items()}
        timed = any(answer.timings.step_ns for answer in answers)
        _, split, parts = costs(answers) if timed else (0.0, 0.0, dict[str, float]())
        return make_row(method, answers, verdicts, cell.budget if answers[0].heads else 0, cell.sessions) | {
            "speedup": figures[ALL]["over_plain"].value,
            "temperature": cell.temperature,
            "cell_budget": cell.budget,
            "figures": figures,
            "accepted": self.accepted(method),
            "parts_ms": parts,
            "split_ms": split,
            "efficiency": (parts["head forward"] + parts["target forward"]) / sum(parts.values()) if timed else 0.0,
            "median_tokens_per_s": statistics.median(answer.tokens_per_s for answer in answers),
            "ttft_ms": ttft_ms,
            "answer_ms": ttft_ms + 1e3 * statistics.fmean(answer.decode_s for answer in answers),
        }

    def figures(self, method: str) -> dict[str, Any]:
        row = make_row(method, self.answers[method], [], 0, self.cell.sessions)
        own = {name: row[name] for name in ("prompts", "tau", "tokens_per_s", "draft_share")}
        over = {"over_plain": "plain"} | {f"over_{name}": name for name in BASELINES if name in self.answers}
        if self.peers:
            speeds = {
                peer: statistics.fmean(answer.tokens_per_s for answer in self.answers[peer]) for peer in self.peers
            }
            over["over_best_peer"] = max(speeds, key=speeds.__getitem__)
        return own | {name: self.ratio(method, other) for name, other in over.items()}


def run_methods(
    bench: Bench,
    methods: Sequence[str],
    cells: Sequence[Cell],
    questions: Sequence[Question],
    warm_up: Sequence[Question] = (),
    way: Callable[[Bench, Cell, str], Ask] | None = None,
    judge: Callable[[Bench, Pairs], dict[str, list[Verdict]]] | None = None,
) -> None:
    """Measure every cell; the report gets rows, tables and checks, also when it is broken off.

    Every method answers the warm-up before each cell, uncounted: `auto`, calibrations and adapters learn from it.
    """
    report, way, judge = bench.report, way or way_of, judge or judged_pairs
    if warm_up:
        report.figures["warm_up"] = len(warm_up)
    names = [[method for method in methods if cell.sessions == 1 or method != HF_GENERATE] for cell in cells]
    rows, ours = list[dict[str, Any]](), list[dict[str, Any]]()
    try:
        with Progress("answers", sum(map(len, names)) * (len(questions) + len(warm_up))) as progress:
            for cell, some in zip(cells, names, strict=True):
                progress.say(f"{cell}: warming up")
                ways = {method: way(bench, cell, method) for method in some}
                for ask in () if warm_up else ways.values():
                    ask([question.ids for question in questions[: cell.sessions]], sampling_of(cell))
                measure(bench, cell, ways, warm_up, progress)
                progress.say(str(cell))
                pairs = measure(bench, cell, ways, questions, progress)
                progress.say(f"{cell}: judging")
                verdicts = judge(bench, pairs)
                rows += [pairs.row(method, verdicts.get(method, ())) for method in some]
                ours += [row for row in rows[-len(some) :] if row["method"] not in pairs.peers]
    finally:  # a later failure takes away nothing that was measured
        report.rows += rows
        add_tables(report, rows)
        report.checks += exactness(ours, report.dtype, bench.options.max_new_tokens)


def sampling_of(cell: Cell, number: int = 0) -> SamplingParams:
    """How a cell's questions are answered; each group has a seed of its own."""
    return SamplingParams(temperature=cell.temperature, seed=SEED + number)


def way_of(bench: Bench, cell: Cell, method: str) -> Ask:
    """The way to ask for a method."""
    new_tokens = bench.options.max_new_tokens
    if method != HF_GENERATE:
        return asking(bench.client, new_tokens, cell.sessions, policy=method, budget=cell.budget)
    return lambda prompts, sampling: [bench.reference.generate(ids, new_tokens, sampling) for ids in prompts]


def measure(
    bench: Bench, cell: Cell, ways: Mapping[str, Ask], questions: Sequence[Question], progress: Progress
) -> Pairs:
    """All answers of a cell; the last method is first in every other group of questions that are asked at once.

    Each question is asked once, but for those that fill up the last group.
    """
    reached, asked, answers = list[Question](), list[tuple[Ids, SamplingParams]](), dict[str, list[Completion]]()
    for number, at in enumerate(range(0, len(questions), cell.sessions)):
        group = [questions[each % len(questions)] for each in range(at, at + cell.sessions)]
        sampling = sampling_of(cell, at)
        ids = [question.ids for question in group]
        answered = in_turn(ways, ids, sampling, number, progress)
        bench.stack.check()
        reached += group
        asked += [(each, sampling) for each in ids]
        for method, its in answered.items():
            answers.setdefault(method, []).extend(its)
    return Pairs(cell, answers, reached, asked)


def judged_pairs(bench: Bench, pairs: Pairs) -> dict[str, list[Verdict]]:
    """The verdicts on the answers that can be judged: sampled ones of peers have other draws."""
    greedy = pairs.cell.temperature == 0 and HF_GENERATE in pairs.answers
    own = [answer.ids for answer in pairs.answers[HF_GENERATE]] if greedy else None
    ours = {method: its for method, its in pairs.answers.items() if method != HF_GENERATE}
    return bench.reference.judge_all(pairs.asked, ours, own)


def run_exact(bench: Bench, questions: Sequence[Question], methods: Sequence[str], cells: Sequence[Cell]) -> None:
    """As `run_methods`, judged greedily by transformers' `generate`."""

    @cache
    def greedy(ids: Ids) -> Ids:
        return bench.reference.greedy(ids, bench.options.max_new_tokens).ids

    def judge(bench: Bench, pairs: Pairs) -> dict[str, list[Verdict]]:
        own = None if pairs.cell.temperature else [greedy(ids) for ids, _ in pairs.asked]
        return bench.reference.judge_all(pairs.asked, pairs.answers, own)

    run_methods(bench, methods, cells, questions, judge=judge)
    note = f"a tie is a token within {EPS:g} of the row's best, in logits at T = 1; in float32 ties fail"
    bench.report.notes.append(note)


def add_tables(report: Report, rows: Sequence[dict[str, Any]]) -> None:
    """Speed by method; then for each cell sets of answers, parts of a step, and alpha by depth."""
    lines: dict[Any, dict[str, Any]] = {}
    for row in rows:
        place = {"method": named(row), "budget": row["cell_budget"], "sessions": row["sessions"]}
        line = lines.setdefault(tuple(place.values()), place)
        line |= {f"{name}, T={row['temperature']:g}": value for name, value in _speed(row).items()}
    title = f"{report.command}, {report.dtype}, {report.threads} threads, prefill left out; in brackets 95%"
    report.add_table(title, lines.values())
    cells: dict[Cell, list[dict[str, Any]]] = {}
    for row in rows:
        cells.setdefault(Cell(row["temperature"], row["cell_budget"], row["sessions"]), []).append(row)
    for cell, its in cells.items():
        if len(its[0]["figures"]) > 1:
            title = f"{cell}: x plain, its median pair / tau / draft share by set of answers"
            report.add_table(title, map(_sets, its))
        drawn = [row for row in its if row["parts_ms"]]
        steps = [{"method": named(row), **row["parts_ms"], "split": row["split_ms"]} for row in drawn]
        report.add_table(f"{cell}: a mean step's milliseconds, and the median split cost", steps)
        drafted = [row for row in its if row["accepted"]]
        alphas = [{"method": named(row), **dict(enumerate(row["accepted"][:16], 1))} for row in drafted]
        if alphas:
            report.add_table(f"{cell}: alpha by depth of the verified tree", alphas)


def named(row: Mapping[str, Any]) -> str:
    """A method's name in tables: of a head alone the head's."""
    return str(row["method"]).removeprefix("single:")


def _speed(row: dict[str, Any]) -> dict[str, Any]:
    every = row["figures"][ALL]
    over = {f"x {name.removeprefix('over_')}": str(ratio) for name, ratio in every.items() if name.startswith("over_")}
    return {
        "tau": row["tau"],
        "tokens/s": row["tokens_per_s"],
        "median": row["median_tokens_per_s"],
        **over,
        f"x plain, {STEADY}": row["figures"].get(STEADY, every)["over_plain"].value,
        "draft share": f"{row['draft_share']:.0%}",
        "efficiency": row["efficiency"] or None,
        "first token ms": f"{row['ttft_ms']:.0f}",
        "same/tie/wrong": verdicts_of(row),
    }


def _sets(row: Mapping[str, Any]) -> dict[str, Any]:
    """A line of SpecBlock's table 1, for the benchmarks at hand and for all answers."""
    line = {"method": named(row)}
    for name, figures in row["figures"].items():
        ratio: Ratio = figures["over_plain"]
        speedup = f"{ratio.value:.2f}, {ratio.median:.2f}"
        line[f"{name} ({figures['prompts']})"] = f"{speedup} / {figures['tau']:.2f} / {figures['draft_share']:.0%}"
    return line
