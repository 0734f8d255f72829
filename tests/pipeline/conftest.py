"""A whole pipeline of real processes on a tiny random target, shared by all tests that need no other."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from coppice.client.client import Client
from coppice.stack.launch import Stack
from coppice.stack.spec import HeadSpec
from coppice.testing.reference import Reference
from tests.stacks import serving
from tests.tiny import make_target

VOCAB, NAMES = 300, ("tiny", "second")
HEADS = ("specblock-code", "lookup")
"""of the demo's stack"""


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target."""
    return make_target(tmp_path_factory.mktemp("target"), VOCAB)


@pytest.fixture(scope="session")
def stack(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Verifier, two drafters (the target itself as an `lm` head, and look-up) and orchestrator with HTTP.

    A test that kills one of them starts it again.
    """
    heads = HeadSpec("self", "lm", target), HeadSpec("lookup", "lookup")
    with serving(tmp_path_factory.mktemp("logs"), target, *heads, http_port=0, name=",".join(NAMES)) as running:
        yield running


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The demo's target with two heads, HTTP and the page. Nothing is pruned: a machine may be busy."""
    logs = tmp_path_factory.mktemp("demo")
    seats = {"limits.sessions": 16, "limits.queued": 0, "server.grace_s": 0.5}
    extra = {"orchestrator": seats, "verifier": {"verifier.prune": False}}
    with serving(logs, None, *map(HeadSpec.parse, HEADS), http_port=0, extra=extra) as running:
        yield running
    log = (logs / "orchestrator.log").read_text()
    assert "Traceback" not in log
    assert "unexpected error" not in log


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[Client]:
    """A client of the stack."""
    with Client(stack.address) as connected:
        yield connected


@pytest.fixture(scope="module")
def reference(target: Path) -> Reference:
    """Plain transformers on the same target."""
    return Reference(target, "float32", threads=1)


def call(
    stack: Stack, path: str, body: Any = None, kind: str = "application/json"
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of one call."""
    connection = HTTPConnection(stack.orchestrator.http, timeout=30)
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    connection.request("GET" if body is None else "POST", path, data, {"Content-Type": kind} if kind else {})
    response = connection.getresponse()
    return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()


def node_modules(config: pytest.Config, name: str, *packages: str) -> Path:
    """A folder with packages, kept between test runs under a name. Skips where they cannot be had."""
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("there is no node")
    assert config.cache is not None
    folder = config.cache.mkdir(f"node-{name}")
    if not (folder / "complete").exists():
        command = ["npm", "install", "--no-audit", "--no-fund", *packages]
        try:
            subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=90)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
            pytest.skip(f"{', '.join(packages)} cannot be installed")
        (folder / "complete").touch()
    return folder / "node_modules"


def parts_of(stream: str) -> list[dict[str, Any]]:
    """The parts of a stream."""
    *parts, done = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: ")]
    assert done == "[DONE]"
    return [json.loads(part) for part in parts]
