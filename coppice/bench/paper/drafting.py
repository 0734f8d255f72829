"""What a draft of a head that reads features costs beside its own forwards, in this process."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

from coppice.bench.bare import STRIDE, Bare
from coppice.bench.options import encode, numbers, vocab_size_of
from coppice.bench.paper.tables import Options, heads_of
from coppice.bench.report import Check, Report
from coppice.config.sections import FEATURE_KINDS
from coppice.prompts.files import demo_prompts
from coppice.speculation.sampling import SamplingParams
from coppice.stack.spec import StackSpec

CONTEXT = 300  # tokens before the first timed draft
BUDGETS = (8, 31)
BOUND = 1.15


def drafting(spec: StackSpec, options: Options, report: Report, say: Callable[[str], None]) -> None:
    """Time drafts of each head that reads features, at every budget and temperature, with one thread.

    What is not the model's own computing may add 15% to it.
    """
    spec = replace(spec, heads=heads_of(spec.heads, FEATURE_KINDS), drafter_threads=1)
    text = text_of(spec.target, CONTEXT + STRIDE * options.n)
    bare, lines = Bare(spec, spec.settings(), 1, len(text)), []
    budgets = (options.budget,) if options.budget else BUDGETS
    for head, budget, temperature in product(spec.heads, budgets, numbers("temperatures", options.temperatures, float)):
        say(f"{head.name}, budget {budget}, T={temperature:g}")
        sampling = SamplingParams(temperature=temperature, seed=1)
        draft = bare.draft(head.name, text[:CONTEXT], text[CONTEXT:], sampling, budget)
        ratio = draft.total_ms / draft.forward_ms
        name = f"{head.name}, budget {budget}, T {temperature:g}: draft over its forwards"
        report.checks.append(Check.at_most(name, ratio, BOUND))
        lines.append(
            {
                "head": head.name,
                "budget": budget,
                "T": f"{temperature:g}",
                "draft_ms": draft.total_ms,
                "forwards_ms": draft.forward_ms,
                "ratio": ratio,
            }
        )
    report.add_figures("drafting", "one session, one thread: medians of a draft and of the forwards in it", lines)


def text_of(target: Path, length: int) -> list[int]:
    """So many ids of the demo's prompts one behind the other; random ids for a target without a tokenizer."""
    if (target / "tokenizer.json").is_file():
        return list(encode(target, "\n\n".join(str(prompt.prompt) for prompt in demo_prompts())))[:length]
    return random.Random(0).choices(range(vocab_size_of(target)), k=length)  # noqa: S311
