"""`coppice bench steps`: what splitting decoding into services costs a step, and where a step's time goes.

The second comes from the spans that the processes of a stack write. All processes of one machine share its clock, so
that one process's span ends where the next one's begins.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from coppice.client.completion import Completion
from coppice.stack.spec import StackSpec
from coppice.training.progress import Progress
from lab.measuring import Bench, Ids, asking, timed
from lab.report import Report

MIDDLE = 0.1
"""share of the steps, around the median one, that are averaged"""
ON_THREAD = {"forward", "tree", "pack", "accept"}
"""what happens on the thread of a model, beside a service's event loop"""
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
    """Add the parts of a median step of each method to the report, from the spans in a folder."""
    steps = steps_of(folder)
    medians = {method: median_step(steps[method]) for method in methods if method in steps}
    if not medians:
        report.notes.append("the extra otel shows where a step's time goes: in a checkout pip install '.[otel]'")
        return
    longest = max(medians.values(), key=len)
    lines = [
        {"lane": lane, "part": part} | {method: took.get((lane, part), 0.0) for method, took in medians.items()}
        for lane, part in longest
    ]
    report.add_figures("account", "where a median step's milliseconds go, one behind the other", lines)


Step = dict[tuple[str, str], float]
"""milliseconds of the parts of a step, one behind the other, by lane and part; lanes are event loops, the threads of
the models, and what lies between the processes"""


@dataclass(frozen=True, slots=True)
class _Span:
    service: str
    began: float
    ended: float
    parts: dict[str, float]
    """when each part of it ended"""


def steps_of(folder: Path) -> dict[str, list[Step]]:
    """The sampled steps that lie in a folder, by the policy of their request."""
    lines = [line for file in sorted(folder.glob("*.jsonl")) for line in file.read_text("utf-8").splitlines()]
    spans = sorted(map(json.loads, lines), key=lambda span: _time(span["end_time"]))
    policies: dict[str, str] = {}
    ends: dict[str, dict[str, float]] = defaultdict(dict)
    for span in spans:
        ends[span["parent_id"]][span["name"]] = _time(span["end_time"])
        if "policy" in span["attributes"]:
            policies[span["context"]["trace_id"]] = span["attributes"]["policy"]
    by_step: dict[tuple[str, int], dict[str, _Span]] = defaultdict(dict)
    for span in spans:
        if (step := span["attributes"].get("step")) is not None:
            process = span["resource"]["attributes"]["service.name"].split("-")[1]
            service = "drafter" if span["name"] == "draft" else process  # a head may live in the verifier's process
            whole = _Span(service, _time(span["start_time"]), _time(span["end_time"]), ends[span["context"]["span_id"]])
            by_step[span["context"]["trace_id"], step][service] = whole  # of several drafts the last one that came
    steps: dict[str, list[Step]] = defaultdict(list)
    for (trace, _), by_service in by_step.items():
        if parts := _in_order(by_service):
            steps[policies[trace]].append(parts)
    return steps


def _time(text: str) -> float:
    """Milliseconds."""
    return datetime.fromisoformat(text).timestamp() * 1e3


def _in_order(by_service: Mapping[str, _Span]) -> Step:
    """A step's parts, one behind the other. Empty when a span is missing."""
    step, verify, draft = (by_service.get(name) for name in ("orchestrator", "verifier", "drafter"))
    if step is None or verify is None or (draft is None and "draft" in step.parts):
        return {}
    ends: list[tuple[str, str, float]] = []

    def inside(service: _Span, thread: str) -> list[tuple[str, str, float]]:
        return [(thread if name in ON_THREAD else service.service, name, at) for name, at in service.parts.items()]

    if draft is not None and "draft" in step.parts:
        ends += [("orchestrator", "ask", step.parts["ask"]), ("wire", "to the drafter", draft.began)]
        ends += [*inside(draft, "head"), ("wire", "from the drafter", step.parts["draft"])]
    ends += [("orchestrator", name, step.parts[name]) for name in ("choose", "send")]
    ends += [("wire", "to the verifier", verify.began), *inside(verify, "target")]
    ends += [("wire", "from the verifier", step.parts["verify"]), ("orchestrator", "commit", step.ended)]
    parts, reached = Step(), step.began  # what was begun before the step counts from there on
    for lane, name, ended in ends:
        parts[lane, name] = max(0.0, ended - reached)
        reached = max(reached, ended)
    return parts


def median_step(steps: Sequence[Step]) -> Step:
    """The mean of the steps around the median one, of those that have the same parts as most."""
    (names, _), *_ = Counter(map(tuple, steps)).most_common(1)
    alike = sorted((step for step in steps if tuple(step) == names), key=lambda step: sum(step.values()))
    half = max(1, int(len(alike) * MIDDLE / 2))
    middle = alike[max(0, len(alike) // 2 - half) : len(alike) // 2 + half]
    return {name: statistics.fmean(step[name] for step in middle) for name in names}
