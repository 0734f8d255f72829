"""The figures of `coppice bench synthetic`; tables, pictures and JSON all say that they are synthetic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from coppice.bench.report import Report, Row
from coppice.bench.run.plots import beside, colour, panels, short, step_bars

NOTE = "synthetic: random weights, acceptance from a profile"


@dataclass(frozen=True, slots=True)
class SyntheticRow(Row):
    """Plain decoding or one head at a number of sessions. tau, tokens/s, speedup and draft share are expected ones: of
    the profile and the bare times. Times are milliseconds; what the pipeline measures is 0 where it did not run."""

    t_m_ms: float = 0.0
    """a bare target forward over root and budget, or over the root alone"""
    t_d_ms: float = 0.0
    """a bare draft inside its forwards"""
    t_d_total_ms: float = 0.0
    """a bare draft with its tree"""
    drawn_tau: tuple[float, ...] = ()
    """5%, 50% and 95% of the answers drawn from the profile"""
    pipeline_step_ms: float = 0.0
    pipeline_tau: float = 0.0
    """of random heads: about 1"""
    efficiency: float = 0.0
    """bare target forward and draft over a step of the pipeline"""
    parts_ms: dict[str, float] = field(default_factory=dict)


class SyntheticReport(Report):
    """A report of SyntheticRows; `figures` hold shape, profile and the times of forwards by sessions and rows."""

    def synthetic_rows(self) -> list[SyntheticRow]:
        """The rows."""
        return [row for row in self.rows if isinstance(row, SyntheticRow)]

    def to_json(self) -> dict[str, Any]:
        """As any report's, marked."""
        return super().to_json() | {"synthetic": NOTE}

    def tables(self) -> Iterable[Table]:
        """Forwards by rows, what follows for each head, and what a step costs in the pipeline."""
        rows, on = self.synthetic_rows(), f"{self.figures['shape']}, {self.dtype}, {self.device}"
        forwards: dict[str, dict[str, float]] = self.figures["forward_ms"]
        counts = list(next(iter(forwards.values())))
        table = _table(f"{NOTE}\n{on}: T_M, milliseconds of a forward by rows a session", ("sessions", *counts))
        for sessions, by_rows in forwards.items():
            table.add_row(sessions, *(f"{by_rows[count]:.2f}" for count in counts))
        yield table
        headings = ("sessions", "T_M", "T_D", "with tree", "tau", "drawn 5-95%", "tokens/s", "x plain", "draft share")
        title = f"{NOTE}\n{on}: expected with profile {self.figures['profile_name']}, budget {self.figures['budget']}"
        table = _table(title, ("method", *headings))
        for row in rows:
            table.add_row(
                short(row),
                str(row.sessions),
                *(f"{value:.2f}" for value in (row.t_m_ms, row.t_d_ms, row.t_d_total_ms, row.tau)),
                f"{row.drawn_tau[0]:.2f}-{row.drawn_tau[-1]:.2f}",
                f"{row.tokens_per_s:.1f}",
                f"{row.speedup:.2f}",
                f"{row.draft_share:.0%}",
            )
        if compared := self.figures["specblock_over_eagle3"]:
            table.caption = "SpecBlock over EAGLE-3: " + "; ".join(
                f"{one['sessions']} sessions: speed {one['speed']:.2f}, T_D {one['t_d']:.2f}, draft share "
                f"{one['draft_share']:.0%} against {one['eagle3_draft_share']:.0%}"
                for one in compared
            )
        yield table
        if measured := [row for row in rows if row.parts_ms]:
            yield self._pipeline_table(f"{NOTE}\n{on}: a step of the pipeline, milliseconds, one session", measured)

    def _pipeline_table(self, title: str, rows: Sequence[SyntheticRow]) -> Table:
        table = _table(title, ("method", "step", "efficiency", "tau", "nodes", "late", *rows[0].parts_ms))
        for row in rows:
            figures = (row.pipeline_step_ms, row.efficiency, row.pipeline_tau, row.verified_nodes)
            told = (*(f"{value:.2f}" for value in figures), str(row.late_drafts))
            table.add_row(short(row), *told, *(f"{value:.2f}" for value in row.parts_ms.values()))
        table.caption = "random heads guess nothing: only what a step costs is measured here, never a speedup"
        return table


def compare(rows: Iterable[SyntheticRow]) -> list[dict[str, float]]:
    """SpecBlock's expected speed, T_D and draft share against EAGLE-3's, by sessions; empty unless both are there."""
    by_name = {(row.method, row.sessions): row for row in rows}
    found = []
    for (method, sessions), block in by_name.items():
        eagle = by_name.get(("single:eagle3", sessions))
        if method == "single:specblock" and eagle:
            found.append(
                {
                    "sessions": sessions,
                    "speed": block.tokens_per_s / eagle.tokens_per_s,
                    "t_d": block.t_d_ms / eagle.t_d_ms,
                    "draft_share": block.draft_share,
                    "eagle3_draft_share": eagle.draft_share,
                }
            )
    return found


def draw_all(report: SyntheticReport, folder: Path) -> list[Path]:
    """Forwards by rows, expected steps and speedups by sessions, and the pipeline's steps if it ran."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = report.synthetic_rows()
    on = f"{NOTE}; {report.figures['shape']}"
    files = [
        panels(folder / "synthetic_forward.png", {on: list(report.figures["forward_ms"].items())}, _forwards),
        panels(folder / "synthetic_expected.png", {on: rows}, _expected, columns=2),
    ]
    if measured := [row for row in rows if row.parts_ms]:
        files.append(panels(folder / "synthetic_step.png", {on: measured}, step_bars, bars=True))
    return files


def _forwards(axes: Any, forwards: Sequence[tuple[str, dict[str, float]]]) -> None:
    for sessions, by_rows in forwards:
        axes.plot([int(count) for count in by_rows], list(by_rows.values()), "o-", label=f"{sessions} sessions")
    axes.set(xlabel="rows a session", ylabel="T_M, milliseconds", ylim=(0, None))
    beside(axes)


def _expected(axes: Sequence[Any], rows: Sequence[SyntheticRow]) -> None:
    for number, method in enumerate(dict.fromkeys(row.method for row in rows)):
        mine = [row for row in rows if row.method == method]
        counts, style = [row.sessions for row in mine], {"color": colour(number), "label": short(mine[0])}
        axes[0].plot(counts, [row.speedup for row in mine], "o-", **style)
        axes[1].plot(counts, [100 * row.draft_share for row in mine], "o-", **style)
    axes[0].set(xlabel="sessions", ylabel="expected speedup over plain", ylim=(0, None))
    axes[1].set(xlabel="sessions", ylabel="expected draft share, %", ylim=(0, None))
    beside(axes[1])


def _table(title: str, headings: Sequence[str]) -> Table:
    wide = max(map(len, title.splitlines()))  # a title is wrapped at its table's edge
    table = Table(
        title=title, title_justify="left", caption_justify="left", box=SIMPLE_HEAD, pad_edge=False, min_width=wide
    )
    table.collapse_padding = True
    for at, heading in enumerate(headings):
        table.add_column(heading, justify="right" if at else "left", overflow="fold")
    return table
