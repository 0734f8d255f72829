"""`coppice bench coupling`: what drafting with the target's own noise gains at T > 0 (docs/architecture.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from coppice.bench.exact import judged
from coppice.bench.reference import Reference
from coppice.bench.report import Check, Report, Row, make_row
from coppice.client.client import Client
from coppice.client.completion import Completion
from coppice.config.sections import FEATURE_KINDS
from coppice.errors import InvalidField
from coppice.speculation.sampling import SamplingParams
from coppice.stack.spec import HeadSpec

KINDS = ("lm", *FEATURE_KINDS)
GAINS = {"lm": 1.15, "specblock": 1.15}
"""what coupling multiplies tau by at T=1, at least, by kind of head"""


@dataclass(frozen=True, slots=True)
class CouplingRow(Row):
    """One head at one temperature, with or without coupled drafting."""

    temperature: float = 0.0
    coupled: bool = True


class CouplingReport(Report):
    """A report of CouplingRows, a coupled one before its uncoupled one."""

    def tables(self) -> Iterable[Table]:
        """tau both ways."""
        table = Table("method", "T", "tau uncoupled", "tau coupled", "ratio", "same/tie/wrong", box=SIMPLE_HEAD)
        rows = [row for row in self.rows if isinstance(row, CouplingRow)]
        for with_it, without in zip(rows[::2], rows[1::2], strict=True):
            counts = (getattr(with_it, name) + getattr(without, name) for name in ("identical", "ties", "wrong"))
            table.add_row(
                with_it.method,
                f"{with_it.temperature:g}",
                f"{without.tau:.2f}",
                f"{with_it.tau:.2f}",
                f"{with_it.tau / without.tau:.2f}",
                "/".join(map(str, counts)),
            )
        return [table]


def coupled_heads(heads: Sequence[HeadSpec]) -> tuple[HeadSpec, ...]:
    """Those whose drafts can use the noise. Raises InvalidField when there are none."""
    found = tuple(head for head in heads if head.kind in KINDS)
    if not found:
        raise InvalidField("heads", f"none is of kind {', '.join(KINDS)}")
    return found


def run_coupling(
    client: Client,
    reference: Reference,
    heads: Sequence[HeadSpec],
    prompts: Sequence[tuple[int, ...]],
    temperatures: Sequence[float],
    new_tokens: int,
    seed: int,
    report: Report,
    say: Callable[[str], None],
) -> None:
    """Fill the report: the same prompts and seeds with coupled drafting and without."""
    budget = client.describe().default_budget
    for temperature in temperatures:
        asked = [(ids, SamplingParams(temperature=temperature, seed=seed + at)) for at, ids in enumerate(prompts)]

        def answers(policy: str, coupled: bool = True, asked: Any = asked) -> list[Completion]:
            return [
                client.generate(
                    ids,
                    policy=policy,
                    coupled=coupled,
                    sampling=sampling,
                    max_new_tokens=new_tokens,
                    ignore_eos=True,
                )
                for ids, sampling in asked
            ]

        expected = [answer.ids for answer in answers("plain")]
        for head in heads:
            say(f"T={temperature:g}: {head.name}")
            taus = []
            for coupled in (True, False):
                mine = answers(f"single:{head.name}", coupled)
                row = make_row(f"single:{head.name}", mine, judged(reference, asked, mine, expected), budget)
                told = {field.name: getattr(row, field.name) for field in fields(Row)}
                report.rows.append(CouplingRow(**told, temperature=temperature, coupled=coupled))
                taus.append(row.tau)
            if temperature == 1 and head.kind in GAINS:
                ratio, bound = round(taus[0] / taus[1], 3), GAINS[head.kind]
                name = f"tau of {head.name} coupled over uncoupled, T=1"
                report.checks.append(Check(name, ratio, f">= {bound}", ratio >= bound))
    wrong = sum(row.wrong for row in report.rows)
    report.checks.append(Check("wrong answers", wrong, "0", wrong == 0))
