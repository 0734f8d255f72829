"""`coppice bench`: each command starts a stack of its own, prints a table and its checks, and exits 1 if one failed."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Annotated

import typer

from coppice.bench.adapt.command import adapt
from coppice.bench.options import (
    Category,
    Count,
    Dtype,
    Heads,
    JsonFile,
    Methods,
    NewTokens,
    Prompts,
    Rounds,
    Seed,
    Target,
    measuring,
    numbers,
    prompt_ids,
    prompts_of,
    reference_of,
    spec_of,
)
from coppice.bench.paper.commands import ablate, baselines, drafting, rank
from coppice.bench.run.command import run
from coppice.bench.synthetic.command import synthetic

app = typer.Typer(
    help="Measure: speed, exactness, the sampling law, the cost of a step, rows of a forward, coupled drafting.",
    no_args_is_help=True,
)


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
    from coppice.bench.paper.coupling import CouplingReport, coupled_heads, run_coupling
    from coppice.client.client import Client

    spec = spec_of(target, heads or (["specblock-code", "eagle3-code", "lm"] if target is None else None), dtype)
    able, levels = coupled_heads(spec.heads), numbers("temperatures", temperatures, float)
    measured = measuring("bench coupling", spec, json_file, CouplingReport)
    with measured as (console, stack, report), Client(stack.address) as client:
        reference = reference_of(stack.spec)
        ids = prompt_ids(prompts, n, client, reference, category)
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
    from coppice.client.client import Client

    spec = spec_of(target, heads, dtype)
    with measuring("bench exact", spec, json_file) as (console, stack, report), Client(stack.address) as client:
        plan = Plan(
            methods=methods_of(client.describe(), methods or ()),
            budgets=numbers("budgets", budgets, int),
            temperatures=numbers("temperatures", temperatures, float),
            sessions=numbers("sessions", sessions, int),
            new_tokens=max_new_tokens,
            seed=seed,
        )
        reference = reference_of(stack.spec)
        ids = prompt_ids(prompts, n, client, reference)
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
    from coppice.client.client import Client

    spec = spec_of(target, heads, "float32")
    with measuring("bench sampling", spec, json_file) as (console, stack, report), Client(stack.address) as client:
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
    from coppice.client.client import Client

    spec = spec_of(target, heads, dtype)
    with measuring("bench steps", spec, json_file) as (console, stack, report), Client(stack.address) as client:
        from coppice.bench.exact import methods_of

        texts = prompts_of(prompts, n, client)
        parts = ("step", "draft", "transport", "verify", "accept", "commit", "target_forward", "head_forward")
        title = "milliseconds a step: means, and the median split cost"
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        table.add_column("method", no_wrap=True)
        for heading in ("step", "draft", "wire", "verify", "accept", "commit", "T_M", "T_D", "split"):
            table.add_column(heading, justify="right", no_wrap=True)
        for method in methods_of(client.describe(), methods or ()):
            measured = measure(client, texts, method, max_new_tokens)
            figures = [getattr(measured, part) for part in parts]
            table.add_row(method, *(f"{figure:.1f}" for figure in figures), f"{measured.split_median:.2f}")
            report.figures.setdefault("steps", []).append(asdict(measured))
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
    from coppice.client.client import Client
    from coppice.machine import this_machine

    spec = replace(spec_of(target, None, dtype), heads=())
    with measuring("bench rows", spec, json_file) as (console, stack, report), Client(stack.address) as client:
        told = stack.settings.verifier
        by_rows, _ = forward_ms(spec.target, told.device, told.dtype, told.threads)
        table = Table("rows", "ms", "over 1 row", title="one forward, one session", title_justify="left")
        for count, took in by_rows.items():
            table.add_row(str(count), f"{took:.2f}", f"{took / by_rows[1]:.2f}")
        console.print(table)
        reference = reference_of(stack.spec)
        ids = prompt_ids(prompts, n, client, reference)
        matrix_units = told.device.startswith("cuda") or "amx_bf16" in this_machine().features
        report.checks.append(rows_check(by_rows, told.dtype, matrix_units))
        report.checks.append(plain_over_generate(stack.address, reference, ids, max_new_tokens, rounds))

        def bare_ms() -> float:
            return forward_ms(spec.target, told.device, told.dtype, told.threads)[1]

        report.checks.append(plain_over_bare(stack.address, bare_ms, ids, max_new_tokens, rounds))


app.command()(run)
app.command()(synthetic)
app.command()(adapt)
app.command()(drafting)
app.command()(rank)
app.command()(ablate)
app.command()(baselines)
