"""`make proof`: the campaigns at full counts, one after the other. What this commit has passed is not run again.

It takes hours. `python -m tests.proof NAME...` runs the campaigns whose names begin so. Of the others the latest result
stays, with the commit that it was measured at. The state is docs/proof.json, the table docs/proof.md, and each
campaign's output is in .proof.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from coppice.machine import this_machine
from tests.faults.campaign.scenarios import SCENARIOS

ROOT = Path(__file__).resolve().parents[1]
STATE, RESULT, LOGS = Path("docs/proof.json"), Path("docs/proof.md"), Path(".proof")
COLUMNS = ("campaign", "commit", "date", "ok", "minutes", "said")
FAULTS = ("fault", "repetitions", "requests", "failed", "wrong", "recovery_p50_s", "recovery_p99_s", "ok")
MUTANTS = ("mutant", "check", "tokens", "found", "ok")
UNIT = ("tree", "sampling", "acceptance", "routing")
PYTEST = (sys.executable, "-m", "pytest", "--timeout", "7200", "--keep-duplicates")
BENCH = (sys.executable, "-c", "from coppice.cli import main; main()", "bench")
TINY = (sys.executable, "-m", "tests.tiny_stack")
FAULTS_OF = (sys.executable, "-m", "tests.faults", "--repeat", "20", "--kinds")

# Each command proves something when it ends with 0. The environment has COPPICE_PROOF=1, which asks for full counts.
CAMPAIGNS: dict[str, tuple[str, ...]] = {
    **{name: (*PYTEST, f"tests/unit/test_{name}.py") for name in UNIT},
    "bench exact": (*BENCH, "exact", "--dtype", "float32", "--n", "8"),
    "bench identity": (*TINY, "bench", "identity", "--ids", "1000000"),
    "bench identity in bfloat16": (*TINY, "bench", "identity", "--dtype", "bfloat16", "--ids", "1000000"),
    "bench identity of the demo": (*BENCH, "identity"),
    "planted bugs": (sys.executable, "-m", "tests.faults.test_mutants", "--json", str(LOGS / "planted bugs.json")),
    "law of every rule": (sys.executable, "-m", "tests.law"),
    "sampled law": (*PYTEST, "tests/unit/test_law.py", "tests/nightly/test_sampled_sessions.py"),
    "weight syncs": (*PYTEST, *3 * ("tests/services/test_weight_sync.py",)),
    "adapter": (*PYTEST, *3 * ("tests/services/test_adapter.py", "tests/services/test_signal_stream.py")),
    "adaptation": (*PYTEST, *3 * ("tests/pipeline/test_adaptation.py",)),
    "ray": (*PYTEST, *3 * ("tests/ray/test_ray_app.py",)),
    **{
        f"faults {group}": (*FAULTS_OF, group, "--json", str(LOGS / f"faults {group}.json"))
        for group in dict.fromkeys(scenario.group for scenario in SCENARIOS)
    },
    "faults under mutual TLS": (
        *(sys.executable, "-m", "tests.faults", "--tls", "--repeat", "3"),
        *("--json", str(LOGS / "faults under mutual TLS.json")),
    ),
    "fuzzing": (*PYTEST, "tests/nightly/test_fuzz_at_length.py", "tests/faults/test_streams.py"),
}


def commit_now(root: Path) -> str:
    """Return the commit that is tested, with "-dirty" behind it when a tracked file other than the results differs."""
    git = ("git", "-C", str(root))
    commit = subprocess.check_output((*git, "rev-parse", "--short=12", "HEAD"), text=True).strip()
    same = subprocess.run((*git, "diff", "--quiet", "HEAD", "--", ".", f":!{STATE}", f":!{RESULT}")).returncode == 0
    return commit if same else f"{commit}-dirty"


def run(name: str, command: Sequence[str], root: Path) -> dict[str, Any]:
    """Run one campaign; `said` is its claim's own figure."""
    log, faults = root / LOGS / f"{name}.log", root / LOGS / f"{name}.json"
    log.parent.mkdir(exist_ok=True)
    faults.unlink(missing_ok=True)
    began = time.monotonic()
    with log.open("wb") as output:
        environment = os.environ | {"COPPICE_PROOF": "1"}
        code = subprocess.run(command, cwd=root, env=environment, stdout=output, stderr=output).returncode
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    key, columns = ("mutants", MUTANTS) if name == "planted bugs" else ("faults", FAULTS)
    report = json.loads(faults.read_text())["rows"] if faults.exists() else []
    rows = [{column: row.get(column) for column in columns} for row in report]
    ok = code == 0 and not any(line.startswith("weak ") for line in lines)  # too little proves nothing
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "machine": this_machine().describe(),
        "ok": ok,
        "minutes": (time.monotonic() - began) / 60,
        "said": _claim(lines, rows, failed=not ok)[:120],
        key: rows,
    }


