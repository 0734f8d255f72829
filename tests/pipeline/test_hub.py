"""`coppice up NAME`: a model is fetched from a hub, here a server that speaks what that takes of the Hub's API."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar

import pytest

from coppice.cli import main
from coppice.client.client import Client
from coppice.testing.reference import Reference
from tests.tiny import make_target
from tests.up import up

NAME, TAG, COMMIT = "acme/tiny", "v1", "c0ffee" + 34 * "0"
UNWANTED = ("pytorch_model.bin", "modeling_tiny.py", "original/model.safetensors", "consolidated.safetensors")
PROMPT = (5, 80, 7, 80, 7, 80)
COPPICE = (sys.executable, "-c", "from coppice.cli import main; main()")


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
        api, files = f"/api/models/{NAME}", f"/{NAME}/resolve/{COMMIT}/"
        if path == f"{api}/revision/{TAG}":
            self._send(json.dumps({"id": NAME, "sha": COMMIT, "siblings": []}).encode(), body)
        elif path == f"{api}/tree/{COMMIT}":
            self._send(json.dumps([self._entry(file) for file in self.folder.rglob("*.*")]).encode(), body)
        elif path.startswith(files):
            self.fetched.add(path.removeprefix(files))
            self._send((self.folder / path.removeprefix(files)).read_bytes(), body)
        else:
            self._send(b"", body, "RevisionNotFound" if path.startswith(api) else "RepoNotFound")

    def _entry(self, file: Path) -> dict[str, object]:
        content = file.read_bytes()
        path = str(file.relative_to(self.folder))
        return {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}

    def _send(self, content: bytes, body: bool, error: str = "") -> None:
        self.send_response(404 if error else 200)
        for name, value in {
            "Content-Length": str(len(content)),
            "ETag": f'"{hashlib.sha1(content).hexdigest()}"',
            "X-Repo-Commit": COMMIT,
            "X-Error-Code": error,
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, and beside it what is not to be fetched."""
    folder = make_target(tmp_path_factory.mktemp("repository"))
    for name in UNWANTED:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("not wanted")
    return folder


@pytest.fixture
def hub(target: Path) -> Iterator[str]:
    """The address of a hub that has it."""
    FakeHub.folder, FakeHub.fetched = target, set()
    with ThreadingHTTPServer(("127.0.0.1", 0), FakeHub) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def variables(hub: str, cache: Path, **more: str) -> dict[str, str]:
    """The environment of a command that goes to this hub with this cache."""
    told = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "COPPICE_"))}
    return {**told, "HF_ENDPOINT": hub, "HF_HOME": str(cache), **more}


def refused(hub: str, cache: Path, *arguments: str, **more: str) -> str:
    """What `coppice up ARGUMENTS` says when it ends with a usage error."""
    command = [*COPPICE, "up", *arguments]
    run = subprocess.run(command, env=variables(hub, cache, **more), capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (2, ""), run.stderr
    return run.stderr


def test_a_model_of_the_hub_is_fetched_and_served_under_its_name(hub: str, target: Path, tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    command = [*COPPICE, "up", NAME, "--revision", TAG, "--head", "own=lookup"]
    with (
        up(command, ready, variables(hub, tmp_path / "cache")) as process,
        Client(json.loads(ready.read_text())["address"]) as client,
    ):
        assert client.describe().name == NAME
        ids = client.generate(PROMPT, max_new_tokens=16, ignore_eos=True).ids
        process.terminate()
        assert "Fetching" in process.communicate(timeout=30)[1]  # progress
    assert ids == Reference(target, "float32", threads=1).greedy(PROMPT, 16).ids
    wanted = {str(file.relative_to(target)) for file in target.rglob("*.*")} - set(UNWANTED)
    assert FakeHub.fetched == wanted


def test_what_needs_no_hub_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    cases: list[tuple[list[str], str]] = [
        (["a/b/c"], "MODEL: a/b/c is neither a folder nor a name"),
        ([".", "--revision", TAG], "revision: is a MODEL's of the Hub"),
        (["--revision", TAG], "revision: is a MODEL's of the Hub"),
        ([NAME, "--target", "."], "same thing as --target"),
    ]
    monkeypatch.setenv("COLUMNS", "200")
    for arguments, why in cases:
        monkeypatch.setattr(sys, "argv", ["coppice", "up", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        assert why in capsys.readouterr().err


def test_without_a_network_it_says_so_at_once(tmp_path: Path) -> None:
    told = refused("http://127.0.0.1:1", tmp_path, NAME)
    why = f"{NAME} is no folder, the cache does not hold it whole, and http://127.0.0.1:1 does not answer"
    assert told == f"coppice: MODEL: {why}\n"


@pytest.mark.parametrize(
    ("arguments", "variables", "why"),
    [
        (["acme/none"], {}, "MODEL: acme/none is no folder, and no model at http"),
        ([NAME, "--revision", "v9"], {}, f"revision: {NAME} has no revision v9"),
        ([NAME], {"COPPICE_SERVER__PRODUCTION": "true"}, "in production"),
    ],
)
def test_what_cannot_be_fetched_is_named(
    arguments: list[str], variables: dict[str, str], why: str, hub: str, tmp_path: Path
) -> None:
    assert why in refused(hub, tmp_path, *arguments, **variables)
    assert FakeHub.fetched == set()
