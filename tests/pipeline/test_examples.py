"""examples/ as they stand: the services of compose.yaml as processes of this machine, and each example asking them."""

from __future__ import annotations

import io
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
import yaml

from coppice.client.client import Client
from coppice.stack.launch import MODULES
from tests.pipeline.conftest import node_modules
from tests.processes import Service

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
COMPOSE = yaml.safe_load((EXAMPLES / "compose.yaml").read_text(encoding="utf-8"))
SERVICES = {name: service for name, service in COMPOSE["services"].items() if "build" in service}
# Each has an address of its own, as its container has, so that ports are the file's.
ADDRESSES = {name: f"127.{1 + os.getpid() % 250}.1.{number}" for number, name in enumerate(SERVICES, 1)}


def here(text: object) -> str:
    """What stands for a text of the file on this machine."""
    text = str(text).replace("/app/", f"{ROOT}/")
    for name, address in ADDRESSES.items():
        text = text.replace(f"{name}:", f"{address}:")
    return text


@pytest.fixture(scope="module")
def variables(start_service: Callable[..., Service]) -> dict[str, str]:
    """The environment of a client of the file's services, which run."""
    for name, service in SERVICES.items():
        program, command, role = service["command"]
        assert (program, command) == ("coppice", "serve")
        settings = {key: here(value) for key, value in service["environment"].items()}
        settings["COPPICE_SERVER__HOST"] = settings["COPPICE_SERVER__ADVERTISE"] = ADDRESSES[name]
        start_service(MODULES[role], variables=settings)
    address = ADDRESSES["orchestrator"]
    urls = {"COPPICE_ADDRESS": f"{address}:50051", "OPENAI_BASE_URL": f"http://{address}:8000/v1"}
    return {**os.environ, **urls, "OPENAI_API_KEY": "none"}


def run(variables: dict[str, str], example: str, *arguments: str, typed: str = "") -> str:
    """What an example in Python prints."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        for name, value in variables.items():
            patch.setenv(name, value)
        patch.setattr(sys, "argv", [example, *arguments])
        patch.setattr(sys, "stdin", io.StringIO(typed))
        runpy.run_path(str(EXAMPLES / example), run_name="__main__")
    return printed.getvalue()


def test_the_sdk_streams(variables: dict[str, str]) -> None:
    with Client(variables["COPPICE_ADDRESS"]) as client:
        expected = client.generate("Once upon a time", temperature=0.8, seed=3, max_new_tokens=64, policy="plain")
        assert set(client.describe().heads) == {"code", "lookup"}
    *text, figures = run(variables, "client.py", "Once upon a time").splitlines()
    assert "\n".join(text) == expected.text
    assert figures.startswith(f"{expected.new_tokens} tokens in ")


def test_a_chat_goes_on(variables: dict[str, str]) -> None:
    answers = run(variables, "chat.py", typed="Hi.\nGo on.\n\n")
    with Client(variables["COPPICE_ADDRESS"]) as client:
        talk = [{"role": "user", "content": "Hi."}]
        first = client.generate(talk, max_new_tokens=32).text
        talk += [{"role": "assistant", "content": first}, {"role": "user", "content": "Go on."}]
        assert answers == f"> {first}\n> {client.generate(talk, max_new_tokens=32).text}\n> "


def test_a_chain_of_langchain_streams(variables: dict[str, str]) -> None:
    with Client(variables["COPPICE_ADDRESS"]) as client:
        expected = client.generate([{"role": "user", "content": "Tell me about a lamp."}], max_new_tokens=32).text
    assert run(variables, "langchain_chain.py") == expected != ""


def test_node_streams(variables: dict[str, str], pytestconfig: pytest.Config) -> None:
    installed = node_modules(pytestconfig, "grpc", "@grpc/grpc-js@1", "@grpc/proto-loader@0.8")
    with Client(variables["COPPICE_ADDRESS"]) as client:
        expected = client.generate("Once upon a time", temperature=0.8, seed=3, max_new_tokens=64).text
    told = {"env": {**variables, "NODE_PATH": str(installed)}, "cwd": ROOT, "timeout": 60}
    done = subprocess.run(["node", "examples/client.js"], capture_output=True, text=True, **told)
    assert (done.returncode, done.stdout) == (0, expected)


def test_what_prometheus_and_grafana_are_told_is_there(variables: dict[str, str]) -> None:
    contents = {name: yaml.safe_load(config["content"]) for name, config in COMPOSE["configs"].items()}
    (job,) = contents["prometheus"]["scrape_configs"]
    (group,) = job["static_configs"]
    assert {target.partition(":")[0] for target in group["targets"]} == set(SERVICES)
    prometheus_2 = {"Accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"}
    for target in group["targets"]:
        metrics = urlopen(Request(f"http://{here(target)}/metrics", headers=prometheus_2), timeout=10).read()
        assert (b"\nvllm:num_requests_running{" if "orchestrator" in target else b"# TYPE coppice_") in metrics
    for service in COMPOSE["services"].values():
        assert {config["source"] for config in service.get("configs", [])} <= set(contents)
        assert all((EXAMPLES / volume.partition(":")[0]).is_file() for volume in service.get("volumes", []))
    page = urlopen(variables["OPENAI_BASE_URL"].replace("/v1", "/"), timeout=10)
    assert b"<title>" in page.read()