def _claim(lines: Sequence[str], rows: Sequence[Mapping[str, Any]], *, failed: bool) -> str:
    """The first check or test that failed; else what the rows of a campaign come to, or the first check that held, or
    the last line.
    """
    if failures := [line for line in lines if failed and line.startswith(("FAILED", "weak "))]:
        return failures[0]
    if rows and "mutant" in rows[0]:
        return f"{sum(bool(row['ok']) for row in rows)} of {len(rows)} planted bugs found"
    if rows:
        counts = (f"{sum(row[name] for row in rows)} {name}" for name in ("requests", "failed", "wrong"))
        return f"{', '.join(counts)}; recovery p99 at most {max(row['recovery_p99_s'] for row in rows):.1f} s"
    return [*[line for line in lines if line.startswith("ok ")][:1], *lines[-1:], ""][0]


def prove(campaigns: Mapping[str, Sequence[str]], root: Path, names: Sequence[str] = ("",)) -> bool:
    """Run the campaigns that begin with one of `names`, note each result at once and return whether all are ok.

    What a dirty tree has passed is run again: the tree may differ the next time.
    """
    state = root / STATE
    results: dict[str, Any] = json.loads(state.read_text()) if state.exists() else {}
    for name, command in campaigns.items():
        last, commit = results.get(name, {"ok": False}), commit_now(root)
        passed = last["ok"] and last["commit"] == commit and not commit.endswith("-dirty")
        if passed or not name.startswith(tuple(names)):
            continue
        print(f"{name}: ", end="", flush=True)
        results[name] = {"campaign": name, "commit": commit} | run(name, command, root)
        print(results[name]["said"], flush=True)
        state.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        (root / RESULT).write_text(report(campaigns, results), encoding="utf-8")
    return all(results[name]["ok"] for name in campaigns if name in results)


def report(campaigns: Iterable[str], results: Mapping[str, Any]) -> str:
    """Return the table of campaigns as Markdown, then what failed in those of many rows."""
    rows = [results.get(name, {"campaign": name, "said": "not run"}) for name in campaigns]
    failed = [row | fault for row in rows for fault in row.get("faults", ()) if not fault["ok"]]
    counts = Counter("not run" if "ok" not in row else "ok" if row["ok"] else "failed" for row in rows)
    return (
        "# Proof\n\nThe latest result of every campaign of `make proof`, with the commit that it was measured at: "
        f"{', '.join(f'{number} {verdict}' for verdict, number in counts.items())}. "
        "[proof.json](proof.json) has the figures of each fault ([faults.md](faults.md) says what it proves) and of "
        "each planted bug (tests/mutants.py). `make nightly` runs the fuzzing alone.\n\n"
        + _table(COLUMNS, rows)
        + "\n## Faults that failed\n\n"
        + _table(("campaign", "date", *FAULTS), failed)
    )


def _table(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    def cell(value: Any) -> str:
        if isinstance(value, bool):
            return "ok" if value else "FAILED"
        return f"{value:.2f}" if isinstance(value, float) else str(value).replace("|", "/")

    lines = [columns, ["---"] * len(columns), *([cell(row.get(name, "")) for name in columns] for row in rows)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def main(names: Sequence[str]) -> int:
    """Run the campaigns whose names begin so, all of them without any; the exit code."""
    for name in names:
        if not any(campaign.startswith(name) for campaign in CAMPAIGNS):
            sys.exit(f"no campaign begins with {name!r}; there are {', '.join(CAMPAIGNS)}")
    return not prove(CAMPAIGNS, ROOT, names or ("",))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
