"""`coppice demo`: the whole pipeline on one machine, three answers in colour, then what each policy gains, and proof.

Green tokens were drafted and accepted, red ones are roots, sampled from the target (SpecBlock, figure 6).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from coppice.adaptation import picture
from coppice.adaptation.client import AdapterClient
from coppice.bench.exact import judged
from coppice.bench.options import clean_check, reference_of, report_of, spread
from coppice.bench.report import HF_GENERATE, Report, exactness_checks, make_row, with_speedups
from coppice.client.client import Client
from coppice.client.completion import Accumulator, Completion
from coppice.commands.tree_picture import longest, show
from coppice.machine import usable_cores
from coppice.messages.generation import Chunk, Origin
from coppice.prompts.files import FilePrompt, demo_prompts
from coppice.speculation.sampling import SamplingParams
from coppice.stack.launch import ADAPTER, Stack
from coppice.stack.redis_server import find_server
from coppice.stack.spec import StackSpec

if TYPE_CHECKING:
    from coppice.bench.reference import Reference

NEW_TOKENS = 64
BUDGET = 8  # in float32 on a CPU every row of a forward costs: a small tree gains more than the default one
PROMPTS = 3  # one of each category of the shipped ones
STYLES = {Origin.DRAFT: "green", Origin.ROOT: "red"}


def demo(console: Console, json_file: Path | None = None) -> bool:
    """Start the shipped models in float32, stream the answers to three prompts, compare the policies, stop all of it.

    Returns whether every check held.
    """
    spec = StackSpec.demo(
        dtype="float32",
        policy="route",
        budget=BUDGET,
        verifier_threads=usable_cores(),  # the adapter does not train here
        adapt=find_server() is not None,
    )
    prompts = spread(demo_prompts(), PROMPTS)
    more = ", Redis, an adapter" if spec.adapt else ""
    console.print(f"starting a verifier, {len(spec.heads)} drafter pools{more} and an orchestrator ...")
    with Stack(spec) as stack, Client(stack.address) as client:
        console.print(services_table(stack))
        for number, prompt in enumerate(prompts):
            stream_coloured(console, client, prompt, trees=number == 0)
        ready = stack.services.get(ADAPTER)
        with AdapterClient(ready.address) if ready else contextlib.nullcontext() as adapter:
            if adapter:
                adapter.pause()  # policies are compared on the same weights
            report = _compare(console, stack, client, prompts)
            if adapter:
                console.print("\nwhat the adapter heard; it was paused while policies were compared:")
                for head in adapter.status():
                    picture.show(head, console)
    report.checks.append(clean_check(stack))
    report.print(console)
    if json_file:
        report.write(json_file)
    return report.ok


def services_table(stack: Stack) -> Table:
    """What runs where."""
    table = Table("service", "address", "metrics", "pid")
    for name, ready in stack.services.items():
        table.add_row(name, ready.address, ready.metrics or "-", str(ready.pid))
    return table


def stream_coloured(console: Console, client: Client, prompt: FilePrompt, trees: bool = False) -> Completion:
    """Print one greedy answer as it comes: accepted drafts green, roots red, and below it how many were drafted.

    trees: also draw the draft tree of the step that accepted most.
    """
    console.print(Text(f"\n{prompt.category or 'prompt'}: {prompt.prompt}", style="bold"))
    answer = Accumulator()
    for event in client.stream(prompt.prompt, max_new_tokens=NEW_TOKENS, ignore_eos=True, trees=trees):
        answer.add(event)
        if isinstance(event, Chunk):
            for piece, origin in zip(event.pieces, event.origins, strict=True):
                console.print(Text(piece, style=STYLES[origin]), end="", soft_wrap=True)
    completion = answer.completion()
    drafted = sum(origin is Origin.DRAFT for origin in completion.origins)
    speed = f"tau {completion.tau:.2f}, {completion.tokens_per_s:.1f} tokens/s"
    console.print(Text(f"\n{drafted} of {completion.new_tokens} tokens drafted, {speed}"), style="dim")
    if completion.trees:
        console.print("the draft tree of the step that accepted most:", style="dim")
        show(longest(completion.trees), console)
    return completion


def _compare(console: Console, stack: Stack, client: Client, prompts: Sequence[FilePrompt]) -> Report:
    """Every method on every prompt in alternating order, each answer judged by transformers' own."""
    console.print("\nloading the target once more, in plain transformers, to compare with ...")
    reference = reference_of(stack.spec)
    ids = [reference.encode(prompt.prompt) if isinstance(prompt.prompt, str) else prompt.prompt for prompt in prompts]
    methods = [HF_GENERATE, "plain", *(f"single:{head.name}" for head in stack.spec.heads), "route", "merge"]
    for method in methods:
        _answer(method, ids[0], client, reference, new_tokens=8)  # warm
    answers: dict[str, list[Completion]] = {method: [] for method in methods}
    for number, prompt in enumerate(ids):
        for method in methods if number % 2 == 0 else reversed(methods):
            answers[method].append(_answer(method, prompt, client, reference))
    stack.check()
    report = report_of("demo", stack.spec)
    budget = stack.settings.orchestrator.budget
    expected = [answer.ids for answer in answers[HF_GENERATE]]
    asked = [(prompt, SamplingParams()) for prompt in ids]
    rows = []
    for method, its in answers.items():
        rows.append(make_row(method, its, judged(reference, asked, its, expected), budget if its[0].heads else 0))
    report.add_methods(with_speedups(rows))
    trained = any(head.path for head in stack.spec.heads)
    report.checks = exactness_checks(rows, report.dtype, trained, NEW_TOKENS)
    return report


def _answer(
    method: str, ids: Sequence[int], client: Client, reference: Reference, new_tokens: int = NEW_TOKENS
) -> Completion:
    if method == HF_GENERATE:
        return reference.greedy(ids, new_tokens)
    return client.generate(ids, policy=method, max_new_tokens=new_tokens, ignore_eos=True)
