"""The proof runner resumes where it was interrupted, and only for the very commit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coppice.cli import app
from tests.proof import CAMPAIGNS, RESULT, ROOT, main, prove

# Counts its runs; fails while a file `FOLDER/fail` is there, proves nothing while `FOLDER/weak` is.
FAKE = """
import os, sys
from pathlib import Path
folder = Path(sys.argv[1])
folder.mkdir(exist_ok=True)
(folder / "runs").open("a").write(os.environ["COPPICE_PROOF"])
sign = "FAILED a check" if (folder / "fail").exists() else "weak a bound" if (folder / "weak").exists() else "ok"
print(sign, "1 | 2", "", sep="\\n")
sys.exit((folder / "fail").exists())
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "docs").mkdir()
    for name, text in (("code.py", "1"), ("docs/proof.json", "{}"), ("docs/proof.md", "")):
        (tmp_path / name).write_text(text)
    git(tmp_path, "init")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "x")
    return tmp_path


def git(root: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    subprocess.run(["git", *identity, *arguments], cwd=root, check=True, capture_output=True)


def fakes(root: Path) -> dict[str, tuple[str, ...]]:
    return {name: (sys.executable, "-c", FAKE, str(root / name)) for name in ("a", "b")}


def runs(root: Path) -> list[int]:
    return [len((root / name / "runs").read_text()) for name in ("a", "b")]


def shown(root: Path) -> str:
    return (root / RESULT).read_text()


def test_a_commit_runs_again_what_failed_or_proved_nothing_and_a_changed_tree_runs_all(root: Path) -> None:
    (root / "a").mkdir()
    for file in ("fail", "weak"):
        (root / "a" / file).touch()
        assert not prove(fakes(root), root)
        assert f"| {'FAILED a check' if file == 'fail' else 'weak a bound'} |" in shown(root)
        (root / "a" / file).unlink()
    for _ in range(2):
        assert prove(fakes(root), root)
    assert runs(root) == [3, 1]
    (root / "code.py").write_text("2")
    for count in (1, 2):
        prove(fakes(root), root)
        assert runs(root) == [3 + count, 1 + count]
    git(root, "commit", "-a", "-m", "y")
    for _ in range(2):
        prove(fakes(root), root)
    assert runs(root) == [6, 4]


def test_an_interruption_loses_the_campaign_that_was_interrupted_only(root: Path) -> None:
    with pytest.raises(FileNotFoundError):
        prove(fakes(root) | {"b": ("no-such-program",)}, root)
    assert prove(fakes(root), root)
    assert runs(root) == [1, 1]


def test_the_files_and_commands_of_the_campaigns_exist() -> None:
    files = [part for command in CAMPAIGNS.values() for part in command if part.startswith("tests/")]
    assert files
    assert all((ROOT / file).is_file() for file in files)
    for name in (name for name in CAMPAIGNS if name.startswith("bench")):
        command = CAMPAIGNS[name]
        ended = CliRunner().invoke(app, [*command[command.index("bench") :], "--help"])
        assert ended.exit_code == 0, ended.output
    with pytest.raises(SystemExit, match="no campaign begins with 'lightning'; there are tree, "):
        main(["lightning"])
