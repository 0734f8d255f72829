"""`coppice bench`: each command starts a stack of its own, prints a table and its checks, and exits 1 if one failed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from coppice.bench.reference import Reference
    from coppice.bench.report import Report
    from coppice.client import Client
    from coppice.launch import Stack
    from coppice.prompt_file import FilePrompt
    from coppice.stack_spec import StackSpec

T = TypeVar("T", int, float)

app = typer.Typer(
    help="Measure: speed, exactness, the sampling law, the cost of a step, rows of a forward, coupled drafting.",
    no_args_is_help=True,
)

Target = Annotated[Path | None, typer.Option(help="Model folder; default: the demo's target and heads.")]
Heads = Annotated[
    list[str] | None, typer.Option("--heads", metavar="NAME=KIND[:DIR]", help="Draft heads (repeatable).")
]
Prompts = Annotated[Path | None, typer.Option(help="JSON lines or .txt; default: the prompts that come with Coppice.")]
Count = Annotated[int, typer.Option("--n", min=1, help="Prompts used.")]
NewTokens = Annotated[int, typer.Option(min=2, help="Tokens made for each prompt, past end-of-text ids too.")]
Methods = Annotated[list[str] | None, typer.Option(help="Policies or head names (repeatable); default: all.")]
Category = Annotated[
    str | None, typer.Option(metavar="NAME,...", help="Keep the prompts of these categories, such as code,maths.")
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the keyed noise and of the prompts' order.")]
Dtype = Annotated[str | None, typer.Option(help="float32 or bfloat16.")]
Rounds = Annotated[int, typer.Option(min=1, help="Alternating rounds; medians are reported.")]
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the figures as JSON.")]


@app.command()
def run(
    target: Target = None,
    heads: Heads = None,
    prompts: Prompts = None,
    category: Category = None,
    n: Count = 16,
    max_new_tokens: Annotated[
        int, typer.Option(min=16, help="Tokens made for each prompt, past end-of-text ids too.")
    ] = 128,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            help="Policies, head names, hf-generate, hf-assisted, hf-lookup (commas between, or repeatable); default: "
            "plain, all heads, route, merge, hf-generate."
        ),
    ] = None,
    budgets: Annotated[int | None, typer.Option(min=0, max=256, help="Draft nodes verified a step.")] = None,
    temperatures: Annotated[str, typer.Option(help="Comma-separated.")] = "0,1",
    rounds: Annotated[int, typer.Option(min=1, help="How often every method answers each prompt.")] = 1,
    sessions: Annotated[int, typer.Option(min=1, help="Prompts answered at once.")] = 1,
    seed: Seed = 1,
    dtype: Dtype = None,
    json_file: JsonFile = None,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="Also draw the speedups.")] = None,
) -> None:
    """Speed of every method on the same prompts, in alternating order, against plain decoding and transformers."""
    from coppice.bench.run import RunPlan, read_methods
    from coppice.bench.run import run as run_methods
    from coppice.bench.run_report import RunReport, draw
    from coppice.client import Client

    spec = _spec(target, heads or (_shipped(methods or ()) if target is None else None), dtype)
    chosen = read_methods(methods or (), spec.heads, sessions)
    levels = _numbers("temperatures", temperatures, float)
    measuring = _measuring("bench run", spec, json_file, RunReport)
    with measuring as (console, stack, report), Client(stack.address) as client:
        budget = stack.settings.orchestrator.budget if budgets is None else budgets
        plan = RunPlan(chosen, budget, levels, max_new_tokens, rounds, sessions, seed)
        reference = _reference(stack)
        ids = _prompt_ids(prompts, n, client, reference, category)
        with console.status("starting") as status:
            run_methods(stack, client, reference, ids, plan, report, target is None, lambda line: status.update(line))
        if png:
            draw(report.rows, png)


@app.command()
def coupling(
    target: Target = None,
    heads: Heads = None,
    prompts: Prompts = None,
    category: Category = None,
    n: Count = 16,
    max_new_tokens: NewTokens = 128,
    temperatures: Annotated[str, typer.Option(help="Comma-separated, above 0.")] = "0.5,0.7,1",
    seed: Seed = 1,
    dtype: Dtype = None,
    json_file: JsonFile = None,
) -> None:
    """tau with coupled drafting and without, for the heads that can use the noise."""
    from coppice.bench.coupling import CouplingReport, coupled_heads, run_coupling
    from coppice.client import Client

    spec = _spec(target, heads or (["specblock-code", "eagle3-code", "lm"] if target is None else None), dtype)
    able, levels = coupled_heads(spec.heads), _numbers("temperatures", temperatures, float)
    measuring = _measuring("bench coupling", spec, json_file, CouplingReport)
    with measuring as (console, stack, report), Client(stack.address) as client:
        reference = _reference(stack)
        ids = _prompt_ids(prompts, n, client, reference, category)
        with console.status("decoding") as status:
            run_coupling(
                client,
                reference,
                able,
                ids,
                levels,
                max_new_tokens,
                seed,
                report,
                lambda line: status.update(line),
            )


@app.command()
def exact(
    target: Target = None,
    heads: Heads = None,
    prompts: Prompts = None,
    n: Count = 8,
    max_new_tokens: NewTokens = 64,
    methods: Methods = None,
    budgets: Annotated[str, typer.Option(help="Comma-separated.")] = "0,1,8,31,60",
    temperatures: Annotated[str, typer.Option(help="Comma-separated.")] = "0,0.7,1",
    sessions: Annotated[str, typer.Option(help="Concurrent sessions, comma-separated.")] = "8",
    seed: Seed = 1,
    dtype: Dtype = "float32",
    json_file: JsonFile = None,
) -> None:
    """Every policy, head, budget and batch mix against `generate`, and at T>0 against plain with the same seed."""
    from coppice.bench.exact import Plan, methods_of, run_exact
    from coppice.bench.report import exactness_checks
    from coppice.client import Client

    spec = _spec(target, heads, dtype)
    with _measuring("bench exact", spec, json_file) as (console, stack, report), Client(stack.address) as client:
        plan = Plan(
            methods=methods_of(client.describe(), methods or ()),
            budgets=_numbers("budgets", budgets, int),
            temperatures=_numbers("temperatures", temperatures, float),
            sessions=_numbers("sessions", sessions, int),
            new_tokens=max_new_tokens,
            seed=seed,
        )
        reference = _reference(stack)
        ids = _prompt_ids(prompts, n, client, reference)
        with console.status("decoding") as status:
            run_exact(stack.address, ids, plan, reference, report, lambda line: status.update(line))
        trained = target is None
        report.checks += exactness_checks(report.rows, stack.settings.verifier.dtype, trained, max_new_tokens)


@app.command()
def sampling(
    target: Target = None,
    heads: Heads = None,
    n: Annotated[int, typer.Option("--n", min=200, help="Samples a policy for the law of three tokens.")] = 2000,
    sessions: Annotated[int, typer.Option(min=1, help="Sampled sessions over gRPC.")] = 300,
    max_new_tokens: NewTokens = 16,
    seed: Seed = 1,
    json_file: JsonFile = None,
) -> None:
    """The law of sampled text on a tiny vocabulary, and sampled sessions over gRPC against plain."""
    from coppice.bench.sampling import law_checks, wire_check
    from coppice.client import Client

    spec = _spec(target, heads, "float32")
    with _measuring("bench sampling", spec, json_file) as (console, stack, report), Client(stack.address) as client:
        with console.status("sampling in process"):
            report.checks += law_checks(n)
        with console.status("sampling over gRPC"):
            report.checks.append(wire_check(client, sessions, max_new_tokens, seed))


@app.command()
def steps(
    target: Target = None,
    heads: Heads = None,
    prompts: Prompts = None,
    n: Count = 4,
    max_new_tokens: NewTokens = 64,
    methods: Methods = None,
    dtype: Dtype = None,
    json_file: JsonFile = None,
) -> None:
    """The split's own cost a step at one session, and where a step's time goes."""
    from rich import box
    from rich.table import Table

    from coppice.bench.steps import measure, split_check
    from coppice.client import Client

    spec = _spec(target, heads, dtype)
    with _measuring("bench steps", spec, json_file) as (console, stack, report), Client(stack.address) as client:
        from coppice.bench.exact import methods_of

        texts = _prompts(prompts, n, client)
        parts = ("step", "draft", "transport", "verify", "accept", "commit", "target_forward", "head_forward")
        title = "milliseconds a step: means, and the median split cost"
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        table.add_column("method", no_wrap=True)
        for heading in (*parts[:6], "T_M", "T_D", "split"):
            table.add_column(heading, justify="right", overflow="ellipsis")
        for method in methods_of(client.describe(), methods or ()):
            measured = measure(client, texts, method, max_new_tokens)
            figures = [*(getattr(measured, part) for part in parts), measured.split_median]
            table.add_row(method, *(f"{figure:.2f}" for figure in figures))
            report.checks.append(split_check(measured))
        console.print(table)


@app.command()
def rows(
    target: Target = None,
    prompts: Prompts = None,
    n: Count = 3,
    max_new_tokens: NewTokens = 96,
    rounds: Rounds = 5,
    dtype: Dtype = None,
    json_file: JsonFile = None,
) -> None:
    """A forward by its rows, and plain decoding over bare forwards and over `generate`."""
    from rich.table import Table

    from coppice.bench.rows import forward_ms, plain_over_bare, plain_over_generate, rows_check
    from coppice.client import Client
    from coppice.machine import default_dtype

    spec = replace(_spec(target, None, dtype), heads=())
    with _measuring("bench rows", spec, json_file) as (console, stack, report), Client(stack.address) as client:
        told = stack.settings.verifier
        by_rows, _ = forward_ms(spec.target, told.device, told.dtype, told.threads)
        table = Table("rows", "ms", "over 1 row", title="one forward, one session", title_justify="left")
        for count, took in by_rows.items():
            table.add_row(str(count), f"{took:.2f}", f"{took / by_rows[1]:.2f}")
        console.print(table)
        reference = _reference(stack)
        ids = _prompt_ids(prompts, n, client, reference)
        report.checks.append(rows_check(by_rows, told.dtype, default_dtype(told.device) == "bfloat16"))
        report.checks.append(plain_over_generate(stack.address, reference, ids, max_new_tokens, rounds))

        def bare_ms() -> float:
            return forward_ms(spec.target, told.device, told.dtype, told.threads)[1]

        report.checks.append(plain_over_bare(stack.address, bare_ms, ids, max_new_tokens, rounds))


@contextmanager
def _measuring(
    command: str, spec: StackSpec, json_file: Path | None, kind: type[Report] | None = None
) -> Iterator[tuple[Console, Stack, Report]]:
    """A running stack and a report that is printed and written at the end; exits 1 when a check failed."""
    from rich.console import Console

    from coppice.bench.report import Check, Report
    from coppice.launch import Stack

    console = Console()
    stack = Stack(spec)
    told = stack.settings.verifier
    report = (kind or Report)(command, told.dtype, told.threads, told.device)
    with stack:
        yield console, stack, report
    report.checks.append(Check("processes not stopped cleanly", len(stack.unclean), "0", not stack.unclean))
    _finish(console, report, json_file)


def _spec(target: Path | None, heads: list[str] | None, dtype: str | None) -> StackSpec:
    from coppice.cli import stack_spec

    return stack_spec(target, heads, dtype=dtype, port=0)


def _shipped(methods: Sequence[str]) -> list[str] | None:
    """The shipped heads that methods name; None when they name none."""
    from coppice.stack_spec import SHIPPED_HEADS

    named = {part.removeprefix("single:") for method in methods for part in method.split(",")}
    return [head for head in SHIPPED_HEADS if head in named or (head == "lm" and "hf-assisted" in named)] or None


def _prompts(file: Path | None, count: int, client: Client, category: str | None = None) -> list[str | tuple[int, ...]]:
    """The first `count` prompts of a file or of Coppice's own; random ids for a target without a tokenizer."""
    from coppice.prompt_file import demo_prompts, read_prompts

    model = client.describe()
    if file is None and not model.has_tokenizer:
        rng = random.Random(0)  # noqa: S311
        return [tuple(rng.randrange(model.vocab_size) for _ in range(8 + 5 * number)) for number in range(count)]
    found = read_prompts(file) if file else demo_prompts()
    if category:
        found = [prompt for prompt in found if prompt.category in category.split(",")]
        if not found:
            raise typer.BadParameter(f"no prompt is of {category!r}", param_hint="--category")
    if file is None:
        found = spread(found, count)
    return [prompt.prompt for prompt in found[:count]]


