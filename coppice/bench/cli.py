"""`coppice bench`: each command starts a stack of its own, prints a table and its checks, and exits 1 if one failed."""

from __future__ import annotations

import random
from collections.abc import Iterator
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
    help="Measure: exactness, the sampling law, the cost of a step, rows of a forward.", no_args_is_help=True
)

Target = Annotated[Path | None, typer.Option(help="Model folder; default: the demo's target and heads.")]
Heads = Annotated[
    list[str] | None, typer.Option("--heads", metavar="NAME=KIND[:DIR]", help="Draft heads (repeatable).")
]
Prompts = Annotated[Path | None, typer.Option(help="JSON lines or .txt; default: the prompts that come with Coppice.")]
Count = Annotated[int, typer.Option("--n", min=1, help="Prompts used.")]
NewTokens = Annotated[int, typer.Option(min=2, help="Tokens made for each prompt, past end-of-text ids too.")]
Methods = Annotated[list[str] | None, typer.Option(help="Policies or head names (repeatable); default: all.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the keyed noise and of the prompts' order.")]
Dtype = Annotated[str | None, typer.Option(help="float32 or bfloat16.")]
Rounds = Annotated[int, typer.Option(min=1, help="Alternating rounds; medians are reported.")]
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the figures as JSON.")]


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
def _measuring(command: str, spec: StackSpec, json_file: Path | None) -> Iterator[tuple[Console, Stack, Report]]:
    """A running stack and a report that is printed and written at the end; exits 1 when a check failed."""
    from rich.console import Console

    from coppice.bench.report import Check, Report
    from coppice.launch import Stack

    console = Console()
    stack = Stack(spec)
    told = stack.settings.verifier
    report = Report(command, told.dtype, told.threads, told.device)
    with stack:
        yield console, stack, report
    report.checks.append(Check("processes not stopped cleanly", len(stack.unclean), "0", not stack.unclean))
    report.print(console)
    if json_file:
        report.write(json_file)
    if not report.ok:
        raise typer.Exit(1)


def _spec(target: Path | None, heads: list[str] | None, dtype: str | None) -> StackSpec:
    from coppice.cli import stack_spec

    return stack_spec(target, heads, dtype=dtype, port=0)


def _prompts(file: Path | None, count: int, client: Client) -> list[str | tuple[int, ...]]:
    """The first `count` prompts of a file or of Coppice's own; random ids for a target without a tokenizer."""
    from coppice.prompt_file import demo_prompts, read_prompts

    model = client.describe()
    if file is None and not model.has_tokenizer:
        rng = random.Random(0)  # noqa: S311
        return [tuple(rng.randrange(model.vocab_size) for _ in range(8 + 5 * number)) for number in range(count)]
    found = read_prompts(file) if file else spread(demo_prompts(), count)
    return [prompt.prompt for prompt in found[:count]]


def spread(prompts: list[FilePrompt], count: int) -> list[FilePrompt]:
    """`count` prompts taken from all categories in turn."""
    by_category: dict[str, list[FilePrompt]] = {}
    for prompt in prompts:
        by_category.setdefault(prompt.category, []).append(prompt)
    turns = zip_longest(*by_category.values())
    return [prompt for turn in turns for prompt in turn if prompt is not None][:count]


def _prompt_ids(file: Path | None, count: int, client: Client, reference: Reference) -> list[tuple[int, ...]]:
    prompts = _prompts(file, count, client)
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

    spec = replace(_spec(target, heads, dtype), drafter_threads=threads)
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
        for budget in _numbers("budgets", budgets, int):
            for temperature in _numbers("temperatures", temperatures, float):
                found = measure(built, text, budget, temperature, drafts)
                figures = (f"{figure:.2f}" for figure in (found.draft_ms, found.forwards_ms, found.ratio))
                table.add_row(head.name, str(budget), f"{temperature:g}", *figures)
                report.checks.append(found.check())
    if not report.checks:
        raise typer.BadParameter(f"none of them is {' or '.join(FEATURE_KINDS)}", param_hint="--heads")
    Console().print(table)
    report.print(Console())
    if json_file:
        report.write(json_file)
    if not report.ok:
        raise typer.Exit(1)
