"""What each fault did, as a row of the campaign's report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from lab.report import Check, Report, table
from tests.faults.campaign.load import Stream

LIMIT_S = 5.0
"""recovery p99 may take as long"""


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest-rank percentile; 0 of nothing."""
    return float(np.quantile(values, share, method="inverted_cdf")) if values else 0.0


@dataclass(slots=True)
class FaultRow:
    """What one fault did, over all its repetitions."""

    fault: str
    repetitions: int = 0
    requests: int = 0
    failed: int = 0
    wrong: int = 0
    """tokens that are not plain's"""
    tokens: int = 0
    drafted: int = 0
    """tokens that were accepted drafts"""
    recoveries: list[float] = field(default_factory=list)
    """of every affected stream, the longest it went without a new token from the fault on, seconds"""
    leaks: list[str] = field(default_factory=list)
    weak: list[str] = field(default_factory=list)
    """why a repetition proves nothing"""
    failures: list[str] = field(default_factory=list)
    """what requests failed with, each said once"""
    violations: list[str] = field(default_factory=list)
    """what in clients' histories breaks a rule"""
    checks: list[Check] = field(default_factory=list)
    """what this fault promises besides"""

    def count(self, streams: Sequence[Stream]) -> None:
        """Take in requests that ended."""
        self.requests += sum(not stream.left for stream in streams)
        self.failed += sum(bool(stream.failure) for stream in streams)
        self.wrong += sum(stream.wrong for stream in streams)
        self.tokens += sum(len(stream.ids) for stream in streams)
        self.drafted += sum(stream.drafted for stream in streams)
        self.violations += [what for stream in streams for what in stream.violations]
        self.failures += sorted({stream.failure for stream in streams if stream.failure} - {*self.failures})

    def recovered(self, streams: Sequence[Stream], since: float, until: float) -> None:
        """Note how long the streams that were affected by a fault between two times were silent."""
        self.recoveries += [stream.silence(since, until) for stream in streams]

    @property
    def p50(self) -> float:
        """Median recovery, seconds."""
        return percentile(self.recoveries, 0.5)

    @property
    def p99(self) -> float:
        """Recovery of all but the worst hundredth, seconds."""
        return percentile(self.recoveries, 0.99)

    def to_checks(self) -> list[Check]:
        """Nothing failed, nothing wrong, back in time, nothing left behind, and the load was worth the name."""
        name = self.fault
        checks = [
            Check(f"{name}: failed requests", self.failed, "0", self.failed == 0, _some(self.failures)),
            Check(f"{name}: wrong tokens", self.wrong, "0", self.wrong == 0),
            Check(f"{name}: broken histories", len(self.violations), "0", not self.violations, _some(self.violations)),
            Check(f"{name}: left behind", len(self.leaks), "0", not self.leaks, _some(self.leaks)),
        ]
        if self.recoveries:
            checks.append(Check.at_most(f"{name}: recovery p99, s", self.p99, LIMIT_S))
        if self.weak:
            note = f"weak: {_some(self.weak)}"
            checks.append(Check(f"{name}: repetitions that prove nothing", len(self.weak), "0", False, note))
        return checks + self.checks

    @property
    def ok(self) -> bool:
        """Whether all of it held."""
        return all(check.ok for check in self.to_checks())

    @property
    def verdict(self) -> str:
        """Whether all of it held, in a word."""
        return "ok" if self.ok else "weak" if self.weak else "FAILED"

    @property
    def line(self) -> str:
        """What came of it, and which checks failed."""
        failed = [check for check in self.to_checks() if not check.ok]
        why = "".join(f"; {check.name}: {check.value:g} ({check.note or check.bound})" for check in failed)
        recovery = f", recovery p99 {self.p99:.2f} s" if self.recoveries else ""
        figures = f"{self.requests} requests, {self.failed} failed, {self.wrong} wrong{recovery}"
        return f"{self.fault} {self.verdict}, {self.repetitions} times: {figures}{why}"

    def to_json(self) -> dict[str, Any]:
        """One entry of `rows`."""
        return asdict(self) | {"recovery_p50_s": self.p50, "recovery_p99_s": self.p99, "ok": self.ok}


def _some(said: Sequence[str]) -> str:
    return "; ".join(said[:3])


def add_faults(report: Report, faults: Sequence[FaultRow]) -> None:
    """Add a row for each fault, their table, and the checks that it does not show as held."""
    lines = []
    for row in faults:
        report.rows.append(row.to_json())
        lines.append(
            {
                "fault": row.fault,
                "times": row.repetitions,
                "requests": row.requests,
                "failed": row.failed,
                "wrong": row.wrong,
                "recovery p50": row.p50 if row.recoveries else None,
                "p99": row.p99 if row.recoveries else None,
                "held": row.verdict,
            }
        )
        report.checks += [check for check in row.to_checks() if not check.ok or check in row.checks]
    report.tables.append(table("seconds from a fault to the next token of every stream it affected", lines))
