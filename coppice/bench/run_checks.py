"""What `coppice bench run` promises of speed: by kinds of heads, each promise where what it compares was run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from coppice.bench.pairs import ENOUGH, Pairs, Ratio
from coppice.bench.peers import HF_ASSISTED
from coppice.bench.report import HF_GENERATE, Check
from coppice.bench.run_report import ALL, FEW_REPEATS, Figures, RunRow


def speed_checks(pairs: Pairs, rows: Iterable[RunRow], kinds: Mapping[str, str], where: str = "") -> list[Check]:
    """The checks of one temperature, for all answers and for those that repeat little. `kinds`: of heads, by name.

    `where`: what else their names say.
    """
    by_method = {row.method: row for row in rows}
    where = f", T={pairs.temperature:g}{where}"
    checks = list(_drafting(pairs, by_method, kinds, where))
    for name, some in ((ALL, pairs), (FEW_REPEATS, pairs.few_repeats())):
        if len(some):
            figures = {method: row.figures[name] for method, row in by_method.items()}
            checks += _Compared(some, figures, kinds, where + ("" if name == ALL else ", few repeats")).checks()
    return checks


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


class _Compared:
    """The checks over one set of pairs."""

    def __init__(self, pairs: Pairs, figures: Mapping[str, Figures], kinds: Mapping[str, str], where: str) -> None:
        self._pairs, self._figures, self._kinds = pairs, figures, kinds
        self._where = where
        self._weak = f"weak: {len(pairs)} pairs" if len(pairs) < ENOUGH else ""

    def checks(self) -> Iterator[Check]:
        """Those whose methods were run."""
        yield from self._faster("plain", HF_GENERATE, 0.95)
        block = _best("specblock", self._kinds, self._pairs)
        if block:
            yield self._at_least(f"tau of {block}", self._figures[block].tau, 3.0)
            yield self._at_least(f"efficiency of {block}", self._figures[block].efficiency or 0.0, 0.85, self._weak)
            for other in (_best("eagle3", self._kinds, self._pairs), _best("lm", self._kinds, self._pairs)):
                yield from self._faster(block, other)
            yield from self._faster(block, HF_ASSISTED)
            yield from self._faster(block, HF_GENERATE, 1.6)
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

    def _faster(self, method: str, over: str | None, bound: float | None = None) -> Iterator[Check]:
        """Tokens/s of a method over another's: at least the bound, without one more than 1."""
        found: Ratio | None = self._pairs.ratio(method, over) if over and method in self._figures else None
        if found is None:
            return
        note = "; ".join(part for part in (self._weak, f"95%: {found.low:.2f} to {found.high:.2f}") if part)
        name = f"tokens/s of {method} over {over}"
        if bound is None:
            yield Check(name + self._where, round(found.value, 3), "> 1", found.value > 1, note)
        else:
            yield self._at_least(name, found.value, bound, note)

    def _at_least(self, name: str, value: float, bound: float, note: str = "") -> Check:
        return Check(name + self._where, round(value, 3), f">= {bound:g}", value >= bound, note)
