"""What the chart promises the services, and they it: settings, ports, health, files, time to drain, metrics."""

from __future__ import annotations

import json
import math
import os
import re
from typing import Any

import helm_python
import pytest
from prometheus_client import CollectorRegistry

from coppice.adaptation.signals import SignalMetrics
from coppice.config.sections import ADAPTED_KINDS, FEATURE_KINDS, HEAD_KINDS
from coppice.config.settings import Settings, load_settings
from coppice.rpc.access import ACCESS
from coppice.stack.launch import MODULES
from coppice.stack.process import SERVICES
from coppice.stack.spec import COUNTING_KINDS
from coppice.telemetry import SessionMetrics
from orchestrator.metrics import OrchestratorMetrics
from services.adapter.state import AdapterMetrics
from services.verifier.__main__ import heads_beside
from services.verifier.prefix import PrefixCacheMetrics
from tests.chart.chart import (
    ALL,
    FOLDER,
    NAMESPACE,
    PLAIN,
    ROOT,
    beside,
    component,
    containers,
    environment,
    laid_over,
    manifests,
    objects,
    objects_in,
    of_kind,
    pods,
    values_of,
)

PRE_STOP_S = 5


def services(found: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Pods of our processes, by their Deployment."""
    return {name: pod for name, pod in pods(found).items() if component(pod) in MODULES}


def settings_of(container: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Settings:
    """What a process would be told by its container's environment alone."""
    for name in [name for name in os.environ if name.startswith("COPPICE_")]:
        monkeypatch.delenv(name)
    with monkeypatch.context() as patch:
        for name, value in environment(container).items():
            patch.setenv(name, value)
        return load_settings([])


@pytest.mark.parametrize("name", PLAIN)
def test_services_are_told_settings_that_they_know(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for where, pod in services(objects(name)).items():
        (container,) = pod["spec"]["containers"]
        told = settings_of(container, monkeypatch)
        ports = {each["name"]: each["containerPort"] for each in container["ports"]}
        assert ports == {
            "grpc": told.server.port,
            "health": told.server.health_port,
            "metrics": told.server.metrics_port,
            **({"http": told.orchestrator.http_port} if component(pod) == "orchestrator" else {}),
        }, where
        assert (told.server.host, told.server.advertise) == ("0.0.0.0", "10.1.2.3")
        assert told.server.production
        assert container["command"] == ["python", "-m", MODULES[component(pod)]]


@pytest.mark.parametrize("name", PLAIN)
def test_probes_ask_what_the_services_answer(name: str) -> None:
    for pod in services(objects(name)).values():
        (container,) = pod["spec"]["containers"]
        (health,) = [each["containerPort"] for each in container["ports"] if each["name"] == "health"]
        ready = {"port": health, "service": SERVICES[component(pod)]}
        assert container["startupProbe"]["grpc"] == ready
        if component(pod) == "orchestrator":
            scheme = "HTTPS" if environment(container).get("COPPICE_TLS__CERT") else "HTTP"
            assert container["readinessProbe"]["httpGet"] == {"path": "/ready", "port": "http", "scheme": scheme}
        else:
            assert container["readinessProbe"]["grpc"] == ready
        assert container["livenessProbe"]["grpc"] == {"port": health}, "the empty name: it lives, ready or not"
        patience = container["startupProbe"]["failureThreshold"] * container["startupProbe"]["periodSeconds"]
        assert patience >= (120 if name == "cpu" else 900)


@pytest.mark.parametrize("require", [True, False, "True", "false"])
@pytest.mark.parametrize("for_all", [True, False])
def test_where_clients_need_certificates_readiness_is_asked_in_plaintext(require: object, for_all: bool) -> None:
    settings = {"settings": {"tls": {"require": require}}}
    values = {"tls": {"enabled": True}, **(settings if for_all else {"orchestrator": settings})}
    pod = of_kind(objects_in(manifests(values)), "Deployment")["coppice-orchestrator"]["spec"]["template"]
    probe = pod["spec"]["containers"][0]["readinessProbe"]
    assert ("grpc" in probe, "httpGet" in probe) == ((False, True) if require in (False, "false") else (True, False))


@pytest.mark.parametrize("name", PLAIN)
def test_a_pod_has_the_time_to_drain(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for pod in services(objects(name)).values():
        (container,) = pod["spec"]["containers"]
        assert container["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", str(PRE_STOP_S)]
        grace_s = settings_of(container, monkeypatch).server.grace_s
        assert pod["spec"]["terminationGracePeriodSeconds"] >= math.ceil(grace_s) + PRE_STOP_S + 5


@pytest.mark.parametrize("name", ALL)
def test_pods_may_do_nothing_that_they_need_not(name: str) -> None:
    for pod in pods(objects(name)).values():
        spec = pod["spec"]
        assert (spec["automountServiceAccountToken"], spec["enableServiceLinks"]) == (False, False)
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in containers(pod):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


@pytest.mark.parametrize("name", ALL)
def test_what_a_pod_may_take_is_bounded(name: str) -> None:
    for where, pod in pods(objects(name)).items():
        for container in containers(pod):
            taken = container["resources"]
            assert {"cpu", "memory"} <= taken["requests"].keys(), (where, container["name"])
            assert "memory" in taken["limits"], (where, container["name"])
            assert re.fullmatch(r".+:\d+\.\d+\.\d+(-\w+)?", container["image"])
        for volume in pod["spec"].get("volumes", []):
            assert "sizeLimit" in volume.get("emptyDir", {"sizeLimit": ""}), (where, volume["name"])


@pytest.mark.parametrize("require", [False, True])
def test_the_test_pod_holds_an_operators_key_only_where_clients_need_one(require: bool) -> None:
    found = objects_in(manifests(laid_over(values_of("cluster"), {"settings": {"tls": {"require": require}}})))
    pod = pods(found)["coppice-test"]
    (volume,) = [each["secret"] for each in pod["spec"]["volumes"] if each["name"] == "tls"]
    named = {name for name in environment(pod["spec"]["containers"][0]) if name.startswith("COPPICE_TLS__")}
    if require:
        assert (volume["secretName"], "items" in volume) == ("coppice-operator-tls", False)
        assert named == {"COPPICE_TLS__CA", "COPPICE_TLS__CERT", "COPPICE_TLS__KEY"}
    else:
        assert [each["key"] for each in volume["items"]] == ["ca.crt"]
        assert named == {"COPPICE_TLS__CA"}


@pytest.mark.parametrize("name", PLAIN)
def test_redis_is_asked_by_tls_where_there_are_certificates(name: str) -> None:
    certificates = of_kind(objects(name), "Certificate")
    for pod in services(objects(name)).values():
        told = environment(pod["spec"]["containers"][0], redis="rediss://theirs:6379/0")
        for variable in [each for each in told if each.endswith("__REDIS")]:
            assert told[variable].startswith("rediss://")
            host = told[variable].rpartition("@")[2].partition(":")[0]
            assert host.startswith("rediss") or host in certificates[host]["spec"]["dnsNames"]
            assert told[variable].endswith("?ssl_ca_certs=/tls/ca.crt") == (name != "given")


@pytest.mark.parametrize("name", PLAIN)
def test_gpus_are_limited_tolerated_and_never_doubled(name: str) -> None:
    devices = set()
    for deployment in of_kind(objects(name), "Deployment").values():
        spec = deployment["spec"]["template"]["spec"]
        (container,) = spec["containers"]
        gpus = container.get("resources", {}).get("limits", {}).get("nvidia.com/gpu", 0)
        told = environment(container)
        device = [value for variable, value in told.items() if variable.endswith("__DEVICE")]
        assert device in ([], ["cuda" if gpus else "cpu"])
        devices.update(device)
        if not container["image"].startswith("redis"):
            assert container["image"].endswith("-cuda" if gpus else "-cpu")
        if gpus:
            assert "nvidia.com/gpu" in [each.get("key") for each in spec["tolerations"]]
            strategy = deployment["spec"]["strategy"]
            assert strategy == {"type": "Recreate"} or strategy["rollingUpdate"]["maxSurge"] == 0
    assert devices == ({"cpu"} if name == "cpu" else {"cpu", "cuda"})


@pytest.mark.parametrize("name", PLAIN)
def test_what_is_scaled_has_no_number_of_replicas(name: str) -> None:
    scaled = of_kind(objects(name), "HorizontalPodAutoscaler", "ScaledObject")
    targets = {each["spec"]["scaleTargetRef"]["name"] for each in scaled.values()}
    deployments = of_kind(objects(name), "Deployment")
    assert {where for where, each in deployments.items() if "replicas" not in each["spec"]} == targets
    assert bool(targets) == (name not in ("cpu", "one-gpu"))


def test_zero_and_false_are_kept() -> None:
    values = {
        "settings": {
            "verifier": {"prefix_cache": 0.5, "threads": 3},
            "server": {"log_json": True, "grace_s": 0},
            "limits": {"idle_s": 1 << 40},
        },
        "defaults": {"replicas": 2, "gpu": 1},
        "verifier": {
            "replicas": 0,
            "gpu": 0,
            "settings": {"verifier": {"prefix_cache": 0}, "server": {"log_json": False}},
        },
        "drafters": [
            {
                "name": "a",
                "kind": "lookup",
                "settings": {"tls": {"require": False}, "orchestrator": {"hosts": ["ann", "bob"]}},
            }
        ],
    }
    found = of_kind(objects_in(manifests(values)), "Deployment")
    verifier, drafter = (found[f"coppice-{name}"]["spec"] for name in ("verifier", "drafter-a"))
    assert (verifier["replicas"], drafter["replicas"]) == (0, 2)
    told = environment(verifier["template"]["spec"]["containers"][0])
    assert told["COPPICE_VERIFIER__PREFIX_CACHE"] == "0"
    assert told["COPPICE_VERIFIER__THREADS"] == "3"
    assert told["COPPICE_SERVER__LOG_JSON"] == "false"
    assert told["COPPICE_SERVER__GRACE_S"] == "0"
    assert told["COPPICE_LIMITS__IDLE_S"] == str(1 << 40)
    assert told["COPPICE_VERIFIER__DEVICE"] == "cpu"
    told = environment(drafter["template"]["spec"]["containers"][0])
    assert told["COPPICE_TLS__REQUIRE"] == "false"
    assert told["COPPICE_ORCHESTRATOR__HOSTS"] == '["ann","bob"]'
    assert told["COPPICE_DRAFTER__DEVICE"] == "cuda"


@pytest.mark.parametrize("gpus", [0, 1, 4])
def test_the_gpus_of_a_verifier_are_ranks_that_meet_in_shared_memory(gpus: int) -> None:
    found = of_kind(objects_in(manifests({"verifier": {"gpu": gpus}})), "Deployment")
    pod = found["coppice-verifier"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container.get("resources", {}).get("limits", {}).get("nvidia.com/gpu", 0) == gpus
    assert environment(container).get("COPPICE_VERIFIER__RANKS", "1") == str(max(1, gpus))
    assert ("/dev/shm" in [mount["mountPath"] for mount in container["volumeMounts"]]) == (gpus > 1)
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}} in pod["volumes"] or gpus < 2


def pool_of(kind: str, **more: Any) -> dict[str, Any]:
    """The values of a chart with one drafter pool."""
    weights = {} if kind in COUNTING_KINDS else {"path": "/models/a"}
    return {"drafters": [{"name": "a", "kind": kind, **weights, **more}]}


@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_every_kind_of_head_is_a_pool_that_is_told_what_it_needs(kind: str) -> None:
    found = of_kind(objects_in(manifests(pool_of(kind))), "Deployment")
    (container,) = found["coppice-drafter-a"]["spec"]["template"]["spec"]["containers"]
    told = environment(container)
    assert told["COPPICE_DRAFTER__KIND"] == kind
    assert {name for name in ("TARGET", "VERIFIERS") if f"COPPICE_DRAFTER__{name}" in told} == (
        {"TARGET", "VERIFIERS"} if kind in FEATURE_KINDS else set()
    )
    if kind in ADAPTED_KINDS:
        manifests(pool_of(kind, adapt=True))
    else:
        with pytest.raises(helm_python.errors.HelmError):
            manifests(pool_of(kind, adapt=True))


@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_every_kind_of_head_may_live_in_the_verifiers_process(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for discovery, place in (("dns", "dns:coppice-verifier:50052"), ("redis", "redis")):
        values = {
            "verifier": pool_of(kind) | {"gpu": 1, "settings": {"drafter": {"threads": 3}}},
            "drafters": [],
            "discovery": discovery,
            "redis": {"secret": "s"},
        }
        found = of_kind(objects_in(manifests(values)), "Deployment")
        assert set(found) == {"coppice-verifier", "coppice-orchestrator"}
        told, asking = (
            settings_of(found[f"coppice-{name}"]["spec"]["template"]["spec"]["containers"][0], monkeypatch)
            for name in ("verifier", "orchestrator")
        )
        head = heads_beside(told)["a"].drafter
        assert (head.kind, head.device, head.threads, head.target) == (kind, "cuda", 3, told.verifier.target)
        assert head.path == ("" if kind in COUNTING_KINDS else "/models/a")
        assert head.verifiers == ([place] if kind in FEATURE_KINDS else [])
        assert asking.orchestrator.heads == [f"a={place}"]
        assert bool(told.directory.redis) == (discovery == "redis")


def test_a_head_of_the_verifiers_process_is_fetched_and_trained() -> None:
    found = objects("beside")
    told = {name: environment(pod["spec"]["containers"][0]) for name, pod in services(found).items()}
    assert set(told) == {f"coppice-{name}" for name in ("adapter", "drafter-lookup", "orchestrator", "verifier")}
    verifier, adapter = told["coppice-verifier"], told["coppice-adapter"]
    assert verifier["COPPICE_VERIFIER__DRAFTERS"] == '["eagle=eagle3:/models/eagle","lookup=lookup"]'
    assert adapter["COPPICE_ADAPTER__HEADS"] == '["eagle=/models/eagle"]'
    assert adapter["COPPICE_ADAPTER__DRAFTERS"] == '["eagle=dns:coppice-verifier:50052"]'
    assert verifier["COPPICE_ADAPTATION__REDIS"] == adapter["COPPICE_ADAPTATION__REDIS"]
    fetched = [each["command"][2] for each in pods(found)["coppice-verifier"]["spec"]["initContainers"]]
    assert fetched == ["meta-llama/Llama-3.1-8B-Instruct", "example/eagle3"]
    assert json.loads(told["coppice-orchestrator"]["COPPICE_ORCHESTRATOR__HEADS"]) == [
        "eagle=dns:coppice-verifier:50052",
        "lookup=dns:coppice-verifier:50052",
        "lookup=dns:coppice-drafter-lookup:50053",
    ]


@pytest.mark.parametrize("name", PLAIN)
def test_every_file_that_is_named_is_mounted(name: str) -> None:
    for where, pod in services(objects(name)).items():
        (container,) = pod["spec"]["containers"]
        mounts = [each["mountPath"] for each in container["volumeMounts"]]
        assert len(mounts) == len(set(mounts))
        volumes = {each["name"] for each in pod["spec"]["volumes"]}
        assert {each["name"] for each in container["volumeMounts"]} <= volumes
        paths = re.findall(r'(?:^|[="])(/[a-z][^"\n]*)', "\n".join(environment(container).values()), re.MULTILINE)
        unmounted = [
            path
            for path in paths
            if not any(f"{path}/".startswith(f"{mount}/") for mount in [*mounts, "/app/models/demo"])
        ]
        assert not unmounted, where


@pytest.mark.parametrize("name", ALL)
def test_secrets_are_named_and_never_written(name: str) -> None:
    for pod in pods(objects(name)).values():
        for container in containers(pod):
            for each in container.get("env", []):
                if re.search(r"TOKEN$|PASSWORD|__REDIS$", each["name"]):
                    assert "secretKeyRef" in each.get("valueFrom", {}) or "$(REDIS_PASSWORD)" in each["value"]


@pytest.mark.parametrize("name", ["cluster", "beside"])
def test_each_role_has_the_certificate_that_says_what_it_may_do(name: str) -> None:
    certificates = of_kind(objects(name), "Certificate")
    names = {each["spec"]["secretName"]: set(each["spec"].get("dnsNames", [])) for each in certificates.values()}
    roles = {role for access in ACCESS.values() for callers in access.callers.values() for role in callers}
    for pod in services(objects(name)).values():
        (secret,) = [each["secret"]["secretName"] for each in pod["spec"]["volumes"] if each["name"] == "tls"]
        others = (roles | {"verifier"}) - {component(pod), *beside(pod)}
        assert {component(pod), *beside(pod)} <= names[secret]
        assert not names[secret] & others
    address = environment(pods(objects(name))["coppice-test"]["spec"]["containers"][0])["COPPICE_ADDRESS"]
    assert {address.partition(":")[0], "coppice.example.com"} <= names["coppice-orchestrator-tls"]
    assert [each for each in certificates.values() if each["spec"].get("isCA")]


def rules(name: str) -> list[dict[str, Any]]:
    """The alarms of a render."""
    (rule,) = of_kind(objects(name), "PrometheusRule").values()
    return [each for group in rule["spec"]["groups"] for each in group["rules"]]


def test_there_is_a_rule_for_each_alarm_of_the_documentation() -> None:
    section = (ROOT / "docs/operations.md").read_text(encoding="utf-8").partition("## What each alarm means")[2]
    rows = [row for row in section.partition("\n## ")[0].splitlines() if row.startswith("| `")]
    explained = {name for row in rows for name in named_metrics(row.split("|")[1])}
    watched = {name for rule in rules("cluster") for name in named_metrics(rule["expr"])}
    assert len(rows) > 14
    assert explained <= watched
    assert all(f'namespace="{NAMESPACE}"' in rule["expr"] for rule in rules("cluster"))


@pytest.mark.parametrize("name", ["cluster", "beside"])
def test_an_alarm_says_how_many_replicas_there_should_be(name: str) -> None:
    missing = [rule["expr"] for rule in rules(name) if rule["alert"] == "CoppiceReplicasMissing"]
    pools = {(re.findall(r'pool="([^"]+)"', expr)[0], expr.rpartition("< ")[2]) for expr in missing}
    assert pools == {("verifier", "2"), ("eagle", "2"), ("lookup", "2")}


def test_traces_may_leave_for_their_collector() -> None:
    policies = of_kind(objects("given"), "NetworkPolicy")
    out = {name: [rule["ports"] for rule in each["spec"].get("egress", [])] for name, each in policies.items()}
    assert [{"port": 4317}] in out["coppice-orchestrator"]
    assert [{"port": 4317}] in out["coppice-drafter-mine"]
    assert not [name for name, each in of_kind(objects("cluster"), "NetworkPolicy").items() if "4317" in str(each)]


def known_metrics() -> set[str]:
    """Every name that a service exposes."""
    registries = [OrchestratorMetrics().registry, AdapterMetrics().registry]
    registries += [SessionMetrics(role).registry for role in ("verifier", "drafter")]
    SignalMetrics(signals := CollectorRegistry())
    PrefixCacheMetrics(cache := CollectorRegistry())
    found = set()
    for metric in [metric for registry in (*registries, signals, cache) for metric in registry.collect()]:
        ends = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"], "info": ["_info"]}.get(
            metric.type, [""]
        )
        found |= {metric.name + end for end in ends}
    return found


def named_metrics(query: str) -> set[str]:
    return set(re.findall(r"(?:coppice_|vllm:)[a-z0-9_]+", re.sub(r'"[^"]*"', "", query)))


def test_every_metric_that_is_asked_for_exists() -> None:
    dashboard = json.loads((FOLDER / "dashboard.json").read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [each["query"] for each in dashboard["templating"]["list"] if each["type"] == "query"]
    assert len(queries) > 20
    assert all(panel["description"] and panel["fieldConfig"]["defaults"]["unit"] for panel in dashboard["panels"])
    queries += [rule["expr"] for rule in rules("cluster")]
    for scaled in of_kind(objects("cluster"), "ScaledObject").values():
        queries += [trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"]]
    assert all(named_metrics(query) for query in queries)
    assert {name for query in queries for name in named_metrics(query)} <= known_metrics()
    (shown,) = of_kind(objects("cluster"), "ConfigMap").values()
    assert json.loads(shown["data"]["coppice.json"]) == dashboard


def test_scaling_asks_about_services_that_are_watched() -> None:
    monitors = of_kind(objects("cluster"), "ServiceMonitor")
    headless = of_kind(objects("cluster"), "Service")
    for where, monitor in monitors.items():
        labels = monitor["spec"]["selector"]["matchLabels"]
        watched = [name for name, each in headless.items() if labels.items() <= each["metadata"]["labels"].items()]
        assert watched == [where]
    for where, scaled in of_kind(objects("cluster"), "ScaledObject").items():
        for trigger in scaled["spec"]["triggers"]:
            services_asked = set(re.findall(r'service="([^"]+)"', trigger["metadata"]["query"]))
            assert services_asked == {where} <= monitors.keys()


@pytest.mark.parametrize("name", PLAIN)
def test_services_lead_to_their_pods(name: str) -> None:
    for where, service in of_kind(objects(name), "Service").items():
        reached = {
            deployment: pod
            for deployment, pod in pods(objects(name)).items()
            if service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
        }
        assert len(reached) == 1, where
        (pod,) = reached.values()
        known = {each["name"]: each["containerPort"] for each in pod["spec"]["containers"][0]["ports"]}
        assert all(known[each["targetPort"]] == each["port"] for each in service["spec"]["ports"])
        if component(pod) in MODULES and where != "coppice":
            assert service["spec"]["clusterIP"] == "None"
