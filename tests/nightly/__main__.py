"""`make nightly`: every campaign at full counts, one after the other. What this code has passed is not run again.

`python -m tests.nightly NAME...` runs the campaigns whose names begin so. Of the others the latest result stays, with
the commit that it was measured at. The state is docs/proof.json, the table docs/proof.md; each line of a campaign's
output is printed as it comes, and kept in .proof.
"""

from __future__ import annotations

import json
import os
import re
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

ROOT = Path(__file__).resolve().parents[2]
STATE, RESULT, LOGS = Path("docs/proof.json"), Path("docs/proof.md"), Path(".proof")
PAGES = ("docs/proof.*", "docs/gpu/*", "*.md", "*.svg", "*.png")
"""what may change without a campaign being run again"""
COLUMNS = ("campaign", "commit", "date", "ok", "minutes", "result")
FAULTS = ("fault", "repetitions", "requests", "failed", "wrong", "recovery_p50_s", "recovery_p99_s", "ok")
MUTANTS = ("mutant", "check", "tokens", "found")
PYTEST = (sys.executable, "-m", "pytest", "--timeout", "7200", "--keep-duplicates", "-vv", "-rs")
BENCH = (sys.executable, "-c", "from coppice.cli import main; main()", "bench")
IDENTITY, FAULTS_OF = (sys.executable, "-m", "tests.tiny_stack"), (sys.executable, "-m", "tests.faults")


def pytest(*files: str, repeat: int = 1) -> tuple[str, ...]:
    """The command that runs these files of tests/ so often."""
    return (*PYTEST, *repeat * tuple(f"tests/{file}.py" for file in files))


# Each command proves something when it ends with 0. The environment has COPPICE_PROOF=1, which asks for full counts.
CAMPAIGNS: dict[str, tuple[str, ...]] = {
    "trees and draws": pytest(*(f"unit/test_{name}" for name in ("tree", "sampling", "acceptance", "routing"))),
    "law of every rule": (sys.executable, "-m", "tests.law"),
    "planted bugs": (sys.executable, "-m", "tests.faults.planted", "--json", str(LOGS / "planted bugs.json")),
    "hostile heads and clients": pytest(*(f"faults/test_{name}" for name in ("head_faults", "hostile", "streams"))),
    "bench exact": (*BENCH, "exact", "--dtype", "float32", "--n", "8"),
    **{
        f"identity, {kind}, {dtype}": (*IDENTITY, kind, "bench", "identity", "--dtype", dtype, "--ids", ids)
        for dtype, unit in (("float32", 5000), ("bfloat16", 3000))  # in 33 and 53 ways: a million ids each
        for kind, ids in (("plain", f"{4 * unit}"), ("grammar", f"{2 * unit}"), ("hybrid", f"{unit}"))
    },
    **{
        f"faults {group}": (
            *(*FAULTS_OF, "--kinds", group, "--tls", "--repeat", "20"),
            *("--json", str(LOGS / f"faults {group}.json")),
        )
        for group in dict.fromkeys(scenario.group for scenario in SCENARIOS)
    },
    "faults in clear": (*FAULTS_OF, "--repeat", "2", "--json", str(LOGS / "faults in clear.json")),
    "weight syncs": pytest("services/test_weight_sync", repeat=3),
    "adapter": pytest("services/test_adapter", "services/test_signal_stream", "pipeline/test_adaptation", repeat=3),
    "chart": pytest(*(f"chart/test_{name}" for name in ("chart", "contract", "run"))),
    "schemas": pytest("nightly/test_schemas"),
    "shipped heads": pytest("nightly/test_shipped_heads"),
    "hybrids": pytest("nightly/test_hybrid_at_length"),
    "ranks": pytest("services/test_ranks", "nightly/test_ranks_at_length"),
    "ray": pytest("ray/test_ray_app"),
    "real": pytest("real/test_real", "nightly/test_peers_at_length"),
    "fuzzing": (*pytest("nightly/test_fuzz_at_length"), "--numprocesses", "2"),
    "HTTP's description": pytest("nightly/test_openapi_at_length"),
    "a day's traffic": pytest("nightly/test_day_at_length"),
}


def commit_now(root: Path) -> str:
    """Return the last commit that changed more than PAGES, with "-dirty" behind it when the tree differs in more."""
    git, others = ("git", "-C", str(root)), ("--", ".", *(f":!{page}" for page in PAGES))
    commit = subprocess.check_output((*git, "log", "-1", "--format=%h", "--abbrev=12", *others), text=True).strip()
    same = subprocess.run((*git, "diff", "--quiet", "HEAD", *others)).returncode == 0
    return commit if same else f"{commit}-dirty"


