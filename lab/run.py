"""`coppice bench run`: methods side by side on the same prompts, in alternating order, against transformers; and
`coppice bench exact`, which asks each method and budget once and judges the answers.

Methods are policies, heads and transformers' own ways. Each temperature, budget and number of sessions is a cell;
methods are compared within their cell, prompt by prompt.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np

from coppice.client.completion import Completion
from coppice.errors import InvalidField
from coppice.speculation.sampling import SamplingParams
from coppice.stack.spec import HeadSpec
from coppice.testing.reference import EPS, Reference, Verdict
from coppice.training.progress import Progress
from lab.measuring import Ask, Bench, Ids, asking, in_turn, judged
from lab.options import read_methods
from lab.questions import Question
from lab.report import HF_GENERATE, Report, Row, exactness_checks, make_row, short, verdicts_of
from lab.steps import costs, parts_of

HF_ASSISTED, HF_LOOKUP = "hf-assisted", "hf-lookup"
PEERS = (HF_GENERATE, HF_ASSISTED, HF_LOOKUP)
DRAFTING: dict[str, tuple[dict[str, float], ...]] = {
    HF_GENERATE: ({},),
    HF_ASSISTED: tuple(
        {"num_assistant_tokens": tokens, "assistant_confidence_threshold": confidence}
        for tokens, confidence in product((2, 4, 8), (0.0, 0.4))
    ),
    HF_LOOKUP: tuple({"prompt_lookup_num_tokens": tokens} for tokens in (2, 4, 8)),
}
"""how much a peer drafts, in transformers' own words: the fastest on the first prompts is taken"""
TUNING_PROMPTS = 2
ALL = "all"
"""the set of all answers, beside the benchmarks"""
RESAMPLES = 2000
SEED = 1
"""of the keyed noise, and of the bootstrap"""


def methods_of(names: Sequence[str] | None, heads: Sequence[HeadSpec], sessions: Sequence[int]) -> tuple[str, ...]:
    """The methods to run, plain first.

    Without any: all heads, route and merge if there are several, and transformers' `generate`. Raises InvalidField for
    what this stack cannot run.
    """
    own = [head.name for head in heads]
    default = [*own, *(["route", "merge"] if len(own) > 1 else []), *([HF_GENERATE] if 1 in sessions else [])]
    methods = read_methods(names or default, heads, PEERS)
    for method in methods:
        if method in PEERS and 1 not in sessions:
            raise InvalidField("methods", f"{method} answers one prompt at a time, not {sessions[0]} sessions")
        if method == HF_ASSISTED and not any(head.kind == "lm" for head in heads):
            raise InvalidField("methods", f"{HF_ASSISTED} needs a head of kind lm to draft with")
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
        return f"{self.value:.2f} ({self.low:.2f}-{self.high:.2f}) {self.median:.2f}"


@dataclass(frozen=True)
class Pairs:
    """Answers of a cell by method, one entry a question, in the same order for all methods."""

    cell: Cell
    answers: Mapping[str, Sequence[Completion]]
    questions: Sequence[Question]

    def sets(self) -> dict[str, Pairs]:
        """All answers, and the benchmarks where there are several."""
        places = {ALL: list(range(len(self.questions)))}
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

    def ratio(self, method: str, over: str) -> Ratio | None:
        """How much faster one method is than another, with a paired bootstrap; None without that other."""
        if over not in self.answers:
            return None
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

    def row(self, method: str, verdicts: Sequence[Verdict]) -> Row:
        """A method's line of `--json` (lab/BOOK.md)."""
        answers, cell = self.answers[method], self.cell
        ttft_ms = 1e3 * statistics.fmean(answer.ttft_s for answer in answers)
        figures = {name: some.figures(method) for name, some in self.sets().items()}
        ratio: Ratio | None = figures[ALL]["over_plain"]
        return make_row(method, answers, verdicts, cell.budget if answers[0].heads else 0, cell.sessions) | {
            "speedup": ratio.value if ratio else 0.0,
            "temperature": cell.temperature,
            "cell_budget": cell.budget,
            "figures": figures,
            "accepted": self.accepted(method),
            "parts_ms": {} if method in PEERS else parts_of(costs(method, answers)),
            "ttft_ms": ttft_ms,
            "answer_ms": ttft_ms + 1e3 * statistics.fmean(answer.decode_s for answer in answers),
        }

    def figures(self, method: str) -> Row:
        """What is said of a set of answers."""
        row = make_row(method, self.answers[method], [], 0, self.cell.sessions)
        own = {name: row[name] for name in ("prompts", "tau", "tokens_per_s", "draft_share")}
        return own | {"over_plain": self.ratio(method, "plain"), "over_hf": self.ratio(method, HF_GENERATE)}


