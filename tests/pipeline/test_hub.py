"""`coppice up NAME`: a model is fetched from a hub, here a server that speaks what that takes of the Hub's API."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar

import pytest

from coppice.client.client import Client
from coppice.commands.up import find_model
from coppice.errors import InvalidField
from coppice.testing.reference import Reference
from tests.tiny import make_target
from tests.up import up

NAME, TAG, COMMIT = "acme/tiny", "v1", "c0ffee" + 34 * "0"
UNWANTED = ("pytorch_model.bin", "modeling_tiny.py", "original/model.safetensors", "consolidated.safetensors")
PROMPT = (5, 80, 7, 80, 7, 80)


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


def test_a_model_of_the_hub_is_fetched_and_served_under_its_name(hub: str, target: Path, tmp_path: Path) -> None:
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
    assert ids == Reference(target, "float32", threads=1).greedy(PROMPT, 16).ids
    expected = {str(file.relative_to(target)) for file in target.rglob("*.*")} - set(UNWANTED)
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
