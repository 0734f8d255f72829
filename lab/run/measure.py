"""`coppice bench run`: how fast every method answers, in alternating order on the same questions, and why."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from coppice.client.completion import Completion
from coppice.errors import CoppiceError
from coppice.prompts.files import FilePrompt
from coppice.speculation.sampling import SamplingParams
from coppice.testing.reference import Verdict
from coppice.testing.target_text import TargetText
from coppice.training.progress import Progress
from lab.asking import Ask, Asked, Group, Ids, asking, judged
from lab.bare import NO_DRAFT, Bare, BareDraft
from lab.calm import Calm
from lab.measuring import Bench
from lab.questions import Question
from lab.report import HF_GENERATE, Check, exactness_checks
from lab.run.pairs import ENOUGH, Cell, Pairs
from lab.run.peers import HF_ASSISTED, PEERS, Peers
from lab.run.report import ALL, FEW_REPEATS, RunRow, run_row, tables
from lab.turns import Taken, ask_again, count, in_turn

AUTO = "auto"
AUTO_BOUND = 0.97
"""of the best fixed method on each benchmark, and of plain decoding at any number of sessions"""
KEPT = 0.85
"""of its speedup over plain at T = 0, which a coupled block head is to keep at T = 1; the paper's keeps 0.69"""


@dataclass(frozen=True)
class _Compared:
    """Pairs, the kinds of their heads, and what names of goals say of them."""

    pairs: Pairs
    kinds: Mapping[str, str]
    where: str

    @property
    def weak(self) -> str:
        """A note if a figure of speed rests on too few pairs."""
        return f"weak: {len(self.pairs)} pairs" if len(self.pairs) < ENOUGH else ""

    def best(self, kind: str) -> str | None:
        """The fastest head of a kind, as a method; None if none was run."""
        methods = (f"single:{head}" for head, its in self.kinds.items() if its == kind)
        run = (method for method in methods if method in self.pairs.answers)
        return max(run, key=self.pairs.tokens_per_s, default=None)

    def faster(self, method: str, over: str | None, bound: float = 1.0, note: str = "") -> Iterator[Check]:
        """Tokens/s of a method over another's: at least the bound; none if one was not run."""
        ratio = self.pairs.ratio(method, over) if method in self.pairs.answers and over else None
        if ratio is not None:
            told = f"95%: {ratio.low:.2f} to {ratio.high:.2f}; median pair: {ratio.median:.2f}"
            note = "; ".join(part for part in (note, self.weak, told) if part)
            yield Check.at_least(
                f"tokens/s of {method} over {over}{self.where}", ratio.value, bound, note, bool(self.weak)
            )


def speed_goals(pairs: Pairs, rows: Iterable[RunRow], kinds: Mapping[str, str], where: str = "") -> list[Check]:
    """The goals of one cell, for all answers and for those that repeat little. `kinds`: of heads, by name.

    `where`: what else their names say.
    """
    by_method = {row.row.method: row for row in rows}
    greedy = pairs.cell.temperature == 0
    every = _Compared(pairs, kinds, f", T={pairs.cell.temperature:g}{where}")
    goals = list(_auto(every))
    block, eagle = every.best("specblock"), every.best("eagle3")
    if block and eagle:
        ratio = by_method[block].t_d_ms / by_method[eagle].t_d_ms
        goals.append(Check.at_most(f"drafting time of {block} over {eagle}{every.where}", ratio, 0.6))
    for name, some in ((ALL, pairs), (FEW_REPEATS, pairs.few_repeats())):
        if not len(some):
            continue
        compared = _Compared(some, kinds, every.where + ("" if name == ALL else ", few repeats"))
        block = compared.best("specblock")
        if block and pairs.cell.sessions == 1:
            efficiency = by_method[block].figures[name].efficiency or 0.0
            name, weak = f"efficiency of {block}{compared.where}", compared.weak
            goals.append(Check.at_least(name, efficiency, 0.9, weak, bool(weak)))
        for method, over, bound in (
            ("plain", HF_GENERATE, 0.95),
            (block or "", compared.best("eagle3"), 1.0),
            (block or "", compared.best("lm"), 1.0),
            (block or "", HF_ASSISTED, 1.3 if greedy else 1.0),
            (block or "", HF_GENERATE, 1.8 if greedy else 1.6),
            ("route" if [*kinds.values()].count("specblock") > 1 else "", block, 1.0),
        ):
            goals += compared.faster(method, over, bound)
    return goals


