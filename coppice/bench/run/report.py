"""The rows of `coppice bench run`, and its tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rich.table import Table

from coppice.bench.report import HF_GENERATE, Report, Row, table
from coppice.bench.run.pairs import Cell, Pairs, Ratio
from coppice.bench.run.peers import PEERS
from coppice.bench.steps import costs, parts_of

ALL, FEW_REPEATS = "all", "few_repeats"
"""The sets of answers that figures are given for, beside the benchmarks."""


@dataclass(frozen=True, slots=True)
class Figures:
    """One method over a set of answers."""

    answers: int
    tau: float
    tokens_per_s: float
    over_plain: Ratio | None
    over_hf: Ratio | None
    """Over transformers' `generate`; None without it."""
    draft_share: float
    """Time that steps wait for drafts over the time of all steps."""
    efficiency: float | None
    """tokens/s over those of the same tau in bare loops; None for a peer."""
    chosen: dict[str, float]
    """Share of the steps routed to each head."""


@dataclass(frozen=True, slots=True)
class BareStep:
    """What a step costs in bare loops, milliseconds; zeros for a peer."""

    t_m_ms: float = 0.0
    """a target forward at the mean verified rows"""
    t_d_ms: float = 0.0
    """the forwards of a draft, of the slowest head"""
    t_d_total_ms: float = 0.0
    """a draft with its tree, of the slowest head"""


@dataclass(frozen=True, slots=True)
class RunRow:
    """One method in one cell."""

    row: Row
    cell: Cell
    figures: dict[str, Figures]
    """By set of answers: all, few_repeats and, where there are several, the benchmarks; an empty set is left out."""
    bare: BareStep
    settings: str = ""
    """the best ones of a peer that has some"""
    draft_ms: float = 0.0
    """Mean time that a step waits for drafts, in the pipeline."""
    accepted: list[float] = field(default_factory=list)
    """alpha_k, k = 1, 2, ... (Pairs.accepted)"""
    parts_ms: dict[str, float] = field(default_factory=dict)
    """Where a step's time goes; empty for a peer."""
    ttft_ms: float = 0.0
    """Mean time to the first token, as the client saw it."""
    answer_ms: float = 0.0
    """Mean time of an answer, prefill included."""

    @property
    def name(self) -> str:
        """The method's name in tables."""
        return self.row.method.removeprefix("single:")

    def to_json(self) -> dict[str, Any]:
        """The row as `--json` holds it; the key `cell_budget` also has the cell's budget for methods without one."""
        others = asdict(self)
        for key in ("row", "cell", "bare"):
            del others[key]
        where = {"temperature": self.cell.temperature, "cell_budget": self.cell.budget}
        return self.row.to_json() | where | asdict(self.bare) | others


def run_row(row: Row, pairs: Pairs, settings: str, bare: BareStep) -> RunRow:
    """One method's row with everything that is known of its pairs."""
    method, answers = row.method, pairs.answers[row.method]
    benchmarks = pairs.by_benchmark()
    sets = {ALL: pairs, FEW_REPEATS: pairs.few_repeats()} | (benchmarks if len(benchmarks) > 1 else {})
    figures = {name: figures_of(method, chosen, bare) for name, chosen in sets.items() if len(chosen)}
    over_plain = figures[ALL].over_plain
    ttft_ms = 1e3 * statistics.fmean(answer.ttft_s for answer in answers)
    return RunRow(
        row=replace(row, tokens_per_s=figures[ALL].tokens_per_s, speedup=over_plain.value if over_plain else 0.0),
        cell=pairs.cell,
        figures=figures,
        bare=bare,
        settings=settings,
        draft_ms=pairs.draft_ms(method),
        accepted=pairs.accepted(method),
        parts_ms={} if method in PEERS else parts_of(costs(method, answers)),
        ttft_ms=ttft_ms,
        answer_ms=ttft_ms + 1e3 * statistics.fmean(answer.decode_s for answer in answers),
    )


def figures_of(method: str, pairs: Pairs, bare: BareStep) -> Figures:
    """A method's figures over some pairs."""
    tau, tokens_per_s, bare_ms = pairs.tau(method), pairs.tokens_per_s(method), bare.t_m_ms + bare.t_d_ms
    return Figures(
        answers=len(pairs),
        tau=tau,
        tokens_per_s=tokens_per_s,
        over_plain=pairs.ratio(method, "plain"),
        over_hf=pairs.ratio(method, HF_GENERATE),
        draft_share=pairs.draft_share(method),
        efficiency=tokens_per_s / pairs.cell.sessions / (tau / bare_ms * 1e3) if bare_ms else None,
        chosen=pairs.chosen(method),
    )


