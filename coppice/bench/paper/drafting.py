"""What a draft of a head that reads features costs beside its own forwards, in this process."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from coppice.bench.bare import STRIDE, Bare
from coppice.bench.progress import Progress
from coppice.bench.report import Check, Report
from coppice.bench.target_text import TargetText
from coppice.prompts.files import demo_prompts
from coppice.speculation.sampling import SamplingParams
from coppice.stack.spec import StackSpec

CONTEXT = 300  # tokens before the first timed draft
BOUND = 1.15


def run_drafting(
    spec: StackSpec, report: Report, count: int, budgets: Sequence[int], temperatures: Sequence[float]
) -> None:
    """Time drafts of each head, at every budget and temperature.

    What is not the model's own computing may add 15% to it.
    """
    text = text_of(spec.target, CONTEXT + STRIDE * count)
    bare, lines = Bare(spec, spec.settings(), 1, len(text)), []
    with Progress("cells", len(spec.heads) * len(budgets) * len(temperatures)) as progress:
        for head, budget, temperature in product(spec.heads, budgets, temperatures):
            progress.say(f"{head.name}, budget {budget}, T={temperature:g}")
            sampling = SamplingParams(temperature=temperature, seed=1)
            draft = bare.draft(head.name, text[:CONTEXT], text[CONTEXT:], sampling, budget)
            line = {"head": head.name, "budget": budget, "T": f"{temperature:g}", "draft_ms": draft.total_ms}
            lines.append(line | {"forwards_ms": draft.forward_ms, "ratio": draft.total_ms / draft.forward_ms})
            name = f"{head.name}, budget {budget}, T {temperature:g}: draft over its forwards"
            report.goals.append(Check.at_most(name, draft.total_ms / draft.forward_ms, BOUND))
            progress.add()
    report.add_figures("drafting", "one session, one thread: medians of a draft and of the forwards in it", lines)


def text_of(target: Path, length: int) -> list[int]:
    """So many ids of the demo's prompts one behind the other; random ids for a target without a tokenizer."""
    text = TargetText(target)
    if text.has_tokenizer:
        return list(text.encode("\n\n".join(str(prompt.prompt) for prompt in demo_prompts())))[:length]
    return random.Random(0).choices(range(text.vocab_size), k=length)  # noqa: S311
