"""Where a step's time goes, from wire-in to wire-out: read from the spans that the processes of a stack wrote.

All processes of one machine share its clock, so that one process's span ends where the next one's begins.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

MIDDLE = 0.1
"""share of the steps, around the median one, that are averaged"""
ON_THREAD = {"forward", "tree", "pack", "accept"}


class Part(NamedTuple):
    """A part of a step: what happens on which lane, from when to when, in milliseconds since the step began."""

    lane: str
    name: str
    began: float
    ended: float


@dataclass(frozen=True, slots=True)
class _Span:
    name: str
    service: str
    began: float
    ended: float
    step: int
    parts: dict[str, tuple[float, float]]


def spans_of(folder: Path) -> Iterator[dict[str, Any]]:
    """The spans in a folder's files, see `telemetry.otlp_endpoint`."""
    for file in sorted(folder.glob("*.jsonl")):
        yield from map(json.loads, file.read_text(encoding="utf-8").splitlines())


def steps_of(folder: Path) -> dict[str, list[list[Part]]]:
    """The sampled steps that lie in a folder, by the policy of their request, each in the order of its parts."""
    spans = list(spans_of(folder))
    policies: dict[str, str] = {}
    children: dict[str, dict[str, tuple[float, float]]] = defaultdict(dict)
    for span in spans:
        children[span["parent_id"]][span["name"]] = _time(span["start_time"]), _time(span["end_time"])
        if "policy" in span["attributes"]:
            policies[span["context"]["trace_id"]] = span["attributes"]["policy"]
    by_step: dict[tuple[str, int], list[_Span]] = defaultdict(list)
    for span in spans:
        if (step := span["attributes"].get("step")) is not None:
            whole = _time(span["start_time"]), _time(span["end_time"])
            process = span["resource"]["attributes"]["service.name"].split("-")[1]
            service = "drafter" if span["name"] == "draft" else process  # a head may live in the verifier's process
            found = _Span(span["name"], service, *whole, step, children[span["context"]["span_id"]])
            by_step[span["context"]["trace_id"], step].append(found)
    steps: dict[str, list[list[Part]]] = defaultdict(list)
    for (trace, _), parts in by_step.items():
        if chain := _chain(parts):
            steps[policies[trace]].append(chain)
    return steps


def _time(text: str) -> float:
    """Milliseconds."""
    return datetime.fromisoformat(text).timestamp() * 1e3


def _chain(spans: Sequence[_Span]) -> list[Part]:
    """A step's parts, one behind the other; of several drafts the last one that came. Empty when a span is missing."""
    by_service = {span.service: span for span in sorted(spans, key=lambda span: span.ended)}
    step, verify, draft = (by_service.get(name) for name in ("orchestrator", "verifier", "drafter"))
    if step is None or verify is None or (draft is None and "draft" in step.parts):
        return []
    parts: list[Part] = []

    def add(lane: str, name: str, ended: float) -> None:
        before = parts[-1].ended if parts else 0.0  # what was begun before the step counts from there on
        parts.append(Part(lane, name, before, max(before, ended - step.began)))

    def inside(service: _Span, thread: str) -> None:
        for name, (_, ended) in service.parts.items():
            add(thread if name in ON_THREAD else service.service, name, ended)

    if draft is not None and "draft" in step.parts:
        add("orchestrator", "ask", step.parts["ask"][1])
        add("wire", "to the drafter", draft.began)
        inside(draft, "head")
        add("wire", "from the drafter", step.parts["draft"][1])
    for name in ("choose", "send"):
        add("orchestrator", name, step.parts[name][1])
    add("wire", "to the verifier", verify.began)
    inside(verify, "target")
    add("wire", "from the verifier", step.parts["verify"][1])
    add("orchestrator", "commit", step.ended)
    return parts


def median_step(steps: Sequence[Sequence[Part]]) -> list[Part]:
    """The mean of the steps around the median one, of those that have the same parts as most."""
    kinds: dict[tuple[str, ...], list[Sequence[Part]]] = defaultdict(list)
    for step in steps:
        kinds[tuple(part.name for part in step)].append(step)
    _, most = max(kinds.items(), key=lambda kind: len(kind[1]))
    alike = sorted(most, key=lambda step: step[-1].ended)
    half = max(1, int(len(alike) * MIDDLE / 2))
    middle = alike[max(0, len(alike) // 2 - half) : len(alike) // 2 + half]
    return [
        Part(
            parts[0].lane,
            parts[0].name,
            *(sum(times) / len(middle) for times in zip(*(p[2:] for p in parts), strict=True)),
        )
        for parts in zip(*middle, strict=True)
    ]
