"""What `coppice bench run` promises of speed: by kinds of heads, each promise where what it compares was run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

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
    """The checks of one temperature, for all answers and for those that repeat little. `kinds`: of heads, by name.

    `where`: what else their names say.
    """
    by_method = {row.method: row for row in rows}
    where = f", T={pairs.temperature:g}{where}"
    checks = [*_drafting(pairs, by_method, kinds, where), *_auto(pairs, where)]
    for name, some in ((ALL, pairs), (FEW_REPEATS, pairs.few_repeats())):
        if len(some):
            figures = {method: row.figures[name] for method, row in by_method.items()}
            checks += _Compared(some, figures, kinds, where + ("" if name == ALL else ", few repeats")).checks()
    return checks


def kept_checks(rows: Iterable[RunRow], kinds: Mapping[str, str]) -> Iterator[Check]:
    """How much of its greedy speedup over plain each block head keeps at T = 1, at one session."""
    blocks = {f"single:{head}" for head, kind in kinds.items() if kind == "specblock"}
    alone = [row for row in rows if row.sessions == 1 and row.method in blocks]
    speedups = {(row.method, row.budget, row.temperature): row.speedup for row in alone}
    several = len({row.budget for row in alone}) > 1
    for (method, budget, temperature), greedy in speedups.items():
        sampled = speedups.get((method, budget, 1.0))
        if temperature == 0 and sampled and greedy:
            where = f", budget {budget}" if several else ""
            yield _at_least(f"speedup of {method} at T=1 over T=0{where}", sampled / greedy, KEPT)


def _at_least(name: str, value: float, bound: float, note: str = "") -> Check:
    return Check(name, round(value, 3), f">= {bound:g}", value >= bound, note)


def _weak(pairs: Pairs) -> str:
    return f"weak: {len(pairs)} pairs" if len(pairs) < ENOUGH else ""


def _faster(
    pairs: Pairs, method: str, over: str | None, where: str, bound: float | None, note: str = ""
) -> list[Check]:
    """Tokens/s of a method over another's: at least the bound, without one more than 1; none if one was not run."""
    found = pairs.ratio(method, over) if over and method in pairs.answers else None
    if found is None:
        return []
    note = "; ".join(part for part in (note, _weak(pairs), f"95%: {found.low:.2f} to {found.high:.2f}") if part)
    name = f"tokens/s of {method} over {over}{where}"
    if bound is None:
        return [Check(name, round(found.value, 3), "> 1", found.value > 1, note)]
    return [_at_least(name, found.value, bound, note)]


def _best(kind: str, kinds: Mapping[str, str], pairs: Pairs) -> str | None:
    """The fastest head of a kind, as a method."""
    methods = [f"single:{head}" for head, its in kinds.items() if its == kind]
    return max((method for method in methods if method in pairs.answers), key=pairs.tokens_per_s, default=None)


def _drafting(pairs: Pairs, rows: Mapping[str, RunRow], kinds: Mapping[str, str], where: str) -> Iterator[Check]:
    block, eagle = _best("specblock", kinds, pairs), _best("eagle3", kinds, pairs)
    if block and eagle:
        bare = round(rows[block].t_d_ms / rows[eagle].t_d_ms, 3)
        piped = rows[block].draft_ms / rows[eagle].draft_ms if rows[eagle].draft_ms else 0.0
        name = f"drafting time of {block} over {eagle}{where}"
        yield Check(name, bare, "<= 0.6", bare <= 0.6, f"in the pipeline {piped:.2f}")


def _auto(pairs: Pairs, where: str) -> Iterator[Check]:
    """`auto` over plain, and on each benchmark over the fastest of the other methods, which are fixed."""
    if AUTO not in pairs.answers:
        return
    yield from _faster(pairs, AUTO, "plain", where, AUTO_BOUND)
    fixed = [method for method in pairs.answers if method not in PEERS and not method.startswith(AUTO)]
    for name, some in pairs.by_benchmark().items():
        best = max(fixed, key=some.tokens_per_s)
        yield from _faster(some, AUTO, best, f" on {name}{where}", AUTO_BOUND, "the best fixed method there")


class _Compared:
    """The checks over one set of pairs."""

    def __init__(self, pairs: Pairs, figures: Mapping[str, Figures], kinds: Mapping[str, str], where: str) -> None:
        self._pairs, self._figures, self._kinds = pairs, figures, kinds
        self._where = where

    def checks(self) -> Iterator[Check]:
        """Those whose methods were run."""
        pairs, weak = self._pairs, _weak(self._pairs)
        yield from self._faster("plain", HF_GENERATE, 0.95)
        block = _best("specblock", self._kinds, pairs)
        if block:
            yield self._at_least(f"tau of {block}", self._figures[block].tau, 3.0)
            if pairs.sessions == 1:
                yield self._at_least(f"efficiency of {block}", self._figures[block].efficiency or 0.0, 0.9, weak)
            for other in (_best("eagle3", self._kinds, pairs), _best("lm", self._kinds, pairs)):
                yield from self._faster(block, other)
            greedy = pairs.temperature == 0
            yield from self._faster(block, HF_ASSISTED, 1.3 if greedy else None)
            yield from self._faster(block, HF_GENERATE, 1.8 if greedy else 1.6)
        yield from self._routing()

    def _routing(self) -> Iterator[Check]:
        """Two block heads or more that are routed between: both are of use, and neither alone is better."""
        blocks = [head for head, kind in self._kinds.items() if kind == "specblock"]
        if len(blocks) < 2 or "route" not in self._figures:
            return
        for head in blocks:
            yield self._at_least(f"share of steps routed to {head}", self._figures["route"].chosen[head], 0.1)
        yield from self._faster("route", _best("specblock", self._kinds, self._pairs), 1.0)
        if "merge" in self._figures:
            ratio = self._figures["merge"].tau / self._figures["route"].tau
            yield self._at_least("tau of merge over route", ratio, 1.0)

    def _faster(self, method: str, over: str | None, bound: float | None = None) -> list[Check]:
        return _faster(self._pairs, method, over, self._where, bound)

    def _at_least(self, name: str, value: float, bound: float, note: str = "") -> Check:
        return _at_least(name + self._where, value, bound, note)
