"""`coppice bench steps`: what splitting decoding into services costs a step, and where a step's time goes.

The second comes from the spans that the processes of a stack write.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from coppice.client.completion import Completion
from coppice.stack.spec import StackSpec
from coppice.training.progress import Progress
from lab.measuring import Bench, Ids, asking, timed
from lab.report import Report

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
FORWARDS = ("head forward", "target forward")
"""what the models compute of a step"""


def run_steps(bench: Bench, prompts: Sequence[Ids], methods: Sequence[str]) -> None:
    """Add a line of each method to the report, at one session."""
    ways = {method: asking(bench.client, bench.options.max_new_tokens, policy=method) for method in methods}
    with Progress("answers", len(ways) * (1 + len(prompts))) as progress:
        answers = timed(ways, prompts, progress)
    lines = [costs(method, its) for method, its in answers.items()]
    bench.report.add_figures("steps", "milliseconds a step: means, and the median split cost", lines)


def costs(method: str, answers: Sequence[Completion]) -> dict[str, Any]:
    """Means over the steps of some answers, and the median split cost, in milliseconds."""
    timings = [answer.timings for answer in answers]
    steps = sum(answer.steps for answer in answers)
    means = {part: sum(getattr(timing, f"{its}_ns") for timing in timings) / steps / 1e6 for part, its in PARTS.items()}
    step = sum(sum(timing.step_ns) for timing in timings) / steps / 1e6
    split = statistics.median(split for timing in timings for split in timing.split_ns) / 1e6
    return {"method": method, "step": step, **means, "split": split}


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


def traced(spec: StackSpec, folder: Path) -> StackSpec:
    """The spec with processes that write spans of some steps into a folder; as it is without OpenTelemetry."""
    if importlib.util.find_spec("opentelemetry") is None:
        return spec
    settings = {"telemetry.otlp_endpoint": f"file:{folder}"}
    roles = ("orchestrator", "verifier", "drafter")
    return replace(spec, extra={role: {**spec.extra.get(role, {}), **settings} for role in roles})


def account(report: Report, folder: Path, methods: Sequence[str]) -> None:
    """Add the median time of each part of a step to the report, by method, from the spans in a folder."""
    lines = [line for file in sorted(folder.glob("*.jsonl")) for line in file.read_text("utf-8").splitlines()]
    spans = sorted(map(json.loads, lines), key=lambda span: span["start_time"])
    policies = {
        span["context"]["trace_id"]: span["attributes"]["policy"] for span in spans if "policy" in span["attributes"]
    }
    steps = {span["context"]["span_id"]: span for span in spans if "step" in span["attributes"]}
    took: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: {method: [] for method in methods})
    for span in spans:
        step, method = steps.get(span["parent_id"]), policies.get(span["context"]["trace_id"], "")
        if step and method in methods:
            process = step["resource"]["attributes"]["service.name"].removeprefix("coppice-")
            service = "drafter" if step["name"] == "draft" else process  # a head may live in the verifier's process
            took[service, span["name"]][method].append(_time(span["end_time"]) - _time(span["start_time"]))
    if not took:
        report.notes.append("the extra otel shows where a step's time goes: in a checkout pip install '.[otel]'")
        return
    medians = [
        {"service": service, "part": part} | {name: statistics.median(its) for name, its in by_method.items() if its}
        for (service, part), by_method in took.items()
    ]
    report.add_figures("account", "median milliseconds of the parts of a step", medians)


def _time(text: str) -> float:
    """Milliseconds."""
    return datetime.fromisoformat(text).timestamp() * 1e3
