"""The command `coppice bench run`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from coppice.bench.options import (
    Category,
    Count,
    Dtype,
    Heads,
    JsonFile,
    Target,
    measuring,
    numbers,
    reference_of,
    shipped_heads,
    spec_of,
)


def run(
    target: Target = None,
    heads: Heads = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            help="JSON lines (Spec-Bench's, SPEED-Bench's) or .txt, a benchmark each if there are several "
            "(repeatable); of a conversation all turns are asked. Default: the prompts that come with Coppice."
        ),
    ] = None,
    category: Category = None,
    n: Count = 16,
    warm_up: Annotated[
        int, typer.Option(min=0, help="Prompts, the next ones after --n, that every method answers first, uncounted.")
    ] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="Send each text as a user's message.")] = False,
    max_new_tokens: Annotated[
        int, typer.Option(min=16, help="Tokens made for each prompt, past end-of-text ids too.")
    ] = 128,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            help="Policies (route:A/B between the heads named), head names, hf-generate, hf-assisted, hf-lookup "
            "(commas between, or repeatable); default: plain, all heads, route, merge, hf-generate."
        ),
    ] = None,
    budgets: Annotated[
        str | None, typer.Option(help="Draft nodes verified a step, comma-separated; default: the server's.")
    ] = None,
    temperatures: Annotated[str, typer.Option(help="Comma-separated.")] = "0,1",
    sessions: Annotated[str, typer.Option(help="Prompts answered at once, comma-separated.")] = "1",
    dtype: Dtype = None,
    skip_long: Annotated[
        bool, typer.Option("--skip-long", help="Leave out prompts that do not fit into the target's context.")
    ] = False,
    json_file: JsonFile = None,
    answers: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Also write each method's answers here, as Spec-Bench does.")
    ] = None,
    plots: Annotated[
        Path | None, typer.Option("--plots", metavar="DIR", help="Also draw PNGs into this folder.")
    ] = None,
) -> None:
    """Speed of every method on the same prompts, in alternating order, against plain decoding and transformers.

    In the table `tau` is the mean of tokens that a step commits, its own root included: Spec-Bench's mean accepted
    tokens and SPEED-Bench's acceptance length. `drafts` is the mean of accepted draft tokens alone, tau - 1.
    """
    from coppice.bench.run.measure import RunPlan
    from coppice.bench.run.measure import run as run_methods
    from coppice.bench.run.methods import read_methods
    from coppice.bench.run.plots import draw_all
    from coppice.bench.run.questions import Wanted, read_questions
    from coppice.bench.target_text import TargetText
    from coppice.limits import MAX_TREE_NODES, check_range

    spec = spec_of(target, heads or (shipped_heads(methods or ()) if target is None else None), dtype)
    counts = numbers("sessions", sessions, int)
    for count in counts:
        check_range("sessions", count, 1, spec.settings().limits.sessions)
    nodes = numbers("budgets", budgets, int) if budgets else (spec.settings().orchestrator.budget,)
    for budget in nodes:
        check_range("budgets", budget, 0, MAX_TREE_NODES)
    chosen = read_methods(methods or (), spec.heads, counts)
    levels = numbers("temperatures", temperatures, float)
    text = TargetText(spec.target)
    wanted = Wanted(
        files=prompts or (),
        count=n,
        warm_up=warm_up,
        category=category,
        chat=chat,
        new_tokens=max_new_tokens,
        context=text.context(spec.settings().verifier.kv_tokens),
        skip_long=skip_long,
    )
    asked, warming, left_out = read_questions(wanted, text)
    for line in left_out:
        print(f"coppice: left out, a context holds {wanted.context}: {line}", file=sys.stderr)
    plan = RunPlan(chosen, nodes, levels, counts, max_new_tokens, tuple(asked), tuple(warming), answers)
    with measuring("bench run", spec, json_file) as (console, stack, report, client):
        if left_out:
            report.figures["left_out"] = left_out
        reference = reference_of(stack.spec)
        with console.status("starting") as status:
            rows = run_methods(stack, client, reference, plan, report, target is None, lambda line: status.update(line))
        if plots:
            draw_all(rows, plots)
