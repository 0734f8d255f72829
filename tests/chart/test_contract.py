"""What the chart promises the services, and they it: settings, ports, health, files, time to drain, metrics."""

from __future__ import annotations

import json
import math
import os
import re
from contextlib import nullcontext
from itertools import product
from typing import Any
from unittest.mock import Mock

import helm_python
import pytest
from prometheus_client import CollectorRegistry, ProcessCollector

from coppice.adaptation.signals import Producer
from coppice.config.sections import ADAPTED_KINDS, FEATURE_KINDS, HEAD_KINDS, SERVICES
from coppice.config.settings import Settings, load_settings
from coppice.rpc.access import ACCESS
from coppice.stack.launch import MODULES
from coppice.stack.spec import COUNTING_KINDS
from coppice.telemetry import SessionMetrics
from orchestrator.metrics import OrchestratorMetrics
from services.adapter.loop import AdapterMetrics
from services.verifier.__main__ import heads_beside
from services.verifier.prefix import PrefixCache
from tests.chart.chart import (
    ALL,
    FOLDER,
    PLAIN,
    ROOT,
    beside,
    component,
    container_of,
    containers,
    environment,
    laid_over,
    manifests,
    objects,
    objects_in,
    of_kind,
    pods,
    rendered,
    values_of,
)

PRE_STOP_S = 5


