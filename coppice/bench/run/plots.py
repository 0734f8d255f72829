"""The pictures of `coppice bench run`, one PNG a question."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coppice.bench.report import Row
from coppice.bench.run.report import ALL, RunRow, cells, crossover

Draw = Callable[[Any, Sequence[Any]], None]


def draw_all(rows: Sequence[RunRow], folder: Path) -> list[Path]:
    """Draw what the rows can show into a folder; a panel for each temperature, budget and number of sessions."""
    folder.mkdir(parents=True, exist_ok=True)
    by_cell = cells(rows)
    files = [
        panels(folder / "speedup.png", by_cell, _speedup, bars=True),
        panels(folder / "tau_and_draft_share.png", by_cell, _tau_and_share, columns=2, bars=True),
        panels(folder / "alpha.png", by_cell, _alpha),
        panels(folder / "step.png", by_cell, step_bars, bars=True),
    ]
    if len({row.cell_budget for row in rows}) > 1:
        files.append(panels(folder / "tau_by_budget.png", _grouped(rows, "sessions"), _tau_by_budget))
    if len({row.sessions for row in rows}) > 1:
        by_budget = _grouped(rows, "cell_budget")
        files.append(panels(folder / "sessions.png", by_budget, _throughput_and_latency, columns=2))
    return files


def _grouped(rows: Iterable[RunRow], name: str) -> dict[str, list[RunRow]]:
    """By temperature and one more property."""
    found: dict[str, list[RunRow]] = {}
    for row in rows:
        where = f"T={row.temperature:g}, {name.removeprefix('cell_')} {getattr(row, name)}"
        found.setdefault(where, []).append(row)
    return found


def panels(file: Path, groups: Mapping[str, Sequence[Any]], draw: Draw, columns: int = 1, bars: bool = False) -> Path:
    """A row of panels for each group; `draw` gets them (one alone as itself). Bars need room."""
    from matplotlib.figure import Figure

    width = max(7.0, 2 + 0.8 * max(map(len, groups.values()))) if bars else 7.0
    figure = Figure(figsize=(columns * width, 3.6 * len(groups)), layout="constrained")
    lines = figure.subplots(len(groups), columns, squeeze=False)
    for (where, rows), line in zip(groups.items(), lines, strict=True):
        draw(line if columns > 1 else line[0], rows)
        line[0].set_title(where, loc="left")
    figure.savefig(file, dpi=130)
    return file


def _bars(axes: Any, rows: Sequence[RunRow], value: Callable[[Any], float], label: str, legend: bool = True) -> None:
    """Bars of every benchmark and of all answers, a colour for each method."""
    names = [*rows[0].benchmarks, ALL]
    width = 0.85 / len(rows)
    for number, row in enumerate(rows):
        heights = [value(row.benchmarks.get(name) or row.figures[ALL]) for name in names]
        at = np.arange(len(names)) + (number - (len(rows) - 1) / 2) * width
        axes.bar(at, heights, 0.95 * width, color=colour(number), label=short(row))
    axes.set_xticks(range(len(names)), names)
    axes.set_ylabel(label)
    if legend:
        beside(axes)


def _speedup(axes: Any, rows: Sequence[RunRow]) -> None:
    _bars(axes, rows, lambda figures: figures.over_plain.value if figures.over_plain else 0.0, "speedup over plain")
    axes.axhline(1, color="0.5", linewidth=0.8)


def _tau_and_share(panels: Sequence[Any], rows: Sequence[RunRow]) -> None:
    ours = [row for row in rows if row.policy]
    _bars(panels[0], ours, lambda figures: float(figures.tau), "tau", legend=False)
    _bars(panels[1], ours, lambda figures: 100 * figures.draft_share, "draft share, % of a step")


def _alpha(axes: Any, rows: Sequence[RunRow]) -> None:
    for number, row in enumerate(rows):
        if row.policy and row.accepted:
            axes.plot(range(1, len(row.accepted) + 1), row.accepted, "o-", color=colour(number), label=short(row))
    axes.set(xlabel="depth k", ylabel="alpha_k of the verified tree", ylim=(0, 1.02))
    if axes.lines:
        beside(axes)


def step_bars(axes: Any, rows: Sequence[Any]) -> None:
    """A mean step of every row that has `parts_ms`, its parts stacked."""
    ours = [row for row in rows if row.parts_ms]
    bottom = np.zeros(len(ours))
    for part in ours[0].parts_ms:
        heights = np.array([row.parts_ms[part] for row in ours])
        axes.bar(range(len(ours)), heights, 0.7, bottom=bottom, label=part)
        bottom += heights
    axes.set_xticks(range(len(ours)), map(short, ours), rotation=20, ha="right")
    axes.set_ylabel("milliseconds a step")
    beside(axes)


def _tau_by_budget(axes: Any, rows: Sequence[RunRow]) -> None:
    for number, (method, mine) in enumerate(_by_method(rows)):
        if mine[0].heads:
            axes.plot([row.budget for row in mine], [row.tau for row in mine], "o-", color=colour(number), label=method)
    axes.set(xlabel="budget, draft nodes verified a step", ylabel="tau")
    beside(axes)


def _throughput_and_latency(panels: Sequence[Any], rows: Sequence[RunRow]) -> None:
    for number, (method, mine) in enumerate(_by_method(rows)):
        counts, style = [row.sessions for row in mine], {"color": colour(number), "label": method}
        speeds = [row.tokens_per_s for row in mine]
        panels[0].plot(counts, speeds, "o-", **style)
        panels[1].plot(counts, [row.answer_ms for row in mine], "o-", **style)
        slower = crossover(mine, mine[0].method)
        if slower is not None and method != "plain":
            panels[0].plot(slower, np.interp(slower, counts, speeds), "X", color=colour(number), markersize=11)
    panels[0].set(xlabel="sessions; X: plain is faster from here on", ylabel="tokens/s of all")
    panels[1].set(xlabel="sessions", ylabel="milliseconds an answer")
    beside(panels[1])


def _by_method(rows: Sequence[RunRow]) -> list[tuple[str, list[RunRow]]]:
    found: dict[str, list[RunRow]] = {}
    for row in rows:
        found.setdefault(short(row), []).append(row)
    return list(found.items())


def beside(axes: Any) -> None:
    """A legend that hides nothing."""
    axes.legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0)


def short(row: Row) -> str:
    """A method's name."""
    return row.method.removeprefix("single:")


def colour(number: int) -> str:
    """matplotlib's, in turn."""
    return f"C{number % 10}"
