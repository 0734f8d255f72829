"""The Dockerfile, without building it: what it copies exists, and what the chart starts works on what it copied."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from coppice.stack.launch import MODULES
from tests.chart.chart import ALL, ROOT, containers, objects, pods

SYSTEM = {"sh", "sleep", "touch"}
"""commands of the image's operating system and of Redis' own image"""


@cache
def stages() -> dict[str, list[list[str]]]:
    """The instructions of each stage, as words."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    found: dict[str, list[list[str]]] = {}
    for line in text.splitlines():
        words = line.split()
        if words and words[0] == "FROM":
            found[words[-1]] = [words]
        elif words and not line.startswith("#") and found:
            found[list(found)[-1]].append(words)
    return found


def instructions(stage: str, name: str) -> list[list[str]]:
    """The words behind each instruction of a name."""
    return [words[1:] for words in stages()[stage] if words[0] == name]


def copied(stage: str) -> list[str]:
    """What a stage copies out of the repository."""
    return [source for words in instructions(stage, "COPY") if "--from=" not in words[0] for source in words[:-1]]


def test_every_source_exists_and_the_final_layers_are_nobodys_and_hold_no_more_than_they_need() -> None:
    assert {"coppice", "services", "orchestrator"} <= set(copied("build"))
    for source in [*copied("build"), *copied("cpu")]:
        assert (ROOT / source).exists(), source
    for stage in ("cpu", "cuda"):
        assert instructions(stage, "USER")[-1] == ["10001:10001"]
        assert not instructions(stage, "ADD")
    assert not instructions("cpu", "RUN")
    (run,) = instructions("cuda", "RUN")
    assert {"gcc", "libc6-dev"} <= set(run), "Triton compiles for the host, too"


def test_what_is_compiled_at_run_time_is_kept_where_the_chart_lets_it_be_written() -> None:
    variables = [word for words in instructions("cuda", "ENV") for word in words]
    caches = [Path(word.partition("=")[2]) for word in variables if "_CACHE_DIR=" in word]
    assert len(caches) == 2, "Triton's and Inductor's"
    for container in [each for pod in pods(objects("cluster")).values() for each in pod["spec"]["containers"]]:
        if container["image"].endswith("-cuda"):
            writable = {Path(mount["mountPath"]) for mount in container["volumeMounts"] if not mount.get("readOnly")}
            assert all(writable & set(cache.parents) for cache in caches)


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """/app with the code that the first stage copies, and what the final one adds."""
    folder = tmp_path_factory.mktemp("app")
    for source in [*(each for each in copied("build") if (ROOT / each).is_dir()), *copied("cpu")]:
        shutil.copytree(ROOT / source, folder / source, ignore=shutil.ignore_patterns("__pycache__", "*.safetensors"))
    return folder


def test_every_command_of_the_chart_is_in_the_image() -> None:
    run = [each for name in ALL for pod in pods(objects(name)).values() for each in containers(pod)]
    commands = [each["command"] for each in run if "command" in each]  # those of Ray are KubeRay's
    assert {words[2] for words in commands if words[0] == "python"} == set(MODULES.values())
    own = {words[0] for words in commands} - SYSTEM - {"python"}
    assert own == {"coppice"}
    assert all(shutil.which(command, path=Path(sys.executable).parent) for command in own)


REFUSED = {
    "services.verifier": ("--verifier.target /missing", "verifier.target: /missing holds no model"),
    "services.drafter": ("--drafter.kind specblock", "drafter.path: names no model folder"),
    "services.adapter": ("", "adaptation.redis: the adapter reads from Redis"),
    "orchestrator": ("--orchestrator.budgets 3", "did you mean --orchestrator.budget?"),
}


@pytest.mark.parametrize("module", MODULES.values())
def test_a_service_checks_its_settings_by_what_the_image_holds_before_it_loads_torch(module: str, app: Path) -> None:
    flags, reason = REFUSED[module]
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("COPPICE_", "PYTHONPATH"))}
    command = [sys.executable, "-X", "importtime", "-m", module, *flags.split()]
    run = subprocess.run(command, cwd=app, env=clean, capture_output=True, text=True)
    imports = [line.rpartition("|")[2].strip() for line in run.stderr.splitlines() if line.startswith("import time")]
    (line,) = [line for line in run.stderr.splitlines() if not line.startswith("import time")]
    assert (run.returncode, reason in line) == (2, True), line
    assert "grpc" in imports
    assert {"torch", "transformers"}.isdisjoint(imports)


def required(name: str, extras: frozenset[str], found: set[tuple[str, frozenset[str]]]) -> set[str]:
    """The names of everything that an installed distribution brings with its extras, itself among it."""
    if (name, extras) not in found:
        found.add((name, extras))
        for each in map(Requirement, importlib.metadata.requires(name) or ()):
            if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
                required(canonicalize_name(each.name), frozenset(each.extras), found)
    return {name for name, _ in found}


def test_everything_that_is_installed_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line.partition("==") for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[0-9][0-9a-z.]*", version) for _, _, version in pins), "no build, no path"
    brought = required("coppice-serve", frozenset({"dev"}), set())
    assert len(brought) > 100
    assert brought - {canonicalize_name(name) for name, _, _ in pins} == {"coppice-serve"}
