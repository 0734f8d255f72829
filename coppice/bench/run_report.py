"""The figures of `coppice bench run`: rows, tables and a picture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from coppice.bench.bare import BareDraft
from coppice.bench.pairs import Pairs, Ratio
from coppice.bench.report import HF_GENERATE, Report, Row

ALL, FEW_REPEATS = "all", "few_repeats"
"""the two sets of answers that figures are given for"""


@dataclass(frozen=True, slots=True)
class Figures:
    """One method over a set of answers."""

    answers: int
    tau: float
    tokens_per_s: float
    over_plain: Ratio | None
    over_hf: Ratio | None
    """over transformers' `generate`; None without it"""
    efficiency: float | None
    """tokens/s over those of the same tau in bare loops; None for a peer"""
    chosen: dict[str, float]
    """share of the steps routed to each head"""
    lookup_tau: float | None
    """of free look-up on the same answers; None without it"""


@dataclass(frozen=True, slots=True)
class RunRow(Row):
    """One method at one temperature. Times are milliseconds a step."""

    temperature: float = 0.0
    settings: str = ""
    """the best ones of a peer that has some"""
    draft_ms: float = 0.0
    """waiting for drafts, in the pipeline"""
    t_m_ms: float = 0.0
    """a bare target forward at the mean verified rows"""
    t_d_ms: float = 0.0
    """a bare draft inside the nn forward, of the slowest head"""
    t_d_total_ms: float = 0.0
    """a bare draft with its tree, of the slowest head"""
    figures: dict[str, Figures] = field(default_factory=dict)
    """by set of answers; a set without answers is left out"""


def run_row(row: Row, pairs: Pairs, settings: str, t_m_ms: float, t_d: BareDraft, lookup: str | None) -> RunRow:
    """One method's row with everything that is known of its pairs. `lookup`: the method of a look-up head."""
    figures = {
        name: figures_of(row, chosen, t_m_ms + t_d.forward_ms, lookup)
        for name, chosen in ((ALL, pairs), (FEW_REPEATS, pairs.few_repeats()))
        if len(chosen)
    }
    over_plain = figures[ALL].over_plain
    told: dict[str, Any] = {each.name: getattr(row, each.name) for each in fields(Row)}
    told |= {
        "tokens_per_s": figures[ALL].tokens_per_s,
        "speedup": over_plain.value if over_plain else 0.0,
        "draft_ms": pairs.draft_ms(row.method),
    }
    return RunRow(
        **told,
        temperature=pairs.temperature,
        settings=settings,
        t_m_ms=t_m_ms,
        t_d_ms=t_d.forward_ms,
        t_d_total_ms=t_d.total_ms,
        figures=figures,
    )


def figures_of(row: Row, pairs: Pairs, bare_ms: float, lookup: str | None) -> Figures:
    """A row's method over some pairs; `bare_ms` is what a step of it costs in bare loops, 0 for a peer."""
    method = row.method
    tau, tokens_per_s = pairs.tau(method), pairs.tokens_per_s(method)
    return Figures(
        answers=len(pairs),
        tau=tau,
        tokens_per_s=tokens_per_s,
        over_plain=pairs.ratio(method, "plain"),
        over_hf=pairs.ratio(method, HF_GENERATE),
        efficiency=tokens_per_s / pairs.sessions / (tau / bare_ms * 1e3) if bare_ms else None,
        chosen=pairs.chosen(method),
        lookup_tau=pairs.tau(lookup) if lookup else None,
    )


class RunReport(Report):
    """A report of RunRows: two tables for each temperature."""

    def tables(self) -> Iterable[Table]:
        """How fast, then where the time goes."""
        rows = [row for row in self.rows if isinstance(row, RunRow)]
        for temperature in dict.fromkeys(row.temperature for row in rows):
            mine = [row for row in rows if row.temperature == temperature]
            where = f"T={temperature:g}, {self.dtype}, {self.threads} threads, {mine[0].sessions} sessions"
            yield _speed_table(f"{self.command}, {where}, prefill left out; in brackets 95%", mine)
            yield _time_table(f"T={temperature:g}: milliseconds a step; T_M and T_D in bare loops", mine)


