"""`coppice bench drafting`, `rank` and `ablate`: heads that read features, without a stack."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from coppice.bench.options import (
    Count,
    Dtype,
    Heads,
    JsonFile,
    NewTokens,
    Prompts,
    Seed,
    Target,
    encode,
    finish,
    numbers,
    offline,
    spec_of,
    spread,
)


def drafting(
    target: Target = None,
    heads: Heads = None,
    budgets: Annotated[str, typer.Option(help="Comma-separated.")] = "8,31",
    temperatures: Annotated[str, typer.Option(help="Comma-separated.")] = "0,1",
    drafts: Annotated[int, typer.Option(min=5, help="Drafts timed for each budget and temperature.")] = 60,
    threads: Annotated[int, typer.Option(min=1, help="torch threads.")] = 1,
    dtype: Dtype = None,
    json_file: JsonFile = None,
) -> None:
    """A draft of each head that reads features over its bare forwards, in this process."""
    from rich.console import Console
    from rich.table import Table

    from coppice.bench.drafting import measure, read_text
    from coppice.bench.report import Report
    from coppice.nn.features import FeatureHead
    from coppice.nn.registry import build_head
    from coppice.stack_spec import FEATURE_KINDS

    if target is None and heads is None:
        heads = ["specblock-code", "eagle3-code"]
    spec = replace(spec_of(target, heads, dtype), drafter_threads=threads)
    told = spec.settings().drafter
    report = Report("bench drafting", told.dtype, threads, told.device)
    table = Table("head", "budget", "T", "draft ms", "forwards ms", "ratio", title_justify="left")
    for head in spec.heads:
        if head.kind not in FEATURE_KINDS:
            continue
        chosen = {"name": head.name, "kind": head.kind, "path": str(head.path), "target": str(spec.target)}
        built = build_head(told.model_copy(update=chosen))
        assert isinstance(built, FeatureHead)
        text = read_text(spec.target, built.description.feature_layers, told.dtype, told.device, drafts)
        for budget in numbers("budgets", budgets, int):
            for temperature in numbers("temperatures", temperatures, float):
                found = measure(built, text, budget, temperature, drafts)
                figures = (f"{figure:.2f}" for figure in (found.draft_ms, found.forwards_ms, found.ratio))
                table.add_row(head.name, str(budget), f"{temperature:g}", *figures)
                report.checks.append(found.check())
    if not report.checks:
        raise typer.BadParameter(f"none of them is {' or '.join(FEATURE_KINDS)}", param_hint="--heads")
    Console().print(table)
    finish(Console(), report, json_file)


def rank(
    target: Target = None,
    heads: Heads = None,
    prompts: Prompts = None,
    n: Count = 12,
    max_new_tokens: NewTokens = 96,
    budget: Annotated[int, typer.Option(min=1, help="Nodes of every tree.")] = 31,
    json_file: JsonFile = None,
) -> None:
    """A SpecBlock head's rank head along the target's answers, and what its trees gain over uniform ones."""
    from coppice.bench.rank import alpha_table, answers, gains_table, rank_table, said_along, tree_gains
    from coppice.prompt_file import demo_prompts, read_prompts

    spec = spec_of(target, heads, "float32")
    chosen = {head.name: head.path for head in spec.heads if head.kind == "specblock" and head.path}
    if not chosen:
        raise typer.BadParameter("none of the heads is a specblock head", param_hint="--heads")
    console, report = offline("bench rank", spec)
    found = read_prompts(prompts) if prompts else spread(demo_prompts(), n)
    ids = [encode(spec.target, prompt.prompt) for prompt in found[:n]]
    with console.status("the target answers"):
        texts = answers(spec.target, ids, max_new_tokens, "float32")
    said, gains = {}, {}
    for name, folder in chosen.items():
        with console.status(f"{name} drafts along the answers"):
            said[name] = said_along(folder, spec.target, [text for text, _ in texts])
            gains[name] = tree_gains(folder, spec.target, texts, budget)
        console.print(rank_table(said[name], f"{name}: does the rank head know where it is right?"))
    console.print(alpha_table(said, "alpha by block and slot along a greedy chain"))
    console.print(gains_table(gains, f"trees of at most {budget} nodes along the target's greedy answers"))
    report.figures = {
        name: {
            "rank_head": of.ranks(),
            "alpha": list(of.alphas.values()),
            "trees": {tree: {"tau": gain.tau, "steps": gain.steps} for tree, gain in gains[name].items()},
        }
        for name, of in said.items()
    }
    finish(console, report, json_file)


def ablate(
    data: Annotated[list[str], typer.Option("--data", help="As for `coppice train head`.")],
    cache: Annotated[Path, typer.Option("--cache", help="Where trained variants and lessons are kept.")],
    target: Target = None,
    lessons: Annotated[Path | None, typer.Option("--lessons", help="Recorded answers; default: CACHE/lessons.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens that every variant learns from.")] = 131_072,
    methods: Annotated[list[str] | None, typer.Option(help="Variants (repeatable); default: all.")] = None,
    budget: Annotated[int, typer.Option(min=1, help="Nodes of every tree.")] = 31,
    n: Count = 8,
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """What each part of SpecBlock is worth: heads without it, trained alike on the target's answers."""
    from coppice.bench import ablate as parts
    from coppice.bench.rank import alpha_table, gains_table, said_along, tree_gains
    from coppice.machine import usable_cores
    from coppice.training.cli import LESSONS_SHARE
    from coppice.training.lessons import LessonPlan, record_lessons

    spec = spec_of(target, None, "float32")
    variants = tuple(methods or parts.VARIANTS)
    if parts.FULL not in variants or not set(variants) <= set(parts.VARIANTS):
        raise typer.BadParameter(f"{parts.FULL} and any of {', '.join(parts.VARIANTS)}", param_hint="--methods")
    console, report = offline("bench ablate", spec)
    wanted = LessonPlan(int(tokens * LESSONS_SHARE), seed=seed)
    recorded = record_lessons(data, spec.target, lessons or cache / "lessons", wanted)
    plan = parts.Plan(data, spec.target, cache, tokens, variants, usable_cores(), seed)
    folders = parts.trained(plan, recorded)
    texts = recorded.greedy_texts(n)
    said = {name: said_along(folder, spec.target, texts) for name, folder in folders.items()}
    told = [(text, len(text.ids) // 4) for text in texts]
    gains = {name: tree_gains(folder, spec.target, told, budget) for name, folder in folders.items()}
    console.print(alpha_table(said, f"alpha by block and slot after {tokens:,} tokens, held-out greedy answers"))
    console.print(gains_table(gains, f"trees of at most {budget} nodes along the same answers"))
    report.figures = {
        name: {"alpha": list(of.alphas.values()), "trees": {tree: gain.tau for tree, gain in gains[name].items()}}
        for name, of in said.items()
    }
    report.checks += parts.effect_checks(said)
    finish(console, report, json_file)
