"""`coppice bench steps`: what splitting decoding into services costs a step, and where a step's time goes."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from psutil import Process

from coppice.client.client import Client
from coppice.client.completion import Completion
from coppice.stack.launch import Stack
from coppice.stack.spec import StackSpec
from coppice.training.progress import Progress
from lab.asking import GREEDY, Ids, asking
from lab.measuring import Bench
from lab.report import Check, Report
from lab.timeline import Part, median_step, steps_of
from lab.turns import compare

LANES = ("orchestrator", "drafter", "head", "wire", "verifier", "target")
"""event loops, the threads of the models, and what lies between the processes"""


def draw(steps: dict[str, list[Part]], file: Path) -> None:
    """Draw a median step of each method into a file."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from coppice.pictures.style import BLUE, GREEN, GREY, ORANGE

    colours = {
        "orchestrator": BLUE,
        "drafter": GREEN,
        "head": GREEN,
        "verifier": ORANGE,
        "target": ORANGE,
        "wire": GREY,
    }
    with rc_context({"font.size": 8, "svg.fonttype": "none"}):
        figure = Figure(figsize=(9, 1.7 * len(steps) + 0.4), layout="constrained")
        all_axes = figure.subplots(len(steps), 1, squeeze=False, sharex=True)[:, 0]
        for axes, (method, parts) in zip(all_axes, steps.items(), strict=True):
            lanes = [lane for lane in LANES if any(part.lane == lane for part in parts)]
            for part in parts:
                at, width = lanes.index(part.lane), part.ended - part.began
                model = part.name == "forward"
                axes.barh(
                    at, width, left=part.began, color=colours[part.lane], alpha=0.35 if model else 1.0, height=0.8
                )
                if width > 0.06 * parts[-1].ended:
                    axes.text(part.began + width / 2, at, part.name, ha="center", va="center", fontsize=6)
            axes.set_yticks(range(len(lanes)), lanes)
            axes.invert_yaxis()
            axes.set_title(f"{method}: {parts[-1].ended:.1f} ms", loc="left", fontsize=8)
            axes.spines[["top", "right"]].set_visible(False)
        all_axes[-1].set_xlabel("ms since the step began")
        figure.savefig(file)


SPLIT_BOUND_MS = 1.2
APART, TOGETHER = "apart", "together"  # heads in processes of their own, and in the verifier's
SAMPLED = 2  # every so many steps have spans
PARTS = {
    "draft": "draft",
    "wire": "transport",
    "verify": "verify",
    "accept": "accept",
    "commit": "commit",
    "T_M": "target_forward",
    "T_D": "head_forward",
}
"""our names, and those of Timings"""


def run_steps(bench: Bench, prompts: Sequence[Ids], methods: Sequence[str], apart: Stack | None = None) -> None:
    """Add a line and the goal of each method to the report, at one session.

    apart: a stack with the same heads in processes of their own. It answers in turns with the one of `bench`, and the
    report gets the tokens and the memory of both.
    """
    stacks = {APART: apart, TOGETHER: bench.stack} if apart else {TOGETHER: bench.stack}
    with ExitStack() as ended:
        clients = {heads: ended.enter_context(Client(stack.address)) for heads, stack in stacks.items()}
        ways = {
            (method, heads): asking(client, bench.options.max_new_tokens, policy=method)
            for method in methods
            for heads, client in clients.items()
        }
        with Progress("answers", len(ways) * (1 + len(prompts))) as progress:
            answers = compare(ways, [([ids], GREEDY) for ids in prompts], progress, bench.report.calm)
    lines = {way: costs(way[0], its) for way, its in answers.items()}
    bench.report.goals += (
        Check.at_most(f"median split cost of {method}, ms", lines[method, TOGETHER]["split"], SPLIT_BOUND_MS)
        for method in methods
    )
    if apart:
        lines = {way: {"heads": way[1], **line, **speed(answers[way])} for way, line in lines.items()}
        memories = [{"heads": heads, **memory(stack)} for heads, stack in stacks.items()]
        bench.report.add_figures(
            "memory", "MB that a stack's processes share with no other, after the answers", memories
        )
    bench.report.add_figures(
        "steps",
        "milliseconds a step: means, and the median split cost",
        [*lines.values()],
        {"tau": ".2f", "tokens/s": ".1f"},
    )


def speed(answers: Sequence[Completion]) -> dict[str, float]:
    """Tokens a step of all answers, and their median tokens a second."""
    tau = sum(answer.new_tokens for answer in answers) / sum(answer.steps for answer in answers)
    return {"tau": tau, "tokens/s": statistics.median(answer.tokens_per_s for answer in answers)}


def memory(stack: Stack) -> dict[str, Any]:
    """How many megabytes the target's and the heads' processes hold of their own, and all of a stack."""
    own = {name: Process(ready.pid).memory_full_info().uss / 1e6 for name, ready in stack.services.items()}
    models = sum(size for name, size in own.items() if not stack.is_orchestrator(name))
    return {"target and heads": models, "all": sum(own.values())}


def costs(method: str, answers: Sequence[Completion]) -> dict[str, Any]:
    """Means over the steps of some answers, and the median split cost, in milliseconds."""
    timings = [answer.timings for answer in answers]
    steps = sum(answer.steps for answer in answers)
    means = {part: sum(getattr(timing, f"{its}_ns") for timing in timings) / steps / 1e6 for part, its in PARTS.items()}
    step = sum(sum(timing.step_ns) for timing in timings) / steps / 1e6
    split = statistics.median(split for timing in timings for split in timing.split_ns) / 1e6
    return {"method": method, "step": step, **means, "split": split}


def traced(spec: StackSpec, folder: Path) -> StackSpec:
    """The spec with processes that write spans of some steps into a folder; as it is without OpenTelemetry."""
    if importlib.util.find_spec("opentelemetry") is None:
        return spec
    told = {"telemetry.otlp_endpoint": f"file:{folder}", "telemetry.step_interval": SAMPLED}
    return replace(
        spec, extra={role: {**spec.extra.get(role, {}), **told} for role in ("orchestrator", "verifier", "drafter")}
    )


def account(report: Report, folder: Path, methods: Sequence[str], picture: Path | None) -> None:
    """Add the parts of a median step of each method to the report, from the spans in a folder; and draw them."""
    steps = steps_of(folder)
    medians = {method: median_step(steps[method]) for method in methods if method in steps}
    if not medians:
        report.notes.append(
            "where a step's time goes is measured with the extra otel: in a checkout pip install '.[otel]'"
        )
        return
    longest = max(medians.values(), key=len)
    lines: list[dict[str, Any]] = [{"lane": part.lane, "part": part.name} for part in longest]
    for method, parts in medians.items():
        took = {(part.lane, part.name): part.ended - part.began for part in parts}
        for line in lines:
            line[method] = took.get((line["lane"], line["part"]), 0.0)
    report.add_figures("account", "where a median step's milliseconds go, one behind the other", lines)
    if picture:
        draw(medians, picture)


def parts_of(step: Mapping[str, Any]) -> dict[str, float]:
    """A mean step in milliseconds, cut into what the models compute and what is done around them."""
    head_forward = min(step["T_D"], step["draft"])
    target_forward = min(step["T_M"], step["verify"])
    return {
        "head forward": head_forward,
        "rest of drafting": step["draft"] - head_forward,
        "target forward": target_forward,
        "rest of verifying": step["verify"] - target_forward,
        "transport": step["wire"],
        "accept": step["accept"],
        "commit": step["commit"],
    }
