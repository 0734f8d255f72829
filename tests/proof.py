"""`make proof`: the campaigns at full counts, one after the other; what this commit has passed is not run again.

It takes hours. `python tests/proof.py NAME...` runs the campaigns whose names begin so; of the others the latest result
stays, each with the commit it was had at. The state is docs/proof.json, the table docs/proof.md; outputs lie in .proof.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from coppice.faults.command import every
from coppice.machine import this_machine

ROOT = Path(__file__).resolve().parents[1]
RESULT = Path("docs") / "proof.md"
STATE = RESULT.with_suffix(".json")
COLUMNS = ("campaign", "commit", "runs", "result", "minutes", "what it said")
FAULT_COLUMNS = ("fault", "repetitions", "requests", "failed", "wrong", "recovery p50, s", "p99, s", "result")
UNIT = ("tree", "sampling", "acceptance", "routing")
PYTEST = (sys.executable, "-m", "pytest", "--timeout", "7200")
BENCH = (sys.executable, "-c", "from coppice.cli import main; main()", "bench")
FAULTS = (sys.executable, "-m", "tests.faults.campaign", "--repeat", "20")


@dataclass(frozen=True)
class Campaign:
    """A command that proves something when it ends with 0, `runs` times in a row."""

    name: str
    command: tuple[str, ...]
    runs: int = 1
    tells_faults: bool = False
    """whether it takes `--json FILE` and writes a row for each fault there"""


CAMPAIGNS = (
    *(Campaign(each, (*PYTEST, f"tests/unit/test_{each}.py")) for each in UNIT),
    Campaign("bench exact", (*BENCH, "exact", "--dtype", "float32", "--n", "8")),
    Campaign("sampled law", (*PYTEST, "tests/unit/test_law.py", "tests/pipeline/test_sampled_sessions.py")),
    *(Campaign(f"bench {each}", (*BENCH, each)) for each in ("steps", "rows")),
    Campaign("weight syncs", (*PYTEST, "tests/services/test_weight_sync.py"), runs=3),
    Campaign("adapter", (*PYTEST, "tests/services/test_adapter.py", "tests/services/test_signal_stream.py"), runs=3),
    Campaign("adaptation", (*PYTEST, "tests/pipeline/test_adaptation.py"), runs=3),
    Campaign("ray", (*PYTEST, "tests/ray/test_ray_app.py"), runs=3),
    *(
        Campaign(f"faults {group}", (*FAULTS, "--kinds", group), tells_faults=True)
        for group in dict.fromkeys(one.group for one in every())
    ),
    Campaign("fuzzing", (*PYTEST, "tests/faults/test_fuzz.py", "tests/faults/test_streams.py")),
)


@dataclass
class Outcome:
    """How far a campaign came at a commit: runs that ended well, and whether the last one did not."""

    commit: str = ""
    date: str = ""
    machine: str = ""
    done: int = 0
    failed: bool = False
    seconds: float = 0.0
    said: str = ""
    """its last line; of a failed run the first check or test that failed"""
    faults: list[dict[str, Any]] = field(default_factory=list)

    def cells(self, campaign: Campaign) -> tuple[str, ...]:
        """A row of the table, in the order of COLUMNS."""
        result = "FAILED" if self.failed else "ok" if self.done == campaign.runs else "not run"
        at = self.commit[:7] + "-dirty" * self.commit.endswith("-dirty")
        return campaign.name, at, f"{self.done}/{campaign.runs}", result, f"{self.seconds / 60:.1f}", self.said

    def fault_cells(self) -> list[tuple[str, ...]]:
        """Rows of the faults' table, in the order of FAULT_COLUMNS."""
        counts = ("fault", "repetitions", "requests", "failed", "wrong")
        return [
            (
                *(str(row[name]) for name in counts),
                *(f"{row[name]:.2f}" for name in ("recovery_p50_s", "recovery_p99_s")),
                "ok" if row["ok"] else "FAILED",
            )
            for row in self.faults
        ]

    def run(self, campaign: Campaign, log: Path) -> None:
        """One run at full counts; its output goes to `log`."""
        told_faults = log.with_suffix(".json")
        told_faults.unlink(missing_ok=True)
        command = (*campaign.command, *(("--json", str(told_faults)) if campaign.tells_faults else ()))
        began, told = time.monotonic(), os.environ | {"COPPICE_PROOF": "1"}
        with log.open("wb") as output:
            ended = subprocess.run(command, cwd=ROOT, env=told, stdout=output, stderr=output, check=False)
        lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        self.date, self.machine = f"{datetime.now(UTC):%Y-%m-%d}", this_machine().describe()
        self.seconds += time.monotonic() - began
        self.failed = ended.returncode != 0
        self.done += not self.failed
        telling = [line for line in lines if line.startswith("FAILED")][:1] if self.failed else []
        self.said = (telling or lines[-1:] or [""])[0].strip()[:120]
        self.faults = json.loads(told_faults.read_text())["rows"] if told_faults.exists() else []


