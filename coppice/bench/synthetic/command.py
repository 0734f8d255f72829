"""The command `coppice bench synthetic`."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from coppice.bench.options import Dtype, JsonFile, MarkdownFile, Plots, Seed, finish, numbers


def synthetic(
    shape: Annotated[
        str, typer.Option(metavar="NAME|DIR", help="demo, 0.5b, llama-3.1-8b, qwen3-8b, or a folder with config.json.")
    ] = "demo",
    heads: Annotated[str, typer.Option(metavar="KIND,...", help="Kinds of heads, at their default shapes.")] = (
        "eagle3,specblock"
    ),
    profile: Annotated[
        str,
        typer.Option(
            help="Acceptance by depth, such as 0.8,0.7,0.6, or that of a target in SpecBlock's table 1: llama-3.1-8b, "
            "llama-3.1-8b-t1, qwen3-8b, qwen3-8b-t1."
        ),
    ] = "llama-3.1-8b",
    rows: Annotated[str, typer.Option(help="Rows of a forward, comma-separated.")] = "1,16,32,60,90",
    sessions: Annotated[str, typer.Option(help="Sessions at once, comma-separated.")] = "1",
    budget: Annotated[int, typer.Option(min=1, max=64, help="Draft nodes verified a step.")] = 60,
    context: Annotated[int, typer.Option(min=8, help="Tokens before the timed rows.")] = 300,
    pipeline: Annotated[bool, typer.Option(help="Also time steps of the real services, at one session.")] = True,
    n: Annotated[int, typer.Option("--n", min=1, help="Answers through the services, of each method.")] = 3,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Tokens of an answer, drawn or made.")] = 48,
    device: Annotated[str, typer.Option(help="A torch device.")] = "cpu",
    dtype: Dtype = None,
    cache: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep the random weights here; else they are made anew.")
    ] = None,
    seed: Seed = 0,
    json_file: JsonFile = None,
    markdown: MarkdownFile = None,
    plots: Plots = None,
) -> None:
    """Size a deployment without trained weights: times on random ones, gains from a profile of acceptance."""
    from rich.console import Console

    from coppice.bench.synthetic import synthetic as measure
    from coppice.bench.synthetic.profiles import read_profile
    from coppice.bench.synthetic.report import SyntheticReport, compare, draw_all
    from coppice.bench.synthetic.shapes import make_weights, read_shape
    from coppice.limits import MAX_TREE_NODES, check_range
    from coppice.machine import default_dtype
    from coppice.stack.spec import StackSpec

    config, kinds = read_shape(shape), heads.split(",")
    counts, at_once = numbers("rows", rows, int), numbers("sessions", sessions, int)
    for name, values, most in (("rows", counts, MAX_TREE_NODES), ("sessions", at_once, 128)):
        for value in values:
            check_range(name, value, 1, most)
    told = read_profile(profile, kinds)
    vocab = config.get_text_config().vocab_size
    plan = measure.SyntheticPlan(counts, at_once, budget, context, max_new_tokens, told, vocab, seed)
    console, kind = Console(), dtype or default_dtype(device)
    with ExitStack() as ended, console.status("making weights") as status:
        folder = cache or Path(ended.enter_context(tempfile.TemporaryDirectory(prefix="coppice-")))
        target, specs = make_weights(folder, config, kinds, kind, device, seed)
        spec = StackSpec(target=target, heads=specs, device=device, dtype=kind, extra=measure.room(plan))  # type: ignore[arg-type]
        report = SyntheticReport("bench synthetic", kind, spec.settings().verifier.threads, device)
        times = measure.measure_bare(spec, plan, lambda line: status.update(line))
        expected = measure.expected_rows(spec, plan, times)
        report.rows += expected
        report.figures = {
            "shape": shape,
            "profile_name": profile,
            "profile": told,
            "budget": budget,
            "context": context,
            "forward_ms": times.by_sessions(),
            "specblock_over_eagle3": compare(expected),
        }
        if pipeline and 1 in at_once:
            measure.measure_pipeline(spec, plan, times, report, n, lambda line: status.update(line))
    if plots:
        draw_all(report, plots)
    finish(console, report, json_file, markdown)
