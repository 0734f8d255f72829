"""What the chart renders: objects that Kubernetes takes, with what operators rely on, and none for a misspelt key.

`REGENERATE=1 pytest tests/chart/test_chart.py` rewrites the settings that the schema knows.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import cache
from typing import Any

import helm_python
import jsonschema
import kubernetes_validate
import pytest
import yaml

from coppice.config.sections import HEAD_KINDS
from coppice.config.settings import Settings
from tests.chart.chart import (
    ALL,
    FILES,
    FOLDER,
    PLAIN,
    ROOT,
    manifests,
    objects,
    objects_in,
    of_kind,
    pods,
    values_of,
)

REGENERATE = os.environ.get("REGENERATE") == "1"
OLDEST, NEWEST = "1.27", kubernetes_validate.latest_version()
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
    """Our schemas of custom resources, by kind."""
    return dict(yaml.safe_load((ROOT / "tests/chart/schemas/custom.yaml").read_text(encoding="utf-8")))


@pytest.mark.parametrize("name", ALL)
def test_every_object_is_one_that_kubernetes_knows(name: str) -> None:
    for found in objects(name):
        if found["kind"] in custom():
            schema = {**custom()[found["kind"]]["spec"], "$defs": custom()["$defs"]}
            assert found["apiVersion"] == custom()[found["kind"]]["apiVersion"]
            jsonschema.Draft202012Validator(schema).validate(found["spec"])
        else:
            for version in (OLDEST, NEWEST):
                kubernetes_validate.validate(found, version, strict=True)


@pytest.mark.parametrize("name", ALL)
def test_no_two_objects_share_a_name_and_all_say_whose_they_are(name: str) -> None:
    keys = [(found["kind"], found["metadata"]["name"]) for found in objects(name)]
    assert len(keys) == len(set(keys))
    assert {found["metadata"]["labels"]["app.kubernetes.io/instance"] for found in objects(name)} == {"coppice"}
    assert max(len(found) for _, found in keys) <= 63


POD = "spec.template.spec"
FACTS: list[tuple[str, str, str, str, Any]] = [
    ("cpu", "Deployment", "coppice-verifier", f"{POD}.containers.0.image", "coppice:0.1.0-cpu"),
    ("given", "Deployment", "coppice-verifier", f"{POD}.containers.0.image", "example.com/coppice:9.9.9-cuda"),
    ("given", "Deployment", "coppice-verifier", f"{POD}.imagePullSecrets.0.name", "pull"),
    ("given", "Deployment", "coppice-verifier", f"{POD}.nodeSelector", {"pool": "gpu"}),
    ("given", "Deployment", "coppice-verifier", f"{POD}.tolerations.1", {"key": "spot", "operator": "Exists"}),
    ("cluster", "Deployment", "coppice-adapter", "spec.strategy.type", "Recreate"),
    ("cluster", "Deployment", "coppice-verifier", "spec.strategy.rollingUpdate", {"maxSurge": 0, "maxUnavailable": 1}),
    ("cluster", "Deployment", "coppice-orchestrator", "spec.strategy.rollingUpdate.maxUnavailable", 0),
    ("cluster", "Deployment", "coppice-verifier", "spec.minReadySeconds", 30),
    ("cluster", "Deployment", "coppice-verifier", "spec.progressDeadlineSeconds", 960),
    ("cluster", "Deployment", "coppice-verifier", f"{POD}.initContainers.0.env.0.valueFrom.secretKeyRef.name", "hub"),
    ("cluster", "Deployment", "coppice-redis", "spec.strategy.type", "Recreate"),
    ("cluster", "PersistentVolumeClaim", "coppice-adapter", "spec.accessModes", ["ReadWriteMany"]),
    (
        "cluster",
        "PersistentVolumeClaim",
        "coppice-adapter",
        "metadata.annotations",
        {"helm.sh/resource-policy": "keep"},
    ),
    ("cluster", "PodDisruptionBudget", "coppice-drafter-eagle", "spec.maxUnavailable", 1),
    ("cluster", "HorizontalPodAutoscaler", "coppice-orchestrator", "spec.behavior.scaleDown.policies.0.value", 1),
    ("cluster", "ScaledObject", "coppice-verifier", "spec.minReplicaCount", 2),
    ("cluster", "ScaledObject", "coppice-verifier", "spec.triggers.0.metadata.threshold", "48"),
    ("cluster", "ScaledObject", "coppice-verifier", "spec.triggers.1.metadata.threshold", "367000"),
    ("cluster", "ServiceMonitor", "coppice-verifier", "spec.endpoints", [{"port": "metrics", "interval": "15s"}]),
    ("cluster", "NetworkPolicy", "coppice", "spec.policyTypes", ["Ingress", "Egress"]),
    ("given", "NetworkPolicy", "coppice-adapter", "spec.egress.1.to.0.ipBlock.cidr", "10.9.0.0/16"),
    ("cluster", "Certificate", "coppice-authority", "spec.isCA", True),
    ("cluster", "Certificate", "coppice-verifier", "spec.issuerRef", {"name": "coppice-authority", "kind": "Issuer"}),
    ("registry", "Certificate", "coppice-verifier", "spec.issuerRef", {"name": "ours"}),
    ("cluster", "Pod", "coppice-test", "metadata.annotations", dict.fromkeys(["helm.sh/hook"], "test")),
]
"""What operators rely on and no other test says: render, kind, name, path, value"""


@pytest.mark.parametrize(("name", "kind", "of", "path", "value"), FACTS, ids=lambda each: str(each)[:60])
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


@pytest.mark.parametrize("release", ["a" * 30, "a" * 40 + "-one", "a" * 20 + "-" * 3 + "b" * 30])
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
    sections = {name: set(field.annotation.model_fields) for name, field in Settings.model_fields.items()}  # type: ignore[union-attr]
    assert all(OWN[section] <= sections[section] for section in OWN)
    known: dict[str, dict[str, Any]] = {
        section: {"type": "object", "propertyNames": {"enum": sorted(names - OWN.get(section, set()))}}
        for section, names in sections.items()
        if names - OWN.get(section, set())
    }
    known["server"]["properties"] = {"grace_s": {"type": "number", "minimum": 0}}  # the chart computes with it
    expected = {"type": "object", "additionalProperties": False, "properties": known}
    file = FOLDER / "values.schema.json"
    text = file.read_text(encoding="utf-8")
    if REGENERATE:
        lines = ",\n".join(f'        "{section}": {json.dumps(each)}' for section, each in known.items())
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
    assert [each for each in opened if "enum" not in each.get("propertyNames", {}) and each not in bases] == []
    assert schema["$defs"]["head"]["properties"]["kind"]["enum"] == list(HEAD_KINDS)


@pytest.mark.parametrize(
    "values",
    [
        {"settings": {"verifier": {"kv_token": 1}}},
        {"settings": {"server": {"port": 1}}},
        {"verifier": {"replicsa": 1}},
        {"drafters": [{"name": "a", "kind": "lookup", "replicsa": 1}]},
        {"rayService": {"workers": [{"name": "a", "replicsa": 1}]}},
        {"drafters": [{"name": "a", "kind": "lookup", "settings": {"drafter": {"toop_k": 1}}}]},
        {"drafters": [{"name": "a", "kind": "eagle3"}]},
        {"drafters": [{"name": "A_b", "kind": "lookup"}]},
        {"drafters": [{"name": "a", "kind": "lookup", "adapt": True}]},
        {"target": {"path": "models"}},
        {"target": {"path": "/elsewhere", "hub": "a/b"}},
        {"adapter": {"replicas": 2}},
        {"adapter": {"autoscaling": {"min": 1, "max": 2, "cpu": 3}}},
        {"verifier": {"autoscaling": {"min": 1, "max": 2}}},
        {"verifier": {"gpu": -1}},
        {"defaults": {"gpu": 2}},
        {"verifier": {"drafters": [{"name": "a", "kind": "lookup", "gpu": 1}]}},
        {"verifier": {"drafters": [{"name": "a", "kind": "lm", "path": "/models/a", "adapt": True}]}},
        {"drafters": [{"name": "a", "kind": "eagle3", "path": "/elsewhere", "hub": "a/b"}]},
        {"settings": {"server": {"grace_s": "10m"}}},
        {"defaults": {"settings": {"server": {"grace_s": -5}}}},
        {"image": {"tag": "latest"}},
        {"redis": {"image": "redis:7.4-alpine"}},
    ],
    ids=str,
)
def test_values_that_cannot_work_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(helm_python.errors.HelmError, match=r"(?i)schema|values|valid"):
        manifests(values)


def test_tokens_may_be_told_to_cross_a_mesh_in_the_clear() -> None:
    for clear in ({"settings": {"tls": {"tokens_in_clear": True}}}, {}):
        own = {"orchestrator": {"tokensSecret": "t", "settings": {} if clear else {"tls": {"tokens_in_clear": True}}}}
        assert manifests(clear | own)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"adapter": {"enabled": True}, "redis": {"secret": "s"}}, "no head has adapt"),
        ({"discovery": "redis"}, "redis.secret"),
        ({"target": {"hub": "a/b"}, "models": {"claim": "c"}}, "exclude each other"),
        ({"tls": {"enabled": True, "secrets": {"verifier": "v"}}}, "tls.secrets"),
        (
            {
                "tls": {"enabled": True, "secrets": dict.fromkeys(("verifier", "drafter", "orchestrator"), "s")},
                "redis": {"enabled": True, "secret": "s"},
            },
            "tls.secrets.redis",
        ),
        (
            {"orchestrator": {"tokensSecret": "t"}},
            "orchestrator.tokensSecret: .*tls.enabled, or settings.tls.tokens_in_clear",
        ),
        (
            {"orchestrator": {"autoscaling": {"min": 3, "max": 2, "cpu": 70}}},
            "orchestrator.autoscaling: min 3 is above max 2",
        ),
        (
            {"drafters": [{"name": "a", "kind": "lookup", "autoscaling": {"min": 10, "max": 9, "sessions": 1}}]},
            "drafter-a.autoscaling: min 10 is above max 9",
        ),
        ({"orchestrator": {"autoscaling": {"min": 1, "max": 2, "sessions": 3}}}, "orchestrator.autoscaling.cpu"),
        ({"verifier": {"autoscaling": {"min": 1, "max": 2, "cpu": 70}}}, "verifier: autoscaling takes sessions"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_a_contradiction_is_named(values: dict[str, Any], why: str) -> None:
    with pytest.raises(helm_python.errors.HelmError, match=why):
        manifests(values)
