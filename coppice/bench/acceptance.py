"""`coppice bench acceptance`: how often each head's best token is right, by depth and kind of text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from coppice.bench.exact import answers_to
from coppice.bench.options import numbers
from coppice.bench.report import Report
from coppice.client.client import Client
from coppice.client.completion import Completion
from coppice.heads.models.expectation import Expectation, expectation, write_expectation
from coppice.messages.generation import StepTree
from coppice.prompts.files import FilePrompt
from coppice.speculation.sampling import SamplingParams
from coppice.speculation.tree import DraftTree
from coppice.speculation.watch import best_path
from coppice.stack.spec import StackSpec

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


def run_acceptance(
    client: Client,
    spec: StackSpec,
    prompts: Sequence[FilePrompt],
    temperatures: str,
    new_tokens: int,
    report: Report,
    say: Callable[[str], None],
    write: bool,
) -> dict[str, Expectation]:
    """Measure every head alone on each category of prompts at each temperature; `write` puts it into their folders."""
    expected = {}
    kinds = sorted({prompt.category for prompt in prompts})
    for head in spec.heads:
        measured: dict[str, list[list[tuple[int, int]]]] = {}
        for kind in kinds:
            texts = [prompt.prompt for prompt in prompts if prompt.category == kind]
            for temperature in numbers("temperatures", temperatures, float):
                say(f"{head.name}: {kind}, T={temperature:g}")
                asked: dict[str, Any] = {
                    "policy": f"single:{head.name}",
                    "sampling": SamplingParams(temperature=temperature, seed=SEED),
                    "max_new_tokens": new_tokens,
                    "budget": BUDGET,
                    "trees": True,
                }
                found = map(counts, answers_to(client, texts, SESSIONS, **asked))
                measured[f"{kind}, T={temperature:g}".lstrip(", ")] = list(found)
        expected[head.name] = expectation(measured)
        if write and head.path is not None:
            write_expectation(head.path, expected[head.name])
    lines = [
        {"head": name, "text": text, **{f"depth {depth}": share for depth, share in enumerate(shares, 1)}}
        for name, one in expected.items()
        for text, shares in [*one.texts.items(), ("expected, at least", one.by_depth)]
    ]
    deepest = max((len(shares) for one in expected.values() for shares in one.texts.values()), default=0)
    lines = [
        dict.fromkeys(("head", "text", *(f"depth {d}" for d in range(1, deepest + 1))), 0.0) | line for line in lines
    ]
    report.add_figures("acceptance", "how often the best token is right", lines)
    return expected
