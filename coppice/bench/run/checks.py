"""What `coppice bench run` promises of speed: by kinds of heads, each promise where what it compares was run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from coppice.bench.report import HF_GENERATE, Check
from coppice.bench.run.pairs import ENOUGH, Pairs
from coppice.bench.run.peers import HF_ASSISTED, PEERS
from coppice.bench.run.report import ALL, FEW_REPEATS, Figures, RunRow

AUTO = "auto"
AUTO_BOUND = 0.97
"""of the best fixed method on each benchmark, and of plain decoding at any number of sessions"""
KEPT = 0.85
"""of its speedup over plain at T = 0, which a coupled block head is to keep at T = 1; the paper's keeps 0.69"""


def speed_checks(pairs: Pairs, rows: Iterable[RunRow], kinds: Mapping[str, str], where: str = "") -> list[Check]:
    """The checks of one cell, for all answers and for those that repeat little. `kinds`: of heads, by name.

    `where`: what else their names say.
    """
    by_method = {row.row.method: row for row in rows}
    every = _Compared(pairs, kinds, f", T={pairs.cell.temperature:g}{where}")
    checks = [*_drafting(every, by_method), *_auto(every)]
    for name, some in ((ALL, pairs), (FEW_REPEATS, pairs.few_repeats())):
        if len(some):
            figures = {method: row.figures[name] for method, row in by_method.items()}
            compared = _Compared(some, kinds, every.where + ("" if name == ALL else ", few repeats"))
            checks += [*_promises(compared, figures), *_routing(compared, figures)]
    return checks


def kept_checks(rows: Iterable[RunRow], kinds: Mapping[str, str]) -> Iterator[Check]:
    """How much of its greedy speedup over plain each block head keeps at T = 1, at one session."""
    blocks = {f"single:{head}" for head, kind in kinds.items() if kind == "specblock"}
    alone = [row for row in rows if row.cell.sessions == 1 and row.row.method in blocks]
    speedups = {(row.row.method, row.cell.budget, row.cell.temperature): row.row.speedup for row in alone}
    several = len({row.cell.budget for row in alone}) > 1
    for (method, budget, temperature), greedy in speedups.items():
        sampled = speedups.get((method, budget, 1.0))
        if temperature == 0 and sampled and greedy:
            where = f", budget {budget}" if several else ""
            yield Check.at_least(f"speedup of {method} at T=1 over T=0{where}", sampled / greedy, KEPT)


@dataclass(frozen=True)
class _Compared:
    """Pairs, the kinds of their heads, and what names of checks say of them."""

    pairs: Pairs
    kinds: Mapping[str, str]
    where: str

    @property
    def weak(self) -> str:
        """A note if a figure of speed rests on too few pairs."""
        return f"weak: {len(self.pairs)} pairs" if len(self.pairs) < ENOUGH else ""

    def best(self, kind: str) -> str | None:
        """The fastest head of a kind, as a method; None if none was run."""
        methods = (f"single:{head}" for head, its in self.kinds.items() if its == kind)
        run = (method for method in methods if method in self.pairs.answers)
        return max(run, key=self.pairs.tokens_per_s, default=None)

    def faster(self, method: str, over: str | None, bound: float = 1.0, note: str = "") -> Iterator[Check]:
        """Tokens/s of a method over another's: at least the bound; none if one was not run."""
        ratio = self.pairs.ratio(method, over) if over and method in self.pairs.answers else None
        if ratio is not None:
            note = "; ".join(part for part in (note, self.weak, f"95%: {ratio.low:.2f} to {ratio.high:.2f}") if part)
            yield Check.at_least(f"tokens/s of {method} over {over}{self.where}", ratio.value, bound, note)


def _drafting(compared: _Compared, rows: Mapping[str, RunRow]) -> Iterator[Check]:
    """A block head's draft against an autoregressive one's."""
    block, eagle = compared.best("specblock"), compared.best("eagle3")
    if block and eagle:
        piped = rows[block].draft_ms / rows[eagle].draft_ms if rows[eagle].draft_ms else 0.0
        name = f"drafting time of {block} over {eagle}{compared.where}"
        ratio = rows[block].t_d_ms / rows[eagle].t_d_ms
        yield Check.at_most(name, ratio, 0.6, f"in the pipeline {piped:.2f}")


def _auto(compared: _Compared) -> Iterator[Check]:
    """`auto` over plain, and on each benchmark over the fastest of the other methods, which are fixed."""
    answers = compared.pairs.answers
    if AUTO not in answers:
        return
    yield from compared.faster(AUTO, "plain", AUTO_BOUND)
    fixed = [method for method in answers if method not in PEERS and not method.startswith(AUTO)]
    for name, some in compared.pairs.by_benchmark().items():
        best = max(fixed, key=some.tokens_per_s)
        there = _Compared(some, compared.kinds, f" on {name}{compared.where}")
        yield from there.faster(AUTO, best, AUTO_BOUND, "the best fixed method there")


def _promises(compared: _Compared, figures: Mapping[str, Figures]) -> Iterator[Check]:
    """Plain decoding against transformers, and the best block head against everything else."""
    yield from compared.faster("plain", HF_GENERATE, 0.95)
    block = compared.best("specblock")
    if block is None:
        return
    yield Check.at_least(f"tau of {block}{compared.where}", figures[block].tau, 3.0)
    if compared.pairs.cell.sessions == 1:
        efficiency = figures[block].efficiency or 0.0
        yield Check.at_least(f"efficiency of {block}{compared.where}", efficiency, 0.9, compared.weak)
    for other in (compared.best("eagle3"), compared.best("lm")):
        yield from compared.faster(block, other)
    greedy = compared.pairs.cell.temperature == 0
    yield from compared.faster(block, HF_ASSISTED, 1.3 if greedy else 1.0)
    yield from compared.faster(block, HF_GENERATE, 1.8 if greedy else 1.6)


def _routing(compared: _Compared, figures: Mapping[str, Figures]) -> Iterator[Check]:
    """Two block heads or more that are routed between: both are of use, and neither alone is better."""
    blocks = [head for head, kind in compared.kinds.items() if kind == "specblock"]
    if len(blocks) < 2 or "route" not in figures:
        return
    for head in blocks:
        share = figures["route"].chosen[head]
        yield Check.at_least(f"share of steps routed to {head}{compared.where}", share, 0.1)
    yield from compared.faster("route", compared.best("specblock"), 1.0)
    if "merge" in figures:
        ratio = figures["merge"].tau / figures["route"].tau
        yield Check.at_least(f"tau of merge over route{compared.where}", ratio, 1.0)
