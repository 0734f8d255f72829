"""What `coppice up` takes in a first hour beside a model: names, a chat template, a token, and bounds."""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from coppice.client.client import Client
from coppice.errors import InvalidField, Unauthenticated
from tests.processes import free_port
from tests.stacks import up

COPPICE = (sys.executable, "-c", "from coppice.cli import main; main()")
TEMPLATE = "{% for m in messages %}{{ m.content }};{% endfor %}"
OPTIONS = "--name first,second --kv-tokens 4096 --budget 5 --max-tokens 40 --threads 1 --token s3cret --head lookup"


def asked(url: str, body: Any = None, token: str = "s3cret") -> tuple[int, Any]:
    """Status and body of a call."""
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode() if body else None, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_names_template_token_and_bounds_hold(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    template, ready = tmp_path / "chat.jinja", tmp_path / "ready.json"
    template.write_text(TEMPLATE)
    options = [*OPTIONS.split(), "--chat-template", str(template), "--log-dir", str(tmp_path / "logs")]
    port = free_port()
    with up([*COPPICE, "up", str(target), *options], ready, http_port=port) as process:
        addresses = json.loads(ready.read_text())
        url = f"http://127.0.0.1:{port}"
        assert [model["id"] for model in asked(f"{url}/v1/models")[1]["data"]] == ["first", "second"]
        status, body = asked(f"{url}/tokenize", {"model": "second", "messages": [{"role": "user", "content": "Hi"}]})
        assert (status, body) == asked(f"{url}/tokenize", {"model": "first", "prompt": "Hi;"})
        assert asked(f"{url}/tokenize", {"model": "third", "prompt": "Hi"})[0] == 404
        assert asked(f"{url}/v1/models", token="wrong")[0] == 401
        with Client(addresses["address"]) as client, pytest.raises(Unauthenticated):
            client.describe()
        monkeypatch.setenv("COPPICE_TOKEN", "s3cret")
        with Client(addresses["address"]) as client:
            described = client.describe()
            assert (described.name, described.default_budget, described.has_chat_template) == ("first", 5, True)
            with pytest.raises(InvalidField, match=r"max_new_tokens: 41 is outside 0\.\.40; a context of \d+ tokens"):
                client.generate((5, 6), max_new_tokens=41)
        process.terminate()
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert "token    clients send it" in out
    assert "float32 on cpu with 1 thread\n" in out
    assert "s3cret" not in out + "".join(log.read_text() for log in (tmp_path / "logs").iterdir())
