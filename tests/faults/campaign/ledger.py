"""A campaign's progress: a line and the results so far after every repetition, to go on from later."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from coppice.errors import InvalidField
from lab.report import Check, Report
from tests.faults.campaign.report import FaultRow, add_faults


class Ledger:
    """The rows of a campaign's faults. What a file holds of an earlier call is not done again."""

    def __init__(
        self,
        report: Report,
        faults: Sequence[str],
        repeat: int,
        file: Path | None = None,
        print_line: Callable[[str], object] = lambda line: None,
    ) -> None:
        """`report`: empty but for figures, which two calls must share so that one goes on with the other's rows."""
        self.print = print_line
        self._report, self._faults, self._repeat, self._file = report, faults, repeat, file
        self.rows = {fault: FaultRow(fault) for fault in faults}
        self._began = self._fault_began = time.monotonic()
        self._done_before = 0

    def resume(self) -> None:
        """Take in the file's rows, if there is one. Raises InvalidField when it is of another campaign."""
        if self._file is None or not self._file.exists():
            return
        try:
            told = json.loads(self._file.read_text(encoding="utf-8"))
            figures, rows = told["figures"], {row["fault"]: FaultRow.from_json(row) for row in told["rows"]}
        except (ValueError, KeyError, TypeError, OSError):
            raise InvalidField("json", f"{self._file} holds no campaign to go on with") from None
        if figures != self._report.figures:
            raise InvalidField("json", f"{self._file} is of a campaign of {figures}, not of {self._report.figures}")
        # What earlier stacks left unclean stays a failure; checks of faults come from their rows.
        told_before = [Check(**check) for check in told["checks"] if not check["ok"] and ": " not in check["name"]]
        self._report.checks += told_before
        self.rows = rows | {fault: row for fault, row in self.rows.items() if fault not in rows}
        self._done_before = sum(row.repetitions for row in rows.values())

    def left(self, fault: str) -> int:
        """Repetitions of a fault that are to be done; 0 when it is complete."""
        return 0 if self.rows[fault].complete else max(1, self._repeat - self.rows[fault].repetitions)

    def begin(self, fault: str) -> FaultRow:
        """The row that a fault's next repetitions are noted in."""
        self._fault_began = time.monotonic()
        return self.rows[fault]

    def note(self, row: FaultRow) -> None:
        """Say that a repetition of a fault ended, and keep the results."""
        self._say(f"{row.fault} {row.repetitions}/{self._repeat}", row)

    def complete(self, row: FaultRow) -> None:
        """Say that a fault's repetitions are all done and which of its checks failed, and keep the results."""
        row.complete = True
        failed = [check for check in row.to_checks() if not check.ok]
        why = "".join(f"; {check.name}: {check.value:g} ({check.note or check.bound})" for check in failed)
        self._say(f"{row.fault} {row.verdict}, {row.repetitions} times", row, why)

    def _say(self, what: str, row: FaultRow, why: str = "") -> None:
        recovery = f", recovery p99 {row.p99:.2f} s" if row.recoveries else ""
        figures = f"{row.requests} requests, {row.failed} failed, {row.wrong} wrong{recovery}"
        now = time.monotonic()
        in_all, left = (timedelta(seconds=int(seconds)) for seconds in (now - self._began, self._remaining()))
        self.print(f"{what}: {figures}, {now - self._fault_began:.0f} s; {in_all} in all, {left} left{why}")
        if self._file:
            partial = self._file.with_name(f"{self._file.name}.partial")
            self.report().write(partial)
            partial.replace(self._file)

    def report(self) -> Report:
        """What is known so far."""
        made = replace(self._report, rows=[], tables=[], checks=list(self._report.checks))
        add_faults(made, [row for row in self.rows.values() if row.repetitions or row.complete])
        return made

    def _remaining(self) -> float:
        """Seconds that what is left takes if it goes on as this call did so far."""
        done = sum(row.repetitions for row in self.rows.values()) - self._done_before
        left = sum(self._repeat - self.rows[fault].repetitions for fault in self._faults if self.left(fault))
        return (time.monotonic() - self._began) / max(1, done) * max(0, left)
