"""The application on a real Ray: pools follow their load, what is killed comes back, texts stay plain decoding's."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil
import pytest
import yaml

from coppice.client.client import Client
from coppice.errors import CoppiceError, DeadlineExceeded, InvalidField, Unauthenticated
from coppice.rpc.channels import Dialer
from coppice.stack.process import LocalRedis, Ready
from coppice.telemetry import metric
from coppice.testing.reference import Reference
from coppice.wire.generation import Chunk
from tests.faults.campaign.load import Load, plain_answers, questions
from tests.layout.test_house import ROOT
from tests.processes import free_port
from tests.signals import eventually, holds

pytestmark = pytest.mark.timeout(1500)
SERVE_YAML = ROOT / "orchestrator" / "serve.yaml"
TOKEN = "a token of these tests"
PROMPT = tuple(range(7, 40))
NEW = 300
TINY_TARGET = {"layers": 4}
SCALED = {"max_replicas": 3, "sessions_per_replica": 2, "upscale_delay_s": 1, "downscale_delay_s": 5, "look_back_s": 11}
LONG_S = 600.0  # Ray starts a replica in seconds, on a busy machine in minutes


@dataclass(frozen=True)
class ServiceProcess:
    """A service of the application: its process, its addresses, and the actor that keeps it."""

    process: psutil.Process
    actor: psutil.Process
    ready: Ready


class Cluster:
    """The shipped Serve config with other arguments, run in a folder of its own: a context manager."""

    def __init__(self, args: Mapping[str, Any], folder: Path) -> None:
        self.folder = folder
        self.door = f"127.0.0.1:{(port := free_port())}"
        config = yaml.safe_load(SERVE_YAML.read_text(encoding="utf-8"))
        config["grpc_options"]["port"], config["http_options"]["port"] = port, free_port()
        config["applications"][0]["args"] = args
        self._config = folder / "serve.yaml"
        self._config.write_text(yaml.safe_dump(config), encoding="utf-8")
        self._session = tempfile.TemporaryDirectory(prefix="ray-")  # a short path: Ray has sockets in it
        self.environment = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_TMPDIR": self._session.name,
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("COPPICE_")}
        with (self.folder / "serve.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ray.serve.scripts", "run", str(self._config)],
                cwd=ROOT,
                env=inherited | self.environment | {"PYTHONPATH": str(ROOT)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process
        mine = self._processes()
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
        psutil.wait_procs(mine, timeout=20)
        for left in self._processes():
            left.kill()
        self._session.cleanup()

    @property
    def log(self) -> str:
        """What `serve run` and its replicas said."""
        return (self.folder / "serve.log").read_text(encoding="utf-8", errors="replace")

    def services(self, name: str) -> list[ServiceProcess]:
        """The processes of a deployment that are ready now."""
        found = []
        for process in self._processes():
            try:
                line = process.cmdline()
                if "coppice.stack.child" in line and line[-1].endswith(f"/{name}.ready.json"):
                    ready = Ready(**json.loads(Path(line[-1]).read_text(encoding="utf-8")))
                    found.append(ServiceProcess(process, psutil.Process(process.ppid()), ready))
            except (psutil.NoSuchProcess, OSError):
                continue  # it ended, or is not ready yet
        return found

    def _processes(self) -> list[psutil.Process]:
        """Those of this Ray, by the folder that they were told of."""
        mine = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("RAY_TMPDIR") == self._session.name and process.pid != os.getpid():
                    mine.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return mine


@pytest.fixture(scope="module")
def address() -> str:
    """The orchestrator's own port."""
    return f"127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def cluster(target: Path, address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two pools, a verifier, an orchestrator that wants a token, and the front door."""
    folder = tmp_path_factory.mktemp("ray")
    tokens = folder / "tokens"
    tokens.write_text(f"tests {hashlib.sha256(TOKEN.encode()).hexdigest()}\n")
    free = {"ray_actor_options": {"num_cpus": 0}}
    told = {"server": {"port": int(address.rpartition(":")[2])}, "orchestrator": {"tokens": str(tokens)}}
    with LocalRedis() as redis:
        args: dict[str, Any] = {
            "target": str(target),
            "settings": {
                "server": {"host": "127.0.0.1", "grace_s": 20},
                "directory": {"redis": redis.url},
                "verifier": {"threads": 1},
                "drafter": {"threads": 1},
                # The machine that runs tests may be busy: no head is to be benched for that.
                "orchestrator": {"draft_deadline_ms": 1000},
            },
            "verifier": free,
            "drafters": [
                {"name": "near", "kind": "lm", "path": str(target), **SCALED, **free},
                {"name": "lookup", "kind": "lookup", **SCALED, **free},
            ],
            "orchestrator": {"settings": told, **free},
            "ingress": free,
        }
        with Cluster(args, folder) as running, pytest.MonkeyPatch.context() as patch:
            patch.setenv("COPPICE_TOKEN", TOKEN)
            if not eventually(lambda: bool(running.services("orchestrator")) and answers(running.door), LONG_S):
                pytest.fail(f"the application does not come up:\n{running.log[-8000:]}")
            yield running


