"""`coppice bench acceptance`: how often each head's best token is right, by depth and kind of text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product

import numpy as np

from coppice.client.completion import Completion
from coppice.heads.models.expectation import expectation, write_expectation
from coppice.speculation.sampling import SamplingParams
from coppice.speculation.tree import DraftTree
from coppice.speculation.watch import best_path
from coppice.training.progress import Progress
from coppice.wire.generation import StepTree
from lab.asking import Ids, answers_to
from lab.measuring import Bench
from lab.questions import Question

DEPTHS, BUDGET = 8, 12
SEED = 1
SESSIONS = 8
"""at once: nothing is timed"""


def counts(answer: Completion) -> list[tuple[int, int]]:
    """Return (right, tried) by depth of an answer's trees, but for the last, whose next token is not known."""
    found = [[0, 0] for _ in range(DEPTHS)]
    for step, following in pairwise(answer.trees):
        for depth, right in enumerate(_path(step, following.root)[:DEPTHS]):
            found[depth][0] += right
            found[depth][1] += 1
    return [(right, tried) for right, tried in found]


def _path(step: StepTree, root: int) -> list[bool]:
    tree = DraftTree(np.array(step.tokens, np.int64), np.array(step.parents, np.int64), np.array(step.log_probs))
    return best_path(tree, [*(step.tokens[node - 1] for node in step.accepted), root])


def run_acceptance(bench: Bench, prompts: Sequence[Question], temperatures: Sequence[float]) -> None:
    """Measure every head alone on each category of prompts at each temperature; `write` puts it into their folders."""
    expected, heads = {}, bench.stack.spec.heads
    kinds: dict[str, list[Ids]] = {}
    for prompt in prompts:
        kinds.setdefault(prompt.benchmark, []).append(prompt.ids)
    with Progress("answers", len(heads) * len(temperatures) * len(prompts)) as progress:
        for head in heads:
            measured: dict[str, list[list[tuple[int, int]]]] = {}
            for (kind, texts), temperature in product(sorted(kinds.items()), temperatures):
                progress.say(f"{head.name}: {kind}, T={temperature:g}")
                sampling = SamplingParams(temperature=temperature, seed=SEED)
                options = {"policy": f"single:{head.name}", "budget": BUDGET, "trees": True}
                options |= {"sampling": sampling, "max_new_tokens": bench.options.max_new_tokens}
                answers = answers_to(bench.client, texts, SESSIONS, **options)
                measured[f"{kind}, T={temperature:g}".lstrip(", ")] = list(map(counts, answers))
                progress.add(len(texts))
            expected[head.name] = expectation(measured)
            if bench.options.write and head.path is not None:
                write_expectation(head.path, expected[head.name])
    lines = [
        {"head": name, "text": text} | {f"depth {depth}": share for depth, share in enumerate(shares, 1)}
        for name, one in expected.items()
        for text, shares in [*one.texts.items(), ("expected, at least", one.by_depth)]
    ]
    bench.report.add_figures("acceptance", "how often the best token is right", lines)
