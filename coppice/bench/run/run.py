"""`coppice bench run`: how fast every method answers, in alternating order on the same questions, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from coppice.bench.adapt.lanes import Lane
from coppice.bench.exact import judged
from coppice.bench.reference import Reference
from coppice.bench.report import HF_GENERATE, Report, Verdict, exactness_checks, make_row
from coppice.bench.run.bare import Bare, BareDraft
from coppice.bench.run.checks import kept_checks, speed_checks
from coppice.bench.run.methods import CHAIN, Method
from coppice.bench.run.pairs import Pairs
from coppice.bench.run.peers import HF_ASSISTED, Peers
from coppice.bench.run.questions import Question, write_answers
from coppice.bench.run.report import RunRow, run_row
from coppice.client.client import Client
from coppice.client.completion import Completion
from coppice.errors import InvalidField
from coppice.speculation.sampling import SamplingParams
from coppice.stack.launch import Stack
from coppice.stack.spec import StackSpec

TUNING_PROMPTS = 2

Prompt = tuple[int, ...]
Asked = list[tuple[Prompt, SamplingParams]]


@dataclass(frozen=True)
class RunPlan:
    """What is compared: all methods, at every temperature, budget and number of sessions. Every method answers each
    prompt once a round; the first ones fill up the last group of concurrent sessions."""

    methods: tuple[Method, ...]
    budgets: tuple[int, ...]
    temperatures: tuple[float, ...]
    new_tokens: int
    rounds: int
    sessions: tuple[int, ...]
    """prompts answered at once"""
    seed: int
    answers: Path | None = None
    """folder for answer files"""
    warm_up: tuple[Question, ...] = ()
    """answered by every method before each cell, which counts nothing: `auto`, calibrations and adapters learn"""


@dataclass(frozen=True, slots=True)
class Cell:
    """One temperature, budget and number of sessions; its methods are compared with one another."""

    temperature: float
    budget: int
    sessions: int

    def __str__(self) -> str:
        return f"T={self.temperature:g}, budget {self.budget}, {self.sessions} sessions"


def run(
    stack: Stack,
    client: Client,
    reference: Reference,
    questions: Sequence[Question],
    plan: RunPlan,
    lanes: Mapping[str, StackSpec],
    report: Report,
    trained: bool,
    say: Callable[[str], None],
) -> None:
    """Fill the report's rows and checks. `lanes`: by method the stack of those that have one of their own, run while
    no other method is. `trained`: heads too weak to prove anything are a failure.
    """
    kinds = {head.name: head.kind for head in stack.spec.heads if CHAIN not in head.flags}
    if plan.warm_up:
        report.figures["warm_up"] = len(plan.warm_up)
    rows: list[RunRow] = []
    with ExitStack() as started:
        running = {name: _start(started, name, spec, say) for name, spec in lanes.items()}
        bench = _Bench(stack, client, reference, questions, plan, running)
        for cell in (Cell(*one) for one in product(plan.temperatures, plan.budgets, plan.sessions)):
            pairs, verdicts = bench.measure(cell, say)
            say(f"{cell}: bare loops")
            mine = bench.rows(cell, pairs, verdicts)
            rows += mine
            report.checks += speed_checks(pairs, mine, kinds, _which(cell, plan))
    for name, lane in running.items():
        changes = lane.served.status.changes if lane.served.status else ()
        report.figures.setdefault("adaptation", {})[name] = [asdict(change) for change in changes]
    report.checks += kept_checks(rows, kinds)
    report.rows += rows
    ours = [row for row in rows if row.policy]
    report.checks += exactness_checks(ours, stack.settings.verifier.dtype, trained, plan.new_tokens)


def _which(cell: Cell, plan: RunPlan) -> str:
    """What tells a cell from others of its temperature."""
    budget = f", budget {cell.budget}" if len(plan.budgets) > 1 else ""
    return budget + (f", {cell.sessions} sessions" if len(plan.sessions) > 1 else "")


def _start(started: ExitStack, name: str, spec: StackSpec, say: Callable[[str], None]) -> Lane:
    say(f"starting {name}")
    lane = Lane(name, spec)
    started.callback(lane.stop)
    lane.start()
    return lane


class _Bench:
    """The stacks, the peers and the bare loops beside them."""

    def __init__(
        self,
        stack: Stack,
        client: Client,
        reference: Reference,
        questions: Sequence[Question],
        plan: RunPlan,
        lanes: Mapping[str, Lane],
    ) -> None:
        self._stack, self._client, self._reference, self._lanes = stack, client, reference, lanes
        self._questions, self._plan = questions, plan
        assisted = any(method.name == HF_ASSISTED for method in plan.methods)
        assistants = [head.path for head in stack.spec.heads if head.kind == "lm" and assisted]
        self._peers = Peers(reference, next(iter(assistants), None))
        longest = max(len(question.ids) for question in questions) + plan.new_tokens
        self._bare = Bare(stack.spec, stack.settings, max(plan.sessions), longest)
        lookup = next((f"single:{head.name}" for head in stack.spec.heads if head.kind == "lookup"), None)
        self._drafts: dict[tuple[Any, ...], BareDraft] = {}
        self._lookup = lookup if lookup in [method.name for method in plan.methods] else None

    def measure(self, cell: Cell, say: Callable[[str], None]) -> tuple[Pairs, dict[str, list[Verdict]]]:
        """All answers of a cell, and the verdicts of those that are judged."""
        plan = self._plan
        sampling = SamplingParams(temperature=cell.temperature, seed=plan.seed)
        methods = [method for method in plan.methods if cell.sessions == 1 or not method.peer]
        say(f"{cell}: warming up")
        first = [question.ids for question in plan.warm_up or self._questions]
        for method in methods:
            if method.peer:
                self._peers.tune(method.name, first[:TUNING_PROMPTS], plan.new_tokens, sampling)
            warm = self._answer(method, cell, first[: cell.sessions], sampling)
            if method.sampled_chain and cell.budget and not any(sum(answer.verified_nodes) for answer in warm):
                raise InvalidField("methods", f"{method.name}: this head does not sample its drafts")
        for _ in self._rounds(cell, methods, plan.warm_up, 1, lambda told: say(f"{told}, warming up")):
            pass
        answers: dict[str, list[Completion]] = {method.name: [] for method in methods}
        asked, questions = Asked(), list[Question]()
        for group, seeded, answered in self._rounds(cell, methods, self._questions, plan.rounds, say):
            for name, mine in answered.items():
                answers[name] += mine
            asked += ((one.ids, seeded) for one in group)
            questions += group
        say(f"{cell}: judging")
        pairs = Pairs(cell.temperature, answers, cell.sessions, plan.seed, questions, cell.budget)
        if plan.answers:
            for name, mine in answers.items():
                where = _which(cell, plan).replace(", ", "-").replace(" ", "-")
                model_id = f"{name}-temperature-{cell.temperature:g}{where}"
                write_answers(plan.answers, model_id, questions, mine, self._reference)
        return pairs, self._judge(methods, answers, asked)

    def _rounds(
        self,
        cell: Cell,
        methods: Sequence[Method],
        questions: Sequence[Question],
        rounds: int,
        say: Callable[[str], None],
    ) -> Iterator[tuple[list[Question], SamplingParams, dict[str, list[Completion]]]]:
        """What was asked at once, how, and every method's answers, the last method first in every other group: every
        question once a round.
        """
        count, plan = len(questions), self._plan
        for number in range(rounds):
            for at in range(0, count, cell.sessions):
                say(f"{cell}: {number * count + at} of {rounds * count} answered")
                group = [questions[one % count] for one in range(at, at + cell.sessions)]
                ids = [question.ids for question in group]
                seeded = SamplingParams(temperature=cell.temperature, seed=plan.seed + number * count + at)
                turned = (number + at // cell.sessions) % 2 > 0
                order = reversed(methods) if turned else methods
                yield group, seeded, {method.name: self._answer(method, cell, ids, seeded) for method in order}
                self._stack.check()

    def rows(self, cell: Cell, pairs: Pairs, verdicts: dict[str, list[Verdict]]) -> list[RunRow]:
        """A row for each method, with bare loops at its own number of rows."""
        plan, questions = self._plan, self._questions
        context = sum(len(question.ids) for question in questions) // len(questions) + plan.new_tokens // 2
        forwards_ms: dict[int, float] = {}  # by rows: what several methods share is timed once
        rows = []
        for method in plan.methods:
            answers = pairs.answers.get(method.name)
            if not answers:
                continue
            heads = answers[0].heads
            row = make_row(method.name, answers, verdicts[method.name], cell.budget if heads else 0, cell.sessions)
            at = 0 if method.peer else round(row.verified_nodes + 1)
            if at and at not in forwards_ms:
                forwards_ms[at] = self._bare.forward_ms(at, context, cell.sessions)
            drafts = [self._draft(cell, head, method, pairs.answers["plain"][0]) for head in heads]
            t_d = max(drafts, key=lambda draft: draft.forward_ms, default=BareDraft())
            settings = str(self._peers.settings.get(method.name, ""))
            rows.append(run_row(row, pairs, settings, forwards_ms.get(at, 0.0), t_d, self._lookup))
        return rows

    def _draft(self, cell: Cell, head: str, method: Method, along: Completion) -> BareDraft:
        """A head's bare drafts as the method wants them; what several methods share is timed once."""
        key = (cell, head, *method.options.values())
        if key not in self._drafts:
            sampling = SamplingParams(temperature=cell.temperature, seed=self._plan.seed)
            self._drafts[key] = self._bare.draft(
                head, self._questions[0].ids, along.ids, sampling, cell.budget, cell.sessions, **method.options
            )
        return self._drafts[key]

    def _answer(
        self, method: Method, cell: Cell, prompts: Sequence[Prompt], sampling: SamplingParams
    ) -> list[Completion]:
        """One method's answers; ours to all prompts at once."""
        plan = self._plan
        if method.peer:
            return [self._peers.answer(method.name, ids, plan.new_tokens, sampling) for ids in prompts]
        with ExitStack() as awake:
            client = self._client
            if lane := self._lanes.get(method.name):
                awake.enter_context(lane.running())
                client = lane.client

            def ask(ids: Prompt) -> Completion:
                return client.generate(
                    ids,
                    policy=method.policy,
                    budget=cell.budget,
                    sampling=sampling,
                    max_new_tokens=plan.new_tokens,
                    ignore_eos=True,
                    **method.options,
                )

            with ThreadPoolExecutor(len(prompts)) as pool:
                return list(pool.map(ask, prompts))

    def _judge(
        self, methods: Sequence[Method], answers: dict[str, list[Completion]], asked: Asked
    ) -> dict[str, list[Verdict]]:
        """Greedy answers by transformers' own; sampled ones by plain's, itself re-scored; those of peers and of p/q
        rejection, whose draws are others, not at all."""
        greedy = asked[0][1].temperature == 0
        expected: list[tuple[int, ...]] = [answer.ids for answer in answers["plain"]]
        if greedy and HF_GENERATE in answers:
            expected = [answer.ids for answer in answers[HF_GENERATE]]
        elif greedy:
            own = {ids: self._reference.greedy(ids, self._plan.new_tokens).ids for ids in {ids for ids, _ in asked}}
            expected = [own[ids] for ids, _ in asked]
        verdicts: dict[str, list[Verdict]] = {}
        for method in methods:
            free = method.peer or method.sampled_chain
            if method.name == HF_GENERATE or (free and not greedy):
                verdicts[method.name] = []
            else:
                wanted = None if method.name == "plain" and not greedy else expected
                verdicts[method.name] = judged(self._reference, asked, answers[method.name], wanted)
        return verdicts
