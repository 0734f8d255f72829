"""Who may call whom: exactly the calls that the services' settings make them make."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from coppice.launch import MODULES, SERVICES
from coppice.rpc.access import ACCESS
from tests.chart.chart import NAMESPACE, PLAIN, component, environment, objects, of_kind, pods

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


def allowed(found: list[dict[str, Any]], way: str) -> set[Call]:
    """What policies let in (Ingress) or out (Egress), DNS apart."""
    calls: set[Call] = set()
    for name, pod in pods(found).items():
        policies = [
            each["spec"]
            for each in of_kind(found, "NetworkPolicy").values()
            if selects(each["spec"]["podSelector"], pod)
        ]
        assert any(way in policy["policyTypes"] for policy in policies), f"{name} is open"
        for rule in [rule for policy in policies for rule in policy.get(way.lower()) or []]:
            for port in rule["ports"]:
                for peer in peers(found, rule.get("from" if way == "Ingress" else "to")):
                    if port["port"] != 53:
                        calls.add((peer, name, port["port"]) if way == "Ingress" else (name, peer, port["port"]))
    return calls


def made(found: list[dict[str, Any]]) -> set[Call]:
    """What the pods' environments tell them to call."""
    own = of_kind(found, "Service")
    owner = {
        name: next(
            each for each, pod in pods(found).items() if selects({"matchLabels": service["spec"]["selector"]}, pod)
        )
        for name, service in own.items()
    }
    calls: set[Call] = set()
    for caller, pod in pods(found).items():
        told = environment(pod["spec"]["containers"][0])
        for host, port in re.findall(r"(?:dns:|@|//|^)([a-z][a-z0-9-]*):(\d+)", "\n".join(told.values()), re.MULTILINE):
            calls.add((caller, owner.get(host, host), int(port)))
        for variable, value in told.items():
            if '"redis"' in value or '=redis"' in value:  # found in the registry
                role = "verifier" if variable.endswith("VERIFIERS") else "drafter"
                calls |= {
                    (caller, each, port_of(pods(found)[each]))
                    for each in pods(found)
                    if component(pods(found)[each]) == role
                }
    return calls


def port_of(pod: dict[str, Any]) -> int:
    return int(pod["spec"]["containers"][0]["ports"][0]["containerPort"])


@pytest.mark.parametrize("name", PLAIN)
def test_policies_let_exactly_the_calls_through_that_are_made(name: str) -> None:
    found = objects(name)
    inside = set(pods(found))
    wanted = made(found)
    out, into = allowed(found, "Egress"), allowed(found, "Ingress")
    both = {call for call in out & into if call[1] in inside}
    assert both == {call for call in wanted if call[1] in inside}
    assert {call[1] for call in wanted} - inside <= {"outside"}
    assert {(caller, port) for caller, called, port in out if called not in inside} == {
        *((caller, port) for caller, called, port in wanted if called == "outside"),
        *(
            (each, 443)
            for each, pod in pods(found).items()
            if any(one["name"].startswith("fetch") for one in pod["spec"].get("initContainers", []))
        ),
    }


@pytest.mark.parametrize("name", PLAIN)
def test_no_call_is_made_that_its_callers_certificate_would_not_allow(name: str) -> None:
    found = objects(name)
    for caller, called, _ in made(found):
        role = component(pods(found)[called]) if called in pods(found) else "redis"
        if role in SERVICES and role != "orchestrator":
            callers = {each for names in ACCESS[SERVICES[role]].callers.values() for each in names}
            assert component(pods(found)[caller]) in callers
    assert not [call for call in made(found) if call[0].endswith("adapter") and call[1].endswith("verifier")]


@pytest.mark.parametrize("name", PLAIN)
def test_strangers_reach_the_orchestrator_and_prometheus_the_metrics(name: str) -> None:
    found = objects(name)
    into = {call for call in allowed(found, "Ingress") if call[0] not in pods(found)}
    strangers = {call for call in into if "monitoring" not in call[0]}
    assert {(called, port) for _, called, port in strangers} == {("coppice-orchestrator", 50051)}
    assert {(called, port) for caller, called, port in into if "monitoring" in caller} == {
        (each, 9090) for each, pod in pods(found).items() if component(pod) in MODULES
    }


def test_everybody_may_ask_dns_and_nobody_else_for_nothing() -> None:
    for pod in pods(objects("cluster")).values():
        policies = [
            each["spec"]
            for each in of_kind(objects("cluster"), "NetworkPolicy").values()
            if selects(each["spec"]["podSelector"], pod)
        ]
        asks = {port["port"] for policy in policies for rule in policy.get("egress") or [] for port in rule["ports"]}
        assert (53 in asks) == (component(pod) != "redis"), NAMESPACE
