"""`coppice bench run`: how fast every method answers, in alternating order on the same prompts, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from coppice.bench.bare import Bare, BareDraft
from coppice.bench.exact import judged
from coppice.bench.pairs import Pairs
from coppice.bench.peers import HF_ASSISTED, PEERS, Peers
from coppice.bench.reference import Reference
from coppice.bench.report import HF_GENERATE, Report, Verdict, exactness_checks, make_row
from coppice.bench.run_checks import speed_checks
from coppice.bench.run_report import RunRow, run_row
from coppice.client import Client
from coppice.completion import Completion
from coppice.errors import InvalidField
from coppice.generation import POLICIES
from coppice.launch import Stack
from coppice.policy import Policy
from coppice.sampling import SamplingParams
from coppice.stack_spec import HeadSpec

TUNING_PROMPTS = 2

Prompt = tuple[int, ...]


@dataclass(frozen=True)
class RunPlan:
    """What is compared. Every method answers each prompt once a round; the first ones fill up the last group of
    concurrent sessions."""

    methods: tuple[str, ...]
    budget: int
    temperatures: tuple[float, ...]
    new_tokens: int
    rounds: int
    sessions: int
    """prompts answered at once"""
    seed: int


def read_methods(wanted: Sequence[str], heads: Sequence[HeadSpec], sessions: int) -> tuple[str, ...]:
    """The methods to run, plain first; each of `wanted` may hold several with commas between.

    Without any: all heads, route and merge if there are several, and transformers' `generate`. Raises InvalidField for
    what this stack cannot run.
    """
    names = [head.name for head in heads]
    told = [name for text in wanted for name in text.split(",")]
    if not told:
        told = [*names, *(["route", "merge"] if len(names) > 1 else []), *([HF_GENERATE] if sessions == 1 else [])]
    methods = dict.fromkeys(("plain", *(f"single:{name}" if name in names else name for name in told)))
    for method in methods:
        if method in PEERS:
            if sessions > 1:
                raise InvalidField("methods", f"{method} answers one prompt at a time, not {sessions} sessions")
            if method == HF_ASSISTED and not any(head.kind == "lm" for head in heads):
                raise InvalidField("methods", f"{method} needs a head of kind lm to draft with")
        elif method in POLICIES[1:] and len(names) < 2:
            raise InvalidField("methods", f"{method} needs at least two heads, there are {len(names)}")
        else:
            Policy.parse(method, names)
    return tuple(methods)


def run(
    stack: Stack,
    client: Client,
    reference: Reference,
    prompts: Sequence[Prompt],
    plan: RunPlan,
    report: Report,
    trained: bool,
    say: Callable[[str], None],
) -> None:
    """Fill the report's rows and checks. `trained`: heads too weak to prove anything are a failure."""
    kinds = {head.name: head.kind for head in stack.spec.heads}
    bench = _Bench(stack, client, reference, prompts, plan)
    rows: list[RunRow] = []
    for temperature in plan.temperatures:
        pairs, verdicts = bench.measure(temperature, say)
        say(f"T={temperature:g}: bare loops")
        mine = bench.rows(pairs, verdicts)
        rows += mine
        report.checks += speed_checks(pairs, mine, kinds)
    report.rows += rows
    ours = [row for row in rows if row.policy]
    report.checks += exactness_checks(ours, stack.settings.verifier.dtype, trained, plan.new_tokens)


