"""`coppice up NAME`: a model is fetched from a hub, here a server that speaks what that takes of the Hub's API."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar
from urllib.error import HTTPError
from urllib.parse import unquote
from urllib.request import Request, urlopen

import pytest
import torch
from transformers import AutoModelForCausalLM

from coppice.client.client import Client
from coppice.commands.up import fetch, find_model
from coppice.errors import InvalidField, Unauthenticated
from coppice.heads.checkpoints import TargetParts
from coppice.speculation.sampling import SamplingParams
from coppice.testing.reference import Reference
from tests.processes import free_port
from tests.stacks import up
from tests.tiny import make_gguf, make_target

COPPICE = (sys.executable, "-c", "from coppice.cli import main; main()")
NAME, TAG, COMMIT = "acme/tiny", "v1", "c0ffee" + 34 * "0"
UNWANTED = ("pytorch_model.bin", "modeling_tiny.py", "original/model.safetensors", "consolidated.safetensors")
PROMPT, PENALTY = (5, 80, 7, 80, 7, 80), 1.25
TOKEN, OPTIONS = "s3cret", "--kv-tokens 4096 --budget 5 --max-tokens 40 --threads 1 --head own=lookup"


class FakeHub(BaseHTTPRequestHandler):
    """Models, each at one tag; everything else is not found, with the code that says what is not."""

    folders: ClassVar[dict[str, Path]]
    tags: ClassVar = {TAG, "main"}
    fetched: ClassVar[set[str]]

    def log_message(self, *_: object) -> None:
        """Nothing is logged."""

    def do_GET(self) -> None:
        """A model's commit, its files, or one of them; of HEAD the headers alone."""
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
        if self.command == "GET":
            self.wfile.write(content)

    do_HEAD = do_GET

    def _entry(self, name: str, file: Path) -> dict[str, object]:
        content, path = file.read_bytes(), str(file.relative_to(self.folders[name]))
        return {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose own configuration penalises repetition, and beside it what is not to be fetched."""
    folder = make_target(tmp_path_factory.mktemp("repository"))
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"repetition_penalty": PENALTY}))
    for name in UNWANTED:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("not wanted")
    return folder


@contextmanager
def serving(**folders: Path) -> Iterator[str]:
    """The address of a hub that has models."""
    FakeHub.folders, FakeHub.fetched = folders, set()
    with ThreadingHTTPServer(("127.0.0.1", 0), FakeHub) as server:
        thread = Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def hub(target: Path) -> Iterator[str]:
    """The address of a hub that has the model."""
    with serving(**{NAME: target}) as address:
        yield address


def use(hub: str, cache: Path, patch: pytest.MonkeyPatch) -> None:
    """Let this process ask a hub, and keep in a folder what it gets."""
    patch.setattr("huggingface_hub.constants.ENDPOINT", hub)
    template = "/{repo_id}/resolve/{revision}/{filename}"
    patch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", hub + template)
    patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))


def asked(url: str, body: Any = None, token: str = TOKEN) -> tuple[int, Any]:
    """Status and body of a call."""
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    request = Request(url, json.dumps(body).encode() if body else None, headers)
    try:
        with urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except HTTPError as error:
        return error.code, json.load(error)


def test_a_model_of_the_hub_is_fetched_and_served_by_what_up_was_told(
    hub: str, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under its name, with a chat template, a token and bounds."""
    template, ready, logs, port = tmp_path / "chat.jinja", tmp_path / "ready.json", tmp_path / "logs", free_port()
    template.write_text("{% for m in messages %}{{ m.content }};{% endfor %}")
    command = [*COPPICE, "up", NAME, "--revision", TAG, *OPTIONS.split(), "--token", TOKEN]
    command += ["--chat-template", str(template), "--log-dir", str(logs)]
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "COPPICE_"))}
    variables |= {"HF_ENDPOINT": hub, "HF_HOME": str(tmp_path / "cache")}
    with up(command, ready, variables, http_port=port) as process:
        address, url = json.loads(ready.read_text())["address"], f"http://127.0.0.1:{port}"
        assert [model["id"] for model in asked(f"{url}/v1/models")[1]["data"]] == [NAME]
        chat = {"messages": [{"role": "user", "content": "Hi"}]}
        assert asked(f"{url}/tokenize", chat) == asked(f"{url}/tokenize", {"prompt": "Hi;"})
        assert asked(f"{url}/v1/models", token="wrong")[0] == 401
        with Client(address) as client, pytest.raises(Unauthenticated):
            client.describe()
        monkeypatch.setenv("COPPICE_TOKEN", TOKEN)
        with Client(address) as client:
            described = client.describe()
            assert (described.name, described.default_budget, described.has_chat_template) == (NAME, 5, True)
            with pytest.raises(InvalidField, match=r"max_new_tokens: 41 is outside 0\.\.40; a context of \d+ tokens"):
                client.generate(PROMPT, max_new_tokens=41)
            assert described.repetition_penalty == PENALTY
            told = {"max_new_tokens": 32, "ignore_eos": True}
            own, without = (client.generate(PROMPT, **more, **told).ids for more in ({}, {"repetition_penalty": 1.0}))
        process.terminate()
        said = "".join(process.communicate(timeout=60))
    assert process.returncode == 0, said
    assert TOKEN not in said + "".join(log.read_text() for log in logs.iterdir())
    reference = Reference(target, "float32", threads=1)
    assert own == reference.greedy(PROMPT, 32).ids
    assert without == reference.generate(PROMPT, 32, SamplingParams(repetition_penalty=1.0)).ids != own
    expected = {str(file.relative_to(target)) for file in target.rglob("*.*")} - set(UNWANTED)
    assert FakeHub.fetched == expected


