"""`coppice bench exact`: every policy, head and budget gives the target's own text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from coppice.speculation.sampling import SamplingParams
from coppice.testing.reference import EPS
from coppice.training.progress import Progress
from lab.asking import Ids, asking, in_turn, judged
from lab.measuring import Bench
from lab.report import exactness_checks, make_row

SEED = 1
SESSIONS = 8
"""at once"""


def run_exact(
    bench: Bench,
    prompts: Sequence[Ids],
    methods: Sequence[str],
    budgets: Sequence[int],
    temperatures: Sequence[float],
) -> None:
    """Add a row for each method, budget and temperature to the report, plain decoding first."""
    report, new_tokens = bench.report, bench.options.max_new_tokens
    ways = {("plain", 0): asking(bench.client, new_tokens, SESSIONS, policy="plain")}
    for method, budget in product(methods[1:], budgets):
        ways[method, budget] = asking(bench.client, new_tokens, SESSIONS, policy=method, budget=budget)
    rows = []
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
                make_row(f"{way[0]} T={temperature:g}", its, verdicts[way], way[1], SESSIONS)
                for way, its in answers.items()
            ]
    report.add_methods(rows)
    report.notes.append(f"a tie is a token within {EPS:g} of the row's best, in logits at T = 1; in float32 ties fail")
    report.checks += exactness_checks(rows, report.dtype, new_tokens)
