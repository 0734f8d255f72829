"""What keeps a stack whole and what shows how it does, against real services and tiny models."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from jsonschema import validate
from rich.console import Console

from coppice.cli import main
from coppice.client.client import Client
from coppice.commands.up import Monitor, metrics_pages
from coppice.stack.launch import MODULES, Stack, Supervisor
from coppice.stack.spec import StackSpec
from coppice.testing.reference import Reference
from tests.signals import eventually
from tests.stacks import interrupted

LOAD_S = 1
SLOW = f"""
import runpy, time
time.sleep({LOAD_S})
runpy.run_module("services.verifier", run_name="__main__", alter_sys=True)
"""
PROMPT = tuple(range(7, 40))
NEW = 200
SCHEMA = {"type": "string", "pattern": "^[a-f]{60,80} at the end$"}
GUIDED = {"structured_outputs": {"json": SCHEMA}, "seed": 7, "ignore_eos": False}
KILLED = [(name, {}) for name in ("drafter-lookup", "drafter-self", "verifier", "orchestrator")]
KILLED += [("verifier", GUIDED | {"temperature": 1.0})]


@contextmanager
def supervised(stack: Stack) -> Iterator[list[str]]:
    """A stack is kept whole while this is open; gives the lines that were said."""
    lines: list[str] = []
    supervisor, done = Supervisor(stack, lines.append), threading.Event()

    def look() -> None:
        while not done.wait(0.05):
            supervisor.look()

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield lines
    finally:
        done.set()
        thread.join()


def test_services_are_processes_of_their_own_as_ps_shows_them(stack: Stack) -> None:
    server = {psutil.Process(ready.pid).ppid() for ready in stack.services.values()}
    assert len(server) == 1
    for ready in stack.services.values():
        command = psutil.Process(ready.pid).cmdline()
        assert command[1:4] == ["-m", "coppice.stack.child", MODULES[ready.role]]
        assert os.getpgid(ready.pid) == ready.pid
        assert Path(f"/proc/{ready.pid}/fd/1").resolve().suffix == ".log"


def struck(client: Client, pid: int, **options: Any) -> tuple[int, ...]:
    """An answer in whose middle a process is killed."""
    return interrupted(client, PROMPT, lambda: os.kill(pid, signal.SIGKILL), max_new_tokens=NEW, **options)


@pytest.mark.parametrize(("name", "options"), KILLED)
def test_what_is_killed_under_a_request_comes_back_and_the_text_is_plains(
    stack: Stack, client: Client, reference: Reference, name: str, options: dict[str, Any]
) -> None:
    before, plain = stack.services[name], reference.greedy(PROMPT, NEW)
    if options:
        plain = client.generate(PROMPT, policy="plain", max_new_tokens=NEW, **options)
        validate(json.loads(plain.text), SCHEMA)
    with supervised(stack) as lines:
        assert struck(client, before.pid, policy="route", **options) == plain.ids
        assert eventually(lambda: len(lines) == 2, 60), lines
    died, back = lines
    assert died.startswith(f"{name} ended with SIGKILL; it is started again in 0.5 s (log: ")
    assert back.startswith(f"{name} is back, ")
    after = stack.services[name]
    assert (after.address, after.health, after.metrics) == (before.address, before.health, before.metrics)
    assert after.pid != before.pid
    stack.check()
    if name.startswith("drafter"):  # it drafts again
        head = name.removeprefix("drafter-")
        assert eventually(lambda: drafts(client, head), 20)


def test_an_answer_waits_for_the_only_verifier_as_long_as_that_takes_to_load(
    target: Path, reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("COPPICE_ORCHESTRATOR__FAILOVER_S", "1")
    spec = StackSpec(target=target, heads=(), dtype="float32", verifier_threads=1)
    with Stack(spec, {**MODULES, "verifier": "slow"}) as stack, supervised(stack), Client(stack.address) as client:
        killed = stack.services["verifier"].pid
        assert struck(client, killed, policy="plain") == reference.greedy(PROMPT, NEW).ids
        assert stack.failover_s > 3 * LOAD_S


def drafts(client: Client, head: str) -> bool:
    """Whether a head's trees are verified."""
    answer = client.generate(PROMPT, policy=f"single:{head}", max_new_tokens=32, ignore_eos=True)
    return any(answer.verified_nodes)


def shown(monitor: Monitor) -> str:
    """The panel as text."""
    console = Console(file=io.StringIO(), width=120)
    console.print(monitor.panel())
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_panel_shows_what_requests_did(stack: Stack, client: Client) -> None:
    monitor = Monitor(metrics_pages(stack))
    monitor.look()
    answer = client.generate(PROMPT, policy="single:self", max_new_tokens=NEW, ignore_eos=True)
    assert eventually(lambda: not monitor.look() and "100%" in shown(monitor), 10), shown(monitor)
    rows = {line.split()[1]: line.split()[2:-1] for line in shown(monitor).splitlines() if len(line.split()) > 5}
    share, tau, replicas, version = rows["self"]
    assert (share, replicas, version) == ("100%", "1", "-")
    assert float(tau) == pytest.approx(answer.tau, abs=0.1)  # the last step may accept more than it may say
    assert rows["lookup"] == ["-", "-", "1", "-"]
    client.generate(PROMPT, policy="merge", max_new_tokens=NEW, ignore_eos=True)
    client.generate(PROMPT, policy="plain", max_new_tokens=NEW, ignore_eos=True)
    assert eventually(lambda: not monitor.look() and "plain" in shown(monitor) and "merged" in shown(monitor), 10)
    assert rows["tokens/s"][0] != "0.0"
    assert "float32" in shown(monitor)
    assert "!" not in shown(monitor)


def test_the_panel_names_what_does_not_answer_and_what_cannot_be_used(stack: Stack) -> None:
    drafter = stack.services["drafter-lookup"]
    monitor = Monitor([*metrics_pages(stack), "127.0.0.1:1"])
    os.kill(drafter.pid, signal.SIGKILL)
    try:
        assert eventually(lambda: not monitor.look() and "! no replica of lookup can be used" in shown(monitor), 20)
        assert "! no answer from 127.0.0.1:1" in shown(monitor)
    finally:
        stack.restart("drafter-lookup")


def test_top_shows_a_running_deployment_or_says_where_there_are_no_metrics(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for address in (stack.orchestrator.metrics, stack.orchestrator.http, stack.orchestrator.address):
        monkeypatch.setattr(sys, "argv", ["coppice", "top", "--address", address])
        with pytest.raises(SystemExit) as ended:
            main()
        output = capsys.readouterr()
        if address != stack.orchestrator.address:
            assert not ended.value.code
            assert "tokens/s" in output.out
            assert "lookup" in output.out
        else:
            assert (ended.value.code, f"coppice: no metrics at {address}; " in output.err) == (3, True)
            assert "its HTTP or metrics port, not gRPC's" in output.err