def _auto(compared: _Compared) -> Iterator[Check]:
    """`auto` over plain, and on each benchmark over the fastest of the other methods, which are fixed."""
    answers = compared.pairs.answers
    if AUTO not in answers:
        return
    yield from compared.faster(AUTO, "plain", AUTO_BOUND)
    fixed = [method for method in answers if method not in PEERS and not method.startswith(AUTO)]
    for name, some in compared.pairs.by_benchmark().items():
        best = max(fixed, key=some.tokens_per_s)
        there = _Compared(some, compared.kinds, f" on {name}{compared.where}")
        yield from there.faster(AUTO, best, AUTO_BOUND, "the best fixed method there")


def kept_goals(rows: Iterable[RunRow], kinds: Mapping[str, str]) -> Iterator[Check]:
    """How much of its greedy speedup over plain each block head keeps at T = 1, at one session."""
    blocks = {f"single:{head}" for head, kind in kinds.items() if kind == "specblock"}
    alone = [row for row in rows if row.cell.sessions == 1 and row.row.method in blocks]
    speedups = {(row.row.method, row.cell.budget, row.cell.temperature): row.row.speedup for row in alone}
    several = len({row.cell.budget for row in alone}) > 1
    for (method, budget, temperature), greedy in speedups.items():
        sampled = speedups.get((method, budget, 1.0))
        if temperature == 0 and sampled and greedy:
            where = f", budget {budget}" if several else ""
            yield Check.at_least(f"speedup of {method} at T=1 over T=0{where}", sampled / greedy, KEPT)


def write_answers(folder: Path, pairs: Pairs, text: TargetText, model: str) -> list[Path]:
    """A line for each question, all its turns in it; asked again to fill up a group, it is written once.

    `accept_lengths` count every token that a step commits, the root included, as Spec-Bench does. SPEED-Bench's
    `acceptance_lengths` leave out the last step of a turn.
    """
    folder.mkdir(parents=True, exist_ok=True)
    cell, written = pairs.cell, []
    for method, answers in pairs.answers.items():
        name = f"{method.removeprefix('single:')}-T{cell.temperature:g}-budget{cell.budget}-sessions{cell.sessions}"
        file = folder / f"{re.sub('[^A-Za-z0-9._-]', '_', name)}.jsonl"
        by_source: dict[FilePrompt, dict[int, Completion]] = {}
        for question, answer in zip(pairs.questions, answers, strict=True):
            source = question.source or FilePrompt(question.ids, question.benchmark)
            by_source.setdefault(source, {}).setdefault(question.turn, answer)
        lines = [
            _line(number, source, [turns[at] for at in sorted(turns)], text, f"{model}-{name}")
            for number, (source, turns) in enumerate(by_source.items(), 1)
        ]
        file.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
        written.append(file)
    return written


def _line(
    number: int, source: FilePrompt, answers: Sequence[Completion], text: TargetText, model: str
) -> dict[str, Any]:
    asked = source.prompt if isinstance(source.prompt, str) else text.decode(source.prompt)
    said = [text.decode(text.ended(answer.ids)).strip() for answer in answers]
    question_id = number if source.question_id == "" else source.question_id
    return {
        "question_id": question_id,
        "category": source.category,
        "answer_id": f"{model}-{question_id}",
        "model_id": model,
        "turns": [asked, *source.later],
        "acceptance_lengths": [length for answer in answers for length in answer.accept_lengths[:-1] or (1,)],
        "choices": [
            {
                "index": 0,
                "turns": said,
                "decoding_steps": [answer.steps for answer in answers],
                "new_tokens": [answer.new_tokens for answer in answers],
                "wall_time": [answer.ttft_s + answer.decode_s for answer in answers],
                "accept_lengths": [length for answer in answers for length in answer.accept_lengths],
            }
        ],
        "tstamp": time.time(),
    }


SEED = 1  # of the keyed noise, and of the bootstrap
TUNING_PROMPTS = 2

Answered = Taken[str, list[Completion]]
"""every method's answers to a group"""


