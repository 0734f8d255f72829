"""The RayService of the chart: the application that it names takes its arguments, on the Ray that is tested."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

import helm_python
import kubernetes_validate
import pytest
import yaml

from tests.chart.chart import (
    ROOT,
    chart,
    component,
    environment,
    laid_over,
    manifests,
    objects,
    objects_in,
    of_kind,
    pods,
    values_of,
)


def ray_service() -> dict[str, Any]:
    return dict(of_kind(objects("ray"), "RayService")["coppice"]["spec"])


def serve_config() -> dict[str, Any]:
    return dict(yaml.safe_load(ray_service()["serveConfigV2"]))


def test_its_pods_are_pods_that_find_the_registry() -> None:
    nodes = {name: pod for name, pod in pods(objects("ray")).items() if component(pod) == "ray"}
    assert set(nodes) == {"coppice-ray-head", "coppice-ray-gpu", "coppice-ray-cpu"}
    for name, pod in nodes.items():
        kubernetes_validate.validate({"apiVersion": "v1", "kind": "Pod", **pod}, "1.31", strict=True)
        (container,) = pod["spec"]["containers"]
        assert environment(container)["COPPICE_DIRECTORY__REDIS"] == "redis://:secret@coppice-redis:6379/0"
        assert container["image"].endswith("-cuda" if name.endswith("gpu") else "-cpu")


@pytest.mark.parametrize(
    ("more", "longest_s"),
    [
        ({}, 90),
        ({"settings": {"server": {"grace_s": 600}}}, 600),
        ({"settings": {"server": {"grace_s": 5}}}, 5),
        ({"settings": {"server": {"grace_s": 30}}, "verifier": {"settings": {"server": {"grace_s": 200.5}}}}, 201),
        ({"defaults": {"settings": {"server": {"grace_s": 300}}}}, 300),
    ],
)
def test_its_pods_have_the_grace_of_the_slowest_of_their_processes(more: dict[str, Any], longest_s: int) -> None:
    for name, pod in pods(objects_in(manifests(laid_over(values_of("ray"), more)))).items():
        if component(pod) == "ray":
            assert pod["spec"]["terminationGracePeriodSeconds"] == longest_s + 30, name  # Serve adds 20 s


def test_clients_dial_the_grpc_port_of_the_proxies() -> None:
    service = of_kind(objects("ray"), "Service")["coppice"]["spec"]
    (container,) = pods(objects("ray"))["coppice-ray-head"]["spec"]["containers"]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert {ports[each["targetPort"]] for each in service["ports"]} == {serve_config()["grpc_options"]["port"]}
    for function in serve_config()["grpc_options"]["grpc_servicer_functions"]:
        module, _, name = function.rpartition(".")
        assert callable(getattr(import_module(module), name))


def test_its_ray_is_the_one_that_is_pinned() -> None:
    (pin,) = re.findall(r"^ray==(.+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert ray_service()["rayClusterConfig"]["rayVersion"] == pin == chart().values["rayService"]["version"]


def test_the_application_takes_its_arguments() -> None:
    pytest.importorskip("ray")
    (application,) = serve_config()["applications"]
    module, _, builder = application["import_path"].partition(":")
    app = import_module(module)
    assert callable(getattr(app, builder))
    args = app.Args.model_validate(application["args"])
    assert [pool.name for pool in args.drafters] == ["eagle", "lookup"]
    assert (args.verifier.min_replicas, args.verifier.max_replicas, args.verifier.sessions_per_replica) == (2, 8, 48)
    assert args.verifier.ray_actor_options["num_gpus"] == 1
    assert args.verifier.settings["verifier"]["device"] == "cuda"
    assert args.drafters[1].settings["drafter"] == {"device": "cpu"}


@pytest.mark.parametrize(
    "more",
    [
        {"adapter": {"enabled": True}},
        {"tls": {"enabled": True}},
        {"verifier": {"drafters": [{"name": "a", "kind": "lookup"}]}},
        {"orchestrator": {"autoscaling": {"min": 5}}},
    ],
    ids=["adapter", "tls", "beside", "autoscaling"],
)
def test_what_it_cannot_do_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(helm_python.errors.HelmError, match=r"rayService excludes|min 5 is above max 4"):
        manifests(laid_over(values_of("ray"), more))
