"""`coppice demo`: the whole pipeline on one machine, three answers in colour, then what each policy gains, and proof.

Green tokens were drafted and accepted, red ones are roots, sampled from the target (SpecBlock, figure 6).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from coppice.client.adapter import AdapterClient
from coppice.client.client import Client
from coppice.client.completion import Accumulator, Completion
from coppice.client.request import Draws
from coppice.commands.generate import print_tree
from coppice.commands.options import stack_spec
from coppice.config.sections import ADAPTED_KINDS
from coppice.machine import usable_cores
from coppice.prompts import FilePrompt, demo_prompts
from coppice.stack.launch import ADAPTER
from coppice.stack.redis_server import find_server
from coppice.training.progress import Progress
from coppice.wire.generation import Chunk, Origin
from lab.measuring import GREEDY, Ask, Bench, asking, judged, measuring, others_s, timed
from lab.options import Options
from lab.questions import Question
from lab.report import exactness_checks
from lab.run import HF_GENERATE, Cell, Pairs, add_speed

NEW_TOKENS = 64
BUDGET = 8  # in float32 on a CPU every row of a forward costs: a small tree gains more than the default one
COMPARE_S = 30  # seconds, after which no other prompt is compared
OTHERS = 0.15  # share of the machine's cores that others may take before speeds mean nothing
PROMPTS = (10, 24, 41)  # shipped ones by number, one of each category, that are short
SHOWN_TOKENS = 32
SHOWN: Draws = {"temperature": 0.7, "seed": 3}
"""of the answers that are streamed: greedy ones of so small a target soon repeat themselves"""
STYLES = {Origin.DRAFT: "green", Origin.ROOT: "red"}


def demo(
    console: Console, json_file: Path | None = None, target: Path | None = None, heads: list[str] | None = None
) -> None:
    """Start a target in float32, by default the shipped one, stream three answers, compare the policies, stop all."""
    cores = usable_cores()  # the adapter does not train here
    spec = stack_spec(target, heads, dtype="float32", policy="route", budget=BUDGET, verifier_threads=cores)
    adaptable = any(head.kind in ADAPTED_KINDS for head in spec.heads)
    spec = replace(spec, adapt=adaptable and find_server() is not None)
    prompts = [prompt for prompt in demo_prompts() if prompt.question_id in PROMPTS]
    more = ", Redis, an adapter" if spec.adapt else ""
    Console(stderr=True).print(f"starting a verifier, {len(spec.heads)} drafter pools{more} and an orchestrator ...")
    with measuring("demo", spec, Options(json_file=json_file)) as bench:
        for number, prompt in enumerate(prompts):
            stream_coloured(console, bench.client, prompt, trees=number == 0)
        ready = bench.stack.services.get(ADAPTER)
        with AdapterClient(ready.address) if ready else contextlib.nullcontext() as adapter:
            if adapter:
                adapter.pause()  # policies are compared on the same weights
            _compare(bench, prompts)
            if adapter:
                heard = ", ".join(f"{head.queries} queries of {head.head}" for head in adapter.status())
                console.print(f"\nthe adapter, paused meanwhile, heard {heard}", highlight=False, soft_wrap=True)


def stream_coloured(console: Console, client: Client, prompt: FilePrompt, trees: bool = False) -> Completion:
    """Print a sampled answer as it comes, drafts green, roots red, its figures, and if `trees` the best step's tree."""
    console.print(Text(f"\n{prompt.category or 'prompt'}: {prompt.prompt}", style="bold"))
    answer = Accumulator()
    for event in client.stream(prompt.prompt, max_new_tokens=SHOWN_TOKENS, trees=trees, **SHOWN):
        answer.add(event)
        if isinstance(event, Chunk):
            for piece, origin in zip(event.pieces, event.origins, strict=True):
                console.print(Text(piece, style=STYLES[origin]), end="", soft_wrap=True)
    completion = answer.completion()
    console.print(Text(f"\n{completion.summary}"), style="dim")
    if completion.trees:
        console.print("the draft tree of the step that accepted most:", style="dim")
        print_tree(completion.trees, console)
    return completion


def _compare(bench: Bench, prompts: Sequence[FilePrompt]) -> None:
    """Ask every method every prompt in alternating order; each answer is judged by transformers' own."""
    Console(stderr=True).print("\nloading the target once more, in plain transformers, to compare with ...")
    reference, report, spec = bench.reference, bench.report, bench.stack.spec
    asked = [(reference.text.encode(str(prompt.prompt)), GREEDY) for prompt in prompts]
    methods = ["plain", *(f"single:{head.name}" for head in spec.heads), "route", "merge"]
    ways: dict[str, Ask] = {HF_GENERATE: lambda several, _: [reference.greedy(ids, NEW_TOKENS) for ids in several]}
    ways |= {method: asking(bench.client, NEW_TOKENS, policy=method) for method in methods}
    began_at, before = time.monotonic(), others_s()
    with Progress("answers", len(ways) * (1 + len(asked))) as progress:
        answers = timed(ways, [ids for ids, _ in asked], progress, COMPARE_S)
    others = (others_s() - before) / (time.monotonic() - began_at)
    bench.stack.check()
    asked = asked[: len(answers["plain"])]
    verdicts = judged(reference, asked, answers, [answer.ids for answer in answers[HF_GENERATE]])
    pairs = Pairs(Cell(0.0, BUDGET, 1), answers, [Question(ids) for ids, _ in asked])
    report.rows = [pairs.row(method, verdicts[method]) for method in answers]
    add_speed(report, report.rows)
    report.checks += exactness_checks(report.rows, report.dtype, NEW_TOKENS)
    if others > OTHERS:
        busy = f"this machine was busy, others took {others:.0%} of it"
        report.notes.append(f"{busy}: the speeds above mean nothing, tau does")