def run(name: str, command: Sequence[str], root: Path) -> dict[str, Any]:
    """Run one campaign, and print its output; `result` is its claim's own figure."""
    log, faults = root / LOGS / f"{name}.log", root / LOGS / f"{name}.json"
    log.parent.mkdir(exist_ok=True)
    faults.unlink(missing_ok=True)
    began, environment = time.monotonic(), os.environ | {"COPPICE_PROOF": "1"}
    streams: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    with log.open("w") as file, subprocess.Popen(command, cwd=root, env=environment, **streams) as process:
        for line in process.stdout or ():
            print(f"{name}, {(time.monotonic() - began) / 60:.1f} min: {line}", end="", flush=True)
            file.write(line)
    lines = [line.strip() for line in log.read_text(encoding="utf-8").splitlines() if line.strip()] or [""]
    report = json.loads(faults.read_text())["rows"] if faults.exists() else []
    rows = [{column: row[column] for column in (*FAULTS, *MUTANTS) if column in row} for row in report]
    # Too little proves nothing, nor do tests that were all skipped.
    weak = any(line.startswith("weak ") for line in lines) or re.search(r"^(?!.* passed).* skipped", lines[-1])
    ok = process.returncode == 0 and not weak
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "machine": this_machine().describe(),
        "ok": ok,
        "minutes": (time.monotonic() - began) / 60,
        "result": _claim(lines, rows, failed=not ok)[:300],
        "rows": rows,
    }


def _claim(lines: Sequence[str], rows: Sequence[Mapping[str, Any]], *, failed: bool) -> str:
    """The checks or tests that failed; else what ways or rows come to, the first check that held, the last line."""
    if failures := [line for line in lines if failed and line.startswith(("FAILED", "weak "))]:
        return "; ".join(failures)
    if ways := [match for line in lines if (match := re.match(r"([0-9a-f]{64})  (\d+) ids  ", line))]:
        return f"{ways[0][1][:16]} of {sum(int(way[2]) for way in ways)} ids in {len(ways)} ways"
    if rows and "mutant" in rows[0]:
        return f"{sum(bool(row['ok']) for row in rows)} of {len(rows)} planted bugs found"
    if rows:
        counts = (f"{sum(row[name] for row in rows)} {name}" for name in ("requests", "failed", "wrong"))
        return f"{', '.join(counts)}; recovery p99 at most {max(row['recovery_p99_s'] for row in rows):.1f} s"
    return [*[line for line in lines if line.startswith("ok ")][:1], *lines[-1:], ""][0].strip("= ")


def prove(campaigns: Mapping[str, Sequence[str]], root: Path, names: Sequence[str] = ("",)) -> bool:
    """Run the campaigns that begin with one of `names`, note each result at once and return whether all are ok.

    What a dirty tree has passed is run again: the tree may differ the next time.
    """
    state = root / STATE
    results: dict[str, Any] = json.loads(state.read_text()) if state.exists() else {}
    results = {name: results[name] for name in campaigns if name in results}
    for name, command in campaigns.items():
        last, commit = results.get(name, {"ok": False}), commit_now(root)
        passed = last["ok"] and last["commit"] == commit and not commit.endswith("-dirty")
        if passed or not name.startswith(tuple(names)):
            continue
        result = {"campaign": name, "commit": commit} | run(name, command, root)
        if not result["ok"]:
            result["since"] = last.get("since", result["date"])
        results[name] = result
        print(f"{name}: {'ok' if result['ok'] else 'FAILED'} {result['result']}", flush=True)
        state.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        (root / RESULT).write_text(report(campaigns, results), encoding="utf-8")
    return all(results[name]["ok"] for name in campaigns if name in results)


def report(campaigns: Iterable[str], results: Mapping[str, Any]) -> str:
    """Return the table of campaigns as Markdown."""
    rows = [results.get(name, {"campaign": name, "result": "not run"}) for name in campaigns]
    rows = [row | {"result": f"{row['result']}, since {row['since']}"} if "since" in row else row for row in rows]
    counts = Counter("not run" if "ok" not in row else "ok" if row["ok"] else "failed" for row in rows)
    return (
        "# Proof\n\nThe latest result of every campaign of `make nightly`, with the commit that it was measured at: "
        f"{', '.join(f'{number} {verdict}' for verdict, number in counts.items())}. "
        "[proof.json](proof.json) has the figures, [faults.md](faults.md) says what faults prove.\n\n"
        + _table(COLUMNS, rows)
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
