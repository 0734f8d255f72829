"""The Serve application without a cluster: what it may be told, what it is built of, how many replicas are wanted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from ray.serve.schema import ServeDeploySchema

from coppice.config.settings import load_settings
from coppice.errors import InvalidField
from orchestrator.ray_app import Args, build, scale_by_sessions
from tests.layout.test_house import ROOT

REDIS = {"directory": {"redis": "redis://127.0.0.1:6379/0"}}


@pytest.mark.parametrize(
    ("sessions", "running", "replicas"),
    [
        ({"r0": 4.0}, 1, 1),
        ({"r0": 4.1}, 1, 2),
        ({"r0": 4.0000001, "r1": 3.9999999}, 2, 2),  # averages are not exact
        ({"r0": 8.0, "r1": 0.0, "r2": 0.0}, 3, 2),  # the sessions are what counts, wherever they are
        ({"r0": 0.0}, 1, 0),  # Serve keeps min_replicas
        # Nothing is taken away while a replica has not said what it holds.
        ({}, 3, 3),
        ({"r0": 1.0}, 3, 3),
        ({"r0": 20.0}, 3, 5),
        ({"gone": 0.0}, 1, 1),
    ],
)
def test_there_are_replicas_for_all_sessions(sessions: dict[str, float], running: int, replicas: int) -> None:
    context: Any = SimpleNamespace(
        running_replicas=[f"r{number}" for number in range(running)],
        target_num_replicas=running,
        aggregated_metrics={"sessions": sessions} if sessions else {},
        config=SimpleNamespace(target_ongoing_requests=4),
    )
    assert scale_by_sessions(context)[0] == replicas


@pytest.mark.parametrize(
    ("told", "named"),
    [
        ({"settings": {"verifier": {"targt": "x"}}}, "verifier.targt"),
        ({"verifier": {"settings": {"limits": {"session": 1}}}}, "limits.session"),
        ({"verifier": {"replicas": 2, "max_replicas": 3}}, "replicas"),
        ({"verifier": {"min_replicas": 2}}, "min_replicas"),
        ({"verifier": {"min_replicas": 3, "max_replicas": 2}}, "max_replicas"),
        ({"ingress": {"max_replicas": 2}}, "max_replicas"),
        ({"drafters": [{"name": "a b"}]}, "name"),
        ({"drafters": [{"name": "a"}, {"name": "a"}]}, "a occurs twice"),
        ({"drafters": [{"name": "a", "kind": "lm"}]}, "path"),
        ({"target": ""}, "target"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(told: dict[str, Any], named: str) -> None:
    with pytest.raises((ValidationError, InvalidField)) as refused:
        build(Args.model_validate({"target": "models/demo/target", "settings": REDIS, **told}))
    assert named in str(refused.value)


def deployments(args: dict[str, Any]) -> dict[str, Any]:
    """What is built, by name."""
    door = build(Args.model_validate(args))._bound_deployment
    orchestrators, others, _ = door.init_args
    parts = [door, orchestrators._bound_deployment, *(other._bound_deployment for other in others)]
    return {part.name: part for part in parts}


def test_each_pool_is_a_deployment_that_is_scaled_by_itself() -> None:
    drafters = [{"name": "a", "max_replicas": 3, "sessions_per_replica": 5}, {"name": "b", "replicas": 2}]
    built = deployments({"target": "models/demo/target", "settings": REDIS, "drafters": drafters})
    assert set(built) == {"ingress", "orchestrator", "verifier", "drafter-a", "drafter-b"}
    scaling = built["drafter-a"]._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas, scaling.target_ongoing_requests) == (1, 3, 5)
    assert scaling.policy.get_policy().__name__ == scale_by_sessions.__name__
    assert built["drafter-b"]._deployment_config.autoscaling_config is None
    assert built["drafter-b"].num_replicas == 2


def test_a_pools_settings_hold_over_the_common_ones_and_serve_waits_for_the_drain() -> None:
    told = {"server": {"grace_s": 200}, "drafter": {"threads": 3}}
    pool = {"name": "a", "kind": "specblock", "path": "w", "settings": told}
    common = {**REDIS, "drafter": {"threads": 1, "top_k": 5}}
    built = deployments({"target": "t", "settings": common, "drafters": [pool]})
    name, role, flags, sections, _ = built["drafter-a"].init_args
    assert (name, role) == ("drafter-a", "drafter")
    drafter = {"target": str(ROOT / "t"), "verifiers": ["redis"], "threads": 3, "top_k": 5}
    assert sections == {**REDIS, "drafter": drafter, "server": {"grace_s": 200}}
    assert flags == {"drafter.name": "a", "drafter.kind": "specblock", "drafter.path": str(ROOT / "w")}
    assert built["drafter-a"]._deployment_config.graceful_shutdown_timeout_s > 200
    assert built["orchestrator"].init_args[3]["orchestrator"]["heads"] == ["a=redis"]


def test_the_shipped_config_is_one_that_serve_and_the_application_take() -> None:
    config = yaml.safe_load((ROOT / "orchestrator" / "serve.yaml").read_text(encoding="utf-8"))
    ServeDeploySchema.model_validate(config)
    (application,) = config["applications"]
    built = deployments(application["args"])
    assert config["http_options"]["host"] == "127.0.0.1"
    assert config["grpc_options"]["enable_reflection"] is False
    for name, part in built.items():
        if name != "ingress":
            sections = part.init_args[3]
            assert load_settings([], sections).model_dump(include=set(sections))