def _speed_table(title: str, rows: Sequence[RunRow]) -> Table:
    headings = ("tau", "tokens/s", "x plain", "x generate", "few: tau", "x plain", "x gen.", "same/tie/wrong")
    table = _table(title, headings)
    for row in rows:
        every, few = row.figures[ALL], row.figures.get(FEW_REPEATS)
        ratios = [ratio and ratio.value for ratio in (few.over_plain, few.over_hf)] if few else (None, None)
        judged = row.identical + row.ties + row.wrong
        table.add_row(
            row.method.removeprefix("single:"),
            f"{row.tau:.2f}",
            f"{row.tokens_per_s:.1f}",
            str(every.over_plain or "-"),
            str(every.over_hf or "-"),
            *map(_number, (few.tau if few else None, *ratios)),
            f"{row.identical}/{row.ties}/{row.wrong}" if judged else "-",
        )
    few = rows[0].figures.get(FEW_REPEATS)
    caption = f"few: {few.answers if few else 0} of {rows[0].prompts} answers repeat at most half of their 4-grams"
    if few and few.lookup_tau is not None:
        caption += f"; look-up's tau there is {few.lookup_tau:.2f}"
    table.caption = "\n".join((caption, *(f"{row.method}: {row.settings}" for row in rows if row.settings)))
    return table


def _time_table(title: str, rows: Sequence[RunRow]) -> Table:
    table = _table(title, ("nodes", "late", "draft", "share", "T_D", "T_M", "efficiency", "few", "chosen"))
    for row in rows:
        if not row.policy:  # a peer
            continue
        every, few = row.figures[ALL], row.figures.get(FEW_REPEATS)
        table.add_row(
            row.method.removeprefix("single:"),
            f"{row.verified_nodes:.1f}",
            str(row.late_drafts),
            f"{row.draft_ms:.2f}",
            f"{row.draft_share:.0%}",
            f"{row.t_d_ms:.2f}",
            f"{row.t_m_ms:.2f}",
            _number(every.efficiency),
            _number(few.efficiency if few else None),
            " ".join(f"{head} {share:.0%}" for head, share in every.chosen.items()) or "-",
        )
    return table


def _table(title: str, headings: Iterable[str]) -> Table:
    table = Table(title=title, title_justify="left", caption_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.collapse_padding = True
    table.add_column("method", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", overflow="fold")
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def draw(rows: Sequence[Row], file: Path) -> None:
    """Bars of the speedup over plain by method and temperature, with intervals and tau; the suffix is the format."""
    from matplotlib.figure import Figure

    told = [row for row in rows if isinstance(row, RunRow)]
    methods = list(dict.fromkeys(row.method for row in told))
    temperatures = list(dict.fromkeys(row.temperature for row in told))
    figure = Figure(figsize=(2 + 1.1 * len(methods), 4), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(temperatures)
    for row in told:
        speedup, series = row.figures[ALL].over_plain, temperatures.index(row.temperature)
        assert speedup  # plain is always run
        x = methods.index(row.method) + (series - (len(temperatures) - 1) / 2) * width
        spread = [[speedup.value - speedup.low], [speedup.high - speedup.value]]
        label = f"T={row.temperature:g}" if row.method == methods[0] else None
        axes.bar(x, speedup.value, 0.95 * width, yerr=spread, capsize=3, color=f"C{series}", label=label)
        axes.annotate(f"{row.tau:.2f}", (x, speedup.high), (0, 3), textcoords="offset points", ha="center", fontsize=8)
    axes.axhline(1, color="#888888", linewidth=0.8)
    axes.set_xticks(range(len(methods)), methods, rotation=20, ha="right")
    axes.set(ylabel="speedup over plain (95%)", title="speed; above each bar: tau")
    axes.margins(y=0.12)
    axes.legend()
    figure.savefig(file, dpi=150)