def answers(address: str) -> bool:
    """Whether generation is served there."""
    with contextlib.suppress(CoppiceError), Client(address) as client:
        return "near" in client.describe(timeout=5).heads
    return False


@pytest.fixture(scope="module")
def reference(target: Path) -> Reference:
    return Reference(target, "float32", threads=1)


async def settled(cluster: Cluster, name: str, replicas: int) -> bool:
    """Whether a deployment comes to have so many processes."""
    return await holds(lambda: len(cluster.services(name)) == replicas, LONG_S)


def opened(cluster: Cluster, name: str) -> list[float]:
    """Sessions that each drafter of a pool has had."""
    return [metric(one.ready.metrics, "coppice_drafter_sessions_opened_total") for one in cluster.services(name)]


def held_to(load: Load) -> None:
    """Every request was answered, as plain decoding answers it."""
    assert load.streams
    assert [stream.failure for stream in load.streams if stream.failure] == []
    assert [stream.wrong for stream in load.streams if stream.wrong] == []
    assert all(len(stream.ids) == len(stream.expected) for stream in load.streams)


async def test_a_pool_follows_its_load_up_and_down_and_the_other_stays(cluster: Cluster, address: str) -> None:
    plain = await plain_answers(address, await asyncio.to_thread(questions, address, 3), NEW)
    assert [len(cluster.services(f"drafter-{name}")) for name in ("near", "lookup")] == [1, 1]
    async with Load(address, plain, 1, "single:near") as light:
        async with Load(address, plain, 5, "single:near") as load:
            assert await settled(cluster, "drafter-near", 3), cluster.log[-4000:]
            assert await holds(lambda: min(opened(cluster, "drafter-near")) > 0, 60)
            assert len(cluster.services("drafter-lookup")) == 1
        assert await settled(cluster, "drafter-near", 1), cluster.log[-4000:]
    assert len(cluster.services("drafter-lookup")) == 1
    held_to(load)
    held_to(light)
    assert sum(stream.drafted for stream in load.streams) > load.tokens / 4


@pytest.mark.parametrize(("name", "whom"), [("drafter-near", "actor"), ("verifier", "process")])
async def test_what_is_killed_is_replaced_unnoticed(cluster: Cluster, address: str, name: str, whom: str) -> None:
    plain = await plain_answers(address, await asyncio.to_thread(questions, address, 2), NEW)
    (before,) = cluster.services(name)
    async with Load(address, plain, 2, "single:near") as load:
        assert await holds(lambda: len(load.answering) > 0, 60)
        os.kill(getattr(before, whom).pid, signal.SIGKILL)
        assert await holds(lambda: not before.process.is_running(), 30), "an orphan"
        assert await settled(cluster, name, 1), cluster.log[-4000:]
        seen = len(load.streams)
        assert await holds(lambda: len(load.streams) > seen + 2, 60)
    held_to(load)
    (after,) = cluster.services(name)
    assert after.process.pid != before.process.pid
    if whom == "actor":
        assert after.actor.pid != before.actor.pid


def test_the_front_door_passes_texts_statuses_and_tokens_on(cluster: Cluster, reference: Reference) -> None:
    (orchestrator,) = cluster.services("orchestrator")
    with Client(cluster.door) as client:
        events = list(client.stream(PROMPT, max_new_tokens=64, ignore_eos=True, policy="single:near"))
        for address in (cluster.door, orchestrator.ready.address):
            with Client(address) as one, pytest.raises(InvalidField, match="ids: token id 5000"):
                one.generate([1, 5_000])
    chunks = [event for event in events if isinstance(event, Chunk)]
    assert len(chunks) > 4
    assert tuple(token for chunk in chunks for token in chunk.ids) == reference.greedy(PROMPT, 64).ids
    with Client(cluster.door, dialer=Dialer()) as stranger:
        for call in (lambda: stranger.generate(PROMPT), stranger.describe):
            with pytest.raises(Unauthenticated):
                call()


def test_the_front_door_passes_deadlines_and_cancellation_on(cluster: Cluster) -> None:
    (orchestrator,) = cluster.services("orchestrator")
    idle = lambda: metric(orchestrator.ready.metrics, "vllm:num_requests_running") == 0  # noqa: E731
    with Client(cluster.door) as client:
        for event in client.stream(PROMPT, max_new_tokens=400, ignore_eos=True):
            if isinstance(event, Chunk):
                assert not idle()
                break
        assert eventually(idle, 5)
        with pytest.raises(DeadlineExceeded):
            client.generate(PROMPT, max_new_tokens=400, ignore_eos=True, timeout=0.4)
        assert eventually(idle, 5)


def test_an_answer_at_the_front_door_outlives_its_orchestrator(cluster: Cluster, reference: Reference) -> None:
    (before,) = cluster.services("orchestrator")
    ids: list[int] = []
    with Client(cluster.door) as client:
        for event in client.stream(PROMPT, max_new_tokens=NEW, ignore_eos=True):
            if isinstance(event, Chunk):
                if not ids:
                    before.process.kill()
                ids += event.ids
    assert tuple(ids) == reference.greedy(PROMPT, NEW).ids
    (after,) = cluster.services("orchestrator")
    assert after.process.pid != before.process.pid
