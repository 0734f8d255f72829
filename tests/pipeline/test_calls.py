"""What a step costs in calls of the project's own functions; the verifier's include those of its target's layers."""

from tests.counting.calls import HEADS, count

BOUNDS = {"orchestrator": (260, 380), "verifier": (455, 480)}  # under a single head, and under `auto`


def test_a_step_calls_few_functions() -> None:
    counted = count((f"single:{HEADS[0]}", "auto")).values()
    for process, bounds in BOUNDS.items():
        calls = tuple(each.total(process) for each in counted)
        assert all(0 < made <= most for made, most in zip(calls, bounds, strict=True)), (process, calls)
