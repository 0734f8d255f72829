"""The rows of `coppice bench run`, and its tables."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rich.table import Table

from lab.bare import NO_DRAFT, BareDraft
from lab.report import HF_GENERATE, Report, Row, table
from lab.run.pairs import Cell, Pairs, Ratio
from lab.run.peers import PEERS
from lab.steps import costs, parts_of

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
class RunRow:
    """One method in one cell."""

    row: Row
    cell: Cell
    figures: dict[str, Figures]
    """By set of answers: all, few_repeats and, where there are several, the benchmarks; an empty set is left out."""
    t_m_ms: float = 0.0
    """A bare target forward at the mean verified rows; 0 for a peer."""
    t_d_ms: float = 0.0
    """The bare forwards of a draft, of the slowest head."""
    t_d_total_ms: float = 0.0
    """That draft with its tree."""
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

    @property
    def group(self) -> str:
        """The words for its temperature and budget."""
        return f"T={self.cell.temperature:g}, budget {self.cell.budget}"

    def to_json(self) -> dict[str, Any]:
        """The row as `--json` holds it; the key `cell_budget` also has the cell's budget for methods without one."""
        others = asdict(self)
        del others["row"], others["cell"]
        return self.row.to_json() | {"temperature": self.cell.temperature, "cell_budget": self.cell.budget} | others


def run_row(row: Row, pairs: Pairs, settings: str = "", t_m_ms: float = 0.0, draft: BareDraft = NO_DRAFT) -> RunRow:
    """One method's row with everything that is known of its pairs."""
    method, answers = row.method, pairs.answers[row.method]
    benchmarks = pairs.by_benchmark()
    sets = {ALL: pairs, FEW_REPEATS: pairs.few_repeats()} | (benchmarks if len(benchmarks) > 1 else {})
    bare_ms = t_m_ms + draft.forward_ms
    figures = {name: figures_of(method, chosen, bare_ms) for name, chosen in sets.items() if len(chosen)}
    over_plain = figures[ALL].over_plain
    step = {} if method in PEERS else costs(method, answers)
    ttft_ms = 1e3 * statistics.fmean(answer.ttft_s for answer in answers)
    return RunRow(
        row=replace(row, speedup=over_plain.value if over_plain else 0.0),
        cell=pairs.cell,
        figures=figures,
        t_m_ms=t_m_ms,
        t_d_ms=draft.forward_ms,
        t_d_total_ms=draft.total_ms,
        settings=settings,
        draft_ms=step.get("draft", 0.0),
        accepted=pairs.accepted(method),
        parts_ms=parts_of(step) if step else {},
        ttft_ms=ttft_ms,
        answer_ms=ttft_ms + 1e3 * statistics.fmean(answer.decode_s for answer in answers),
    )


def figures_of(method: str, pairs: Pairs, bare_ms: float) -> Figures:
    """A method's figures over some pairs, beside a step of so many milliseconds in bare loops."""
    row = pairs.row(method)
    return Figures(
        answers=row.prompts,
        tau=row.tau,
        tokens_per_s=row.tokens_per_s,
        over_plain=pairs.ratio(method, "plain"),
        over_hf=pairs.ratio(method, HF_GENERATE),
        draft_share=row.draft_share,
        efficiency=row.tokens_per_s / row.sessions / (row.tau / bare_ms * 1e3) if bare_ms else None,
        chosen=pairs.chosen(method),
    )


def tables(rows: Sequence[RunRow], report: Report, warm_up: int) -> Iterator[Table]:
    """For each cell how fast, on which texts, where the time goes; then more sessions, if there are any."""
    for cell, its in grouped(rows, lambda row: str(row.cell)).items():
        on = f"{cell}, {report.dtype}, {report.threads} threads"
        if warm_up:
            on += f", {warm_up} prompts answered before"
        yield _speed_table(f"{report.command}, {on}, prefill left out; in brackets 95%, then the median pair", its)
        if len(its[0].figures) > 1:
            yield _sets_table(f"{cell}: x plain, its median pair / tau / draft share by set of answers", its)
        yield _time_table(f"{cell}: a step; T_D and T_M are milliseconds in bare loops", its)
    if len({row.cell.sessions for row in rows}) > 1:
        yield _sessions_table("tokens/s (ms an answer) by sessions", rows)


def grouped(rows: Iterable[RunRow], key: Callable[[RunRow], str]) -> dict[str, list[RunRow]]:
    """The rows by what the key says of them, in their order."""
    groups: dict[str, list[RunRow]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
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
            "drafts": row.row.tau - 1,
            "tokens/s": row.row.tokens_per_s,
            "x plain": str(row.figures[ALL].over_plain or "-"),
            "x generate": str(row.figures[ALL].over_hf or "-"),
            "same/tie/wrong": str(row.row.verdicts),
        }
        for row in rows
    ]
    made = table(title, lines, {"tokens/s": ".1f"})
    made.below = "\n".join(f"{row.name}: {row.settings}" for row in rows if row.settings)
    return made


def _sets_table(title: str, rows: Sequence[RunRow]) -> Table:
    """Table 1 of SpecBlock for the benchmarks at hand, for all answers, and for those that do not loop."""

    def cell(figures: Figures) -> str:
        speedup = f"{figures.over_plain.value:.2f}, {figures.over_plain.median:.2f}" if figures.over_plain else "-"
        return f"{speedup} / {figures.tau:.2f} / {figures.draft_share:.0%}"

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
            "draft share": row.row.draft_share,
            "T_D": row.t_d_ms,
            "T_M": row.t_m_ms,
            "efficiency": row.figures[ALL].efficiency,
        }
        for row in rows
        if row.row.method not in PEERS
    ]
    return table(title, lines, {"draft share": ".0%"})


def _sessions_table(title: str, rows: Sequence[RunRow]) -> Table:
    lines = []
    for name, its in grouped(rows, lambda row: f"{row.name}, {row.group}").items():
        line: dict[str, Any] = {"method": name}
        line |= {str(row.cell.sessions): f"{row.row.tokens_per_s:.1f} ({row.answer_ms:.0f})" for row in its}
        lines.append(line | {"slower than plain from": None if its[0].name == "plain" else crossover(its)})
    return table(title, lines, {"slower than plain from": ".1f"})