class _Bench:
    """One stack, the peers and the bare loops beside it."""

    def __init__(
        self, stack: Stack, client: Client, reference: Reference, prompts: Sequence[Prompt], plan: RunPlan
    ) -> None:
        self._stack, self._client, self._reference = stack, client, reference
        self._prompts, self._plan = prompts, plan
        assistants = [head.path for head in stack.spec.heads if head.kind == "lm" and HF_ASSISTED in plan.methods]
        self._peers = Peers(reference, next(iter(assistants), None))
        longest = max(map(len, prompts)) + plan.new_tokens
        self._bare = Bare(stack.spec, stack.settings, plan.sessions, longest)
        lookup = next((f"single:{head.name}" for head in stack.spec.heads if head.kind == "lookup"), None)
        self._lookup = lookup if lookup in plan.methods else None

    def measure(self, temperature: float, say: Callable[[str], None]) -> tuple[Pairs, dict[str, list[Verdict]]]:
        """All answers at one temperature, and the verdicts of those that are judged."""
        plan, where = self._plan, f"T={temperature:g}"
        sampling = SamplingParams(temperature=temperature, seed=plan.seed)
        say(f"{where}: warming up")
        for method in plan.methods:
            if method in PEERS:
                self._peers.tune(method, self._prompts[:TUNING_PROMPTS], plan.new_tokens, sampling)
            self._answer(method, self._prompts[: plan.sessions], sampling)
        answers: dict[str, list[Completion]] = {method: [] for method in plan.methods}
        asked: list[tuple[Prompt, SamplingParams]] = []
        for number in range(plan.rounds):
            for at in range(0, len(self._prompts), plan.sessions):
                say(f"{where}: round {number + 1} of {plan.rounds}, prompt {at + 1} of {len(self._prompts)}")
                group = [self._prompts[one % len(self._prompts)] for one in range(at, at + plan.sessions)]
                seeded = sampling.model_copy(update={"seed": plan.seed + number * len(self._prompts) + at})
                turned = (number + at // plan.sessions) % 2
                for method in reversed(plan.methods) if turned else plan.methods:
                    answers[method] += self._answer(method, group, seeded)
                asked += ((ids, seeded) for ids in group)
                self._stack.check()
        say(f"{where}: judging")
        return Pairs(temperature, answers, plan.sessions, plan.seed), self._judge(answers, asked)

    def rows(self, pairs: Pairs, verdicts: dict[str, list[Verdict]]) -> list[RunRow]:
        """A row for each method, with bare loops at its own number of rows."""
        plan = self._plan
        sampling = SamplingParams(temperature=pairs.temperature, seed=plan.seed)
        drafts = {
            head.name: self._bare.draft(
                head.name, self._prompts[0], pairs.answers["plain"][0].ids, sampling, plan.budget
            )
            for head in self._stack.spec.heads
        }
        context = sum(map(len, self._prompts)) // len(self._prompts) + plan.new_tokens // 2
        forwards_ms: dict[int, float] = {}  # by rows: what several methods share is timed once
        rows = []
        for method, answers in pairs.answers.items():
            heads = answers[0].heads
            row = make_row(method, answers, verdicts[method], plan.budget if heads else 0, plan.sessions)
            at = 0 if method in PEERS else round(row.verified_nodes + 1)
            if at and at not in forwards_ms:
                forwards_ms[at] = self._bare.forward_ms(at, context)
            t_d = max((drafts[head] for head in heads), key=lambda draft: draft.forward_ms, default=BareDraft())
            settings = str(self._peers.settings.get(method, ""))
            rows.append(run_row(row, pairs, settings, forwards_ms.get(at, 0.0), t_d, self._lookup))
        return rows

    def _answer(self, method: str, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Completion]:
        """One method's answers; ours to all prompts at once."""
        plan = self._plan
        if method in PEERS:
            return [self._peers.answer(method, ids, plan.new_tokens, sampling) for ids in prompts]

        def ask(ids: Prompt) -> Completion:
            return self._client.generate(
                ids,
                policy=method,
                budget=plan.budget,
                sampling=sampling,
                max_new_tokens=plan.new_tokens,
                ignore_eos=True,
            )

        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(ask, prompts))

    def _judge(
        self, answers: dict[str, list[Completion]], asked: Sequence[tuple[Prompt, SamplingParams]]
    ) -> dict[str, list[Verdict]]:
        """Greedy answers by transformers' own; sampled ones by plain's, itself re-scored, and peers' not at all."""
        greedy = asked[0][1].temperature == 0
        expected: list[tuple[int, ...]] = [answer.ids for answer in answers["plain"]]
        if greedy and HF_GENERATE in answers:
            expected = [answer.ids for answer in answers[HF_GENERATE]]
        elif greedy:
            own = {ids: self._reference.greedy(ids, self._plan.new_tokens).ids for ids in self._prompts}
            expected = [own[ids] for ids, _ in asked]
        verdicts: dict[str, list[Verdict]] = {}
        for method, mine in answers.items():
            if method == HF_GENERATE or (method in PEERS and not greedy):
                verdicts[method] = []
            else:
                wanted = None if method == "plain" and not greedy else expected
                verdicts[method] = judged(self._reference, asked, mine, wanted)
        return verdicts
