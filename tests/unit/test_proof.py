"""The proof runner resumes where it was interrupted, and only for the very commit."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from coppice.faults.report import FaultRow
from tests.proof import CAMPAIGNS, ROOT, Campaign, Outcome, commit_now, report, run_all

QUIET = Console(quiet=True)
# Notes that it ran; fails while a file says so, and on the third run when it is told to.
FAKE = """
import os, sys
from pathlib import Path
folder, fail_at = Path(sys.argv[1]), int(sys.argv[2])
count = len((folder / "ran").read_text()) if (folder / "ran").exists() else 0
(folder / "ran").write_text("x" * (count + 1))
print("proof", os.environ["COPPICE_PROOF"])
print("FAILED a check" if count + 1 == fail_at else "ok")
print(f"run {count + 1} | done", end="\\n\\n")
sys.exit(count + 1 == fail_at)
"""


def fake(folder: Path, runs: int = 1, fail_at: int = 0) -> Campaign:
    folder.mkdir(exist_ok=True)
    return Campaign(folder.name, (sys.executable, "-c", FAKE, str(folder), str(fail_at)), runs)


def within(folder: Path) -> tuple[Path, Path]:
    """The state and the folder of logs."""
    return folder / "proof.json", folder / ".proof"


def times_run(folder: Path) -> int:
    return len((folder / "ran").read_text()) if (folder / "ran").exists() else 0


def test_what_a_commit_passed_is_not_run_again(tmp_path: Path) -> None:
    campaigns = [fake(tmp_path / "a"), fake(tmp_path / "b", runs=3)]
    first = run_all(campaigns, *within(tmp_path), "c0ffee", QUIET)
    again = run_all(campaigns, *within(tmp_path), "c0ffee", QUIET)
    assert (times_run(tmp_path / "a"), times_run(tmp_path / "b")) == (1, 3)
    assert again == first
    assert (first[campaigns[1]].done, first[campaigns[1]].said) == (3, "run 3 | done")
    assert (tmp_path / ".proof" / "a.log").read_text().startswith("proof 1\n")


@pytest.mark.parametrize("commit", ["beef", "c0ffee-dirty"])
def test_another_commit_and_a_dirty_tree_start_anew(tmp_path: Path, commit: str) -> None:
    campaigns = [fake(tmp_path / "a")]
    run_all(campaigns, *within(tmp_path), "c0ffee", QUIET)
    run_all(campaigns, *within(tmp_path), commit, QUIET)
    assert times_run(tmp_path / "a") == 2
    run_all(campaigns, *within(tmp_path), commit, QUIET)
    assert times_run(tmp_path / "a") == (3 if commit.endswith("dirty") else 2)


def test_a_failed_run_ends_its_campaign_only_and_is_tried_again_from_there(tmp_path: Path) -> None:
    campaigns = [fake(tmp_path / "a", runs=4, fail_at=3), fake(tmp_path / "b")]
    made = run_all(campaigns, *within(tmp_path), "c0ffee", QUIET)
    failed = made[campaigns[0]]
    assert (failed.failed, failed.done, failed.said) == (True, 2, "FAILED a check")
    assert (made[campaigns[1]].failed, made[campaigns[1]].done) == (False, 1)
    made = run_all(campaigns, *within(tmp_path), "c0ffee", QUIET)
    assert (made[campaigns[0]].failed, made[campaigns[0]].done) == (False, 4)
    assert (times_run(tmp_path / "a"), times_run(tmp_path / "b")) == (5, 1)


def test_some_campaigns_can_be_run_and_the_others_are_known_as_before(tmp_path: Path) -> None:
    campaigns = [fake(tmp_path / name) for name in ("apple", "ant", "bee")]
    run_all(campaigns, *within(tmp_path), "c0ffee", QUIET, ["bee"])
    made = run_all(campaigns, *within(tmp_path), "c0ffee", QUIET, ["an"])
    assert [times_run(tmp_path / name) for name in ("apple", "ant", "bee")] == [0, 1, 1]
    assert [outcome.cells(campaign)[2] for campaign, outcome in made.items()] == ["0/1", "1/1", "1/1"]


def test_an_interruption_loses_the_run_that_was_interrupted_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    campaigns = [fake(tmp_path / "a", runs=5)]
    whole = Outcome.run

    def interrupted(self: Outcome, *arguments: object) -> None:
        if self.done == 2:
            raise KeyboardInterrupt
        whole(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Outcome, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_all(campaigns, *within(tmp_path), "c0ffee", QUIET)
    monkeypatch.setattr(Outcome, "run", whole)
    made = run_all(campaigns, *within(tmp_path), "c0ffee", QUIET)
    assert made[campaigns[0]].done == times_run(tmp_path / "a") == 5


def test_results_of_other_commits_stay_until_they_are_had_again(tmp_path: Path) -> None:
    campaigns = [fake(tmp_path / name) for name in ("old", "new")]
    run_all(campaigns, *within(tmp_path), "c0ffee" * 7, QUIET)
    made = run_all(campaigns, *within(tmp_path), "decade" * 7, QUIET, ["new"])
    assert [outcome.cells(campaign)[1:4] for campaign, outcome in made.items()] == [
        ("c0ffeec", "1/1", "ok"),
        ("decaded", "1/1", "ok"),
    ]


def test_the_result_names_commit_date_machine_and_every_campaign(tmp_path: Path) -> None:
    campaigns = [fake(tmp_path / "good"), fake(tmp_path / "bad", fail_at=1)]
    made = run_all(campaigns, *within(tmp_path), "c0ffee", QUIET)
    report(made, tmp_path / "proof.md", QUIET)
    text = (tmp_path / "proof.md").read_text()
    assert "at; 20" in text
    assert "cores" in text
    assert "| good | c0ffee | 1/1 | ok | 0.0 | run 1 / done |" in text
    assert "| bad | c0ffee | 0/1 | FAILED |" in text
    assert len({line.count("|") for line in text.splitlines() if line.startswith("|")}) == 1


def test_the_result_has_a_row_for_every_fault(tmp_path: Path) -> None:
    row = FaultRow("drafter-kill", 20, 300, recoveries=[0.1, 0.25])
    told = json.dumps({"rows": [row.to_json()]})
    writes = f"import sys; open(sys.argv[2], 'w').write({told!r})"
    campaigns = [Campaign("faults", (sys.executable, "-c", writes), tells_faults=True)]
    for _ in range(2):  # the second time from the state
        made = run_all(campaigns, *within(tmp_path), "c0ffee", QUIET)
        report(made, tmp_path / "proof.md", QUIET)
        assert "| drafter-kill | 20 | 300 | 0 | 0 | 0.10 | 0.25 | ok |" in (tmp_path / "proof.md").read_text()


def test_a_changed_file_makes_the_commit_dirty_and_the_result_itself_does_not(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    (tmp_path / "docs").mkdir()
    for name in ("docs/proof.md", "docs/proof.json", "code.py"):
        (tmp_path / name).write_text("1")
    git("init")
    git("add", ".")
    git("commit", "-m", "x")
    clean = commit_now(tmp_path)
    assert len(clean) == 40
    for name in ("proof.md", "proof.json"):
        (tmp_path / "docs" / name).write_text("2")
    assert commit_now(tmp_path) == clean
    (tmp_path / "code.py").write_text("2")
    assert commit_now(tmp_path) == f"{clean}-dirty"


def test_the_campaigns_are_told_apart_and_their_tests_exist() -> None:
    assert len({campaign.name for campaign in CAMPAIGNS}) == len(CAMPAIGNS)
    files = [part for campaign in CAMPAIGNS for part in campaign.command if part.startswith("tests/")]
    assert files
    assert all((ROOT / file).is_file() for file in files)


@pytest.mark.parametrize(
    "campaign", [each for each in CAMPAIGNS if each.name.startswith("bench")], ids=lambda c: c.name
)
def test_the_commands_of_the_campaigns_exist_with_their_options(campaign: Campaign) -> None:
    asked = dataclasses.replace(campaign, command=(*campaign.command, "--help"))
    told = subprocess.run(asked.command, capture_output=True, text=True, cwd=ROOT)
    assert told.returncode == 0, told.stderr


def test_the_campaigns_models_and_options_are_what_the_command_takes() -> None:
    command = [sys.executable, "-m", "tests.faults.campaign", "--kinds", "lightning"]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    assert told.returncode == 2
    assert "'lightning' is none of" in told.stderr


def test_a_name_that_no_campaign_begins_with_is_an_error() -> None:
    command = [sys.executable, "-m", "tests.proof", "lightning"]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    assert told.returncode == 1
    assert "no campaign begins with 'lightning'; there are tree, " in told.stderr
