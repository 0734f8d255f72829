"""The figures of `coppice bench run`: rows, tables and a picture."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from coppice.bench.report import HF_GENERATE, Report, Row
from coppice.bench.run.bare import BareDraft
from coppice.bench.run.pairs import Pairs, Ratio
from coppice.bench.steps import StepCosts, costs

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
    draft_share: float
    """waiting for drafts / step time"""
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
    cell_budget: int = 0
    """of the methods that this one is compared with, where it has none itself"""
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
    benchmarks: dict[str, Figures] = field(default_factory=dict)
    """by benchmark, where there are several"""
    accepted: list[float] = field(default_factory=list)
    """alpha_k, k = 1, 2, ... (coppice.bench.run.pairs)"""
    parts_ms: dict[str, float] = field(default_factory=dict)
    """where a step's time goes; empty for a peer"""
    ttft_ms: float = 0.0
    """mean time to the first token, as the client saw it"""
    answer_ms: float = 0.0
    """mean time of an answer, prefill included"""


def run_row(row: Row, pairs: Pairs, settings: str, t_m_ms: float, t_d: BareDraft, lookup: str | None) -> RunRow:
    """One method's row with everything that is known of its pairs. `lookup`: the method of a look-up head."""
    figures = {
        name: figures_of(row, chosen, t_m_ms + t_d.forward_ms, lookup)
        for name, chosen in ((ALL, pairs), (FEW_REPEATS, pairs.few_repeats()))
        if len(chosen)
    }
    benchmarks = {
        name: figures_of(row, chosen, t_m_ms + t_d.forward_ms, lookup) for name, chosen in pairs.by_benchmark().items()
    }
    over_plain, answers = figures[ALL].over_plain, pairs.answers[row.method]
    ttft_ms = 1e3 * statistics.fmean(answer.ttft_s for answer in answers)
    told: dict[str, Any] = {each.name: getattr(row, each.name) for each in fields(Row)}
    told |= {
        "tokens_per_s": figures[ALL].tokens_per_s,
        "speedup": over_plain.value if over_plain else 0.0,
        "draft_ms": pairs.draft_ms(row.method),
    }
    return RunRow(
        **told,
        temperature=pairs.temperature,
        cell_budget=pairs.budget,
        settings=settings,
        t_m_ms=t_m_ms,
        t_d_ms=t_d.forward_ms,
        t_d_total_ms=t_d.total_ms,
        figures=figures,
        benchmarks=benchmarks if len(benchmarks) > 1 else {},
        accepted=pairs.accepted(row.method),
        parts_ms=parts_of(costs(row.method, answers)) if row.policy else {},
        ttft_ms=ttft_ms,
        answer_ms=ttft_ms + 1e3 * statistics.fmean(answer.decode_s for answer in answers),
    )


def parts_of(step: StepCosts) -> dict[str, float]:
    """A mean step in milliseconds, cut into what the models compute and what is done around them."""
    head_forward = min(step.head_forward, step.draft)
    target_forward = min(step.target_forward, step.verify)
    return {
        "head forward": head_forward,
        "rest of drafting": step.draft - head_forward,
        "target forward": target_forward,
        "rest of verifying": step.verify - target_forward,
        "transport": step.transport,
        "accept": step.accept,
        "commit": step.commit,
    }


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
        draft_share=pairs.draft_share(method),
        efficiency=tokens_per_s / pairs.sessions / (tau / bare_ms * 1e3) if bare_ms else None,
        chosen=pairs.chosen(method),
        lookup_tau=pairs.tau(lookup) if lookup else None,
    )


class RunReport(Report):
    """A report of RunRows: for each temperature, budget and number of sessions how fast, and where the time goes."""

    def tables(self) -> Iterable[Table]:
        """How fast, on which benchmark, where the time goes; then more sessions, if there are any."""
        rows = [row for row in self.rows if isinstance(row, RunRow)]
        for where, mine in cells(rows).items():
            on = f"{where}, {self.dtype}, {self.threads} threads"
            if before := self.figures.get("warm_up"):
                on += f", {before} prompts answered before"
            yield _speed_table(f"{self.command}, {on}, prefill left out; in brackets 95%", mine)
            if mine[0].benchmarks:
                yield _benchmark_table(f"{where}: x plain / tau / draft share by benchmark", mine)
            yield _time_table(f"{where}: milliseconds a step; T_M and T_D in bare loops", mine)
        if len({row.sessions for row in self.rows}) > 1:
            yield _sessions_table("tokens/s (ms an answer) by sessions", rows)


def cells(rows: Iterable[RunRow]) -> dict[str, list[RunRow]]:
    """The rows that were measured in alternation, by temperature, budget and sessions."""
    found: dict[str, list[RunRow]] = {}
    for row in rows:
        where = f"T={row.temperature:g}, budget {row.cell_budget}, {row.sessions} sessions"
        found.setdefault(where, []).append(row)
    return found


def crossover(rows: Iterable[RunRow], method: str) -> float | None:
    """The number of sessions from which on plain is faster, between two measured ones in proportion; None: never.

    `rows`: of one temperature and budget.
    """
    speedups = sorted((row.sessions, row.speedup) for row in rows if row.method == method)
    for at, (sessions, speedup) in enumerate(speedups):
        if speedup < 1:
            if at == 0:
                return float(sessions)
            fewer, faster = speedups[at - 1]
            return fewer + (faster - 1) / (faster - speedup) * (sessions - fewer)
    return None


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


def _benchmark_table(title: str, rows: Sequence[RunRow]) -> Table:
    """Table 1 of SpecBlock for the benchmarks at hand."""
    names = list(rows[0].benchmarks)
    table = _table(title, (*(f"{name} ({rows[0].benchmarks[name].answers})" for name in names), "all"))
    for row in rows:
        sets = [*(row.benchmarks[name] for name in names), row.figures[ALL]]
        table.add_row(
            row.method.removeprefix("single:"),
            *(
                f"{one.over_plain.value if one.over_plain else 0:.2f} / {one.tau:.2f} / {one.draft_share:.0%}"
                for one in sets
            ),
        )
    return table


def _sessions_table(title: str, rows: Sequence[RunRow]) -> Table:
    counts = sorted({row.sessions for row in rows})
    table = _table(title, (*map(str, counts), "slower than plain from"))
    groups: dict[tuple[float, int, str], list[RunRow]] = {}
    for row in rows:
        groups.setdefault((row.temperature, row.cell_budget, row.method), []).append(row)
    for (temperature, budget, method), mine in groups.items():
        by_count = {row.sessions: row for row in mine}
        slower = crossover(mine, method)
        table.add_row(
            f"{method.removeprefix('single:')}, T={temperature:g}, budget {budget}",
            *(
                f"{by_count[count].tokens_per_s:.1f} ({by_count[count].answer_ms:.0f})" if count in by_count else "-"
                for count in counts
            ),
            "-" if slower is None or method == "plain" else f"{slower:.1f}",
        )
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
