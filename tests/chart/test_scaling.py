"""What the chart's autoscaling does under load, by the arithmetic of KEDA and of the HorizontalPodAutoscaler it makes.

https://kubernetes.io/docs/tasks/run-application/horizontal-pod-autoscale/#algorithm-details and "Configurable scaling
behavior" there; https://keda.sh/docs/latest/reference/scaledobject-spec/ for what comes from and goes to zero.
"""

from __future__ import annotations

import math
import random
import re
from itertools import pairwise
from typing import Any

import pytest

from coppice.config.settings import Settings
from tests.chart.chart import (
    FILES,
    PLAIN,
    container_of,
    environment,
    laid_over,
    manifests,
    objects,
    objects_in,
    of_kind,
    pods,
    values_of,
)

TICK_S = 15  # of the autoscaler and of a scrape
POLL_S = 30  # KEDA's, for what is at zero
TOLERANCE = 0.1
UP_PODS, UP_FACTOR, UP_PERIOD_S = 4, 2, 15  # the policies of scaleUp where none are given
PLATEAU_S = 3600
METRICS = ("vllm:num_requests_running", "vllm:num_requests_waiting", "coppice_verifier_kv_tokens_used")
SCALED = [name for name in PLAIN if name in FILES or of_kind(objects(name), "ScaledObject")]


def kv_tokens_of(verifier: dict[str, str]) -> int:
    """The KV of a verifier with these variables; 0 stands for what its device has left."""
    return int(verifier.get("COPPICE_VERIFIER__KV_TOKENS", Settings().verifier.kv_tokens)) or 1 << 18


class Scaled:
    """A component that a ScaledObject scales: when each of its replicas is ready, and every number there was."""

    def __init__(self, spec: dict[str, Any], start_s: float) -> None:
        self.least, self.most = int(spec["minReplicaCount"]), int(spec["maxReplicaCount"])
        self.triggers, self.cooldown_s = spec["triggers"], spec["cooldownPeriod"]
        self.down = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"]
        self.up = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleUp"]
        self.start_s, self.ready_at = start_s, [0.0] * max(1, self.least)
        self.wanted: list[tuple[float, int]] = []
        self.history: list[tuple[float, int]] = []
        self.active_at = 0.0

    def ready(self, now: float) -> int:
        """Replicas that have started."""
        return sum(at <= now for at in self.ready_at)

    def recommended(self, metrics: dict[str, float]) -> int:
        """The largest number that a trigger asks for."""
        numbers, current = list[int](), len(self.ready_at)
        for trigger in self.triggers:
            assert re.fullmatch(r"sum\([^()]*\)( \+ sum\([^()]*\))*", trigger["metadata"]["query"])
            total = sum(metrics[name] for name in re.findall(r"sum\(([a-z_:]+)\{", trigger["metadata"]["query"]))
            each = float(trigger["metadata"]["threshold"])
            within = abs(1 - total / (each * current)) <= TOLERANCE
            numbers.append(current if within else math.ceil(total / each))
        return max(numbers)

    def next_number(self, now: float, metrics: dict[str, float]) -> int:
        """How many replicas there are to be."""
        current, is_active = len(self.ready_at), any(metrics.values())
        self.active_at = now if is_active else self.active_at
        if not current:
            return int(is_active and now % POLL_S == 0)
        if not self.least and now - self.active_at > self.cooldown_s:
            return 0
        number = self.recommended(metrics)
        window_s = self.down["stabilizationWindowSeconds"]
        self.wanted = [(at, each) for at, each in self.wanted if at > now - window_s] + [(now, number)]
        assert self.up == {"stabilizationWindowSeconds": 0}

        def before(period_s: float) -> int:
            return next((each for at, each in reversed(self.history) if at <= now - period_s), current)

        if number > current:
            earlier = before(UP_PERIOD_S)
            number = min(number, max(earlier + UP_PODS, earlier * UP_FACTOR))
        else:
            (policy,) = self.down["policies"]
            slowest = before(policy["periodSeconds"]) - policy["value"]
            number = min(current, max(max(each for _, each in self.wanted), slowest))
        return min(max(number, self.least, 1), self.most)

    def scale(self, now: float, metrics: dict[str, float]) -> None:
        """Take one look and add or remove replicas, the youngest first."""
        number = self.next_number(now, metrics)
        self.ready_at = (self.ready_at + [now + self.start_s] * number)[:number]
        self.history.append((now, number))

    def turns(self, since: float, until: float) -> list[int]:
        """The directions of its changes between two times, equal ones in a row once."""
        numbers = [each for at, each in self.history if since <= at < until]
        steps = [(b > a) - (b < a) for a, b in pairwise(numbers)]
        moves = [step for step in steps if step]
        return [move for at, move in enumerate(moves) if at == 0 or moves[at - 1] != move]


