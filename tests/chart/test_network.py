"""Who may call whom: exactly the calls that the services' settings make them make."""

from __future__ import annotations

import json
import re
from itertools import product
from typing import Any

import pytest

from coppice.rpc.access import ACCESS
from coppice.stack.launch import MODULES
from coppice.stack.process import SERVICES
from tests.chart.chart import PLAIN, beside, component, containers, environment, objects, of_kind, pods

DNS = 53
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
            for port, other in product({each["port"] for each in rule["ports"]} - {DNS}, others):
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
                listed = {name: each for name, each in pods(found).items() if component(each) == role}
                calls |= {(caller, name, port_of(each)) for name, each in listed.items()}
    return calls


def port_of(pod: dict[str, Any]) -> int:
    return int(pod["spec"]["containers"][0]["ports"][0]["containerPort"])


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
    assert {(called, port) for _, called, port in strangers} == {
        ("coppice-orchestrator", port) for port in (50051, 8000)
    }
    assert {(called, port) for caller, called, port in into if "monitoring" in caller} == {
        (each, 9090) for each, pod in inside.items() if component(pod) in MODULES
    }


def test_everybody_but_redis_may_ask_dns() -> None:
    found = objects("cluster")
    for pod in pods(found).values():
        rules = [rule for policy in policies(found, pod) for rule in policy.get("egress") or []]
        asks = {port["port"] for rule in rules for port in rule["ports"]}
        assert (DNS in asks) == (component(pod) != "redis")
