"""The campaigns of the proof name files and commands that exist."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from coppice.cli import app
from tests.nightly.__main__ import CAMPAIGNS, ROOT, main


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