def run_methods(
    bench: Bench,
    methods: Sequence[str],
    cells: Sequence[Cell],
    questions: Sequence[Question],
    warm_up: Sequence[Question] = (),
) -> None:
    """Measure every cell; the report gets rows, tables and checks, also when it is broken off.

    Every method answers the warm-up before each cell, uncounted: `auto`, calibrations and adapters learn from it.
    """
    report = bench.report
    if warm_up:
        report.figures["warm_up"] = len(warm_up)
    turns = sum(1 + len(question.later) for question in (*questions, *warm_up))
    ways = [[method for method in methods if cell.sessions == 1 or method not in PEERS] for cell in cells]
    rows: list[dict[str, Any]] = []
    try:
        with Progress("answers", sum(map(len, ways)) * turns) as progress:
            for cell, names in zip(cells, ways, strict=True):
                pairs, verdicts = measure(bench, cell, names, questions, warm_up, progress)
                rows += [pairs.row(method, verdicts.get(method, ())) for method in names]
    finally:  # a later failure takes away nothing that was measured
        report.rows += rows
        add_tables(report, rows)
        ours = [row for row in rows if row["method"] not in PEERS]
        report.checks += exactness_checks(ours, report.dtype, bench.options.max_new_tokens)


def measure(
    bench: Bench,
    cell: Cell,
    methods: Sequence[str],
    questions: Sequence[Question],
    warm_up: Sequence[Question],
    progress: Progress,
) -> tuple[Pairs, dict[str, list[Verdict]]]:
    """All answers of a cell, and the verdicts of those that are judged."""
    sampling, new_tokens = SamplingParams(temperature=cell.temperature, seed=SEED), bench.options.max_new_tokens
    progress.say(f"{cell}: warming up")
    first = [question.ids for question in warm_up or questions]
    assistant = next((head.path for head in bench.stack.spec.heads if head.kind == "lm"), None)
    ways: dict[str, Ask] = {}
    for method in methods:
        if method in PEERS:
            folder = assistant if method == HF_ASSISTED else None
            ways[method] = peer(bench.reference, method, folder, first[:TUNING_PROMPTS], new_tokens, sampling)
        else:
            ways[method] = asking(bench.client, new_tokens, cell.sessions, policy=method, budget=cell.budget)
        ways[method](first[: cell.sessions], sampling)
    for _ in turns_of(bench, cell, ways, warm_up, progress):
        pass
    progress.say(str(cell))
    reached: list[Question] = []
    asked: list[tuple[Ids, SamplingParams]] = []
    answers: dict[str, list[Completion]] = {method: [] for method in methods}
    for group, seeded, answered in turns_of(bench, cell, ways, questions, progress):
        reached += group
        asked += [(question.ids, seeded) for question in group]
        for method in methods:
            answers[method] += answered[method]
    progress.say(f"{cell}: judging")
    greedy = cell.temperature == 0 and HF_GENERATE in answers
    own = [answer.ids for answer in answers[HF_GENERATE]] if greedy else None
    free = (HF_GENERATE,) if cell.temperature == 0 else PEERS  # sampled answers of peers have other draws
    ours = {method: its for method, its in answers.items() if method not in free}
    return Pairs(cell, answers, reached), judged(bench.reference, asked, ours, own)


def peer(
    reference: Reference,
    name: str,
    assistant: Path | None,
    prompts: Sequence[Ids],
    new_tokens: int,
    sampling: SamplingParams,
) -> Ask:
    """The way that asks transformers, with the settings that answer the prompts fastest."""

    def ask(settings: dict[str, float], several: Sequence[Ids], how: SamplingParams) -> list[Completion]:
        return [reference.generate(ids, new_tokens, how, assistant, settings) for ids in several]

    def tokens_per_s(settings: dict[str, float]) -> float:
        answers = ask(settings, prompts, sampling)
        return sum(sum(answer.accept_lengths) for answer in answers) / sum(answer.decode_s for answer in answers)

    return partial(ask, max(DRAFTING[name], key=tokens_per_s))


def turns_of(
    bench: Bench, cell: Cell, ways: Mapping[str, Ask], questions: Sequence[Question], progress: Progress
) -> Iterator[tuple[list[Question], SamplingParams, dict[str, list[Completion]]]]:
    """The questions asked at once, and every method's answers; the last method is first in every other group.

    Each question is asked once, but for those that fill up the last group. A conversation goes on behind what plain
    decoding answered, whatever the method: they are compared on the same prompts.
    """
    for number, at in enumerate(range(0, len(questions), cell.sessions)):
        group = [questions[each % len(questions)] for each in range(at, at + cell.sessions)]
        sampling = SamplingParams(temperature=cell.temperature, seed=SEED + at)
        while group:
            answered = in_turn(ways, [question.ids for question in group], sampling, number, progress)
            yield group, sampling, answered
            bench.stack.check()
            both = zip(group, answered["plain"], strict=True)
            ended = bench.reference.text.ended
            following = [question.next(ended(answer.ids)) for question, answer in both if question.later]
            group = [following[each % len(following)] for each in range(cell.sessions)] if following else []


