"""`coppice bench exact`: every policy, head, budget and batch mix gives the target's own text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from typing import Any

from coppice.bench.reference import EPS, Reference
from coppice.bench.report import Report, Row, Verdict, make_row, with_speedups
from coppice.client.client import Client
from coppice.client.completion import Completion
from coppice.messages.generation import ModelDescription
from coppice.speculation.sampling import SamplingParams

Prompt = str | tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """What is run: every method at every budget, temperature and number of concurrent sessions."""

    methods: tuple[str, ...]
    budgets: tuple[int, ...]
    temperatures: tuple[float, ...]
    sessions: tuple[int, ...]
    new_tokens: int
    seed: int


def methods_of(model: ModelDescription, wanted: Sequence[str]) -> tuple[str, ...]:
    """The policies to run, plain first; head names are short for single:HEAD; all of them when none is wanted."""
    named = [f"single:{name}" if name in model.heads else name for name in wanted] or list(model.policies)
    return ("plain", *(name for name in dict.fromkeys(named) if name != "plain"))


def run_exact(
    client: Client,
    prompts: Sequence[tuple[int, ...]],
    plan: Plan,
    reference: Reference,
    report: Report,
    say: Callable[[str], None],
) -> list[Row]:
    """Add a row for each method, temperature, budget and batch mix to the report. Returns the rows."""
    greedy = [reference.greedy(ids, plan.new_tokens).ids for ids in prompts]
    rows = []
    for temperature in plan.temperatures:
        sampling = SamplingParams(temperature=temperature, seed=plan.seed)
        asked = [(ids, sampling) for ids in prompts]
        expected: list[tuple[int, ...]] | None = greedy if temperature == 0 else None
        runs = product(("plain",), (0,), plan.sessions), product(plan.methods[1:], plan.budgets, plan.sessions)
        for method, budget, sessions in (each for several in runs for each in several):
            options = {"policy": method, "budget": budget, "sampling": sampling, "max_new_tokens": plan.new_tokens}
            answers = answers_to(client, prompts, sessions, **options)
            verdicts = judged(reference, asked, answers, expected)
            if expected is None:  # what plain decoding says with this seed, itself re-scored
                expected = [answer.ids for answer in answers]
            row = make_row(f"{method} T={temperature:g}", answers, verdicts, budget, sessions)
            rows.append(row)
            say(f"{row.method} B={budget} sessions={sessions}: {row.verdicts}")
    report.add_methods(with_speedups(rows))
    report.notes.append(f"a tie is a token within {EPS:g} of the row's best, in logits at T = 1; in float32 ties fail")
    return rows


def answers_to(client: Client, prompts: Sequence[Prompt], sessions: int = 1, **options: Any) -> list[Completion]:
    """The answers to all prompts, so many at once, end-of-text ids included like any other."""
    with ThreadPoolExecutor(sessions) as pool:
        return list(pool.map(lambda prompt: client.generate(prompt, ignore_eos=True, **options), prompts))


def judged(
    reference: Reference,
    asked: Sequence[tuple[tuple[int, ...], SamplingParams]],
    answers: Sequence[Completion],
    expected: Sequence[tuple[int, ...]] | None,
) -> list[Verdict]:
    """A verdict on the answer to each prompt and its sampling; without `expected` they are re-scored."""
    return [
        reference.judge(prompt, answer.ids, sampling, expected[number] if expected else None)
        for number, ((prompt, sampling), answer) in enumerate(zip(asked, answers, strict=True))
    ]
