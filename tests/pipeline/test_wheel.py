"""The wheel, installed into an environment of its own: what it holds, and that it serves where there is no checkout."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import psutil
import pytest
from hatchling.builders.wheel import WheelBuilder

from coppice.stack.launch import MODULES
from coppice.testing.reference import Reference
from tests.chart.chart import ROOT
from tests.tiny import make_target
from tests.up import up

PROMPT = (5, 80, 7, 80, 7, 80)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    return Path(next(iter(WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"]))))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a fresh environment that holds the wheel, and the packages, but not the Coppice, of this one."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    options = ("--quiet", "--no-compile", "--no-deps", "--no-index")
    subprocess.run([sys.executable, "-m", "pip", "--python", str(folder), "install", *options, str(wheel)], check=True)
    scheme = {"base": str(folder), "platbase": str(folder)}
    # A folder that a .pth file names is imported from, and its own .pth files, such as an editable install's, are not.
    packages = sysconfig.get_path("purelib")
    (Path(sysconfig.get_path("purelib", vars=scheme)) / "others.pth").write_text(packages)
    return folder / "bin"


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder outside the checkout, to work in: what it holds is called as packages of ours are."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    for name in ("coppice", "services", "orchestrator"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('somebody else')")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_wheel_holds_one_package_without_models(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert wheel.name.startswith("coppice_serve-")
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"coppice", "coppice_serve"}
    assert {"coppice/py.typed", "coppice/prompts/demo.jsonl", "coppice/services/verifier/__main__.py"} <= set(names)
    assert "coppice/v1/coppice.binpb" in names  # the contract for other languages
    assert {"coppice/orchestrator/http/page/index.html", "coppice/orchestrator/http/page/main.js"} <= set(names)
    assert not [name for name in names if name.endswith((".safetensors", ".pyc", ".yaml"))]


def test_it_serves_where_there_is_no_checkout(installed: Path, elsewhere: Path) -> None:
    target = make_target(elsewhere / "target")
    ready = elsewhere / "ready.json"
    with up([str(installed / "coppice"), "up", "--target", str(target), "--head", "own=lookup"], ready):
        told = json.loads(ready.read_text())
        lines = [" ".join(psutil.Process(service["pid"]).cmdline()) for service in told["services"]]
        ask = ["generate", "--ids", ",".join(map(str, PROMPT)), "--max-new-tokens", "16", "--json"]
        answer = subprocess.run(
            [installed / "coppice", *ask, "--address", told["address"]], capture_output=True, text=True, check=True
        )
    for service, line in zip(told["services"], lines, strict=True):
        assert f" coppice.{MODULES[service['role']]} " in line
    expected = Reference(target, "float32", threads=1).greedy(PROMPT, 16).ids
    assert tuple(json.loads(answer.stdout)["ids"]) == expected


def test_without_a_checkout_the_demos_models_are_missed_in_one_line(installed: Path, elsewhere: Path) -> None:
    run = subprocess.run([installed / "coppice", "up"], capture_output=True, text=True)
    assert run.returncode == 2
    assert run.stderr == (
        "coppice: the demo's models are in a checkout and in the image, not in the package: give --target DIR\n"
    )