def test_a_gguf_file_of_the_hub_is_found_by_the_end_of_its_name(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf")
    folder, model = tmp_path / "repository", f"{NAME}:Q8_0"
    folder.mkdir()
    for kind in ("Q8_0", "F32"):
        make_gguf(target, folder / f"tiny-{kind}.gguf", kind)
    with serving(**{NAME: folder}) as hub:
        use(hub, tmp_path, monkeypatch)
        file, name = find_model(model, None, None)
    assert file
    assert (name, file.read_bytes()) == (model, (folder / "tiny-Q8_0.gguf").read_bytes())
    assert FakeHub.fetched == {"tiny-Q8_0.gguf"}


@pytest.mark.parametrize(("sharded", "parts"), [(True, ("tokenizer", "heads", "all")), (False, ("heads",))])
def test_heads_get_the_shards_that_they_share_alone(
    sharded: bool,
    parts: tuple[Any, ...],
    target: Path,
    hub: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = Path(shutil.copytree(target, tmp_path / "repository"))
    FakeHub.folders = {NAME: folder}
    model = AutoModelForCausalLM.from_pretrained(target)
    if sharded:
        model.save_pretrained(folder, max_shard_size="20KB")
        (folder / "model.safetensors").unlink()
    link, whole = tmp_path / "models" / "target", {file.name for file in folder.glob("model*.safetensors")}
    for part in parts:
        use(hub, tmp_path / f"models/{part}", monkeypatch)
        FakeHub.fetched = set()
        fetch(NAME, TAG, part, link)
        assert capsys.readouterr().out == f"{link}\n"
        shards = {file.name for file in link.glob("*.safetensors")}
        assert shards == {name for name in FakeHub.fetched if name.endswith(".safetensors")}
        if part == "heads":
            shared = TargetParts(link)
            assert torch.equal(shared.embedding, model.get_input_embeddings().weight)
            assert torch.equal(shared.output, model.get_output_embeddings().weight)
            assert (shards < whole) == sharded
        assert part == "heads" or shards == (whole if part == "all" else set())
        assert (link / "tokenizer.json").is_file()
    with pytest.raises(InvalidField, match=f"link: {folder} is a folder already"):
        fetch(NAME, TAG, link=folder)


REFUSED: list[tuple[str | None, Path | None, str | None, dict[str, str], str]] = [
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
]


def test_what_cannot_be_fetched_is_named(hub: str, tmp_path: Path) -> None:
    for *asked_for, variables, reason in REFUSED:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            use(variables.get("HF_ENDPOINT", hub), tmp_path, patch)
            with pytest.raises(InvalidField, match=re.escape(reason)):
                find_model(*asked_for)
    assert FakeHub.fetched == set()
