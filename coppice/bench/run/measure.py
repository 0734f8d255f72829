"""`coppice bench run`: how fast every method answers, in alternating order on the same questions, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from coppice.bench.bare import NO_DRAFT, Bare, BareDraft
from coppice.bench.exact import answers_to, judged
from coppice.bench.reference import Reference
from coppice.bench.report import HF_GENERATE, Report, Verdict, exactness_checks
from coppice.bench.run.answers import write_answers
from coppice.bench.run.checks import kept_checks, speed_checks
from coppice.bench.run.pairs import Cell, Pairs
from coppice.bench.run.peers import HF_ASSISTED, PEERS, Peers
from coppice.bench.run.questions import Question
from coppice.bench.run.report import RunRow, run_row, tables
from coppice.client.client import Client
from coppice.client.completion import Completion
from coppice.errors import CoppiceError
from coppice.speculation.sampling import SamplingParams
from coppice.stack.launch import Stack

SEED = 1  # of the keyed noise, and of the bootstrap
TUNING_PROMPTS = 2

Prompt = tuple[int, ...]
Asked = list[tuple[Prompt, SamplingParams]]
Say = Callable[[str], None]


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

    def distinction(self, cell: Cell) -> str:
        """The words that tell a cell from others of its temperature, for names of checks."""
        budget = f", budget {cell.budget}" if len(self.budgets) > 1 else ""
        return budget + (f", {cell.sessions} sessions" if len(self.sessions) > 1 else "")


def run(
    stack: Stack, client: Client, reference: Reference, plan: RunPlan, report: Report, trained: bool, say: Say
) -> list[RunRow]:
    """Measure every cell; the report gets rows, tables and checks. Returns the rows.

    `trained`: heads too weak to prove anything are a failure.
    """
    kinds = {head.name: head.kind for head in stack.spec.heads}
    measured: list[RunRow] = []
    bench = _Bench(stack, client, reference, plan)
    if plan.warm_up:
        report.figures["warm_up"] = len(plan.warm_up)
    try:
        for cell in plan.cells():
            pairs, verdicts, failure = bench.measure(cell, say)
            say(f"{cell}: bare loops")
            rows = bench.rows(pairs, verdicts)
            report.checks += speed_checks(pairs, rows, kinds, plan.distinction(cell))
            measured += rows
            report.rows += (row.to_json() for row in rows)
            if plan.answers:
                write_answers(plan.answers, pairs, reference.text, stack.spec.target.resolve().name)
            if failure:
                raise failure
    finally:  # a later failure takes away nothing that was measured
        report.tables += tables(measured, report, len(plan.warm_up))
        report.checks += kept_checks(measured, kinds)
        ours = [row.row for row in measured if row.row.method not in PEERS]
        report.checks += exactness_checks(ours, report.dtype, trained, plan.new_tokens)
    return measured


class _Bench:
    """The stack, the peers and the bare loops beside it."""

    def __init__(self, stack: Stack, client: Client, reference: Reference, plan: RunPlan) -> None:
        self._stack, self._client, self._reference, self._plan = stack, client, reference, plan
        assistant = next((head.path for head in stack.spec.heads if head.kind == "lm"), None)
        self._peers = Peers(reference, assistant if HF_ASSISTED in plan.methods else None)
        longest = max(question.longest(plan.new_tokens) for question in plan.questions)
        self._bare = Bare(stack.spec, stack.settings, max(plan.sessions), longest)

    def measure(self, cell: Cell, say: Say) -> tuple[Pairs, dict[str, list[Verdict]], Exception | None]:
        """All answers of a cell, the verdicts of those that are judged, and what broke it off behind some answers."""
        plan, sampling = self._plan, SamplingParams(temperature=cell.temperature, seed=SEED)
        methods = [method for method in plan.methods if cell.sessions == 1 or method not in PEERS]
        say(f"{cell}: warming up")
        first = [question.ids for question in plan.warm_up or plan.questions]
        for method in methods:
            if method in PEERS:
                self._peers.tune(method, first[:TUNING_PROMPTS], plan.new_tokens, sampling)
            self._answer(method, cell, first[: cell.sessions], sampling)
        for _ in self._groups(cell, methods, plan.warm_up, lambda line: say(f"{line}, warming up")):
            pass
        answers: dict[str, list[Completion]] = {method: [] for method in methods}
        asked, questions = Asked(), list[Question]()
        failure: Exception | None = None
        try:
            for group, seeded, answered in self._groups(cell, methods, plan.questions, say):
                for method, its in answered.items():
                    answers[method] += its
                asked += ((question.ids, seeded) for question in group)
                questions += group
        except (CoppiceError, RuntimeError) as error:
            if not questions:
                raise
            failure = error
        say(f"{cell}: judging")
        return Pairs(cell, answers, SEED, questions), self._judge(answers, asked), failure

    def _groups(
        self, cell: Cell, methods: Sequence[str], questions: Sequence[Question], say: Say
    ) -> Iterator[tuple[list[Question], SamplingParams, dict[str, list[Completion]]]]:
        """The questions asked at once, how, and every method's answers; the last method is first in every other group.

        Each question is asked once, but for those that fill up a group. A conversation goes on behind what plain
        decoding answered, whatever the method: they are compared on the same prompts.
        """
        count = len(questions)
        for number, at in enumerate(range(0, count, cell.sessions)):
            say(f"{cell}: {at} of {count} answered")
            group = [questions[each % count] for each in range(at, at + cell.sessions)]
            seeded = SamplingParams(temperature=cell.temperature, seed=SEED + at)
            while group:
                ids = [question.ids for question in group]
                order = reversed(methods) if number % 2 else methods
                answered = {method: self._answer(method, cell, ids, seeded) for method in order}
                yield group, seeded, answered
                self._stack.check()
                both = zip(group, answered["plain"], strict=True)
                ended = self._reference.text.ended
                on = [question.next(ended(answer.ids)) for question, answer in both if question.later]
                group = [on[each % len(on)] for each in range(cell.sessions)] if on else []

    def _answer(self, method: str, cell: Cell, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Completion]:
        """One method's answers; Coppice's to all prompts at once."""
        new_tokens = self._plan.new_tokens
        if method in PEERS:
            return [self._peers.answer(method, ids, new_tokens, sampling) for ids in prompts]
        options = {"policy": method, "budget": cell.budget, "sampling": sampling, "max_new_tokens": new_tokens}
        return answers_to(self._client, prompts, len(prompts), **options)

    def _judge(self, answers: dict[str, list[Completion]], asked: Asked) -> dict[str, list[Verdict]]:
        """Judge greedy answers by transformers' own and sampled ones by plain's, which are themselves re-scored.

        Sampled answers of peers are not judged: their draws are others.
        """
        greedy = asked[0][1].temperature == 0
        expected: list[tuple[int, ...]] = [answer.ids for answer in answers["plain"]]
        if greedy and HF_GENERATE in answers:
            expected = [answer.ids for answer in answers[HF_GENERATE]]
        elif greedy:
            own = {ids: self._reference.greedy(ids, self._plan.new_tokens).ids for ids in {ids for ids, _ in asked}}
            expected = [own[ids] for ids, _ in asked]
        verdicts: dict[str, list[Verdict]] = {}
        for method, its in answers.items():
            if method == HF_GENERATE or (method in PEERS and not greedy):
                verdicts[method] = []
            else:
                wanted = None if method == "plain" and not greedy else expected
                verdicts[method] = judged(self._reference, asked, its, wanted)
        return verdicts

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
