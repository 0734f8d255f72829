"""What the chart renders: objects that Kubernetes takes, with what operators rely on, and none for a misspelt key.

`REGENERATE=1 pytest tests/chart/test_chart.py` rewrites the settings that the schema knows.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import helm_python
import jsonschema
import kubernetes_validate
import pytest
import yaml

from coppice.config.settings import Settings
from tests.chart.chart import (
    ALL,
    CASES,
    FILES,
    FOLDER,
    PLAIN,
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

WORDS = {"default", "description", "title"}
REGENERATE = os.environ.get("REGENERATE") == "1"
PROOF = os.environ.get("COPPICE_PROOF") == "1"  # as `make chart` and `make nightly` set it
KUBERNETES = tuple(f"1.{minor}" for minor in ((27, *range(29, 35), 37) if PROOF else (29, 34)))
# Settings that are the chart's to make: addresses, paths, what comes out of Secrets, and what is for tests.
OWN = {
    "server": {"host", "port", "health_port", "metrics_port", "advertise", "ready_file", "failpoints"},
    "tls": {"ca", "cert", "key"},
    "verifier": {"target", "device", "ranks", "drafters"},
    "drafter": {"name", "kind", "path", "target", "verifiers", "device"},
    "directory": {"redis"},
    "orchestrator": {"target", "verifiers", "heads", "tokens", "http_port"},
    "adaptation": {"redis"},
    "adapter": {"target", "heads", "drafters", "folder", "device"},
}


@cache
def custom() -> dict[str, Any]:
    """Schemas of custom resources, by kind."""
    ours, theirs = (ROOT / "tests/chart/schemas" / name for name in ("custom.yaml", "crds.json"))
    return {**yaml.safe_load(ours.read_text(encoding="utf-8")), **json.loads(theirs.read_text(encoding="utf-8"))}


@cache
def is_valid(text: str) -> bool:
    """Validate an object, given as JSON, by the schemas of Kubernetes or ours. Raises what they raise."""
    found = json.loads(text)
    if ours := custom().get(found["kind"]):
        assert found["apiVersion"] == ours["apiVersion"]
        jsonschema.Draft202012Validator(ours["spec"]).validate(found["spec"])
    else:
        for version in KUBERNETES:  # for one that it lacks, the package takes an older one
            assert kubernetes_validate.validate(found, version, strict=True) == version
    return True


@pytest.mark.parametrize("name", ALL)
def test_every_object_is_one_that_kubernetes_knows_and_has_a_name_of_its_own(name: str) -> None:
    rays = [pod for pod in pods(objects(name)).values() if component(pod) == "ray"]
    nodes = [{"apiVersion": "v1", "kind": "Pod", **pod} for pod in rays]
    assert all(is_valid(json.dumps(found)) for found in (*objects(name), *nodes))
    keys = [(found["kind"], found["metadata"]["name"]) for found in objects(name)]
    assert len(keys) == len(set(keys))
    assert {found["metadata"]["labels"]["app.kubernetes.io/instance"] for found in objects(name)} == {"coppice"}
    assert max(len(found) for _, found in keys) <= 63


@pytest.mark.parametrize(("name", "kind", "of", "path", "value"), CASES["facts"], ids=lambda each: str(each)[:60])
def test_operators_find_what_they_rely_on(name: str, kind: str, of: str, path: str, value: Any) -> None:
    found: Any = of_kind(objects(name), kind)[of]
    for key in path.split("."):
        found = found[int(key)] if isinstance(found, list) else found[key]
    assert found == value if not isinstance(value, dict) else value.items() <= found.items()


@pytest.mark.parametrize("name", PLAIN)
def test_volumes_and_secrets_are_the_ones_that_were_named(name: str) -> None:
    named = {"cpu": set(), "one-gpu": {"models"}, "given": {"models", "versions"}}.get(name)
    volumes = [volume for pod in pods(objects(name)).values() for volume in pod["spec"].get("volumes", [])]
    claims = {each["persistentVolumeClaim"]["claimName"] for each in volumes if "persistentVolumeClaim" in each}
    assert claims == (set(of_kind(objects(name), "PersistentVolumeClaim")) if named is None else named)
    for volume in volumes:
        if volume.get("persistentVolumeClaim", {}).get("claimName") == "models":
            assert volume["persistentVolumeClaim"]["readOnly"]
    secrets = {each["secret"]["secretName"] for each in volumes if "secret" in each} - {"clients"}
    if name == "given":
        assert secrets == {f"{role}-pair" for role in ("verifier", "drafter", "orchestrator", "adapter")}
    else:
        made = {each["spec"]["secretName"] for each in of_kind(objects(name), "Certificate").values()}
        assert secrets == made - {"coppice-operator-tls", "coppice-authority"}


@pytest.mark.parametrize("release", ["a" * 40 + "-one", "a" * 20 + "-" * 3 + "b" * 30])
def test_releases_share_no_name(release: str) -> None:
    mine, others = (
        {(each["kind"], each["metadata"]["name"]) for each in objects_in(manifests(values_of("cluster"), name))}
        for name in (release, "a" * 40 + "-other")
    )
    assert not mine & others
    assert max(len(name) for _, name in mine) <= 63


def test_helm_finds_nothing_to_say() -> None:
    for file in FILES:
        report = helm_python.lint(FOLDER, values_of(file), strict=True)
        assert not [each for each in report["messages"] if each["severity"] > 1], report


def test_the_schema_knows_every_setting_that_is_not_the_charts_own() -> None:
    sections = {
        name: field.annotation.model_json_schema()["properties"] for name, field in Settings.model_fields.items()
    }  # type: ignore[union-attr]
    assert all(OWN[section] <= sections[section].keys() for section in OWN)
    known: dict[str, dict[str, Any]] = {}
    for section, fields in sections.items():
        bounds = {
            name: {key: fields[name][key] for key in sorted(fields[name].keys() - WORDS)} for name in sorted(fields)
        }
        if names := [name for name in bounds if name not in OWN.get(section, ())]:
            properties = {name: bounds[name] for name in names}
            known[section] = {"type": "object", "additionalProperties": False, "properties": properties}
    expected = {"type": "object", "additionalProperties": False, "properties": known}
    file = FOLDER / "values.schema.json"
    text = file.read_text(encoding="utf-8")
    if REGENERATE:
        lines = ",\n".join(
            f'        "{section}": {{"type": "object", "additionalProperties": false, "properties": {{\n'
            + ",\n".join(f'          "{name}": {json.dumps(bounds)}' for name, bounds in each["properties"].items())
            + "\n        }}"
            for section, each in known.items()
        )
        head = '      "type": "object",\n      "additionalProperties": false,\n      "properties": {\n'
        made = f'"settings": {{\n{head}{lines}\n      }}\n    }}'
        begin = text.rindex('"settings": {')
        file.write_text(f"{text[:begin]}{made}\n  }}\n}}\n", encoding="utf-8")
    assert json.loads(file.read_text(encoding="utf-8"))["$defs"]["settings"] == expected, "REGENERATE=1 rewrites it"


def objects_of(schema: Any) -> Iterator[dict[str, Any]]:
    """Every schema of an object with keys of its own, wherever it is."""
    if isinstance(schema, list):
        schema = dict(enumerate(schema))
    if isinstance(schema, dict):
        if "properties" in schema and schema.get("type") == "object":
            yield schema
        for each in schema.values():
            yield from objects_of(each)


def test_a_misspelt_key_is_refused_wherever_it_is() -> None:
    schema = json.loads((FOLDER / "values.schema.json").read_text(encoding="utf-8"))
    found = list(objects_of(schema))
    assert len(found) > 20
    closed = ("additionalProperties", "unevaluatedProperties")
    opened = [each for each in found if not any(each.get(name) is False for name in closed)]
    bases = [schema["$defs"][name] for name in ("component", "head", "rayNode")]  # whoever takes one closes it
    assert [each for each in opened if each not in bases] == []


@pytest.mark.parametrize(("values", "reason"), CASES["refused"], ids=str)
def test_values_that_cannot_work_or_contradict_each_other_are_refused(values: dict[str, Any], reason: str) -> None:
    pattern = r"(?i)schema|values|valid" if reason == "schema" else reason
    below = values_of("ray") if "rayService" in values else {}
    with pytest.raises(helm_python.errors.HelmError, match=pattern):
        manifests(laid_over(below, values))


def test_scaling_is_refused_by_a_cluster_without_keda(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FOLDER, tmp_path / "coppice"))
    scaling = folder / "templates" / "_scaling.tpl"
    text = scaling.read_text(encoding="utf-8")
    for served, refused in (("keda.sh/v1alpha1", True), ("apps/v1", False)):  # without a cluster, Helm knows apps/v1
        cluster = text.replace('Has "apiregistration.k8s.io/v1"', 'Has "v1"')
        scaling.write_text(cluster.replace('Has "keda.sh/v1alpha1"', f'Has "{served}"'), encoding="utf-8")
        with pytest.raises(helm_python.errors.HelmError, match="has no KEDA") if refused else nullcontext():
            helm_python.Chart.load(folder).render(values_of("cluster"), name="a", namespace="b")


# --- the RayService: the application that it names takes its arguments, on the Ray that is tested ---


def serve_config() -> dict[str, Any]:
    (service,) = of_kind(objects("ray"), "RayService").values()
    return dict(yaml.safe_load(service["spec"]["serveConfigV2"]))


def test_its_nodes_run_the_pinned_ray_find_the_registry_and_are_dialed_at_their_proxies() -> None:
    (pin,) = re.findall(r"^ray==(.+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    (ray,) = of_kind(objects("ray"), "RayService").values()
    assert ray["spec"]["rayClusterConfig"]["rayVersion"] == pin == chart().values["rayService"]["version"]
    service, options = of_kind(objects("ray"), "Service")["coppice"]["spec"], serve_config()["grpc_options"]
    nodes = {name: pod for name, pod in pods(objects("ray")).items() if component(pod) == "ray"}
    assert set(nodes) == {"coppice-ray-head", "coppice-ray-gpu", "coppice-ray-cpu"}
    for name, pod in nodes.items():
        (container,) = pod["spec"]["containers"]
        assert environment(container)["COPPICE_DIRECTORY__REDIS"] == "redis://:secret@coppice-redis:6379/0"
        assert container["image"].endswith("-cuda" if name.endswith("gpu") else "-cpu")
        ports = {each["name"]: each["containerPort"] for each in container["ports"]}
        assert {ports[each["targetPort"]] for each in service["ports"]} == {options["port"]}
    for function in options["grpc_servicer_functions"]:
        module, _, name = function.rpartition(".")
        assert callable(getattr(import_module(module), name))


@pytest.mark.parametrize(
    ("more", "longest_s"),
    [
        ({}, 90),
        ({"settings": {"server": {"grace_s": 5}}}, 5),
        ({"settings": {"server": {"grace_s": 30}}, "verifier": {"settings": {"server": {"grace_s": 200.5}}}}, 201),
        ({"defaults": {"settings": {"server": {"grace_s": 300}}}}, 300),
    ],
)
def test_its_pods_have_the_grace_of_the_slowest_of_their_processes(more: dict[str, Any], longest_s: int) -> None:
    for name, pod in pods(objects_in(manifests(laid_over(values_of("ray"), more)))).items():
        if component(pod) == "ray":
            assert pod["spec"]["terminationGracePeriodSeconds"] == longest_s + 30, name  # Serve adds 20 s


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