def services(found: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Pods of our processes, by their Deployment."""
    return {name: pod for name, pod in pods(found).items() if component(pod) in MODULES}


def deployed(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The Deployments of values, by name."""
    return of_kind(objects_in(manifests(values)), "Deployment")


def settings_of(container: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Settings:
    """What a process would be told by its container's environment alone."""
    for name in [name for name in os.environ if name.startswith("COPPICE_")]:
        monkeypatch.delenv(name)
    with monkeypatch.context() as patch:
        for name, value in environment(container).items():
            patch.setenv(name, value)
        return load_settings([])


@pytest.mark.parametrize("name", PLAIN)
def test_a_service_is_told_settings_and_has_time_to_start_and_drain(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for where, pod in services(objects(name)).items():
        role, container = component(pod), container_of(pod)
        settings = settings_of(container, monkeypatch)
        ports = {each["name"]: each["containerPort"] for each in container["ports"]}
        server = settings.server
        expected = {"grpc": server.port, "health": server.health_port, "metrics": server.metrics_port}
        if role == "orchestrator":
            expected["http"] = settings.orchestrator.http_port
        assert ports == expected, where
        assert (server.host, server.advertise, server.production) == ("0.0.0.0", "10.1.2.3", True)
        assert container["command"] == ["python", "-m", MODULES[role]]

        ready = {"port": server.health_port, "service": SERVICES[role]}
        assert container["startupProbe"]["grpc"] == ready
        if role == "orchestrator" and name != "idle":  # which is asked while there is no verifier
            scheme = "HTTPS" if environment(container).get("COPPICE_TLS__CERT") else "HTTP"
            assert container["readinessProbe"]["httpGet"] == {"path": "/ready", "port": "http", "scheme": scheme}
        else:
            assert container["readinessProbe"]["grpc"] == ready
        alive = {"port": server.health_port}  # the empty name: it lives, ready or not
        assert container["livenessProbe"]["grpc"] == alive
        patience_s = container["startupProbe"]["failureThreshold"] * container["startupProbe"]["periodSeconds"]
        assert patience_s >= (120 if name == "cpu" else 900)
        assert container["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", str(PRE_STOP_S)]
        drain_s = math.ceil(server.grace_s) + PRE_STOP_S + 5
        assert pod["spec"]["terminationGracePeriodSeconds"] >= drain_s


@pytest.mark.parametrize("name", ALL)
def test_a_pod_may_do_and_take_no_more_than_it_needs(name: str) -> None:
    for where, pod in pods(objects(name)).items():
        spec = pod["spec"]
        assert (spec["automountServiceAccountToken"], spec["enableServiceLinks"]) == (False, False)
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"].get("runAsUser") == (None if name == "day" else 10001)
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for volume in spec.get("volumes", []):
            assert "sizeLimit" in volume.get("emptyDir", {"sizeLimit": ""}), (where, volume["name"])
        for container in containers(pod):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": name != "day",
                "capabilities": {"drop": ["ALL"]},
            }
            resources = container["resources"]
            assert {"cpu", "memory"} <= resources["requests"].keys(), (where, container["name"])
            assert "memory" in resources["limits"], (where, container["name"])
            assert re.fullmatch(r".+:\d+\.\d+\.\d+(-\w+)?(@sha256:0{64})?", container["image"])
            for each in container.get("env", []):  # secrets are named and never written
                if re.search(r"TOKEN$|PASSWORD|__REDIS$", each["name"]):
                    assert "secretKeyRef" in each.get("valueFrom", {}) or "$(REDIS_PASSWORD)" in each["value"]


@pytest.mark.parametrize(
    ("require", "held"), [(False, ["ca.crt"]), (True, ["ca.crt", "tls.crt", "tls.key"])], ids=["open", "required"]
)
@pytest.mark.parametrize("for_all", [True, False])
def test_where_clients_need_certificates_the_test_has_one_and_readiness_is_asked_in_plaintext(
    require: bool, held: list[str], for_all: bool
) -> None:
    settings = {"settings": {"tls": {"require": require}}}
    found = pods(
        objects_in(manifests(laid_over(values_of("hub"), settings if for_all else {"orchestrator": settings})))
    )
    probe = container_of(found["coppice-orchestrator"])["readinessProbe"]
    assert ("grpc" in probe, "httpGet" in probe) == (require, not require)
    pod = found["coppice-test"]
    (volume,) = [each["secret"] for each in pod["spec"]["volumes"] if each["name"] == "tls"]
    variables = environment(container_of(pod))
    assert sorted(variables[name] for name in variables if "TLS__" in name) == [f"/tls/{file}" for file in held]
    assert [each["key"] for each in volume.get("items", [])] == ([] if require else held)
    assert not require or volume["secretName"] == "coppice-operator-tls"


@pytest.mark.parametrize("name", PLAIN)
def test_a_service_finds_its_redis_by_tls_and_every_file_that_is_named(name: str) -> None:
    certificates = of_kind(objects(name), "Certificate")
    for where, pod in services(objects(name)).items():
        container = container_of(pod)
        variables = environment(container, redis="rediss://theirs:6379/0")
        for url in [value for variable, value in variables.items() if variable.endswith("__REDIS")]:
            host = url.rpartition("@")[2].partition(":")[0]
            assert url.startswith("rediss://")
            assert host.startswith("rediss") or host in certificates[host]["spec"]["dnsNames"]
            assert url.endswith("?ssl_ca_certs=/tls/ca.crt") == (name != "given")
        mounts = [each["mountPath"] for each in container["volumeMounts"]]
        assert len(mounts) == len(set(mounts))
        volumes = {each["name"] for each in pod["spec"]["volumes"]}
        assert {each["name"] for each in container["volumeMounts"]} <= volumes
        text = "\n".join(environment(container).values())
        paths = re.findall(r'(?:^|[="])(/[a-z][^"\n]*)', text, re.MULTILINE)
        held = tuple(f"{mount}/" for mount in [*mounts, "/app/models/demo"])
        assert [path for path in paths if not f"{path}/".startswith(held)] == [], where


@pytest.mark.parametrize("name", PLAIN)
def test_gpus_are_limited_tolerated_and_never_doubled_and_what_is_scaled_has_no_number(name: str) -> None:
    devices, deployments = set(), of_kind(objects(name), "Deployment")
    for deployment in deployments.values():
        pod = deployment["spec"]["template"]
        container = container_of(pod)
        gpus = container.get("resources", {}).get("limits", {}).get("nvidia.com/gpu", 0)
        variables = environment(container)
        device = [value for variable, value in variables.items() if variable.endswith("__DEVICE")]
        assert device in ([], ["cuda" if gpus else "cpu"])
        devices.update(device)
        if component(pod) == "verifier":  # ranks meet in shared memory
            assert variables.get("COPPICE_VERIFIER__RANKS", "1") == str(max(1, gpus))
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts.get("shm") == ("/dev/shm" if gpus > 1 else None)
        if not container["image"].startswith("redis"):
            assert container["image"].partition("@")[0].endswith("-cuda" if gpus else "-cpu")
        if gpus:
            assert "nvidia.com/gpu" in [each.get("key") for each in pod["spec"]["tolerations"]]
            strategy = deployment["spec"]["strategy"]
            assert strategy == {"type": "Recreate"} or strategy["rollingUpdate"]["maxSurge"] == 0
    assert devices == ({"cpu"} if name == "cpu" else {"cpu", "cuda"})
    scaled = of_kind(objects(name), "HorizontalPodAutoscaler", "ScaledObject")
    targets = {each["spec"]["scaleTargetRef"]["name"] for each in scaled.values()}
    assert {where for where, each in deployments.items() if "replicas" not in each["spec"]} == targets
    assert bool(targets) == (name not in ("cpu", "one-gpu", "hub", "day"))


def test_zero_and_false_are_kept() -> None:
    verifier = {"verifier": {"prefix_cache": 0}, "server": {"log_json": False}}
    drafter = {"tls": {"require": False}, "orchestrator": {"hosts": ["ann", "bob"]}}
    common = {"verifier": {"prefix_cache": 0.5, "threads": 3}, "server": {"log_json": True, "grace_s": 0}}
    values = {
        "settings": {**common, "limits": {"idle_s": 1 << 40}},
        "defaults": {"replicas": 2, "gpu": 1},
        "verifier": {"replicas": 0, "gpu": 0, "settings": verifier},
        "drafters": [{"name": "a", "kind": "lookup", "settings": drafter}],
    }
    expected = {
        "verifier": "VERIFIER__PREFIX_CACHE=0 VERIFIER__THREADS=3 SERVER__LOG_JSON=false SERVER__GRACE_S=0 "
        f"LIMITS__IDLE_S={1 << 40} VERIFIER__DEVICE=cpu",
        "drafter-a": 'TLS__REQUIRE=false ORCHESTRATOR__HOSTS=["ann","bob"] DRAFTER__DEVICE=cuda',
    }
    found = deployed(values)
    for (name, variables), replicas in zip(expected.items(), (0, 2), strict=True):
        spec = found[f"coppice-{name}"]["spec"]
        lines = {f"{variable}={value}" for variable, value in environment(container_of(spec["template"])).items()}
        assert {f"COPPICE_{line}" for line in variables.split()} <= lines
        assert spec["replicas"] == replicas


@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_every_kind_of_head_has_a_pool_or_lives_in_the_verifier(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {} if kind in COUNTING_KINDS else {"path": "/models/a"}
    pool = {"drafters": [{"name": "a", "kind": kind, **weights}]}
    variables = environment(container_of(deployed(pool)["coppice-drafter-a"]["spec"]["template"]))
    assert variables["COPPICE_DRAFTER__KIND"] == kind
    needs = {name for name in ("TARGET", "VERIFIERS") if f"COPPICE_DRAFTER__{name}" in variables}
    assert needs == ({"TARGET", "VERIFIERS"} if kind in FEATURE_KINDS else set())
    adapted = {"drafters": [{**pool["drafters"][0], "adapt": True}]}
    with nullcontext() if kind in ADAPTED_KINDS else pytest.raises(helm_python.errors.HelmError):
        manifests(adapted)

    for discovery, place in (("dns", "dns:coppice-verifier:50052"), ("redis", "redis")):
        verifier_values = pool | {"gpu": 1, "settings": {"drafter": {"threads": 3}}}
        registry = {"discovery": discovery, "redis": {"secret": "s"}}
        found = deployed({"verifier": verifier_values, "drafters": [], **registry})
        assert set(found) == {"coppice-verifier", "coppice-orchestrator"}
        verifier, orchestrator = (
            settings_of(container_of(found[f"coppice-{name}"]["spec"]["template"]), monkeypatch)
            for name in ("verifier", "orchestrator")
        )
        head = heads_beside(verifier)["a"].drafter
        assert (head.kind, head.device, head.threads, head.target) == (kind, "cuda", 3, verifier.verifier.target)
        assert head.path == weights.get("path", "")
        assert head.verifiers == ([place] if kind in FEATURE_KINDS else [])
        assert orchestrator.orchestrator.heads == [f"a={place}"]
        assert bool(orchestrator.directory.redis) == (discovery == "redis")


def test_a_plug_ins_head_has_what_it_reads_under_a_name_of_the_operators() -> None:
    head = {"name": "mine", "kind": "linear", "path": "/models/mine"}
    for features in (False, True):
        values = {"nameOverride": "llm", "plugins": {"linear": {"features": features}}, "drafters": [head]}
        found = deployed(values)
        assert set(found) == {f"llm-{name}" for name in ("drafter-mine", "orchestrator", "verifier")}
        variables = environment(container_of(found["llm-drafter-mine"]["spec"]["template"]))
        assert variables["COPPICE_DRAFTER__KIND"] == "linear"
        assert ("COPPICE_DRAFTER__TARGET" in variables) == features


def test_a_head_of_the_verifiers_process_is_fetched_and_trained() -> None:
    found = objects("beside")
    variables = {name: environment(container_of(pod)) for name, pod in services(found).items()}
    assert set(variables) == {f"coppice-{name}" for name in ("adapter", "drafter-lookup", "orchestrator", "verifier")}
    adapter, place = variables["coppice-adapter"], "dns:coppice-verifier:50052"
    assert adapter["COPPICE_ADAPTER__HEADS"] == '["eagle=/models/eagle"]'
    assert adapter["COPPICE_ADAPTER__DRAFTERS"] == f'["eagle={place}"]'
    assert variables["coppice-verifier"]["COPPICE_ADAPTATION__REDIS"] == adapter["COPPICE_ADAPTATION__REDIS"]
    fetched = [each["command"][2] for each in pods(found)["coppice-verifier"]["spec"]["initContainers"]]
    assert fetched == ["meta-llama/Llama-3.1-8B-Instruct", "example/eagle3"]
    heads = json.loads(variables["coppice-orchestrator"]["COPPICE_ORCHESTRATOR__HEADS"])
    assert heads == [f"eagle={place}", f"lookup={place}", "lookup=dns:coppice-drafter-lookup:50053"]


@pytest.mark.parametrize("name", ["cluster", "beside"])
def test_each_role_has_the_certificate_that_says_what_it_may_do(name: str) -> None:
    certificates = of_kind(objects(name), "Certificate")
    names = {each["spec"]["secretName"]: set(each["spec"].get("dnsNames", [])) for each in certificates.values()}
    roles = {role for methods in ACCESS.values() for callers in methods.values() for role in callers}
    for pod in services(objects(name)).values():
        (secret,) = [each["secret"]["secretName"] for each in pod["spec"]["volumes"] if each["name"] == "tls"]
        own = {component(pod), *beside(pod)}
        assert own <= names[secret]
        assert not names[secret] & ((roles | {"verifier"}) - own)
    address = environment(container_of(pods(objects(name))["coppice-test"]))["COPPICE_ADDRESS"]
    assert {address.partition(":")[0], "coppice.example.com"} <= names["coppice-orchestrator-tls"]
    assert [each for each in certificates.values() if each["spec"].get("isCA")]


@pytest.mark.parametrize("name", PLAIN)
def test_services_lead_to_their_pods(name: str) -> None:
    for where, service in of_kind(objects(name), "Service").items():
        labels = service["spec"]["selector"].items()
        (pod,) = [pod for pod in pods(objects(name)).values() if labels <= pod["metadata"]["labels"].items()]
        ports = {each["name"]: each["containerPort"] for each in container_of(pod)["ports"]}
        assert all(ports[each["targetPort"]] == each["port"] for each in service["spec"]["ports"])
        if component(pod) in MODULES and where != "coppice":
            assert service["spec"]["clusterIP"] == "None"


def test_a_cache_of_one_node_holds_its_pods_beside_a_verifier() -> None:
    found = objects("hub")
    held = [pod for pod in pods(found).values() if "coppice-models" in json.dumps(pod["spec"]["volumes"])]
    assert {component(pod) for pod in held} == {"verifier", "orchestrator", "models"}
    for pod in held:
        (term,) = pod["spec"]["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        anchors = [each for each in pods(found).values() if selects(term["labelSelector"], each)]
        assert anchors == (held if component(pod) == "verifier" else [pods(found)["coppice-verifier"]])
    many = {"models": {"cache": {"accessMode": "ReadWriteMany"}}}
    pool = {"verifier": {"drafters": []}, "drafters": values_of("hub")["verifier"]["drafters"]}
    yours = {"models": {"claim": "c"}, "target": {"hub": ""}, **pool}  # the small model alone is downloaded
    for more in (many, yours):
        orchestrator = deployed(laid_over(values_of("hub"), more))["coppice-orchestrator"]["spec"]
        assert "affinity" not in orchestrator["template"]["spec"]
        assert orchestrator["progressDeadlineSeconds"] == 3300


def test_the_notes_lead_to_an_answer() -> None:
    text = rendered("hub")["coppice/templates/NOTES.txt"]
    (secret,) = re.findall(r"get secret (\S+) -o jsonpath='{.data.ca", text)
    (name,) = re.findall(r"TLS__SERVER_NAME=(\S+)", text)
    (spec,) = [each["spec"] for each in objects("hub") if each.get("spec", {}).get("secretName") == secret]
    assert name in spec["dnsNames"]
    assert "serves Qwen/Qwen3-8B." in text
    assert "secret clients -o jsonpath='{.data.test}'" in text
    assert "TLS__" not in rendered("day")["coppice/templates/NOTES.txt"]
    assert "wait rayservice/coppice" in rendered("ray")["coppice/templates/NOTES.txt"]


# --- metrics ---


def rules(name: str) -> list[dict[str, Any]]:
    """The alarms of a render."""
    (rule,) = of_kind(objects(name), "PrometheusRule").values()
    return [each for group in rule["spec"]["groups"] for each in group["rules"]]


def named_metrics(query: str) -> set[str]:
    return set(re.findall(r"(?:coppice_|vllm:|process_)[a-z0-9_]+", re.sub(r'"[^"]*"', "", query)))


def known_metrics() -> set[str]:
    """Every name that a service exposes."""
    registries = [OrchestratorMetrics().registry, AdapterMetrics().registry]
    registries += [SessionMetrics(role).registry for role in ("verifier", "drafter")]
    Producer("", signals := CollectorRegistry(), [])
    PrefixCache(Mock(block_size=1), 0, cache := CollectorRegistry())
    ProcessCollector(registry=cache)
    suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"], "info": ["_info"]}
    metrics = [metric for registry in (*registries, signals, cache) for metric in registry.collect()]
    return {metric.name + suffix for metric in metrics for suffix in suffixes.get(metric.type, [""])}


def test_there_is_a_rule_for_each_alarm_of_the_documentation() -> None:
    section = (ROOT / "docs/operations.md").read_text(encoding="utf-8").partition("## What each alarm means")[2]
    rows = [row for row in section.partition("\n## ")[0].splitlines() if row.startswith("| `")]
    explained = {name for row in rows for name in named_metrics(row.split("|")[1])}
    assert len(rows) > 14
    assert explained <= {name for rule in rules("cluster") for name in named_metrics(rule["expr"])}
    assert not [each for each in rules("idle") if "adapter" in each["expr"]]  # there is none
    for render in ("cluster", "beside"):  # an alarm says how many replicas there should be
        missing = [rule["expr"] for rule in rules(render) if rule["alert"] == "CoppiceReplicasMissing"]
        pools = {(re.findall(r'pool="([^"]+)"', expr)[0], expr.rpartition("< ")[2]) for expr in missing}
        assert pools == {("verifier", "2"), ("eagle", "2"), ("lookup", "2")}


def test_every_metric_that_is_asked_for_exists_and_scaling_asks_about_what_is_watched() -> None:
    dashboard = json.loads((FOLDER / "dashboard.json").read_text(encoding="utf-8"))
    panels = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert all(query.count("{") == query.count('{namespace=~"$namespace",service=~"$service"') for query in panels)
    queries = panels + [each["query"] for each in dashboard["templating"]["list"] if each["type"] == "query"]
    assert len(queries) > 20
    assert all(panel["description"] and panel["fieldConfig"]["defaults"]["unit"] for panel in dashboard["panels"])
    alarms = [rule["expr"] for rule in rules("cluster")]
    assert all(query.count("{") == query.count('{namespace="serving",service="coppice-') for query in alarms)
    queries += alarms
    monitors, headless = (of_kind(objects("cluster"), kind) for kind in ("ServiceMonitor", "Service"))
    for where, monitor in monitors.items():
        labels = monitor["spec"]["selector"]["matchLabels"].items()
        assert [name for name, each in headless.items() if labels <= each["metadata"]["labels"].items()] == [where]
    for where, scaled in of_kind(objects("cluster"), "ScaledObject").items():
        for trigger in scaled["spec"]["triggers"]:
            queries.append(trigger["metadata"]["query"])
            expected = where if "kv_tokens" in queries[-1] else "coppice-orchestrator"
            assert set(re.findall(r'service="([^"]+)"', queries[-1])) == {expected} <= monitors.keys()
    assert all(named_metrics(query) or '__name__=~"coppice_' in query for query in queries)
    assert {name for query in queries for name in named_metrics(query)} <= known_metrics()


# --- who may call whom: exactly the calls that the services' settings make them make ---

DNS = {53, 5353}
HOST_PORT = re.compile(r"(?:dns:|@|//|^)([a-z][a-z0-9-]*):([0-9]+)")
Call = tuple[str, str, int]
"""Who calls, who is called, at which port; ends outside the release are called by what a policy says of them"""


def selects(selector: dict[str, Any], pod: dict[str, Any]) -> bool:
    return bool(selector.get("matchLabels", {}).items() <= pod["metadata"]["labels"].items())


def peers(found: list[dict[str, Any]], told: list[dict[str, Any]] | None) -> set[str]:
    """The pods of the release that peers mean; others as they are written."""
    if told is None:
        return {"anywhere"}
    names: set[str] = set()
    for peer in told:
        if set(peer) == {"podSelector"}:
            names |= {name for name, pod in pods(found).items() if selects(peer["podSelector"], pod)}
            names |= set() if peer["podSelector"] else {"the namespace"}
        else:
            names.add(json.dumps(peer))
    return names


def policies(found: list[dict[str, Any]], pod: dict[str, Any]) -> list[dict[str, Any]]:
    """Those that hold for a pod."""
    told = [each["spec"] for each in of_kind(found, "NetworkPolicy").values()]
    return [policy for policy in told if selects(policy["podSelector"], pod)]


def allowed(found: list[dict[str, Any]], way: str) -> set[Call]:
    """What policies let in (Ingress) or out (Egress), DNS apart."""
    calls: set[Call] = set()
    for name, pod in pods(found).items():
        assert any(way in policy["policyTypes"] for policy in policies(found, pod)), f"{name} is open"
        for rule in [rule for policy in policies(found, pod) for rule in policy.get(way.lower()) or []]:
            others = peers(found, rule.get("from" if way == "Ingress" else "to"))
            for port, other in product({each["port"] for each in rule["ports"]} - DNS, others):
                calls.add((other, name, port) if way == "Ingress" else (name, other, port))
    return calls


def made(found: list[dict[str, Any]]) -> set[Call]:
    """What the pods' environments tell them to call."""
    behind = {
        service: name
        for service, each in of_kind(found, "Service").items()
        for name, pod in pods(found).items()
        if selects({"matchLabels": each["spec"]["selector"]}, pod)
    }
    calls: set[Call] = set()
    for caller, pod in pods(found).items():
        for variable, value in environment(pod["spec"]["containers"][0]).items():
            for host, port in HOST_PORT.findall(value):
                calls.add((caller, behind.get(host, host), int(port)))
            if '"redis"' in value or '=redis"' in value:  # found in the registry
                role = "verifier" if variable.endswith("VERIFIERS") else "drafter"
                listed = {name: container_of(each) for name, each in pods(found).items() if component(each) == role}
                calls |= {(caller, name, each["ports"][0]["containerPort"]) for name, each in listed.items()}
    return calls


@pytest.mark.parametrize("name", PLAIN)
def test_policies_let_exactly_the_calls_through_that_are_made(name: str) -> None:
    found = objects(name)
    inside, calls = pods(found), made(found)
    out, into = allowed(found, "Egress"), allowed(found, "Ingress")
    both = {call for call in out & into if call[1] in inside}
    assert both == {call for call in calls if call[1] in inside}
    assert {call[1] for call in calls} - inside.keys() <= {"outside"}
    leaving = {(caller, port) for caller, called, port in calls if called == "outside"}
    for caller, pod in inside.items():
        leaving |= {(caller, 443) for each in containers(pod) if each["name"].startswith("fetch")}
    assert {(caller, port) for caller, called, port in out if called not in inside} == leaving

    # No call is made that its caller's certificate would not allow.
    for caller, called, _ in calls:
        pod = inside.get(called, {})
        served = {component(pod), *beside(pod)} & set(SERVICES) if pod else set()
        if served and served != {"orchestrator"}:
            callers = {each for role in served for names in ACCESS[SERVICES[role]].values() for each in names}
            assert callers & {component(inside[caller]), *beside(inside[caller])}
    pushed = [call for call in calls if call[0].endswith("adapter") and call[1].endswith("verifier")]
    assert bool(pushed) == (name == "beside")

    # Strangers reach the orchestrator, and Prometheus the metrics.
    into = {call for call in into if call[0] not in inside}
    strangers = {call for call in into if "monitoring" not in call[0]}
    assert {call[1:] for call in strangers} == {("coppice-orchestrator", port) for port in (50051, 8000)}
    assert {(called, port) for caller, called, port in into if "monitoring" in caller} == {
        (each, 9090) for each, pod in inside.items() if component(pod) in MODULES
    }
