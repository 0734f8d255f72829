"""The launcher against real processes: it starts, watches and stops them, and leaves none behind."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from coppice.errors import InvalidField
from coppice.machine import usable_cores
from coppice.stack import launch
from coppice.stack.launch import Stack
from coppice.stack.process import ProcessFailed
from coppice.stack.spec import HeadSpec, StackSpec
from tests.signals import eventually
from tests.stacks import up

FAKES = dict.fromkeys(launch.MODULES, "tests.fake_service")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A folder that looks like a model."""
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def flags_of(log: Path, run: int = 0) -> dict[str, list[str]]:
    """The flags that a fake was started with."""
    runs = [line for line in log.read_text().splitlines() if line.startswith("arguments: ")]
    flags: dict[str, list[str]] = {}
    for flag, value in itertools.pairwise(runs[run].split()):
        if flag.startswith("--"):
            flags.setdefault(flag.removeprefix("--"), []).append(value)
    return flags


def ends(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(30)
    return not psutil.pid_exists(pid)


def test_a_stack_starts_and_stops_cleanly(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COPPICE_ADAPTATION__REDIS", "redis://user:secret@127.0.0.1:1/0")
    monkeypatch.setenv("COPPICE_ORCHESTRATOR__FAILOVER_S", "0.01")
    spec = StackSpec(
        target=target,
        heads=(HeadSpec("look", "lookup"), HeadSpec("block", "specblock", target)),
        verifiers=2,
        orchestrators=2,
        adapt=True,
        policy="merge",
        budget=7,
        dtype="bfloat16",
        verifier_threads=3,
        extra={"verifier": {"verifier.kv_tokens": 64}},
    )

    def via(name: str, address: str) -> str:
        return f"{name}:{address.rpartition(':')[2]}"

    logs = tmp_path / "logs"
    with Stack(spec, FAKES, log_dir=logs, via=via) as stack:
        orchestrators = ["orchestrator-0", "orchestrator-1"]
        names = ["verifier-0", "verifier-1", "drafter-look", "drafter-block", "adapter", *orchestrators]
        assert {name: ready.role for name, ready in stack.services.items()} == {
            name: name.partition("-")[0] for name in names
        }
        own = {name: ready.address for name, ready in stack.services.items()}
        reached = {name: via(name, address) for name, address in own.items()}
        assert stack.address == ",".join(reached[name] for name in orchestrators)
        stack.check()
        before = stack.services["verifier-0"]
        assert stack.restart("verifier-0", {"verifier.kv_tokens": 4096})
        os.kill(stack.services["verifier-0"].pid, signal.SIGKILL)
        assert ends(stack.services["verifier-0"].pid)
        for address in (before.address, before.health):  # whoever takes any port cannot get it meanwhile
            with pytest.raises(OSError, match="in use"), socket.socket() as other:
                other.bind(("127.0.0.1", int(address.rpartition(":")[2])))
        assert not stack.restart("verifier-0")  # what was told once is not told again
        after = stack.services["verifier-0"]
        assert (after.address, after.health) == (before.address, before.health)
        stack.check()
        pids = stack.pids
        assert all(psutil.pid_exists(pid) for pid in pids)
    assert stack.unclean == []
    assert not any(psutil.pid_exists(pid) for pid in pids)
    kv_tokens = [flags_of(logs / "verifier-0.log", run)["verifier.kv_tokens"] for run in range(3)]
    assert kv_tokens == [["64"], ["4096"], ["64"]]
    flags = {name: flags_of(logs / f"{name}.log") for name in names}
    placed = {"target": str(target), "dtype": "bfloat16", "threads": "3"}
    assert {name: flags["verifier-1"][f"verifier.{name}"] for name in placed} == {
        name: [value] for name, value in placed.items()
    }
    assert (flags["drafter-look"]["drafter.name"], flags["drafter-look"]["drafter.kind"]) == (["look"], ["lookup"])
    assert flags["drafter-block"]["drafter.verifiers"] == [own[name] for name in names[:2]]
    assert "drafter.verifiers" not in flags["drafter-look"]
    assert flags["adapter"]["adapter.heads"] == [f"block={target}"]
    for name in orchestrators:
        assert flags[name]["orchestrator.verifiers"] == [reached[verifier] for verifier in names[:2]]
        heads = [f"look={reached['drafter-look']}", f"block={reached['drafter-block']}"]
        assert flags[name]["orchestrator.heads"] == heads
        assert (flags[name]["orchestrator.policy"], flags[name]["orchestrator.budget"]) == (["merge"], ["7"])
        assert float(flags[name]["orchestrator.failover_s"][0]) > 0.1  # as long as a verifier takes to load
    # The password of a Redis is on no command line.
    assert not [name for name in names if "adaptation.redis" in flags[name] or "secret" in str(flags[name])]


SPECS: list[tuple[dict[str, Any], dict[str, str], dict[str, Any]]] = [
    (
        {},
        {},
        {"verifier.dtype": "float32", "verifier.threads": usable_cores(), "orchestrator.budget": 31, "server.port": 0},
    ),
    (
        {"device": "cuda:0", "port": None},
        {},
        {"drafter.device": "cuda:0", "drafter.dtype": "bfloat16", "orchestrator.budget": 60, "server.port": 50051},
    ),
    ({}, {"THREADS": "5", "DTYPE": "bfloat16"}, {"verifier.threads": 5, "verifier.dtype": "bfloat16"}),
    (
        {"verifier_threads": 2, "dtype": "float32"},
        {"THREADS": "5", "DTYPE": "bfloat16"},
        {"verifier.threads": 2, "verifier.dtype": "float32"},
    ),
]


def test_settings_come_from_the_spec_then_variables_then_the_machine(target: Path) -> None:
    for options, variables, expected in SPECS:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(f"COPPICE_VERIFIER__{name}", value)
            settings = StackSpec(target=target, **options).settings().model_dump()
        places = {name: name.partition(".") for name in expected}
        assert {name: settings[section][field] for name, (section, _, field) in places.items()} == expected


def test_a_head_is_name_kind_and_folder_and_there_is_one_of_everything_else(target: Path) -> None:
    for text, head in {"a=bigram": HeadSpec("a", "bigram"), "b=lm:/x:y": HeadSpec("b", "lm", Path("/x:y"))}.items():
        assert HeadSpec.parse(text) == head
        assert str(head) == text
    for text in ("bigram", "a=magic", "a="):
        with pytest.raises(InvalidField):
            HeadSpec.parse(text)
    for name in ("verifiers", "replicas", "orchestrators"):
        with pytest.raises(InvalidField, match=name):
            StackSpec(target=target, **{name: 0})


@pytest.mark.parametrize(
    ("name", "reason"),
    [("dies", r"verifier ended with exit code 1(.|\n)*no such model"), ("hangs", "verifier was not ready in time")],
)
def test_what_does_not_start_shows_its_log_and_stops_the_others(target: Path, name: str, reason: str) -> None:
    spec = StackSpec(target=target, extra={"verifier": {"verifier.name": name}})
    stack = Stack(spec, FAKES, ready_s=300.0 if name == "dies" else 2.0)
    with pytest.raises(ProcessFailed, match=reason), stack:
        pass
    assert stack.unclean == ([] if name == "hangs" else ["verifier"])  # what never served may be ended by the signal
    children = psutil.Process().children(recursive=True)
    assert [child for child in children if "tests.fake_service" in child.cmdline()] == []


def test_a_process_that_ignores_sigterm_is_killed_and_named(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "STOP_GRACE_S", 1.0)
    spec = StackSpec(target=target, heads=(), extra={"verifier": {"verifier.name": "stubborn"}})
    lines = list[str]()
    with Stack(spec, FAKES, say=lines.append) as stack:
        pid = stack.services["verifier"].pid
        status, terminate = Path(f"/proc/{pid}/status"), 1 << (signal.SIGTERM - 1)
        assert eventually(lambda: int(status.read_text().partition("SigCgt:")[2].split()[0], 16) & terminate, 30)
        stack.stop()
    assert [line.partition(",")[0] for line in lines] == ["verifier: ready", "orchestrator: ready"]
    assert "verifier" in stack.unclean
    assert not psutil.pid_exists(pid)


def test_a_head_that_refuses_ends_the_start(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "loads.py").write_text("import time; time.sleep(600)")
    (tmp_path / "refuses.py").write_text("import sys; print('drafter.kind: no', file=sys.stderr); sys.exit(2)")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    spec = StackSpec(target=target, heads=(HeadSpec("block", "specblock", target),))
    modules = {**FAKES, "verifier": "loads", "drafter": "refuses"}
    with pytest.raises(ProcessFailed, match=r"^drafter-block: drafter.kind: no$"), Stack(spec, modules, ready_s=60):
        pass


UP = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in the background
from coppice.stack import launch
launch.MODULES.update({role: "tests.fake_service" for role in launch.MODULES})
launch.IMPORTS = ("coppice.rpc.server",)
from coppice.cli import main
main()
"""
Services = Callable[[], dict[str, dict[str, Any]]]


@contextlib.contextmanager
def running(target: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], Services]]:
    """`coppice up` over fakes, once it is ready; gives the process, and what its ready file says of the services."""
    ready = target.parent / "ready.json"

    def services() -> dict[str, dict[str, Any]]:
        return {service["name"]: service for service in json.loads(ready.read_text())["services"]}

    with up([sys.executable, "-c", UP, "up", "--target", str(target), *arguments], ready) as process:
        yield process, services
    assert not ready.exists()


def test_up_starts_replicas_keeps_logs_and_stops_on_an_interrupt(target: Path) -> None:
    logs = target.parent / "logs"
    counts = ("--verifiers", "2", "--drafters", "2", "--orchestrators", "2", "--log-dir", str(logs))
    with running(target, "--head", "look=lookup", *counts) as (process, services):
        names = [f"{stem}-{number}" for stem in ("verifier", "drafter-look", "orchestrator") for number in (0, 1)]
        before = services()
        assert list(before) == names
        grpc.channel_ready_future(grpc.insecure_channel(before["orchestrator-0"]["address"])).result(30)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert f"ready at {before['orchestrator-0']['address']}" in out
    assert f"stopping {', '.join(names)}; " in out
    assert {file.stem for file in logs.glob("*.log")} == set(names)
    assert not any(psutil.pid_exists(service["pid"]) for service in before.values())


def test_what_dies_is_started_again_but_no_orchestrator_for_ever(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COPPICE_ADAPTATION__REDIS", "redis://127.0.0.1:1/0")
    monkeypatch.setattr(launch, "FIRST_PAUSE_S", 0.1)
    heads, said = (HeadSpec("block", "specblock", target), HeadSpec("look", "lookup")), list[str]()
    with Stack(StackSpec(target=target, heads=heads, adapt=True), FAKES) as stack:
        supervisor, before = launch.Supervisor(stack, said.append), dict(stack.services)
        revived = ("drafter-look", "verifier", "adapter", "orchestrator")
        for names in (revived, ("orchestrator",)):
            for name in names:
                os.kill(stack.services[name].pid, signal.SIGKILL)
            assert eventually(supervisor.look, 60)
        for name, ready in stack.services.items():
            assert ready.address == before[name].address
            assert (ready.pid != before[name].pid) == (name in revived)
        os.kill(stack.services["orchestrator"].pid, signal.SIGKILL)
        with pytest.raises(ProcessFailed, match="3 times in 60 s orchestrator ended with SIGKILL"):
            eventually(supervisor.look, 60)
    for name in revived:
        assert [line for line in said if line.startswith(f"{name} ended with SIGKILL; it is started again in 0.1 s (")]
        assert [line for line in said if line.startswith(f"{name} is back, ")]


def test_children_end_when_their_parent_is_killed(target: Path) -> None:
    with running(target) as (process, services):
        pids = [service["pid"] for service in services().values()]
        for pid in pids[::2]:  # also those that are held still
            os.kill(pid, signal.SIGSTOP)
            assert eventually(lambda pid=pid: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
        process.kill()
        process.wait()
        assert all(ends(pid) for pid in pids)
        (target.parent / "ready.json").unlink()