def commit_now(root: Path) -> str:
    """The commit that is tested, with "-dirty" behind it when a tracked file other than the results differs."""

    def git(*arguments: str) -> str:
        return subprocess.run(("git", *arguments), cwd=root, capture_output=True, text=True, check=True).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", f":!{RESULT}", f":!{STATE}")
    return git("rev-parse", "HEAD") + ("-dirty" if changed else "")


def run_all(
    campaigns: Sequence[Campaign], state: Path, logs: Path, commit: str, console: Console, names: Sequence[str] = ("",)
) -> dict[Campaign, Outcome]:
    """Run what this commit has not passed yet, from where it was interrupted; every run is noted in `state` at once.

    `names`: what the campaigns to run begin with. What a dirty tree passed is run again: it may differ the next time.
    """
    logs.mkdir(parents=True, exist_ok=True)
    known = json.loads(state.read_text()) if state.exists() else {}
    outcomes = {campaign: Outcome(**known.get(campaign.name, {})) for campaign in campaigns}
    for campaign in campaigns:
        if not campaign.name.startswith(tuple(names)):
            continue
        if outcomes[campaign].commit != commit or commit.endswith("-dirty"):
            outcomes[campaign] = Outcome(commit)
        outcome = outcomes[campaign]
        outcome.failed = False  # it is tried again
        while outcome.done < campaign.runs and not outcome.failed:
            console.print(f"{campaign.name}: run {outcome.done + 1} of {campaign.runs}", highlight=False)
            outcome.run(campaign, logs / f"{campaign.name}.log")
            had = {each.name: asdict(one) for each, one in outcomes.items() if one.commit}
            state.write_text(json.dumps(had, indent=1) + "\n", encoding="utf-8")
    return outcomes


def report(outcomes: Mapping[Campaign, Outcome], file: Path, console: Console) -> None:
    """Print the table and write it with the dates and machines that its rows are of."""
    rows = [outcome.cells(each) for each, outcome in outcomes.items()]
    table = Table(*COLUMNS, title="proof", title_justify="left")
    for cells in rows:
        table.add_row(*cells)
    console.print(table)
    ran = [outcome for outcome in outcomes.values() if outcome.commit]
    dates, machines = ({outcome.date for outcome in ran}, {outcome.machine for outcome in ran})
    text = "# Proof\n\nThe latest result of every campaign of `make proof`, at the commit it was had at; "
    text += f"{' to '.join(dict.fromkeys((min(dates), max(dates))))}, on {'; '.join(sorted(machines))}.\n\n"
    text += _markdown(COLUMNS, rows)
    if faults := [cells for outcome in outcomes.values() for cells in outcome.fault_cells()]:
        text += "\n## Faults\n\n[faults.md](faults.md) says what each proves.\n\n" + _markdown(FAULT_COLUMNS, faults)
    file.write_text(text, encoding="utf-8")


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ("---",) * len(columns), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |\n" for cells in lines)


if __name__ == "__main__":
    terminal, asked = Console(), sys.argv[1:] or ("",)
    known = [each.name for each in CAMPAIGNS]
    for name in asked:
        if not any(each.startswith(name) for each in known):
            sys.exit(f"no campaign begins with {name!r}; there are {', '.join(known)}")
    made = run_all(CAMPAIGNS, ROOT / STATE, ROOT / ".proof", commit_now(ROOT), terminal, asked)
    report(made, ROOT / RESULT, terminal)
    sys.exit(any(outcome.failed for outcome in made.values()))