@dataclass(frozen=True)
class RunPlan:
    """What is compared: all methods, in a cell for every temperature, budget and number of sessions.

    Every method answers each question once. The first questions fill up the last group of concurrent sessions.
    """

    methods: tuple[str, ...]
    budgets: tuple[int, ...]
    temperatures: tuple[float, ...]
    sessions: tuple[int, ...]
    """prompts answered at once"""
    new_tokens: int
    questions: tuple[Question, ...]
    warm_up: tuple[Question, ...] = ()
    """answered by every method before each cell and not counted: `auto`, calibrations and adapters learn from them"""
    answers: Path | None = None
    """folder for the answers of every method and cell"""

    def cells(self) -> list[Cell]:
        """Every cell, in the order in which they are measured."""
        return [Cell(*each) for each in product(self.temperatures, self.budgets, self.sessions)]

    def methods_at(self, sessions: int) -> list[str]:
        """The methods that answer so many prompts at once."""
        return [method for method in self.methods if sessions == 1 or method not in PEERS]

    def answers_in_all(self) -> int:
        """How many answers are asked for, warm-up included."""
        turns = [1 + len(question.later) for question in (*self.questions, *self.warm_up)]
        return sum(len(self.methods_at(cell.sessions)) * sum(turns) for cell in self.cells())

    def distinction(self, cell: Cell) -> str:
        """The words that tell a cell from others of its temperature, for names of goals."""
        budget = f", budget {cell.budget}" if len(self.budgets) > 1 else ""
        return budget + (f", {cell.sessions} sessions" if len(self.sessions) > 1 else "")


def run_methods(bench: Bench, plan: RunPlan) -> list[RunRow]:
    """Measure every cell; the report gets rows, tables, checks and goals. Returns the rows."""
    spec, report = bench.stack.spec, bench.report
    kinds = {head.name: head.kind for head in spec.heads}
    measured: list[RunRow] = []
    if plan.warm_up:
        report.figures["warm_up"] = len(plan.warm_up)
    try:
        with Progress("answers", plan.answers_in_all()) as progress:
            runner = _Runner(bench, plan, progress)
            for cell in plan.cells():
                pairs, verdicts, failure = runner.measure(cell)
                progress.say(f"{cell}: bare loops")
                rows = runner.rows(pairs, verdicts)
                report.goals += speed_goals(pairs, rows, kinds, plan.distinction(cell))
                measured += rows
                report.rows += (row.to_json() for row in rows)
                if plan.answers:
                    write_answers(plan.answers, pairs, bench.reference.text, spec.target.resolve().name)
                if failure:
                    raise failure
    finally:  # a later failure takes away nothing that was measured
        report.tables += tables(measured, report, len(plan.warm_up))
        report.goals += kept_goals(measured, kinds)
        ours = [row.row for row in measured if row.row.method not in PEERS]
        report.checks += exactness_checks(ours, report.dtype, plan.new_tokens)
    return measured


