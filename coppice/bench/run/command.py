"""The command `coppice bench run`."""

from __future__ import annotations

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
            help="JSON lines or .txt, a benchmark each if there are several (repeatable); default: the prompts that "
            "come with Coppice."
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
    json_file: JsonFile = None,
    plots: Annotated[
        Path | None, typer.Option("--plots", metavar="DIR", help="Also draw PNGs into this folder.")
    ] = None,
) -> None:
    """Speed of every method on the same prompts, in alternating order, against plain decoding and transformers."""
    from coppice.bench.run.measure import RunPlan
    from coppice.bench.run.measure import run as run_methods
    from coppice.bench.run.methods import read_methods
    from coppice.bench.run.plots import draw_all
    from coppice.bench.run.questions import read_questions
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
    with measuring("bench run", spec, json_file) as (console, stack, report, client):
        reference = reference_of(stack.spec)
        asked, warming = read_questions(prompts or (), n, client, reference, category, chat, warm_up)
        plan = RunPlan(chosen, nodes, levels, counts, max_new_tokens, tuple(asked), tuple(warming))
        with console.status("starting") as status:
            rows = run_methods(stack, client, reference, plan, report, target is None, lambda line: status.update(line))
        if plots:
            draw_all(rows, plots)
