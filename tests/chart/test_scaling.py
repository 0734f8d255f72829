"""What the chart's autoscaling asks for under load, by the arithmetic of the HorizontalPodAutoscaler that KEDA makes.

https://kubernetes.io/docs/tasks/run-application/horizontal-pod-autoscale/#algorithm-details
"""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from coppice.config.settings import Settings
from tests.chart import chart

TOLERANCE = 0.1
METRICS = ("vllm:num_requests_running", "vllm:num_requests_waiting", "coppice_verifier_kv_tokens_used")
SCALED = [name for name in chart.PLAIN if name in chart.FILES or chart.of_kind(chart.objects(name), "ScaledObject")]


def scaled_objects(name: str) -> list[dict[str, Any]]:
    """Those of a render; a file that scales nothing is scaled as operations.md says."""
    scaling = {"min": 1, "max": 6, "sessions": 90}
    more = {"verifier": {"autoscaling": scaling | {"kvTokens": 1000}}, "orchestrator": {"autoscaling": scaling}}
    own = chart.of_kind(chart.objects(name), "ScaledObject")
    scaled = own or chart.of_kind(
        chart.objects_in(chart.manifests(chart.laid_over(chart.values_of(name), more))), "ScaledObject"
    )
    return [each["spec"] for each in scaled.values()]


def recommended(scaled: dict[str, Any], metrics: dict[str, float], current: int) -> int:
    """The largest number of replicas that a trigger asks for beside so many."""
    numbers = list[int]()
    for trigger in scaled["triggers"]:
        assert re.fullmatch(r"sum\([^()]*\)( \+ sum\([^()]*\))*", trigger["metadata"]["query"])
        total = sum(metrics[name] for name in re.findall(r"sum\(([a-z_:]+)\{", trigger["metadata"]["query"]))
        each = float(trigger["metadata"]["threshold"])
        within = abs(1 - total / (each * current)) <= TOLERANCE
        numbers.append(current if within else math.ceil(total / each))
    return max(numbers)


@pytest.mark.parametrize("name", SCALED)
def test_full_seats_ask_for_more_of_everything_and_one_loop_asks_for_one_core(name: str) -> None:
    parts = scaled_objects(name)
    (front,) = [each for each in parts if each["scaleTargetRef"]["name"] == "coppice-orchestrator"]
    container, limits = chart.container_of(chart.pods(chart.objects(name))["coppice-orchestrator"]), Settings().limits
    seats = int(chart.environment(container).get("COPPICE_LIMITS__SESSIONS", limits.sessions))
    queued = int(chart.environment(container).get("COPPICE_LIMITS__QUEUED", limits.queued))
    most = front["maxReplicaCount"]
    for number in range(1, most):
        assert recommended(front, dict(zip(METRICS, (number * seats, 0.0, 0.0), strict=True)), number) > number
    full = dict(zip(METRICS, (most * seats, most * queued, 0.0), strict=True))
    for part in parts:
        assert recommended(part, full, max(1, part["maxReplicaCount"] - 1)) >= part["maxReplicaCount"]
        behaviour = part["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        assert behaviour["scaleUp"] == {"stabilizationWindowSeconds": 0}  # up at once, down a few at a time
        assert behaviour["scaleDown"]["stabilizationWindowSeconds"] > 0
        assert len(behaviour["scaleDown"]["policies"]) == 1
    assert container["resources"]["requests"]["cpu"] in ("1", "500m")
