"""Draws one trace of the demo as docs/trace.svg, from spans that its processes export: `python -m tests.trace_picture`.

The collector is that of tests/pipeline/test_seeing.py.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from coppice.stack.launch import Stack
from coppice.stack.spec import HeadSpec, StackSpec
from tests.pipeline.test_seeing import APPLICATION, collecting, facts_of

FILE = Path(__file__).parents[1] / "docs" / "trace.svg"
HEADS = ("specblock-code", "lookup")
PROMPT, NEW_TOKENS = "def read_lines(path):\n", 48
ANSWERS = 6
COLOURS = {
    "application": "#000000",
    "coppice-orchestrator": "#0072B2",
    "coppice-verifier": "#E69F00",
    f"coppice-drafter-{HEADS[0]}": "#009E73",
    f"coppice-drafter-{HEADS[1]}": "#CC79A7",
}


def traced() -> list[tuple[str, Span]]:
    """Spans of the fastest of a few answers of the demo: the least disturbed one."""
    with collecting() as (collector, endpoint):
        told = {"telemetry.otlp_endpoint": endpoint}
        extra = dict.fromkeys(("verifier", "drafter", "orchestrator"), told)
        heads = tuple(map(HeadSpec.shipped, HEADS))
        with Stack(StackSpec.demo(heads=heads, verifier_threads=1, drafter_threads=1, extra=extra)) as stack:
            for _ in range(ANSWERS):
                command = [sys.executable, "-c", APPLICATION, stack.address, endpoint, str(NEW_TOKENS), PROMPT]
                subprocess.run(command, check=True)
    spans = sorted(collector.spans, key=lambda one: one[1].start_time_unix_nano)
    asked = [span for _, span in spans if span.name == "generate"]
    fastest = min(asked, key=lambda span: span.end_time_unix_nano - span.start_time_unix_nano).trace_id
    return [one for one in spans if one[1].trace_id == fastest and one[1].name != "question"]


def in_order(spans: list[tuple[str, Span]]) -> list[tuple[int, str, Span]]:
    """Every span behind the one it is below, with its depth."""
    known = {span.span_id for _, span in spans}
    found: list[tuple[int, str, Span]] = []

    def add(above: bytes, depth: int) -> None:
        for service, span in spans:
            if (span.parent_span_id if span.parent_span_id in known else b"") == above:
                found.append((depth, service, span))
                add(span.span_id, depth + 1)

    add(b"", 0)
    return found


def draw(rows: list[tuple[int, str, Span]]) -> Figure:
    """A line a span: its name, indented, and its time."""
    began = min(span.start_time_unix_nano for _, _, span in rows)
    figure = Figure(figsize=(11, 0.19 * len(rows) + 1.2), layout="constrained")
    axes = figure.add_subplot()
    drawn = set()
    for number, (depth, service, span) in enumerate(rows):
        start, length = span.start_time_unix_nano - began, span.end_time_unix_nano - span.start_time_unix_nano
        label = None if service in drawn else service.removeprefix("coppice-")
        drawn.add(service)
        axes.barh(
            number, length / 1e6, left=start / 1e6, height=0.7, label=label, color=COLOURS[service], ec=COLOURS[service]
        )
        step = facts_of(span).get("step", "")
        name = span.name.rpartition("/")[2]
        axes.annotate(
            f"{'    ' * depth}{name} {step}".rstrip(),
            (-0.24, number),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize=8,
        )
        axes.annotate(f" {length / 1e6:.2f}", ((start + length) / 1e6, number), va="center", fontsize=6)
    axes.set(ylim=(len(rows), -1), yticks=[], xlabel="ms since the client asked; the number at a bar is its length")
    axes.grid(axis="x", alpha=0.3)
    figure.legend(loc="outside upper center", ncols=len(drawn), frameon=False)
    axes.spines[["top", "right", "left"]].set_visible(False)
    return figure


if __name__ == "__main__":
    with rc_context({"svg.hashsalt": "coppice", "svg.fonttype": "none"}):
        figure = draw(in_order(traced()))
        figure.savefig(FILE, metadata={"Date": None})
        if len(sys.argv) > 1:
            figure.savefig(sys.argv[1])
