"""What a step costs in calls of the project's own functions: a bound on Python beside the models."""

from __future__ import annotations

from tests.counting.calls import HEADS, count


def test_a_step_calls_few_functions() -> None:
    single, auto = count((f"single:{HEADS[0]}", "auto")).values()
    assert 0 < single.total("orchestrator") <= 287
    assert auto.total("orchestrator") <= 500
    assert 0 < max(single.total("verifier"), auto.total("verifier")) <= 400
