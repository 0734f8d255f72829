"""The launcher against real processes: it starts, watches and stops them, and leaves none behind."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest
from rich.console import Console

from coppice.commands.up import service_lines
from coppice.errors import InvalidField
from coppice.machine import usable_cores
from coppice.stack import launch
from coppice.stack.launch import Stack
from coppice.stack.process import ProcessFailed
from coppice.stack.spec import HeadSpec, StackSpec
from tests.signals import eventually
from tests.up import up

FAKES = dict.fromkeys(launch.MODULES, "tests.fake_service")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A folder that looks like a model."""
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def _arguments(log: Path) -> list[str]:
    """The arguments a fake was started with."""
    return log.read_text().splitlines()[0].removeprefix("arguments: ").split()


def _value(arguments: list[str], flag: str) -> str:
    return arguments[arguments.index(flag) + 1]


def _values(arguments: list[str], flag: str) -> list[str]:
    return [after for before, after in itertools.pairwise(arguments) if before == flag]


def _ends(pid: int, within_s: float = 10.0) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(within_s)
    return not psutil.pid_exists(pid)


def test_a_stack_starts_is_healthy_and_stops_cleanly(target: Path, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    spec = StackSpec(target=target, policy="merge", budget=7, dtype="bfloat16", verifier_threads=3)
    with Stack(spec, FAKES, log_dir=logs) as stack:
        names = ["verifier", "drafter-bigram", "drafter-lookup", "orchestrator"]
        assert list(stack.services) == names
        assert [ready.role for ready in stack.services.values()] == ["verifier", "drafter", "drafter", "orchestrator"]
        assert stack.address == stack.services["orchestrator"].address
        stack.check()
        told = stack.to_json()
        pids = [service["pid"] for service in told["services"]]
        assert all(psutil.pid_exists(pid) for pid in pids)
        assert (told["address"], told["metrics"]) == (stack.address, "127.0.0.1:9")
        assert list(told["services"][0]) == ["name", "role", "address", "health", "metrics", "pid", "http", "memory"]
        addresses = {name: ready.address for name, ready in stack.services.items()}
    assert stack.unclean == []
    assert not any(psutil.pid_exists(pid) for pid in pids)
    verifier, drafter, orchestrator = (_arguments(logs / f"{name}.log") for name in (names[0], names[2], names[3]))
    assert _value(verifier, "--verifier.target") == str(target)
    assert _value(verifier, "--verifier.dtype") == "bfloat16"
    assert _value(verifier, "--verifier.threads") == "3"
    assert (_value(drafter, "--drafter.name"), _value(drafter, "--drafter.kind")) == ("lookup", "lookup")
    assert _value(orchestrator, "--orchestrator.verifiers") == addresses["verifier"]
    heads = _values(orchestrator, "--orchestrator.heads")
    assert heads == [f"bigram={addresses['drafter-bigram']}", f"lookup={addresses['drafter-lookup']}"]
    assert (_value(orchestrator, "--orchestrator.policy"), _value(orchestrator, "--orchestrator.budget")) == (
        "merge",
        "7",
    )


def test_the_password_of_a_redis_is_on_no_command_line(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COPPICE_ADAPTATION__REDIS", "redis://user:secret@127.0.0.1:1/0")
    logs, head = tmp_path / "logs", HeadSpec("block", "specblock", target)
    with Stack(StackSpec(target=target, heads=(head,), adapt=True), FAKES, log_dir=logs) as stack:
        assert "adapter" in stack.services
    for log in logs.glob("*.log"):
        told = _arguments(log)
        assert "--adaptation.redis" not in told
        assert not [argument for argument in told if "user:secret" in argument]


def test_several_verifiers_and_orchestrators_all_know_each_other(target: Path, tmp_path: Path) -> None:
    heads = (HeadSpec("look", "lookup"), HeadSpec("block", "specblock", target))
    spec = StackSpec(target=target, heads=heads, verifiers=2, orchestrators=2)
    with Stack(
        spec, FAKES, log_dir=tmp_path, via=lambda name, address: f"{name}:{address.rpartition(':')[2]}"
    ) as stack:
        verifiers, orchestrators = ["verifier-0", "verifier-1"], ["orchestrator-0", "orchestrator-1"]
        assert list(stack.services) == [*verifiers, "drafter-look", "drafter-block", *orchestrators]
        own = {name: ready.address for name, ready in stack.services.items()}
        reached = {name: f"{name}:{address.rpartition(':')[2]}" for name, address in own.items()}
        assert stack.address == ",".join(reached[name] for name in orchestrators)
        assert stack.to_json()["address"] == own["orchestrator-0"]
    assert stack.unclean == []
    reader = _values(_arguments(tmp_path / "drafter-block.log"), "--drafter.verifiers")
    assert reader == [own[name] for name in verifiers]
    for name in orchestrators:
        told = _arguments(tmp_path / f"{name}.log")
        assert _values(told, "--orchestrator.verifiers") == [reached[verifier] for verifier in verifiers]
        heads_told = [f"look={reached['drafter-look']}", f"block={reached['drafter-block']}"]
        assert _values(told, "--orchestrator.heads") == heads_told


@pytest.mark.parametrize("number", [signal.SIGKILL, None], ids=["killed", "running"])
def test_a_restarted_process_comes_back_where_it_was(
    target: Path, tmp_path: Path, number: signal.Signals | None
) -> None:
    spec = StackSpec(target=target, heads=(), budget=7, extra={"verifier": {"verifier.kv_tokens": 64}})
    with Stack(spec, FAKES, log_dir=tmp_path) as stack:
        before = stack.services["verifier"]
        if number:
            os.kill(before.pid, number)
            assert _ends(before.pid)
            for address in (before.address, before.health):  # whoever takes any port cannot get it meanwhile
                with pytest.raises(OSError, match="in use"), socket.socket() as other:
                    other.bind(("127.0.0.1", int(address.rpartition(":")[2])))
        assert stack.restart("verifier", {"verifier.kv_tokens": 4096}) == (number is None)
        after = stack.services["verifier"]
        assert (after.address, after.health) == (before.address, before.health)
        assert after.pid != before.pid
        stack.check()
        assert stack.restart("verifier")  # what was told once is not told again
    assert stack.unclean == []
    runs = [line for line in (tmp_path / "verifier.log").read_text().splitlines() if line.startswith("arguments: ")]
    assert [_value(run.split(), "--verifier.kv_tokens") for run in runs] == ["64", "4096", "64"]


def test_a_stack_has_at_least_one_of_everything(target: Path) -> None:
    for name in ("verifiers", "replicas", "orchestrators"):
        with pytest.raises(InvalidField, match=name):
            StackSpec(target=target, **{name: 0})


def test_settings_come_from_the_spec_then_variables_then_the_machine(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = StackSpec(target=target).settings()
    assert (silent.verifier.dtype, silent.drafter.dtype) == ("float32", "float32")
    assert silent.verifier.threads == usable_cores()
    assert (silent.orchestrator.budget, silent.server.port) == (31, 0)
    cuda = StackSpec(target=target, device="cuda:0", port=None).settings()
    assert (cuda.verifier.dtype, cuda.drafter.dtype, cuda.drafter.device) == ("bfloat16", "bfloat16", "cuda:0")
    assert (cuda.orchestrator.budget, cuda.server.port) == (60, 50051)
    monkeypatch.setenv("COPPICE_VERIFIER__THREADS", "5")
    monkeypatch.setenv("COPPICE_VERIFIER__DTYPE", "bfloat16")
    assert StackSpec(target=target).settings().verifier.threads == 5
    assert StackSpec(target=target, verifier_threads=2).settings().verifier.threads == 2
    assert StackSpec(target=target).settings().verifier.dtype == "bfloat16"
    assert StackSpec(target=target, dtype="float32").settings().verifier.dtype == "float32"


@pytest.mark.parametrize(
    ("text", "head"),
    [
        ("a=bigram", HeadSpec("a", "bigram")),
        ("b=lm:/x:y", HeadSpec("b", "lm", Path("/x:y"))),
        ("bigram", None),
        ("a=magic", None),
        ("a=", None),
    ],
)
def test_a_head_is_name_kind_and_folder(text: str, head: HeadSpec | None) -> None:
    if head:
        assert HeadSpec.parse(text) == head
    else:
        with pytest.raises(InvalidField):
            HeadSpec.parse(text)


def test_a_process_that_dies_at_start_shows_its_log_and_stops_the_others(target: Path, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    spec = StackSpec(target=target, extra={"verifier": {"verifier.name": "dies"}})
    stack = Stack(spec, FAKES, log_dir=logs)
    with pytest.raises(ProcessFailed, match=r"verifier ended with exit code 1(.|\n)*no such model"), stack:
        pass
    children = psutil.Process().children(recursive=True)
    assert [child for child in children if "tests.fake_service" in child.cmdline()] == []


def test_a_process_that_never_gets_ready_is_an_error(target: Path) -> None:
    spec = StackSpec(target=target, heads=(), extra={"verifier": {"verifier.name": "hangs"}})
    stack = Stack(spec, FAKES, ready_s=2.0)
    with pytest.raises(ProcessFailed, match="verifier was not ready in time"), stack:
        pass
    assert stack.unclean == []  # what never served may be ended by the signal


def test_a_process_that_ignores_sigterm_is_killed_and_named(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "STOP_GRACE_S", 4.0)
    spec = StackSpec(target=target, heads=(), extra={"verifier": {"verifier.name": "stubborn"}})
    console = Console(file=io.StringIO(), force_terminal=False)
    with Stack(spec, FAKES) as stack:
        pid = stack.services["verifier"].pid
        time.sleep(0.5)  # until it has installed its handler
        with service_lines(console, stack):
            stack.stop()
    assert "verifier: stopping, " in console.file.getvalue()  # type: ignore[attr-defined]
    assert stack.unclean == ["verifier"]
    assert not psutil.pid_exists(pid)


UP = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in the background
from coppice.stack import launch
launch.MODULES.update({role: "tests.fake_service" for role in launch.MODULES})
from coppice.cli import main
main()
"""


@contextlib.contextmanager
def _up(target: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """`coppice up` over fakes, once it is ready; gives the process and its ready file."""
    ready = target.parent / "ready.json"
    with up([sys.executable, "-c", UP, "up", "--target", str(target), *arguments], ready) as process:
        yield process, ready


def test_up_writes_its_ready_file_and_stops_on_an_interrupt(target: Path) -> None:
    with _up(target) as (process, ready):
        told = json.loads(ready.read_text())
        grpc.channel_ready_future(grpc.insecure_channel(told["address"])).result(5)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
        assert (process.returncode, err) == (0, "")
        assert f"ready at {told['address']}" in out
        assert "float32: the text is plain decoding's, token for token\n" in out
        assert not any(psutil.pid_exists(service["pid"]) for service in told["services"])
        assert not ready.exists()


def _pids(ready: Path) -> dict[str, int]:
    return {service["name"]: service["pid"] for service in json.loads(ready.read_text())["services"]}


def test_up_starts_again_what_dies_and_says_so(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COPPICE_ADAPTATION__REDIS", "redis://127.0.0.1:1/0")
    mortal = ("drafter-look", "verifier", "adapter", "orchestrator")
    heads = ("--head", f"block=specblock:{target}", "--head", "look=lookup", "--adapt")
    with _up(target, *heads) as (process, ready):
        before = json.loads(ready.read_text())
        for name in mortal:
            pid = _pids(ready)[name]
            os.kill(pid, signal.SIGKILL)
            assert eventually(lambda name=name, pid=pid: _pids(ready)[name] != pid, 30)
        after = json.loads(ready.read_text())
        assert [one["address"] for one in after["services"]] == [one["address"] for one in before["services"]]
        assert process.poll() is None
        process.terminate()
        out, err = process.communicate(timeout=30)
    assert process.returncode == 0
    for name in mortal:
        assert f"coppice: {name} ended with SIGKILL; it is started again in 0.5 s (log: " in err
        assert f"coppice: {name} is back, " in err
    assert err.count("\n") == 2 * len(mortal)
    assert "stopping verifier, drafter-block, drafter-look, adapter, orchestrator; answers that are" in out


def test_up_ends_when_an_orchestrator_dies_three_times_in_a_minute(target: Path) -> None:
    with _up(target, "--orchestrators", "2") as (process, ready):
        for _ in range(2):
            pid = _pids(ready)["orchestrator-1"]
            os.kill(pid, signal.SIGKILL)
            assert eventually(lambda pid=pid: _pids(ready)["orchestrator-1"] != pid, 30)
        pids = _pids(ready)
        os.kill(pids["orchestrator-1"], signal.SIGKILL)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 1
    last = "coppice: 3 times in 60 s orchestrator-1 ended with SIGKILL; its log ends with:\narguments:"
    assert last in err
    assert not any(psutil.pid_exists(pid) for pid in pids.values())


def test_up_starts_replicas_and_keeps_logs(target: Path) -> None:
    logs = target.parent / "logs"
    counts = ("--verifiers", "2", "--drafters", "2", "--orchestrators", "2", "--log-dir", str(logs))
    with _up(target, "--head", "look=lookup", *counts) as (process, ready):
        names = [f"{stem}-{number}" for stem in ("verifier", "drafter-look", "orchestrator") for number in (0, 1)]
        assert list(_pids(ready)) == names
        process.terminate()
        out, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert {file.stem for file in logs.glob("*.log")} == set(names)
    assert f"logs     {logs}\n" in out
    assert "drafter-look-1 lookup" in out


@pytest.mark.parametrize("held_still", [False, True])
def test_children_end_when_their_parent_is_killed(target: Path, held_still: bool) -> None:
    with _up(target) as (process, ready):
        pids = [service["pid"] for service in json.loads(ready.read_text())["services"]]
        for pid in pids if held_still else ():
            os.kill(pid, signal.SIGSTOP)
            assert eventually(lambda pid=pid: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
        process.kill()
        process.wait()
        assert all(_ends(pid) for pid in pids)