EXACT_SESSIONS = 8


def run_exact(
    bench: Bench,
    prompts: Sequence[Ids],
    methods: Sequence[str],
    budgets: Sequence[int],
    temperatures: Sequence[float],
) -> None:
    """Add a row for each method, budget and temperature to the report, plain decoding first."""
    new_tokens, rows = bench.options.max_new_tokens, list[Row]()
    ways = {("plain", 0): asking(bench.client, new_tokens, EXACT_SESSIONS, policy="plain")}
    for method, budget in product(methods[1:], budgets):
        ways[method, budget] = asking(bench.client, new_tokens, EXACT_SESSIONS, policy=method, budget=budget)
    with Progress("answers", (len(ways) * len(temperatures) + temperatures.count(0)) * len(prompts)) as progress:
        for temperature in temperatures:
            progress.say(f"T={temperature:g}")
            sampling = SamplingParams(temperature=temperature, seed=SEED)
            greedy: list[Ids] = []
            for ids in prompts if temperature == 0 else ():
                greedy.append(bench.reference.greedy(ids, new_tokens).ids)
                progress.add()
            answers = in_turn(ways, prompts, sampling, 0, progress)
            progress.say(f"T={temperature:g}, judging")
            verdicts = judged(bench.reference, [(ids, sampling) for ids in prompts], answers, greedy or None)
            rows += [
                make_row(f"{way[0]} T={temperature:g}", its, verdicts[way], way[1], EXACT_SESSIONS)
                for way, its in answers.items()
            ]
    bench.report.add_methods(rows, new_tokens)
    note = f"a tie is a token within {EPS:g} of the row's best, in logits at T = 1; in float32 ties fail"
    bench.report.notes.append(note)


def add_tables(report: Report, rows: Sequence[dict[str, Any]]) -> None:
    """For each cell speed, sets of answers and parts of a step; then alpha by depth, and more sessions if there are."""
    cells: dict[Cell, list[dict[str, Any]]] = {}
    for row in rows:
        cells.setdefault(Cell(row["temperature"], row["cell_budget"], row["sessions"]), []).append(row)
    for cell, its in cells.items():
        title = f"{report.command}, {cell}, {report.dtype}, {report.threads} threads"
        report.add_table(f"{title}, prefill left out; in brackets 95%, then the median pair", map(_speed, its))
        if len(its[0]["figures"]) > 1:
            title = f"{cell}: x plain, its median pair / tau / draft share by set of answers"
            report.add_table(title, map(_sets, its))
        steps = [{"method": short(row["method"]), "draft share": row["draft_share"], **row["parts_ms"]} for row in its]
        ours = [line for line in steps if len(line) > 2]
        report.add_table(f"{cell}: a mean step's milliseconds", ours, {"draft share": ".0%"})
        drafted = [row for row in its if row["accepted"]]
        alphas = [{"method": short(row["method"]), **dict(enumerate(row["accepted"][:16], 1))} for row in drafted]
        if alphas:
            report.add_table(f"{cell}: alpha by depth of the verified tree", alphas)
    if len({cell.sessions for cell in cells}) > 1:
        lines: dict[str, dict[str, Any]] = {}
        for row in rows:
            name = f"{short(row['method'])}, T={row['temperature']:g}, budget {row['cell_budget']}"
            value = f"{row['tokens_per_s']:.1f} ({row['answer_ms']:.0f})"
            lines.setdefault(name, {"method": name})[f"{row['sessions']} sessions"] = value
        report.add_table("tokens/s (ms an answer) by sessions", lines.values())


def _speed(row: Row) -> dict[str, Any]:
    every = row["figures"][ALL]
    return {
        "method": short(row["method"]),
        "tau": row["tau"],
        "drafts": row["tau"] - 1,
        "tokens/s": row["tokens_per_s"],
        "x plain": str(every["over_plain"] or "-"),
        "x generate": str(every["over_hf"] or "-"),
        "same/tie/wrong": verdicts_of(row),
    }


def _sets(row: Mapping[str, Any]) -> dict[str, Any]:
    """A line of SpecBlock's table 1, for the benchmarks at hand and for all answers."""
    line = {"method": short(row["method"])}
    for name, figures in row["figures"].items():
        ratio: Ratio | None = figures["over_plain"]
        speedup = f"{ratio.value:.2f}, {ratio.median:.2f}" if ratio else "-"
        line[f"{name} ({figures['prompts']})"] = f"{speedup} / {figures['tau']:.2f} / {figures['draft_share']:.0%}"
    return line
