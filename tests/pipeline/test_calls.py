"""What a step costs in calls of the project's own functions: a bound on Python beside the models.

The verifier's calls include those of its target's layers, and what it tells the drafters that follow its sessions.
"""

from __future__ import annotations

from tests.counting.calls import HEADS, count


def test_a_step_calls_few_functions() -> None:
    single, auto = count((f"single:{HEADS[0]}", "auto")).values()
    assert 0 < single.total("orchestrator") <= 270
    assert auto.total("orchestrator") <= 450
    assert 0 < single.total("verifier") <= 490
    assert auto.total("verifier") <= 490
