"""What the chart runs is what is tested: the containers of values-one-gpu.yaml, started here by their own commands and
environments, find each other and answer through the port of the orchestrator's Service with the target's own text; and
what values-hub.yaml downloads.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from redis import AuthenticationError, Redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from coppice.client.client import Client
from coppice.stack.process import find_redis
from coppice.testing.reference import Reference
from tests.certificates import Authority
from tests.chart.chart import component, containers, objects, of_kind, pods
from tests.pipeline.test_hub import serving
from tests.processes import Service
from tests.tiny import make_target
from tests.unit.test_feature_heads import save_random

VOCAB, NEW = 300, 32
MODELS = ("Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B")
SERVING = health_pb2.HealthCheckResponse.SERVING
# Every pod has an address of its own, as in a cluster, so that ports are the chart's.
NETWORK = f"127.{1 + os.getpid() % 250}.{os.getpid() // 250 % 250}"


@dataclass
class Release:
    """The pods of a render, each at an address of its own on this machine."""

    name: str
    folder: Path
    """the volume's files"""
    addresses: dict[str, str]
    variables: dict[str, dict[str, str]]
    """each pod's environment; what a cluster with a GPU has and this machine has not is replaced"""
    running: dict[str, Service]
    reference: Reference | None = None
    hub: str = ""

    @property
    def pods(self) -> dict[str, dict[str, Any]]:
        """The manifests, an orchestrator's behind those that it waits for."""
        order = ("models", "verifier", "drafter", "orchestrator", "test")
        return dict(sorted(pods(objects(self.name)).items(), key=lambda each: order.index(component(each[1]))))

    @property
    def address(self) -> str:
        """Where the Service that clients dial leads to."""
        service = of_kind(objects(self.name), "Service")["coppice"]["spec"]
        selected = service["selector"]["app.kubernetes.io/component"]
        (pod,) = [name for name in self.running if component(self.pods[name]) == selected]
        return f"{self.addresses[pod]}:{service['ports'][0]['port']}"

    def value(self, pod: str, text: str) -> str:
        """What a word of a container's command or environment is here."""
        for host, address in self.addresses.items():
            text = text.replace(f"dns:{host}:", f"dns:{address}:")
        text = text.replace("coppice:50051", f"{self.addresses['coppice-orchestrator']}:50051")
        text = text.replace("/models/", f"{self.folder}/models/")
        here = {"0.0.0.0": self.addresses[pod], "cuda": "cpu", "bfloat16": "float32"}
        here |= {"https://hub.example.com": self.hub, **dict.fromkeys(self.addresses, "localhost")}
        return here.get(text, text)

    def environment(self, pod: str, container: dict[str, Any]) -> dict[str, str]:
        """A container's variables; what a cluster with a GPU has and this machine has not is replaced."""
        variables = {}
        for each in container.get("env", []):
            secret = "secret" if "secretKeyRef" in each.get("valueFrom", {}) else self.addresses[pod]
            variables[each["name"]] = self.value(pod, each.get("value", secret))
        if "COPPICE_VERIFIER__KV_TOKENS" in variables:
            variables["COPPICE_VERIFIER__KV_TOKENS"] = "16384"
        return variables

    def run(self, pod: str, container: dict[str, Any]) -> subprocess.CompletedProcess[str]:
        """Run a container that ends."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("COPPICE_", "HF_"))}
        path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        words = [self.value(pod, word) for word in (*container["command"], *container.get("args", []))]
        env = clean | path | self.environment(pod, container)
        return subprocess.run(words, env=env, capture_output=True, text=True, timeout=60)

    def start(self, start_service: Callable[..., Service]) -> None:
        """Run every container in the order in which a cluster would find all that it waits for."""
        for name, pod in self.pods.items():
            (container,) = pod["spec"]["containers"]
            self.variables[name] = self.environment(name, container)
            if container["command"][:2] == ["python", "-m"]:
                flags = container.get("args", [])
                self.running[name] = start_service(container["command"][2], *flags, variables=self.variables[name])


def placed(name: str, folder: Path, number: int) -> Release:
    """A release with an address for each pod."""
    addresses = {pod: f"{NETWORK}.{16 * number + at}" for at, pod in enumerate(sorted(pods(objects(name))), 1)}
    return Release(name, folder, addresses, {}, {})


@pytest.fixture(scope="module")
def release(start_service: Callable[..., Service], tmp_path_factory: pytest.TempPathFactory) -> Release:
    """Every service's container as a process, over a tiny target and a random EAGLE-3 head of it."""
    folder = tmp_path_factory.mktemp("release")
    make_target(folder / "models/target", VOCAB, layers=8, max_len=1024)
    (folder / "models/eagle").mkdir()
    save_random(folder / "models/eagle", "eagle3", vocab_size=VOCAB, draft_vocab_size=200)
    release = placed("one-gpu", folder, 0)
    release.reference = Reference(folder / "models/target", "float32", threads=1)
    release.start(start_service)
    return release


def test_the_job_fetches_every_model_of_the_hub(tmp_path: Path) -> None:
    """By the commands and environments of values-hub.yaml with what an operator adds."""
    release = placed("day", tmp_path, 1)
    (name,) = [name for name, pod in release.pods.items() if component(pod) == "models"]
    with serving(**{model: make_target(tmp_path / model, VOCAB) for model in MODELS}) as release.hub:
        for container in containers(release.pods[name]):
            done = release.run(name, container)
            assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "models").rglob("config.json"))) == len(MODELS)


def test_a_generation_through_the_service_is_the_targets_own(release: Release) -> None:
    reference, prompt = release.reference, (5, 9, 13, 5, 9)
    assert reference
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
    (container,) = release.pods["coppice-test"]["spec"]["containers"]
    reference = release.reference
    assert reference
    assert release.variables["coppice-test"]["COPPICE_ADDRESS"] == release.address
    run = release.run("coppice-test", container)
    assert run.returncode == 0, run.stderr
    answer = json.loads(run.stdout)
    expected = reference.greedy(reference.text.encode("Once upon a time"), 16).ids
    assert answer["ids"]
    assert answer["ids"] == list(expected[: len(answer["ids"])])


def test_the_probes_find_every_process(release: Release) -> None:
    for name in release.running:
        (container,) = release.pods[name]["spec"]["containers"]
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
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
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
    server = find_redis()
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
