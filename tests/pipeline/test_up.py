"""What keeps a stack whole and what shows how it does, against real services and tiny models."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar

import pytest
from rich.console import Console

from coppice.cli import main
from coppice.client.client import Client
from coppice.commands.top import Monitor
from coppice.commands.up import find_model, metrics_pages
from coppice.errors import InvalidField
from coppice.stack.launch import MODULES, Stack, Supervisor
from coppice.stack.spec import StackSpec
from coppice.testing.reference import Reference
from tests.signals import eventually
from tests.stacks import interrupted, up
from tests.tiny import make_target

LOAD_S = 2
SLOW = f"""
import runpy, time
time.sleep({LOAD_S})
runpy.run_module("services.verifier", run_name="__main__", alter_sys=True)
"""
PROMPT = tuple(range(7, 40))
NEW = 200


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


def struck(client: Client, pid: int, policy: str) -> tuple[int, ...]:
    """An answer in whose middle a process is killed."""
    return interrupted(client, PROMPT, lambda: os.kill(pid, signal.SIGKILL), policy=policy, max_new_tokens=NEW)


@pytest.mark.parametrize("name", ["drafter-lookup", "drafter-self", "verifier", "orchestrator"])
def test_what_is_killed_under_a_request_comes_back_and_the_text_is_plains(
    stack: Stack, client: Client, reference: Reference, name: str
) -> None:
    before = stack.services[name]
    with supervised(stack) as lines:
        assert struck(client, before.pid, "route") == reference.greedy(PROMPT, NEW).ids
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
        assert struck(client, killed, "plain") == reference.greedy(PROMPT, NEW).ids
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
            assert (ended.value.code, f"coppice: {address} is the gRPC port; metrics are at" in output.err) == (3, True)


# --- `coppice up NAME`: a model is fetched from a hub, here a server that speaks what that takes of the Hub's API ---

NAME, TAG, COMMIT = "acme/tiny", "v1", "c0ffee" + 34 * "0"
UNWANTED = ("pytorch_model.bin", "modeling_tiny.py", "original/model.safetensors", "consolidated.safetensors")


class FakeHub(BaseHTTPRequestHandler):
    """One model at one tag; everything else is not found, with the code that says what is not."""

    folder: ClassVar[Path]
    fetched: ClassVar[set[str]]

    def do_HEAD(self) -> None:
        """What a file is."""
        self._answer(body=False)

    def do_GET(self) -> None:
        """A model's commit, its files, or one of them."""
        self._answer(body=True)

    def log_message(self, *_: object) -> None:
        """Nothing is logged."""

    def _answer(self, body: bool) -> None:
        path = self.path.partition("?")[0]
        api, files, content, error = f"/api/models/{NAME}", f"/{NAME}/resolve/{COMMIT}/", b"", ""
        if path == f"{api}/revision/{TAG}":
            content = json.dumps({"id": NAME, "sha": COMMIT, "siblings": []}).encode()
        elif path == f"{api}/tree/{COMMIT}":
            content = json.dumps([self._entry(file) for file in self.folder.rglob("*.*")]).encode()
        elif path.startswith(files):
            self.fetched.add(path.removeprefix(files))
            content = (self.folder / path.removeprefix(files)).read_bytes()
        else:
            error = "RevisionNotFound" if path.startswith(api) else "RepoNotFound"
        self.send_response(404 if error else 200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("X-Error-Code", error)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def _entry(self, file: Path) -> dict[str, object]:
        content, path = file.read_bytes(), str(file.relative_to(self.folder))
        return {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, and beside it what is not to be fetched."""
    folder = make_target(tmp_path_factory.mktemp("repository"))
    for name in UNWANTED:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("not wanted")
    return folder


@pytest.fixture
def hub(repository: Path) -> Iterator[str]:
    """The address of a hub that has it."""
    FakeHub.folder, FakeHub.fetched = repository, set()
    with ThreadingHTTPServer(("127.0.0.1", 0), FakeHub) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_model_of_the_hub_is_fetched_and_served_under_its_name(hub: str, repository: Path, tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    command = [sys.executable, "-c", "from coppice.cli import main; main()", "up", NAME, "--revision", TAG]
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "COPPICE_"))}
    variables |= {"HF_ENDPOINT": hub, "HF_HOME": str(tmp_path / "cache")}
    with (
        up([*command, "--head", "own=lookup"], ready, variables) as process,
        Client(json.loads(ready.read_text())["address"]) as client,
    ):
        assert client.describe().name == NAME
        ids = client.generate(PROMPT, max_new_tokens=16, ignore_eos=True).ids
        process.terminate()
        assert "Fetching" in process.communicate(timeout=60)[1]  # progress
    assert ids == Reference(repository, "float32", threads=1).greedy(PROMPT, 16).ids
    expected = {str(file.relative_to(repository)) for file in repository.rglob("*.*")} - set(UNWANTED)
    assert FakeHub.fetched == expected


@pytest.mark.parametrize(
    ("model", "folder", "revision", "variables", "reason"),
    [
        ("a/b/c", None, None, {}, "MODEL: a/b/c is neither a folder nor a name"),
        (".", None, TAG, {}, "revision: is a MODEL's of the Hub"),
        (None, None, TAG, {}, "revision: is a MODEL's of the Hub"),
        (NAME, Path(), None, {}, "same thing as --target"),
        ("acme/none", None, None, {}, "MODEL: acme/none is no folder, and no model at http"),
        (NAME, None, "v9", {}, f"revision: {NAME} has no revision v9"),
        (NAME, None, None, {"COPPICE_SERVER__PRODUCTION": "true"}, "in production"),
        (NAME, None, None, {"HF_ENDPOINT": "http://127.0.0.1:1"}, "and http://127.0.0.1:1 does not answer"),
    ],
)
def test_what_cannot_be_fetched_is_named(
    model: str | None,
    folder: Path | None,
    revision: str | None,
    variables: dict[str, str],
    reason: str,
    hub: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", variables.get("HF_ENDPOINT", hub))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(InvalidField, match=re.escape(reason)):
        find_model(model, folder, revision)
    assert FakeHub.fetched == set()
