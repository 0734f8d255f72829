"""`coppice bench rank` and `ablate`: draft heads along known answers, without a stack."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coppice.bench.options import (
    Count,
    Heads,
    JsonFile,
    NewTokens,
    Prompts,
    Seed,
    Target,
    encode,
    finish,
    offline,
    spec_of,
    spread,
)


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
