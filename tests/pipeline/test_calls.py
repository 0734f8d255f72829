"""What a step costs in calls of the project's own functions: a bound on Python beside the models."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.counting.calls import HEADS


def test_a_step_calls_few_functions() -> None:
    # In a process of its own: services that the tests' fork server starts do not count.
    command = [sys.executable, "-m", "tests.counting.calls", "--json"]
    output = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True).stdout
    calls = json.loads(output.splitlines()[-1])
    single = calls[f"single:{HEADS[0]}"]
    assert 0 < single["orchestrator"] <= 287
    assert calls["auto"]["orchestrator"] <= 500
    assert 0 < max(single["verifier"], calls["auto"]["verifier"]) <= 400
