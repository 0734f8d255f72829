"""What a step costs in calls of the project's own functions: a bound on Python beside the models."""

from __future__ import annotations

from tests.counting.calls import HEADS, count


def test_a_step_calls_few_functions() -> None:
    single = f"single:{HEADS[0]}"
    calls = count([single, "auto"])
    assert calls[single].steps > 10
    assert calls[single].total("orchestrator") <= 287
    assert calls["auto"].total("orchestrator") <= 500
    assert max(one.total("verifier") for one in calls.values()) <= 400