class Deployment:
    """What a render serves under a load that comes back when it is refused."""

    def __init__(self, found: list[dict[str, Any]], start_s: float, session_tokens: int) -> None:
        variables = {name: environment(container_of(pod)) for name, pod in pods(found).items()}
        scaled = of_kind(found, "ScaledObject")
        self.parts = {
            name.removeprefix("coppice-"): Scaled(each["spec"], start_s if "verifier" in name else 60)
            for name, each in scaled.items()
        }
        limits, self.session_tokens = Settings().limits, session_tokens
        own = variables["coppice-orchestrator"]
        self.seats = int(own.get("COPPICE_LIMITS__SESSIONS", limits.sessions))
        self.queued = int(own.get("COPPICE_LIMITS__QUEUED", limits.queued))
        own = variables["coppice-verifier"]
        kv_tokens = kv_tokens_of(own)
        self.sessions = min(int(own.get("COPPICE_LIMITS__SESSIONS", limits.sessions)), kv_tokens // session_tokens)
        self.served = 0.0

    @property
    def most(self) -> int:
        """Requests that all its replicas decode at once."""
        return min(self.parts["orchestrator"].most * self.seats, self.parts["verifier"].most * self.sessions)

    def tick(self, now: float, load: float, metrics: dict[str, float]) -> dict[str, float]:
        """Serve what there is room for, and scale by the metrics of the tick before; returns those of this one."""
        front, verifiers = (self.parts[name].ready(now) for name in ("orchestrator", "verifier"))
        running = min(load, front * self.seats)
        self.served = min(running, verifiers * self.sessions)
        for part in self.parts.values():
            part.scale(now, metrics)
        return {
            "vllm:num_requests_running": running,
            "vllm:num_requests_waiting": min(load - running, front * self.queued),
            "coppice_verifier_kv_tokens_used": self.served * self.session_tokens,
        }


def deployment(name: str, start_s: float, session_tokens: int) -> Deployment:
    """That of a render; a file that scales nothing is scaled as operations.md says."""
    found = objects(name)
    if not of_kind(found, "ScaledObject"):
        variables = environment(container_of(pods(found)["coppice-verifier"]))
        kv_tokens = kv_tokens_of(variables)
        scaling = {"min": 1, "max": 6, "sessions": 90}
        more = {
            "verifier": {"autoscaling": scaling | {"kvTokens": kv_tokens * 4 // 5}},
            "orchestrator": {"autoscaling": scaling},
        }
        found = objects_in(manifests(laid_over(values_of(name), more)))
    return Deployment(found, start_s, session_tokens)


@pytest.mark.parametrize("session_tokens", [100, 3000])
@pytest.mark.parametrize("start_s", [60, 600])
@pytest.mark.parametrize("name", SCALED)
def test_replicas_follow_the_load_and_come_back_without_swinging(
    name: str, start_s: float, session_tokens: int
) -> None:
    served, chance = deployment(name, start_s, session_tokens), random.Random(0)
    first, now, metrics = served.parts["orchestrator"].least * served.seats, 0.0, dict.fromkeys(METRICS, 0.0)
    for times in (0, 0.5, 1, 2, 5, 10, 3, 0):
        began, load = now, times * first
        while now < began + PLATEAU_S:
            metrics = served.tick(now, load * chance.uniform(0.95, 1.05), metrics)
            now += TICK_S
        assert served.served >= 0.95 * min(load, served.most) - 1, times
        for part in served.parts.values():
            numbers = [number for at, number in part.history if at >= began]
            assert part.least <= min(numbers) <= max(numbers) <= part.most
            turns = part.turns(began, now)
            assert len(turns) <= 1, (times, turns)
            assert not part.turns(now - PLATEAU_S / 4, now), times
    assert {each: part.history[-1][1] for each, part in served.parts.items()} == {
        each: part.least for each, part in served.parts.items()
    }


@pytest.mark.parametrize("name", SCALED)
def test_full_seats_ask_for_more_of_everything_and_one_loop_asks_for_one_core(name: str) -> None:
    served = deployment(name, 60, 100)
    front = served.parts["orchestrator"]
    for number in range(1, front.most):
        full = dict(zip(METRICS, (number * served.seats, 0.0, 0.0), strict=True))
        front.ready_at = [0.0] * number
        assert front.recommended(full) > number
    full = dict(zip(METRICS, (front.most * served.seats, front.most * served.queued, 0.0), strict=True))
    for part in served.parts.values():
        part.ready_at = [0.0] * (part.most - 1)
        assert part.recommended(full) >= part.most
    cores = container_of(pods(objects(name))["coppice-orchestrator"])["resources"]["requests"]["cpu"]
    assert cores in ("1", "500m")
