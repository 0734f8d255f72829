"""What a step costs in calls of the project's own functions; the verifier's include those of its target's layers."""

from tests.counting.calls import HEADS, count

BOUNDS = {"orchestrator": (260, 380), "verifier": (455, 480)}  # under a single head, and under `auto`


def test_a_step_calls_few_functions() -> None:
    for _ in range(3):  # a full machine adds late drafts and cut trees to some counts
        counted = count((f"single:{HEADS[0]}", "auto")).values()
        calls = {process: tuple(each.total(process) for each in counted) for process in BOUNDS}
        if all(
            0 < made <= most for process in BOUNDS for made, most in zip(calls[process], BOUNDS[process], strict=True)
        ):
            return
    raise AssertionError(f"{calls} calls a step, allowed are {BOUNDS}")
