"""How fast `coppice bench run` is to be: by kinds of heads, each goal where what it compares was run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from lab.report import HF_GENERATE, Check
from lab.run.pairs import ENOUGH, Pairs
from lab.run.peers import HF_ASSISTED, PEERS
from lab.run.report import ALL, FEW_REPEATS, RunRow

AUTO = "auto"
AUTO_BOUND = 0.97
"""of the best fixed method on each benchmark, and of plain decoding at any number of sessions"""
KEPT = 0.85
"""of its speedup over plain at T = 0, which a coupled block head is to keep at T = 1; the paper's keeps 0.69"""


@dataclass(frozen=True)
class _Compared:
    """Pairs, the kinds of their heads, and what names of goals say of them."""

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
        ratio = self.pairs.ratio(method, over) if method in self.pairs.answers and over else None
        if ratio is not None:
            told = f"95%: {ratio.low:.2f} to {ratio.high:.2f}; median pair: {ratio.median:.2f}"
            note = "; ".join(part for part in (note, self.weak, told) if part)
            yield Check.at_least(
                f"tokens/s of {method} over {over}{self.where}", ratio.value, bound, note, bool(self.weak)
            )


def speed_goals(pairs: Pairs, rows: Iterable[RunRow], kinds: Mapping[str, str], where: str = "") -> list[Check]:
    """The goals of one cell, for all answers and for those that repeat little. `kinds`: of heads, by name.

    `where`: what else their names say.
    """
    by_method = {row.row.method: row for row in rows}
    greedy = pairs.cell.temperature == 0
    every = _Compared(pairs, kinds, f", T={pairs.cell.temperature:g}{where}")
    goals = list(_auto(every))
    block, eagle = every.best("specblock"), every.best("eagle3")
    if block and eagle:
        ratio = by_method[block].t_d_ms / by_method[eagle].t_d_ms
        goals.append(Check.at_most(f"drafting time of {block} over {eagle}{every.where}", ratio, 0.6))
    for name, some in ((ALL, pairs), (FEW_REPEATS, pairs.few_repeats())):
        if not len(some):
            continue
        compared = _Compared(some, kinds, every.where + ("" if name == ALL else ", few repeats"))
        block = compared.best("specblock")
        if block and pairs.cell.sessions == 1:
            efficiency = by_method[block].figures[name].efficiency or 0.0
            name, weak = f"efficiency of {block}{compared.where}", compared.weak
            goals.append(Check.at_least(name, efficiency, 0.9, weak, bool(weak)))
        for method, over, bound in (
            ("plain", HF_GENERATE, 0.95),
            (block or "", compared.best("eagle3"), 1.0),
            (block or "", compared.best("lm"), 1.0),
            (block or "", HF_ASSISTED, 1.3 if greedy else 1.0),
            (block or "", HF_GENERATE, 1.8 if greedy else 1.6),
            ("route" if [*kinds.values()].count("specblock") > 1 else "", block, 1.0),
        ):
            goals += compared.faster(method, over, bound)
    return goals


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


def kept_goals(rows: Iterable[RunRow], kinds: Mapping[str, str]) -> Iterator[Check]:
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
