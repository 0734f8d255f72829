"""The command `coppice bench synthetic`."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from coppice.bench.options import Dtype, JsonFile, finish, numbers, report_of


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
    sessions: Annotated[str, typer.Option(help="Sessions at once, comma-separated.")] = "1",
    budget: Annotated[int, typer.Option(min=1, max=64, help="Draft nodes verified a step.")] = 60,
    pipeline: Annotated[bool, typer.Option(help="Also time steps of the real services, at one session.")] = True,
    device: Annotated[str, typer.Option(help="A torch device.")] = "cpu",
    dtype: Dtype = None,
    cache: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep the random weights here; else they are made anew.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Size a deployment without trained weights: times on random ones, gains from a profile of acceptance."""
    from rich.console import Console

    from coppice.bench.synthetic import measure
    from coppice.bench.synthetic.profiles import read_profile
    from coppice.bench.synthetic.shapes import make_weights, read_shape
    from coppice.limits import check_range
    from coppice.machine import default_dtype
    from coppice.stack.spec import StackSpec

    config, kinds, counts = read_shape(shape), heads.split(","), numbers("sessions", sessions, int)
    for count in counts:
        check_range("sessions", count, 1, 128)
    alphas, kind, console = read_profile(profile, kinds), dtype or default_dtype(device), Console()
    plan = measure.SyntheticPlan(counts, budget, alphas, config.get_text_config().vocab_size)
    with ExitStack() as ended, console.status("making weights") as status:
        folder = cache or Path(ended.enter_context(tempfile.TemporaryDirectory(prefix="coppice-")))
        target, specs = make_weights(folder, config, kinds, kind, device, 0)
        spec = StackSpec(target=target, heads=specs, device=device, dtype=kind, extra=measure.room())  # type: ignore[arg-type]
        report = report_of("bench synthetic", spec)
        times = measure.measure_bare(spec, plan, lambda line: status.update(line))
        on = f"{measure.NOTE}\n{shape}, {report.dtype}, {device}"
        report.add_figures("forward_ms", f"{on}: milliseconds of a forward by rows a session", times.lines())
        report.rows = measure.expected_lines(spec, plan, times)
        title = f"{on}: expected with profile {profile}, budget {budget}"
        report.add_figures("expected", title, report.rows, {"draft_share": ".0%"})
        if pipeline and 1 in counts:
            steps = measure.measure_pipeline(spec, plan, times, report, lambda line: status.update(line))
            report.add_figures("pipeline", f"{on}: milliseconds a step of the services, one session", steps)
    assumed = {"shape": shape, "profile_name": profile, "profile": alphas, "budget": budget, "context": measure.CONTEXT}
    report.figures = {"synthetic": measure.NOTE} | assumed | report.figures
    finish(console, report, json_file)
