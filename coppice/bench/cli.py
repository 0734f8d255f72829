"""`coppice bench`: each command starts a stack of its own, prints a table and its checks, and exits 1 if one failed."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from coppice.bench.adapt.command import adapt
from coppice.bench.options import (
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
    counting,
    measuring,
    numbers,
    prompt_ids,
    prompts_of,
    reference_of,
    running,
    spec_of,
    spread,
)
from coppice.bench.paper.command import paper
from coppice.bench.run.command import run
from coppice.bench.synthetic.command import synthetic

app = typer.Typer(
    help="Measure: speed, exactness, the cost of a step, rows of a forward, adaptation, the papers' tables.",
    no_args_is_help=True,
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

    spec = spec_of(target, heads, dtype)
    with measuring("bench exact", spec, json_file) as (console, stack, report, client):
        plan = Plan(
            methods=methods_of(client.describe(), methods or ()),
            budgets=numbers("budgets", budgets, int),
            temperatures=numbers("temperatures", temperatures, float),
            sessions=numbers("sessions", sessions, int),
            new_tokens=max_new_tokens,
            seed=seed,
        )
        reference = reference_of(stack.spec)
        ids = prompt_ids(prompts, n, client, reference, max_new_tokens)
        with console.status("decoding") as status:
            rows = run_exact(client, ids, plan, reference, report, lambda line: status.update(line))
        report.checks += exactness_checks(rows, report.dtype, target is None, max_new_tokens)


@app.command()
def identity(
    target: Target = None,
    heads: Heads = None,
    ids: Annotated[int, typer.Option(min=1, help="Token ids of each line, at least.")] = 100_000,
    max_new_tokens: NewTokens = 192,
    methods: Methods = None,
    budgets: Annotated[str, typer.Option(help="Comma-separated.")] = "8,60",
    sessions: Annotated[str, typer.Option(help="At once on each of two verifiers, comma-separated.")] = "8,1",
    seed: Seed = 1,
    json_file: JsonFile = None,
) -> None:
    """One SHA-256 of ids for every policy, head, budget and batch mix, beside kills and weight syncs: all plain's."""
    from coppice.bench.exact import methods_of
    from coppice.bench.identity import QUICK, SPARE, Identity, questions, two_of_each, ways_of
    from coppice.config.sections import ADAPTED_KINDS

    spec = two_of_each(spec_of(target, heads, "float32"))
    adapts, count = any(head.kind in ADAPTED_KINDS for head in spec.heads), -(-ids // max_new_tokens)
    with measuring("bench identity", spec, json_file) as (console, stack, report, client):
        drafting = methods_of(client.describe(), methods or ())[1:]
        ways, syncing = ways_of(drafting, numbers("budgets", budgets, int), numbers("sessions", sessions, int))
        syncing = syncing if adapts else []
        reference = reference_of(stack.spec)
        asked = questions(prompt_ids(None, 60, client, reference, max_new_tokens), int(SPARE * count) + 1, seed)
        with counting(console, "ids", (1 + len(ways) + len(syncing)) * count * max_new_tokens) as heard:
            identity = Identity(
                asked, max_new_tokens, heard, lambda line: console.print(line, highlight=False, soft_wrap=True)
            )
            identity.begin(stack, reference, count)
            for way in ways:
                identity.run(stack, way)
            if syncing:
                with running(replace(spec, adapt=True, extra={"adapter": QUICK}), report) as adapting:
                    for way in syncing:
                        identity.run(adapting, way)
        identity.report(report, ids)


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
    from coppice.bench.exact import answers_to, methods_of
    from coppice.bench.steps import costs, split_check

    spec = spec_of(target, heads, dtype)
    with measuring("bench steps", spec, json_file) as (_, _, report, client):
        texts = prompts_of(prompts, n, client, max_new_tokens)
        measured = []
        for method in methods_of(client.describe(), methods or ()):
            _, *answers = answers_to(client, [texts[0], *texts], policy=method, max_new_tokens=max_new_tokens)
            measured.append(costs(method, answers))
        report.add_figures("steps", "milliseconds a step: means, and the median split cost", measured)
        report.checks += map(split_check, measured)


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
    from coppice.bench.rows import forward_ms, plain_over_bare, plain_over_generate, rows_check
    from coppice.machine import this_machine

    spec = replace(spec_of(target, None, dtype), heads=())
    with measuring("bench rows", spec, json_file) as (_, stack, report, client):
        verifier = stack.settings.verifier
        placed = (spec.target, verifier.device, verifier.dtype, verifier.threads)
        by_rows, _ = forward_ms(*placed)
        lines = [{"rows": count, "ms": took, "over 1 row": took / by_rows[1]} for count, took in by_rows.items()]
        report.add_figures("rows", "one forward, one session", lines)
        reference = reference_of(stack.spec)
        ids = prompt_ids(prompts, n, client, reference, max_new_tokens)
        matrix_units = verifier.device.startswith("cuda") or "amx_bf16" in this_machine().features
        report.checks.append(rows_check(by_rows, verifier.dtype, matrix_units))
        report.checks.append(plain_over_generate(client, reference, ids, max_new_tokens, rounds))
        report.checks.append(plain_over_bare(client, lambda: forward_ms(*placed)[1], ids, max_new_tokens, rounds))


@app.command()
def acceptance(
    target: Target = None,
    heads: Heads = None,
    prompts: Prompts = None,
    n: Count = 30,
    max_new_tokens: NewTokens = 128,
    temperatures: Annotated[str, typer.Option(help="Comma-separated, at most 1.")] = "0,1",
    write: Annotated[
        bool, typer.Option(help="Put what is expected of each head into its folder's config.json.")
    ] = False,
    dtype: Dtype = None,
    json_file: JsonFile = None,
) -> None:
    """How often each head's best token is right, by depth: the orchestrator raises an alarm about a head far below."""
    from coppice.bench.acceptance import run_acceptance
    from coppice.prompts.files import demo_prompts, read_prompts

    spec = spec_of(target, heads, dtype)
    with measuring("bench acceptance", spec, json_file) as (console, _, report, client):
        chosen = spread(read_prompts(prompts) if prompts else demo_prompts(), n)
        with console.status("decoding") as status:
            run_acceptance(
                client, spec, chosen, temperatures, max_new_tokens, report, lambda line: status.update(line), write
            )


app.command()(run)
app.command()(paper)
app.command()(adapt)
app.command()(synthetic)
