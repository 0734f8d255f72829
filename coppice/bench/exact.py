"""`coppice bench exact`: every policy, head, budget and batch mix gives the target's own text."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coppice.bench.reference import EPS, Reference
from coppice.bench.report import Report, Row, Verdict, make_row, with_speedups
from coppice.client.client import AsyncClient
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
    address: str,
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
        expected: list[tuple[int, ...]] | None = greedy if temperature == 0 else None
        for method in plan.methods:
            for budget in plan.budgets if method != "plain" else (0,):
                for sessions in plan.sessions:
                    answers = asyncio.run(_answers(address, prompts, method, budget, sampling, plan, sessions))
                    verdicts = judged(reference, [(ids, sampling) for ids in prompts], answers, expected)
                    if expected is None:  # what plain decoding says with this seed, itself re-scored
                        expected = [answer.ids for answer in answers]
                    row = make_row(f"{method} T={temperature:g}", answers, verdicts, budget, sessions)
                    rows.append(row)
                    say(f"{row.method} B={budget} sessions={sessions}: {row.verdicts}")
    report.add_methods(with_speedups(rows))
    report.notes.append(f"a tie is a token within {EPS:g} of the row's best, in logits at T = 1; in float32 ties fail")
    return rows


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


async def _answers(
    address: str,
    prompts: Sequence[tuple[int, ...]],
    method: str,
    budget: int,
    sampling: SamplingParams,
    plan: Plan,
    sessions: int,
) -> list[Completion]:
    gate = asyncio.Semaphore(sessions)
    async with AsyncClient(address) as client:

        async def one(prompt: tuple[int, ...]) -> Completion:
            async with gate:
                return await client.generate(
                    prompt,
                    policy=method,
                    budget=budget,
                    sampling=sampling,
                    max_new_tokens=plan.new_tokens,
                    ignore_eos=True,
                )

        return list(await asyncio.gather(*map(one, prompts)))