def spread(prompts: list[FilePrompt], count: int) -> list[FilePrompt]:
    """`count` prompts taken from all categories in turn."""
    by_category: dict[str, list[FilePrompt]] = {}
    for prompt in prompts:
        by_category.setdefault(prompt.category, []).append(prompt)
    turns = zip_longest(*by_category.values())
    return [prompt for turn in turns for prompt in turn if prompt is not None][:count]


def _prompt_ids(
    file: Path | None, count: int, client: Client, reference: Reference, category: str | None = None
) -> list[tuple[int, ...]]:
    prompts = _prompts(file, count, client, category)
    return [reference.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]


def _numbers(option: str, text: str, kind: type[T]) -> tuple[T, ...]:
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of numbers", param_hint=f"--{option}") from None


def _reference(stack: Stack) -> Reference:
    from coppice.bench.reference import Reference

    told = stack.settings.verifier
    return Reference(stack.spec.target, told.dtype, told.device, told.threads)


@app.command()
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

    spec = _spec(target, heads, "float32")
    chosen = {head.name: head.path for head in spec.heads if head.kind == "specblock" and head.path}
    if not chosen:
        raise typer.BadParameter("none of the heads is a specblock head", param_hint="--heads")
    console, report = _offline("bench rank", spec)
    found = read_prompts(prompts) if prompts else spread(demo_prompts(), n)
    ids = [_encode(spec.target, prompt.prompt) for prompt in found[:n]]
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
    _finish(console, report, json_file)


@app.command()
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

    spec = _spec(target, None, "float32")
    variants = tuple(methods or parts.VARIANTS)
    if parts.FULL not in variants or not set(variants) <= set(parts.VARIANTS):
        raise typer.BadParameter(f"{parts.FULL} and any of {', '.join(parts.VARIANTS)}", param_hint="--methods")
    console, report = _offline("bench ablate", spec)
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
    _finish(console, report, json_file)


def _offline(command: str, spec: StackSpec) -> tuple[Console, Report]:
    """A report of something measured without a stack."""
    from rich.console import Console

    from coppice.bench.report import Report

    told = spec.settings().verifier
    return Console(), Report(command, "float32", told.threads, "cpu")


def _finish(console: Console, report: Report, json_file: Path | None) -> None:
    """Print and write a report; exits 1 when a check failed."""
    report.print(console)
    if json_file:
        report.write(json_file)
    if not report.ok:
        raise typer.Exit(1)


def _encode(target: Path, prompt: str | tuple[int, ...]) -> tuple[int, ...]:
    from tokenizers import Tokenizer

    if isinstance(prompt, str):
        return tuple(Tokenizer.from_file(str(target / "tokenizer.json")).encode(prompt).ids)
    return prompt
