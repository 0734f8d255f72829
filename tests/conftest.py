"""Fixtures of all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from coppice.stack import process
from coppice.stack.launch import IMPORTS
from coppice.stack.process import LocalRedis
from tests import fork_server
from tests.certificates import Authority
from tests.processes import Service, StartService

# Two workers with two threads each on two cores wait for one another most of the time: a test took four times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
process.fork = fork_server.fork
process.preload(IMPORTS)


@pytest.fixture(autouse=True)
def pretended(request: pytest.FixtureRequest) -> Iterator[None]:
    """What is marked `gpu` runs on a CUDA device, where there is none on a pretended one."""
    if request.node.get_closest_marker("gpu"):
        import torch

        from tests.pretend import pretending

        with nullcontext() if torch.cuda.is_available() else pretending():
            yield
    else:
        yield


@pytest.fixture(scope="module")
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target, to be read only, by the module's TINY_TARGET; else one that the random heads of
    tests/unit/test_feature_heads.py can draft for."
    """
    from tests.tiny import make_target

    usual = {"vocab": 96, "layers": 8, "tokenizer": False}
    return make_target(tmp_path_factory.mktemp("target"), **getattr(request.module, "TINY_TARGET", usual))


@pytest.fixture
def redis() -> Iterator[LocalRedis]:
    """On a port that it keeps when it is started again."""
    with LocalRedis() as running:
        yield running


@pytest.fixture(scope="module")
def shared_redis() -> Iterator[LocalRedis]:
    """The same for all tests of a module."""
    with LocalRedis() as running:
        yield running


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Certificates for all roles."""
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def model(target: Path) -> Any:
    """Plain transformers on the module's target: the reference."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def verifier(start_service: StartService, target: Path) -> Service:
    """One of the module's target."""
    return start_service("services.verifier", "--verifier.target", str(target), "--verifier.threads", "1")


@pytest.fixture(scope="module")
def start_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartService]:
    """`start_service(module, *flags)` starts a service process on free ports and waits until it is ready.

    What a test does not stop ends with the module. A process that does not end by itself on SIGTERM, or not with exit
    code 0, is an error that shows its log.
    """
    services: list[Service] = []

    def start(module: str, *flags: str, **told: Any) -> Service:
        folder = tmp_path_factory.mktemp("service") / module
        services.append(Service(module, *flags, folder=folder, **told))
        return services[-1]

    yield start
    logs = [f"exit code {service.exit_code}:\n{service.log}" for service in reversed(services) if service.stop()]
    if logs:
        pytest.fail("a service did not end well, " + "\n".join(logs))