def tables(rows: Sequence[RunRow], report: Report, warm_up: int) -> Iterator[Table]:
    """For each cell how fast, on which texts, where the time goes; then more sessions, if there are any."""
    for cell, its in by_cell(rows).items():
        on = f"{cell}, {report.dtype}, {report.threads} threads"
        if warm_up:
            on += f", {warm_up} prompts answered before"
        yield _speed_table(f"{report.command}, {on}, prefill left out; in brackets 95%", its)
        if len(its[0].figures) > 1:
            yield _sets_table(f"{cell}: x plain / tau / draft share by set of answers", its)
        yield _time_table(f"{cell}: milliseconds a step; T_M and T_D in bare loops", its)
    if len({row.cell.sessions for row in rows}) > 1:
        yield _sessions_table("tokens/s (ms an answer) by sessions", rows)


def by_cell(rows: Iterable[RunRow]) -> dict[Cell, list[RunRow]]:
    """The rows that were measured in alternation."""
    groups: dict[Cell, list[RunRow]] = {}
    for row in rows:
        groups.setdefault(row.cell, []).append(row)
    return groups


def over_sessions(rows: Iterable[RunRow]) -> dict[tuple[float, int, str], list[RunRow]]:
    """The rows that differ by the number of sessions alone, by temperature, budget and method."""
    groups: dict[tuple[float, int, str], list[RunRow]] = {}
    for row in rows:
        groups.setdefault((row.cell.temperature, row.cell.budget, row.name), []).append(row)
    return groups


def crossover(rows: Iterable[RunRow]) -> float | None:
    """The number of sessions from which on plain is faster, between two measured ones in proportion; None: never.

    `rows`: of one method, temperature and budget.
    """
    speedups = sorted((row.cell.sessions, row.row.speedup) for row in rows)
    for at, (sessions, speedup) in enumerate(speedups):
        if speedup < 1:
            if at == 0:
                return float(sessions)
            fewer, faster = speedups[at - 1]
            return fewer + (faster - 1) / (faster - speedup) * (sessions - fewer)
    return None


def _speed_table(title: str, rows: Sequence[RunRow]) -> Table:
    lines = [
        {
            "method": row.name,
            "tau": row.row.tau,
            "tokens/s": row.row.tokens_per_s,
            "x plain": str(row.figures[ALL].over_plain or "-"),
            "x generate": str(row.figures[ALL].over_hf or "-"),
            "same/tie/wrong": str(row.row.verdicts),
        }
        for row in rows
    ]
    made = table(title, lines, {"tokens/s": ".1f"})
    made.caption = "\n".join(f"{row.name}: {row.settings}" for row in rows if row.settings)
    return made


def _sets_table(title: str, rows: Sequence[RunRow]) -> Table:
    """Table 1 of SpecBlock for the benchmarks at hand, for all answers, and for those that do not loop."""

    def cell(figures: Figures) -> str:
        speedup = figures.over_plain.value if figures.over_plain else 0.0
        return f"{speedup:.2f} / {figures.tau:.2f} / {figures.draft_share:.0%}"

    headings = {name: f"{name} ({its.answers})" for name, its in rows[0].figures.items()}
    return table(
        title,
        [
            {"method": row.name} | {heading: cell(row.figures[name]) for name, heading in headings.items()}
            for row in rows
        ],
    )


def _time_table(title: str, rows: Sequence[RunRow]) -> Table:
    lines = [
        {
            "method": row.name,
            "nodes": row.row.verified_nodes,
            "late": row.row.late_drafts,
            "draft": row.draft_ms,
            "share": row.row.draft_share,
            "T_D": row.bare.t_d_ms,
            "T_M": row.bare.t_m_ms,
            "efficiency": row.figures[ALL].efficiency,
            "chosen": " ".join(f"{head} {share:.0%}" for head, share in row.figures[ALL].chosen.items()) or "-",
        }
        for row in rows
        if row.row.method not in PEERS
    ]
    return table(title, lines, {"nodes": ".1f", "share": ".0%"})


def _sessions_table(title: str, rows: Sequence[RunRow]) -> Table:
    lines = []
    for (temperature, budget, method), its in over_sessions(rows).items():
        line: dict[str, Any] = {"method": f"{method}, T={temperature:g}, budget {budget}"}
        line |= {str(row.cell.sessions): f"{row.row.tokens_per_s:.1f} ({row.answer_ms:.0f})" for row in its}
        lines.append(line | {"slower than plain from": None if method == "plain" else crossover(its)})
    return table(title, lines, {"slower than plain from": ".1f"})
