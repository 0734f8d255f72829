"""The Dockerfile, without building it: what it copies exists, and what the chart starts works on what it copied."""

from __future__ import annotations

import fnmatch
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from redis import AuthenticationError, Redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from coppice.client.client import Client
from coppice.stack.launch import MODULES
from coppice.stack.redis_server import find_server
from coppice.testing.reference import Reference
from tests.certificates import Authority
from tests.chart.chart import ALL, ROOT, component, containers, objects, of_kind, pods
from tests.processes import Service, StartService, free_port
from tests.tiny import make_target
from tests.unit.test_feature_heads import save_random

SYSTEM = {"sh", "sleep"}
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


def left_out(path: str) -> bool:
    """Whether .dockerignore keeps a path of the repository from the builder."""
    out = False
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            pattern = line.lstrip("!").removeprefix("**/")
            whole = fnmatch.fnmatch(path, pattern) or path.startswith(f"{pattern}/")
            within = line.startswith("**/") and any(fnmatch.fnmatch(part, pattern) for part in path.split("/"))
            out = not line.startswith("!") if whole or within else out
    return out


def test_every_source_exists_and_the_final_layers_are_nobodys_and_hold_no_more_than_they_need() -> None:
    assert {"coppice", "services", "orchestrator"} <= set(copied("build"))
    for source in [*copied("build"), *copied("cpu")]:
        assert (ROOT / source).exists(), source
        assert not left_out(source), source
    assert all(map(left_out, (".git/config", "tests/tiny.py", "services/drafter/__pycache__/x.pyc")))
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
    assert own == {"coppice", "hf"}
    assert all(shutil.which(command, path=Path(sys.executable).parent) for command in own)


@pytest.mark.parametrize("module", MODULES.values())
def test_a_service_starts_from_what_the_image_holds(module: str, app: Path) -> None:
    """It gets as far as its settings: an unknown variable ends it with the exit code of a usage error."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("COPPICE_", "PYTHONPATH"))}
    variables = {**clean, "COPPICE_SERVER__PROT": "1"}
    run = subprocess.run([sys.executable, "-m", module], cwd=app, env=variables, capture_output=True, text=True)
    assert run.returncode == 2, run.stderr
    assert "did you mean COPPICE_SERVER__PORT?" in run.stderr


def test_the_hubs_client_takes_the_flags_of_the_init_containers(tmp_path: Path) -> None:
    """Offline: it fails to find the repository, and finds nothing wrong with what it is told."""
    first = [each for pod in pods(objects("cluster")).values() for each in pod["spec"].get("initContainers", [])]
    commands = {tuple(each["command"] + each.get("args", [])) for each in first if each["command"][0] == "hf"}
    assert len(commands) == 3, "target, tokenizer, head"
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    for words in commands:
        command = [str(Path(sys.executable).parent / words[0]), *words[1:]]
        run = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)
        assert run.returncode == 1, run.stderr
        assert ("offline" in run.stderr, "Ignoring" in run.stderr) == (True, False)


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


# --- what the chart runs is what is tested: the containers of values-one-gpu.yaml, started here by their own commands
# and environments, answer through the port of the orchestrator's Service with the target's own text ---

VOCAB, NEW = 300, 32
SERVING = health_pb2.HealthCheckResponse.SERVING
# Every pod has an address of its own, as in a cluster, so that ports are the chart's.
NETWORK = f"127.{1 + os.getpid() % 250}.{os.getpid() // 250 % 250}"


@dataclass
class Release:
    """The pods of values-one-gpu.yaml, each at an address of its own on this machine."""

    models: Path
    """the volume"""
    addresses: dict[str, str]
    variables: dict[str, dict[str, str]]
    """each pod's environment; what a cluster with a GPU has and this machine has not is replaced"""
    running: dict[str, Service]
    reference: Reference

    @property
    def address(self) -> str:
        """Where the Service that clients dial leads to."""
        service = of_kind(objects("one-gpu"), "Service")["coppice"]["spec"]
        selected = service["selector"]["app.kubernetes.io/component"]
        (pod,) = [name for name in self.running if component(pods(objects("one-gpu"))[name]) == selected]
        return f"{self.addresses[pod]}:{service['ports'][0]['port']}"

    def value(self, pod: str, variable: dict[str, Any]) -> str:
        """What a variable of a pod's container is here."""
        value = self.addresses[pod] if "valueFrom" in variable else str(variable["value"])
        for host, address in self.addresses.items():
            value = value.replace(f"dns:{host}:", f"dns:{address}:")
        value = value.replace("coppice:50051", f"{self.addresses['coppice-orchestrator']}:50051")
        value = value.replace("/models/", f"{self.models}/")
        return {"0.0.0.0": self.addresses[pod], "cuda": "cpu", "bfloat16": "float32"}.get(value, value)


