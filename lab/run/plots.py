"""The pictures of `coppice bench run`, one PNG a question."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coppice.pictures.style import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, Look, looks
from lab.run.report import ALL, FEW_REPEATS, RunRow, crossover, grouped

Looks = Mapping[str, Look]
Draw = Callable[[Sequence[Any], Sequence[RunRow], Looks], None]

PART_COLOURS = (BLUE, ORANGE, GREEN, SKY, PURPLE, VERMILION, GREY, BLACK)
BAR_INCHES = 0.24


def draw_all(rows: Sequence[RunRow], folder: Path) -> list[Path]:
    """Draw speedups, alpha, a step's parts and, if there are several numbers of sessions, what these do."""
    folder.mkdir(parents=True, exist_ok=True)
    styles = looks(row.name for row in rows)
    cells = grouped(rows, lambda row: str(row.cell))
    lines = 0.9 + BAR_INCHES * max(map(len, cells.values()))
    files = [
        _panels(folder / "speedup.png", cells, styles, _speedup, (2.6, lines), columns=len(_sets(rows))),
        _panels(folder / "alpha.png", cells, styles, _alpha, (7.0, 3.6)),
        _panels(folder / "step.png", cells, styles, _step, (9.0, lines)),
    ]
    if len({row.cell.sessions for row in rows}) > 1:
        groups = grouped(rows, lambda row: row.group)
        files.append(_panels(folder / "sessions.png", groups, styles, _sessions, (5.0, 3.8), columns=2))
    return files


def _panels(
    file: Path,
    groups: Mapping[str, Sequence[RunRow]],
    styles: Looks,
    draw: Draw,
    inches: tuple[float, float],
    columns: int = 1,
) -> Path:
    """Write a picture with a line of panels, each of `inches`, for each group of rows."""
    from matplotlib.figure import Figure

    size = (1.6 + columns * inches[0], inches[1] * len(groups))
    figure = Figure(figsize=size, layout="constrained")
    lines = figure.subplots(len(groups), columns, squeeze=False)
    for (where, rows), line in zip(groups.items(), lines, strict=True):
        draw(line, rows, styles)
        above = "\n" if line[0].get_title() else ""
        line[0].set_title(where + above, loc="left", fontsize="medium")
        for panel in line:
            panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=130)
    return file


def _sets(rows: Sequence[RunRow]) -> list[str]:
    """The sets of answers that speedups are drawn of, all of them last."""
    return [*(name for name in rows[0].figures if name not in (ALL, FEW_REPEATS)), ALL]


def _speedup(panels: Sequence[Any], rows: Sequence[RunRow], styles: Looks) -> None:
    """A bar for each method, with its 95%, in a panel for each set of answers."""
    for column, (panel, name) in enumerate(zip(panels, _sets(rows), strict=True)):
        for at, row in enumerate(rows):
            ratio = row.figures[name].over_plain
            if ratio is None:
                continue
            panel.barh(at, ratio.value, 0.72, color=styles[row.name].colour)
            bounds = [[ratio.value - ratio.low], [ratio.high - ratio.value]]
            panel.errorbar(ratio.value, at, xerr=bounds, color="0.25", linewidth=1, capsize=2)
            panel.annotate(f"{ratio.value:.2f}", (ratio.high, at), (4, 0), textcoords="offset points", va="center")
        _names(panel, rows if column == 0 else [])
        panel.axvline(1, color="0.5", linewidth=0.8)
        panel.margins(x=0.16)
        panel.set_xlim(left=0)
        panel.set(title=name, xlabel="speedup over plain")


def _names(panel: Any, rows: Sequence[RunRow]) -> None:
    """Write the methods beside their bars, the first one on top."""
    panel.set_yticks(range(len(rows)), [row.name for row in rows])
    panel.invert_yaxis()


def _alpha(panels: Sequence[Any], rows: Sequence[RunRow], styles: Looks) -> None:
    drawn = [row for row in rows if row.row.heads and row.accepted]
    for row in sorted(drawn, key=lambda row: -row.accepted[0]):
        panels[0].plot(range(1, len(row.accepted) + 1), row.accepted, **styles[row.name].drawn, label=row.name)
    panels[0].set(xlabel="depth k", ylabel="alpha_k of the verified tree", ylim=(0, 1.02))
    _legend(panels[0])


def _step(panels: Sequence[Any], rows: Sequence[RunRow], styles: Looks) -> None:
    """A mean step of every method: its parts behind each other, its total at the end."""
    ours = [row for row in rows if row.parts_ms]
    left = np.zeros(len(ours))
    for part, colour in zip(ours[0].parts_ms, PART_COLOURS, strict=False):
        widths = np.array([row.parts_ms[part] for row in ours])
        panels[0].barh(range(len(ours)), widths, 0.72, left=left, color=colour, label=part)
        left += widths
    for at, total in enumerate(left):
        panels[0].annotate(f"{total:.1f}", (total, at), (4, 0), textcoords="offset points", va="center")
    _names(panels[0], ours)
    panels[0].margins(x=0.08)
    panels[0].set_xlabel("milliseconds a step")
    _legend(panels[0])


def _sessions(panels: Sequence[Any], rows: Sequence[RunRow], styles: Looks) -> None:
    """Throughput and latency; a cross where plain overtakes."""
    counts = sorted({row.cell.sessions for row in rows})
    methods = grouped(rows, lambda row: row.name)
    crossed = False
    for method, its in sorted(methods.items(), key=lambda one: -one[1][-1].row.tokens_per_s):
        own, look = [row.cell.sessions for row in its], styles[method]
        speeds = [row.row.tokens_per_s for row in its]
        panels[0].plot(own, speeds, **look.drawn)
        panels[1].plot(own, [row.answer_ms for row in its], **look.drawn, label=method)
        slower = crossover(its)
        if slower is not None and method != "plain":
            label = None if crossed else "plain is faster from here on"
            place = (slower, np.interp(slower, own, speeds))
            panels[0].plot(*place, "X", color=look.colour, markeredgecolor="white", markersize=12, label=label)
            crossed = True
    for panel, title, unit in zip(panels, ("throughput", "latency"), ("tokens/s of all", "ms an answer"), strict=True):
        panel.set_xscale("log", base=2)
        panel.set_xticks(counts, map(str, counts))
        panel.set_ylim(bottom=0)
        panel.set(title=title, xlabel="sessions", ylabel=unit)
    if crossed:
        panels[0].legend(fontsize="small")
    _legend(panels[1])


def _legend(panel: Any) -> None:
    """Name what is drawn beside the panel, in the order of drawing."""
    panel.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0, frameon=False)
