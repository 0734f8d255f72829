"""`make proof`: the campaigns at full counts, one after the other; what this commit has passed is not run again.

It takes hours. `python tests/proof.py NAME...` runs the campaigns whose names begin so. The state lies in
.proof/COMMIT.json, outputs beside it; what all campaigns came to so far is docs/proof.md.
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
COLUMNS = ("campaign", "runs", "result", "minutes", "last line")
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
    Campaign("bench sampling", (*BENCH, "sampling", "--n", "20000", "--sessions", "1000")),
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
    """How far a campaign came: runs that ended well, and whether the last one did not."""

    done: int = 0
    failed: bool = False
    seconds: float = 0.0
    last_line: str = ""
    faults: list[dict[str, Any]] = field(default_factory=list)

    def cells(self, campaign: Campaign) -> tuple[str, ...]:
        """A row of the table, in the order of COLUMNS."""
        result = "FAILED" if self.failed else "ok" if self.done == campaign.runs else "not run"
        return campaign.name, f"{self.done}/{campaign.runs}", result, f"{self.seconds / 60:.1f}", self.last_line

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
        self.seconds += time.monotonic() - began
        self.failed = ended.returncode != 0
        self.done += not self.failed
        self.last_line = lines[-1].strip()[:120] if lines else ""
        self.faults = json.loads(told_faults.read_text())["rows"] if told_faults.exists() else []


def commit_now(root: Path) -> str:
    """The commit that is tested, with "-dirty" behind it when a tracked file other than the result differs."""

    def git(*arguments: str) -> str:
        return subprocess.run(("git", *arguments), cwd=root, capture_output=True, text=True, check=True).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", f":!{RESULT}")
    return git("rev-parse", "HEAD") + ("-dirty" if changed else "")


def run_all(
    campaigns: Sequence[Campaign], folder: Path, commit: str, console: Console, names: Sequence[str] = ("",)
) -> dict[Campaign, Outcome]:
    """Run what this commit has not passed yet, from where it was interrupted; every run is noted at once.

    `names`: what the campaigns to run begin with. What a dirty tree passed is not remembered: it may differ the next
    time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    state = folder / f"{commit}.json"
    known = json.loads(state.read_text()) if state.exists() and not commit.endswith("-dirty") else {}
    outcomes = {campaign: Outcome(**known.get(campaign.name, {})) for campaign in campaigns}
    for campaign, outcome in outcomes.items():
        if not campaign.name.startswith(tuple(names)):
            continue
        outcome.failed = False  # it is tried again
        while outcome.done < campaign.runs and not outcome.failed:
            console.print(f"{campaign.name}: run {outcome.done + 1} of {campaign.runs}", highlight=False)
            outcome.run(campaign, folder / f"{campaign.name}.log")
            state.write_text(json.dumps({each.name: asdict(had) for each, had in outcomes.items()}, indent=1))
    return outcomes


def report(outcomes: Mapping[Campaign, Outcome], commit: str, file: Path, console: Console) -> None:
    """Print the table and write it with commit, date and machine."""
    rows = [outcome.cells(each) for each, outcome in outcomes.items()]
    table = Table(*COLUMNS, title=f"proof at {commit}", title_justify="left")
    for cells in rows:
        table.add_row(*cells)
    console.print(table)
    text = f"# Proof\n\n`make proof` at {commit}, {datetime.now(UTC):%Y-%m-%d}, on {this_machine().describe()}.\n\n"
    text += _markdown(COLUMNS, rows)
    if faults := [cells for outcome in outcomes.values() for cells in outcome.fault_cells()]:
        text += "\n## Faults\n\n[faults.md](faults.md) says what each proves.\n\n" + _markdown(FAULT_COLUMNS, faults)
    file.write_text(text, encoding="utf-8")


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ("---",) * len(columns), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |\n" for cells in lines)


if __name__ == "__main__":
    now, terminal = commit_now(ROOT), Console()
    made = run_all(CAMPAIGNS, ROOT / ".proof", now, terminal, sys.argv[1:] or ("",))
    report(made, now, ROOT / RESULT, terminal)
    sys.exit(any(outcome.failed for outcome in made.values()))
