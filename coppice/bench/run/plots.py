"""The pictures of `coppice bench run`, one PNG a question."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coppice.bench.run.report import ALL, FEW_REPEATS, RunRow, crossover, grouped

Draw = Callable[[Sequence[Any], Sequence[RunRow]], None]


def draw_all(rows: Sequence[RunRow], folder: Path) -> list[Path]:
    """Draw speedups, alpha, a step's parts and, if there are several numbers of sessions, what these do."""
    folder.mkdir(parents=True, exist_ok=True)
    cells = grouped(rows, lambda row: str(row.cell))
    files = [
        _panels(folder / "speedup.png", cells, _speedup),
        _panels(folder / "alpha.png", cells, _alpha),
        _panels(folder / "step.png", cells, _step),
    ]
    if len({row.cell.sessions for row in rows}) > 1:
        groups = grouped(rows, lambda row: row.group)
        files.append(_panels(folder / "sessions.png", groups, _sessions, columns=2))
    return files


def _panels(file: Path, groups: Mapping[str, Sequence[RunRow]], draw: Draw, columns: int = 1) -> Path:
    """Write a picture with a line of panels for each group of rows."""
    from matplotlib.figure import Figure

    width = max(7.0, 2 + 0.8 * max(map(len, groups.values())))
    figure = Figure(figsize=(columns * width, 3.6 * len(groups)), layout="constrained")
    lines = figure.subplots(len(groups), columns, squeeze=False)
    for (where, rows), line in zip(groups.items(), lines, strict=True):
        draw(line, rows)
        line[0].set_title(where, loc="left")
        if line[-1].get_legend_handles_labels()[1]:
            line[-1].legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0)
    figure.savefig(file, dpi=130)
    return file


def _speedup(panels: Sequence[Any], rows: Sequence[RunRow]) -> None:
    names = [*(name for name in rows[0].figures if name not in (ALL, FEW_REPEATS)), ALL]
    width = 0.85 / len(rows)
    for number, row in enumerate(rows):
        ratios = [row.figures[name].over_plain for name in names]
        heights = [ratio.value if ratio else 0.0 for ratio in ratios]
        at = np.arange(len(names)) + (number - (len(rows) - 1) / 2) * width
        panels[0].bar(at, heights, 0.95 * width, color=f"C{number}", label=row.name)
    panels[0].set_xticks(range(len(names)), names)
    panels[0].set_ylabel("speedup over plain")
    panels[0].axhline(1, color="0.5", linewidth=0.8)


def _alpha(panels: Sequence[Any], rows: Sequence[RunRow]) -> None:
    for number, row in enumerate(rows):
        if row.row.heads and row.accepted:
            depths = range(1, len(row.accepted) + 1)
            panels[0].plot(depths, row.accepted, "o-", color=f"C{number}", label=row.name)
    panels[0].set(xlabel="depth k", ylabel="alpha_k of the verified tree", ylim=(0, 1.02))


def _step(panels: Sequence[Any], rows: Sequence[RunRow]) -> None:
    """A mean step of every method, its parts stacked."""
    ours = [row for row in rows if row.parts_ms]
    bottom = np.zeros(len(ours))
    for part in ours[0].parts_ms:
        heights = np.array([row.parts_ms[part] for row in ours])
        panels[0].bar(range(len(ours)), heights, 0.7, bottom=bottom, label=part)
        bottom += heights
    panels[0].set_xticks(range(len(ours)), [row.name for row in ours], rotation=20, ha="right")
    panels[0].set_ylabel("milliseconds a step")


def _sessions(panels: Sequence[Any], rows: Sequence[RunRow]) -> None:
    """Throughput and latency; a cross where plain overtakes."""
    for number, (method, its) in enumerate(grouped(rows, lambda row: row.name).items()):
        counts, colour = [row.cell.sessions for row in its], f"C{number}"
        speeds = [row.row.tokens_per_s for row in its]
        panels[0].plot(counts, speeds, "o-", color=colour)
        panels[1].plot(counts, [row.answer_ms for row in its], "o-", color=colour, label=method)
        slower = crossover(its)
        if slower is not None and method != "plain":
            panels[0].plot(slower, np.interp(slower, counts, speeds), "X", color=colour, markersize=11)
    panels[0].set(xlabel="sessions; X: plain is faster from here on", ylabel="tokens/s of all")
    panels[1].set(xlabel="sessions", ylabel="milliseconds an answer")
