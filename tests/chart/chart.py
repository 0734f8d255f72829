"""The chart as Helm renders it, with the values files it ships and with some that it does not."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import helm_python
import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "helm"
RELEASE, NAMESPACE = "coppice", "serving"
FILES = {path.stem.removeprefix("values-"): path for path in sorted(FOLDER.glob("values-*.yaml"))}

CASES: dict[str, Any] = yaml.safe_load((ROOT / "tests/chart/cases.yaml").read_text(encoding="utf-8"))
VARIATIONS: dict[str, dict[str, Any]] = CASES["variations"]
ALL = (*FILES, *VARIATIONS)
PLAIN = tuple(name for name in ALL if name != "ray")
"""Those with a Deployment for each component"""


@cache
def chart() -> helm_python.Chart:
    """The chart, loaded once."""
    return helm_python.Chart.load(FOLDER)


def laid_over(below: Any, above: Any) -> Any:
    """Values as Helm lays one file over another."""
    if not isinstance(below, dict) or not isinstance(above, dict):
        return deepcopy(above)
    return {**below, **{key: laid_over(below.get(key), value) for key, value in above.items()}}


def values_of(name: str) -> dict[str, Any]:
    """The values of a file or a variation, without the chart's own."""
    if name in FILES:
        return dict(yaml.safe_load(FILES[name].read_text(encoding="utf-8")))
    return dict(laid_over(values_of(VARIATIONS[name]["file"]), VARIATIONS[name]["values"]))


def manifests(values: dict[str, Any], release: str = RELEASE) -> dict[str, str]:
    """What Helm renders, by template. Raises HelmError, as for a key that the schema does not know."""
    return chart().render(values, name=release, namespace=NAMESPACE)


def objects_in(files: dict[str, str]) -> list[dict[str, Any]]:
    """The objects of rendered templates, as YAML reads them."""
    texts = [text for file, text in files.items() if not file.endswith(".txt")]
    return [found for text in texts for found in yaml.safe_load_all(text) if found]


@cache
def rendered(name: str) -> dict[str, str]:
    """The manifests of a file or a variation."""
    return manifests(values_of(name))


@cache
def objects(name: str) -> list[dict[str, Any]]:
    """The objects of a file or a variation: not to be changed."""
    return objects_in(rendered(name))


def of_kind(found: list[dict[str, Any]], *kinds: str) -> dict[str, dict[str, Any]]:
    """Objects by name."""
    return {each["metadata"]["name"]: each for each in found if each["kind"] in kinds}


def pods(found: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Pods and templates of pods, {metadata, spec}, by what they belong to."""
    templates = {name: each["spec"]["template"] for name, each in of_kind(found, "Deployment", "Job").items()}
    for name, service in of_kind(found, "RayService").items():
        cluster = service["spec"]["rayClusterConfig"]
        templates[f"{name}-ray-head"] = cluster["headGroupSpec"]["template"]
        for group in cluster["workerGroupSpecs"]:
            templates[f"{name}-ray-{group['groupName']}"] = group["template"]
    return {**templates, **of_kind(found, "Pod")}


def container_of(pod: dict[str, Any]) -> dict[str, Any]:
    """The one container of a pod, those that come first left out."""
    (container,) = pod["spec"]["containers"]
    return dict(container)


def containers(pod: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All of a pod, the ones that come first included."""
    yield from pod["spec"].get("initContainers", [])
    yield from pod["spec"]["containers"]


def component(pod: dict[str, Any]) -> str:
    """Its role."""
    return str(pod["metadata"]["labels"]["app.kubernetes.io/component"])


def beside(pod: dict[str, Any]) -> set[str]:
    """What its process serves beside its role: a verifier with heads is a drafter, too."""
    drafters = environment(pod["spec"]["containers"][0]).get("COPPICE_VERIFIER__DRAFTERS")
    return {"drafter"} if drafters else set()


def environment(container: dict[str, Any], redis: str = "redis://:password@outside:6379/0") -> dict[str, str]:
    """A container's variables as the kubelet would set them, when the pod's address is 10.1.2.3 and Secrets hold an URL
    of Redis and the word secret.
    """
    found: dict[str, str] = {}
    for each in container.get("env", []):
        source = each.get("valueFrom", {})
        secret = redis if each["name"].endswith("__REDIS") else "secret"
        value = each.get("value", "10.1.2.3" if "fieldRef" in source else secret)
        for name, known in found.items():
            value = value.replace(f"$({name})", known)
        found[each["name"]] = value
    return found