@pytest.fixture(scope="module")
def release(start_service: StartService, tmp_path_factory: pytest.TempPathFactory) -> Release:
    """Every service's container as a process, over a tiny target and a random EAGLE-3 head of it."""
    folder = tmp_path_factory.mktemp("models")
    make_target(folder / "target", VOCAB, layers=8, max_len=1024)
    (folder / "eagle").mkdir()
    save_random(folder / "eagle", "eagle3", vocab_size=VOCAB, draft_vocab_size=200)
    manifests = pods(objects("one-gpu"))
    addresses = {name: f"{NETWORK}.{number}" for number, name in enumerate(sorted(manifests), 1)}
    release = Release(folder, addresses, {}, {}, Reference(folder / "target", "float32", threads=1))
    order = ("verifier", "drafter", "orchestrator", "test")  # an orchestrator starts when there is a verifier
    for name in sorted(manifests, key=lambda name: order.index(component(manifests[name]))):
        (container,) = manifests[name]["spec"]["containers"]
        release.variables[name] = {each["name"]: release.value(name, each) for each in container.get("env", [])}
        if component(manifests[name]) != "test":
            python, option, module = container["command"]
            assert (python, option, container.get("args")) == ("python", "-m", None)
            release.running[name] = start_service(module, variables=release.variables[name])
    return release


def test_a_generation_through_the_service_is_the_targets_own(release: Release) -> None:
    reference, prompt = release.reference, (5, 9, 13, 5, 9)
    with Client(release.address) as client:
        for policy in ("route", "merge", "single:eagle", "single:lookup"):
            answer = client.generate(prompt, policy=policy, max_new_tokens=NEW, ignore_eos=True)
            assert answer.ids == reference.greedy(prompt, NEW).ids
            assert answer.heads
        drawn: Any = {"temperature": 1.0, "seed": 3, "max_new_tokens": NEW, "ignore_eos": True}
        assert client.generate(prompt, **drawn).ids == client.generate(prompt, policy="plain", **drawn).ids
        both = client.generate(prompt, policy="merge", budget=16, max_new_tokens=NEW, ignore_eos=True)
    assert set(both.heads) == {"eagle", "lookup"}
    assert sum(both.verified_nodes) > NEW, "an EAGLE-3 head drafts trees, from features that it fetched"


def test_helm_test_passes(release: Release) -> None:
    (container,) = pods(objects("one-gpu"))["coppice-test"]["spec"]["containers"]
    variables, reference = release.variables["coppice-test"], release.reference
    assert variables["COPPICE_ADDRESS"] == release.address
    command = [str(Path(sys.executable).parent / container["command"][0]), *container["command"][1:]]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("COPPICE_")}
    run = subprocess.run(command, env=clean | variables, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    answer = json.loads(run.stdout)
    assert answer["ids"]
    assert answer["ids"] == list(
        reference.greedy(reference.text.encode("Once upon a time"), 16).ids[: len(answer["ids"])]
    )


def test_the_probes_find_every_process(release: Release) -> None:
    for name in release.running:
        (container,) = pods(objects("one-gpu"))[name]["spec"]["containers"]
        ports = {each["name"]: each["containerPort"] for each in container["ports"]}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            if http := container[probe].get("httpGet"):
                url = f"{http['scheme'].lower()}://{release.addresses[name]}:{ports[http['port']]}{http['path']}"
                assert urlopen(url, timeout=10).status == 200
                continue
            asked = container[probe]["grpc"]
            request = health_pb2.HealthCheckRequest(service=asked.get("service", ""))
            with grpc.insecure_channel(f"{release.addresses[name]}:{asked['port']}") as channel:
                assert health_pb2_grpc.HealthStub(channel).Check(request, timeout=10).status == SERVING


@pytest.mark.parametrize("name", ["cluster", "ray"])
def test_the_charts_redis_takes_its_password_where_nobody_sees_it(name: str, tmp_path: Path) -> None:
    """It runs here, by the container's own command: with a certificate of ours, and in the clear for Ray."""
    (container,) = pods(objects(name))["coppice-redis"]["spec"]["containers"]
    port = free_port()
    options: Any = {"host": "127.0.0.1", "port": port, "socket_timeout": 5, "retry": Retry(NoBackoff(), 0)}
    if name == "cluster":
        options |= {"ssl": True, "ssl_ca_certs": str(tmp_path / "ca.crt")}
        authority = Authority(tmp_path / "authority").folder
        for ours, theirs in (("ca.pem", "ca.crt"), ("orchestrator.pem", "tls.crt"), ("orchestrator.key", "tls.key")):
            shutil.copy(authority / ours, tmp_path / theirs)
    command, ping = (
        [part.replace("6379", str(port)).replace("/tls/", f"{tmp_path}/") for part in each]
        for each in (container["command"], container["livenessProbe"]["exec"]["command"])
    )
    server = find_server()
    assert server is not None
    variables = {"PATH": f"{server.parent}:{os.environ['PATH']}", "REDIS_PASSWORD": "hush"}
    log = tmp_path / "log"
    with log.open("w") as written:
        process = subprocess.Popen(command, env=variables, cwd=tmp_path, stdout=written, stderr=subprocess.STDOUT)
    try:
        until = time.monotonic() + 10
        while subprocess.run(ping, env=variables, capture_output=True, timeout=10).returncode:
            if process.poll() is not None and "tls-port" in log.read_text(encoding="utf-8"):
                pytest.skip("requires redis-server with TLS: this one was built without")
            assert time.monotonic() < until, log.read_text(encoding="utf-8")
        assert Redis(password="hush", **options).ping()
        with pytest.raises(AuthenticationError):
            Redis(**options).ping()
        arguments = Path(f"/proc/{process.pid}/cmdline").read_text(encoding="utf-8")
        assert "redis-server" in arguments
        assert "hush" not in arguments
    finally:
        process.kill()
        process.wait()