class _Runner:
    """The stack, the peers and the bare loops beside it."""

    def __init__(self, bench: Bench, plan: RunPlan, progress: Progress) -> None:
        self._bench, self._plan, self._progress = bench, plan, progress
        stack = bench.stack
        assistant = next((head.path for head in stack.spec.heads if head.kind == "lm"), None)
        self._peers = Peers(bench.reference, assistant if HF_ASSISTED in plan.methods else None)
        longest = max(question.longest(plan.new_tokens) for question in plan.questions)
        self._bare = Bare(stack.spec, stack.settings, max(plan.sessions), longest)

    def measure(self, cell: Cell) -> tuple[Pairs, dict[str, list[Verdict]], Exception | None]:
        """All answers of a cell, the verdicts of those that are judged, and what broke it off behind some answers."""
        plan, sampling = self._plan, SamplingParams(temperature=cell.temperature, seed=SEED)
        ways = {method: self._way(method, cell) for method in plan.methods_at(cell.sessions)}
        self._progress.say(f"{cell}: warming up")
        first = [question.ids for question in plan.warm_up or plan.questions]
        for method, way in ways.items():
            if method in PEERS:
                self._peers.tune(method, first[:TUNING_PROMPTS], plan.new_tokens, sampling)
            way(first[: cell.sessions], sampling)
        for _ in self._groups(cell, ways, plan.warm_up):
            pass
        self._progress.say(str(cell))
        calm, taken, questions = self._bench.report.calm, list[Answered](), list[Question]()
        failure: Exception | None = None
        try:
            for group, answered in self._groups(cell, ways, plan.questions, calm):
                questions += group
                taken.append(answered)
            ask_again(ways, taken, self._progress, calm)
        except CoppiceError as error:
            if not questions:
                raise
            failure = error
        count(taken, calm)
        answers = {method: [answer for each in taken for answer in each.given[method]] for method in ways}
        asked = [(ids, sampling) for prompts, sampling in (each.group for each in taken) for ids in prompts]
        self._progress.say(f"{cell}: judging")
        own = self._own(asked, answers) if cell.temperature == 0 else None
        free = (HF_GENERATE,) if own else PEERS  # sampled answers of peers have other draws
        verdicts = judged(self._bench.reference, asked, answers, own, free)
        return Pairs(cell, answers, SEED, questions), verdicts, failure

    def _own(self, asked: Asked, answers: Mapping[str, Sequence[Completion]]) -> list[Ids]:
        """transformers' greedy answers, each made once."""
        if HF_GENERATE in answers:
            return [answer.ids for answer in answers[HF_GENERATE]]
        own = {ids: self._bench.reference.greedy(ids, self._plan.new_tokens).ids for ids in {ids for ids, _ in asked}}
        return [own[ids] for ids, _ in asked]

    def _way(self, method: str, cell: Cell) -> Ask:
        """How a method answers; Coppice's answer all prompts at once."""
        new_tokens = self._plan.new_tokens
        if method not in PEERS:
            return asking(self._bench.client, new_tokens, cell.sessions, policy=method, budget=cell.budget)
        return lambda prompts, sampling: [self._peers.answer(method, ids, new_tokens, sampling) for ids in prompts]

    def _groups(
        self, cell: Cell, ways: dict[str, Ask], questions: Sequence[Question], calm: Calm | None = None
    ) -> Iterator[tuple[list[Question], Answered]]:
        """The questions asked at once, and every method's answers; the last method is first in every other group.

        Each question is asked once, but for those that fill up a group. A conversation goes on behind what plain
        decoding answered, whatever the method: they are compared on the same prompts.
        """
        count = len(questions)
        for number, at in enumerate(range(0, count, cell.sessions)):
            group = [questions[each % count] for each in range(at, at + cell.sessions)]
            seeded = SamplingParams(temperature=cell.temperature, seed=SEED + at)
            while group:
                together: Group = [question.ids for question in group], seeded
                answered = in_turn(ways, together, number, self._progress, calm)
                yield group, answered
                self._bench.stack.check()
                both = zip(group, answered.given["plain"], strict=True)
                ended = self._bench.reference.text.ended
                on = [question.next(ended(answer.ids)) for question, answer in both if question.later]
                group = [on[each % len(on)] for each in range(cell.sessions)] if on else []

    def rows(self, pairs: Pairs, verdicts: dict[str, list[Verdict]]) -> list[RunRow]:
        """A row for each method of a cell, with bare loops at its own number of rows."""
        cell, questions = pairs.cell, self._plan.questions
        context = sum(len(question.ids) for question in questions) // len(questions) + self._plan.new_tokens // 2
        forwards_ms: dict[int, float] = {0: 0.0}  # by rows: what several methods share is timed once
        drafts: dict[str, BareDraft] = {}
        rows = []
        for method in pairs.answers:
            row = pairs.row(method, verdicts[method])
            at = 0 if method in PEERS else round(row.verified_nodes + 1)
            if at not in forwards_ms:
                forwards_ms[at] = self._bare.forward_ms(at, context, cell.sessions)
            for head in row.heads:
                if head not in drafts:
                    drafts[head] = self._draft(cell, head, pairs.answers["plain"][0])
            slowest = max((drafts[head] for head in row.heads), key=lambda each: each.forward_ms, default=NO_DRAFT)
            rows.append(run_row(row, pairs, self._peers.told(method), forwards_ms[at], slowest))
        return rows

    def _draft(self, cell: Cell, head: str, along: Completion) -> BareDraft:
        """A head's bare drafts along an answer to the first question."""
        sampling = SamplingParams(temperature=cell.temperature, seed=SEED)
        prompt = self._plan.questions[0].ids
        return self._bare.draft(head, prompt, along.ids, sampling, cell.budget, cell.sessions)
