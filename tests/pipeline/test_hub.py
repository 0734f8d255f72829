"""`coppice up NAME`: a model is fetched from a hub, here a server that speaks what that takes of the Hub's API."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar
from urllib.parse import unquote

import pytest
import torch
from transformers import AutoModelForCausalLM

from coppice.client.client import Client
from coppice.commands.up import find_model
from coppice.errors import InvalidField
from coppice.heads.checkpoints import TargetParts
from coppice.testing.reference import Reference, TargetText
from tests.stacks import up
from tests.tiny import make_gguf, make_target

COPPICE = (sys.executable, "-c", "from coppice.cli import main; main()")
NAME, TAG, COMMIT = "acme/tiny", "v1", "c0ffee" + 34 * "0"
UNWANTED = ("pytorch_model.bin", "modeling_tiny.py", "original/model.safetensors", "consolidated.safetensors")
PROMPT = (5, 80, 7, 80, 7, 80)


class FakeHub(BaseHTTPRequestHandler):
    """Models, each at one tag; everything else is not found, with the code that says what is not."""

    folders: ClassVar[dict[str, Path]]
    tags: ClassVar = {TAG, "main"}
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
        path = unquote(self.path.partition("?")[0])
        name = next((name for name in self.folders if f"/{name}/" in path), NAME)
        api, files, content, error = f"/api/models/{name}", f"/{name}/resolve/{COMMIT}/", b"", ""
        if path.removeprefix(f"{api}/revision/") in self.tags:
            content = json.dumps({"id": name, "sha": COMMIT, "siblings": []}).encode()
        elif path == f"{api}/tree/{COMMIT}":
            content = json.dumps([self._entry(name, file) for file in self.folders[name].rglob("*.*")]).encode()
        elif path.startswith(files):
            self.fetched.add(path.removeprefix(files))
            content = (self.folders[name] / path.removeprefix(files)).read_bytes()
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

    def _entry(self, name: str, file: Path) -> dict[str, object]:
        content, path = file.read_bytes(), str(file.relative_to(self.folders[name]))
        return {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, and beside it what is not to be fetched."""
    folder = make_target(tmp_path_factory.mktemp("repository"))
    for name in UNWANTED:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("not wanted")
    return folder


@contextmanager
def serving(**folders: Path) -> Iterator[str]:
    """The address of a hub that has models."""
    FakeHub.folders, FakeHub.fetched = folders, set()
    with ThreadingHTTPServer(("127.0.0.1", 0), FakeHub) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def hub(target: Path) -> Iterator[str]:
    """The address of a hub that has the model."""
    with serving(**{NAME: target}) as address:
        yield address


def test_a_model_of_the_hub_is_fetched_and_served_under_its_name(hub: str, target: Path, tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    command = [*COPPICE, "up", NAME, "--revision", TAG]
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


def test_a_gguf_file_of_the_hub_is_served_by_the_end_of_its_name(target: Path, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    folder, ready, model = tmp_path / "repository", tmp_path / "ready", f"{NAME}:Q8_0"
    folder.mkdir()
    for kind in ("Q8_0", "F32"):
        make_gguf(target, folder / f"tiny-{kind}.gguf", kind)
    command = [*COPPICE, "up", model]
    with serving(**{NAME: folder}) as hub:
        variables = {**os.environ, "HF_ENDPOINT": hub, "HF_HOME": str(tmp_path / "cache")}
        with up(command, ready, variables), Client(json.loads(ready.read_text())["address"]) as client:
            assert client.describe().name == model
            answer = client.generate("ab cö", max_new_tokens=16, ignore_eos=True)
        assert FakeHub.fetched == {"tiny-Q8_0.gguf"}
    (folder,) = tmp_path.glob("cache/coppice/*/tiny-Q8_0")
    assert answer.ids == Reference(folder, "float32", threads=1).greedy(TargetText(folder).encode("ab cö"), 16).ids


@pytest.mark.parametrize("sharded", [True, False])
def test_heads_get_the_shards_that_they_share_alone(sharded: bool, target: Path, hub: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(target, tmp_path / "repository"))
    FakeHub.folders = {NAME: folder}
    model = AutoModelForCausalLM.from_pretrained(target)
    if sharded:
        model.save_pretrained(folder, max_shard_size="20KB")
        (folder / "model.safetensors").unlink()
    link = tmp_path / "models" / "target"
    for part in ("tokenizer", "heads", "all"):
        run = [*COPPICE, "fetch", NAME, "--revision", TAG]
        variables = {**os.environ, "HF_ENDPOINT": hub, "HF_HOME": str(tmp_path / f"models/{part}")}
        FakeHub.fetched = set()
        done = subprocess.run([*run, "--part", part, "--link", link], env=variables, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, f"{link}\n"), done.stderr
        shards = {file.name for file in link.glob("*.safetensors")}
        assert shards == {name for name in FakeHub.fetched if name.endswith(".safetensors")}
        whole = {file.name for file in folder.glob("model*.safetensors")}
        if part == "heads":
            parts = TargetParts(link)
            assert torch.equal(parts.embedding, model.get_input_embeddings().weight)
            assert torch.equal(parts.output, model.get_output_embeddings().weight)
            assert (shards < whole) == sharded
        assert part == "heads" or shards == (whole if part == "all" else set())
        assert (link / "tokenizer.json").is_file()
    done = subprocess.run([*run, "--link", folder], env=variables, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, f"coppice: link: {folder} is a folder already\n")


@pytest.mark.parametrize(
    ("model", "folder", "revision", "variables", "reason"),
    [
        ("a/b/c", None, None, {}, "MODEL: a/b/c is neither a folder nor a name"),
        (".", None, TAG, {}, "revision: is a MODEL's of the Hub"),
        (None, None, TAG, {}, "revision: is a MODEL's of the Hub"),
        (f"{NAME}:Q4_K_M", None, None, {}, f"MODEL: {NAME}:Q4_K_M names no file"),
        (None, Path(f"{NAME}:Q4_K_M"), None, {}, f"target: {NAME}:Q4_K_M names no file"),
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
