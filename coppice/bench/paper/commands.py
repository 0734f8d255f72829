"""`coppice bench drafting`, `rank`, `ablate` and `baselines`: heads that read features, without a stack."""

from __future__ import annotations

from dataclasses import asdict, replace
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

    from coppice.bench.paper.drafting import measure, read_text
    from coppice.bench.report import Report
    from coppice.config.sections import FEATURE_KINDS
    from coppice.heads.feature_head import FeatureHead
    from coppice.heads.registry import build_head

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
    from coppice.bench.paper.rank import alpha_table, answers, gains_table, rank_table, said_along, tree_gains
    from coppice.prompts.files import demo_prompts, read_prompts

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
    adaptation: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What `bench adapt --json` wrote: adds its policies' rows.")
    ] = None,
    n: Count = 8,
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """What each part of SpecBlock is worth: heads without it, trained alike on the target's answers."""
    from coppice.bench.paper import ablate as parts
    from coppice.bench.paper.head_cache import HeadCache
    from coppice.bench.paper.rank import alpha_table, gains_table, said_along, tree_gains
    from coppice.machine import usable_cores
    from coppice.training.cli import LESSONS_SHARE
    from coppice.training.data.target_answers import LessonPlan, record_lessons

    spec = spec_of(target, None, "float32")
    variants = tuple(methods or parts.VARIANTS)
    if parts.FULL not in variants or not set(variants) <= set(parts.VARIANTS):
        raise typer.BadParameter(f"{parts.FULL} and any of {', '.join(parts.VARIANTS)}", param_hint="--methods")
    if adaptation:
        parts.read_adapted(adaptation)  # before hours of training
    console, report = offline("bench ablate", spec)
    wanted = LessonPlan(int(tokens * LESSONS_SHARE), seed=seed)
    recorded = record_lessons(data, spec.target, lessons or cache / "lessons", wanted)
    kept = HeadCache(data, spec.target, cache, tokens, usable_cores(), seed)
    folders = parts.trained(kept, variants, recorded)
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
    rows = parts.ablations(gains, adaptation)
    console.print(parts.ablation_table(rows, f"one part less each: trees of {budget} nodes, policies of adaptation"))
    report.figures["table_2"] = [asdict(row) for row in rows]
    report.checks += parts.effect_checks(said)
    finish(console, report, json_file)


def baselines(
    out: Annotated[Path, typer.Option("--out", metavar="CACHE", help="Where trained heads and lessons are kept.")],
    tokens: Annotated[int, typer.Option(min=1, help="Tokens that every head learns from.")],
    kinds: Annotated[
        list[str] | None,
        typer.Option(help="Kinds of heads (commas between, or repeatable); default: those that none is shipped of."),
    ] = None,
    target: Target = None,
    data: Annotated[
        list[str] | None,
        typer.Option("--data", help="As for `coppice train head`; default: what the lessons are of, else Python code."),
    ] = None,
    lessons: Annotated[Path | None, typer.Option("--lessons", help="Recorded answers; default: CACHE/lessons.")] = None,
    device: Annotated[str, typer.Option("--device", help="A torch device to train on.")] = "cpu",
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """Train the heads that SpecBlock is compared with, each on the same data and steps; those that are there stay."""
    import torch

    from coppice.bench.paper import baselines as parts
    from coppice.bench.paper.head_cache import HeadCache
    from coppice.config.sections import FEATURE_KINDS
    from coppice.machine import usable_cores
    from coppice.training.cli import LESSONS_SHARE
    from coppice.training.data.target_answers import LessonPlan, record_lessons, recorded_lines
    from coppice.training.dtype import fast_dtype

    chosen = [kind for part in kinds or parts.BASELINES for kind in part.split(",")]
    if unknown := [kind for kind in chosen if kind not in FEATURE_KINDS]:
        raise typer.BadParameter(f"{unknown[0]!r} is none of {', '.join(FEATURE_KINDS)}", param_hint="--kinds")
    spec = spec_of(target, None, "float32")
    folder = lessons or out / "lessons"
    lines = data or recorded_lines(folder) or ["code=python:stdlib"]
    console, report = offline("bench baselines", spec)
    dtype = str(fast_dtype(torch.device(device))).removeprefix("torch.")
    plan = LessonPlan(int(tokens * LESSONS_SHARE), seed=seed)
    recorded = record_lessons(lines, spec.target, folder, plan, device=device, dtype=dtype)
    cache = HeadCache(lines, spec.target, out, tokens, usable_cores() if device == "cpu" else 1, seed, device)
    found = list(parts.trained(cache, chosen, recorded))
    console.print(parts.baselines_table(found, f"heads after {tokens:,} tokens, on held-out text"))
    for one in found:
        console.print(f"--heads {one.kind}={one.kind}:{one.folder}", soft_wrap=True, highlight=False)
    report.figures = {one.kind: one.to_json() for one in found}
    finish(console, report, json_file)
