"""The packages of examples/own-head and docs/extend.md, beside Coppice: their heads and policy serve exact texts."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from hatchling.builders.wheel import WheelBuilder
from typer.testing import CliRunner

from coppice.client.client import Client
from coppice.config.settings import load_settings
from coppice.errors import InvalidField, NotFound
from coppice.heads.base import build_head
from coppice.machine import extensions
from coppice.stack.launch import MODULES
from coppice.stack.spec import HeadSpec, StackSpec
from coppice.testing.reference import Reference
from coppice.training.cli import app as train
from tests.stacks import serving, up
from tests.tiny import make_target

ROOT = Path(__file__).parents[2]
PROMPT = (5, 80, 7, 9) * 6
NEW = 32


def blocks(language: str) -> list[str]:
    page = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


def install(folder: Path, name: str, groups: Mapping[str, Mapping[str, str]]) -> None:
    """Write what pip does of a package's metadata."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in added.items())
        for group, added in groups.items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))


def built(project: Path, folder: Path) -> Path:
    """The wheel of a project, made in a folder."""
    return Path(next(iter(WheelBuilder(str(project)).build(directory=str(folder), versions=["standard"]))))


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the example's wheel is unpacked, and beside it the page's package with the tests of both."""
    folder = tmp_path_factory.mktemp("packages")
    with zipfile.ZipFile(built(ROOT / "examples" / "own-head", tmp_path_factory.mktemp("example"))) as example:
        example.extractall(folder)
    *modules, test = blocks("python")
    for code in modules:
        (folder / code.partition(":")[0].strip('"')).write_text(code)
    (folder / "test_heads.py").write_text(test)
    (project,) = (tomllib.loads(text)["project"] for text in blocks("toml"))
    install(folder, "coppice_linear", project["entry-points"])
    return folder


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def found(package: Path) -> Iterator[None]:
    """This process and those that it starts find what is installed there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(package)
        patch.setenv("PYTHONPATH", str(package), prepend=os.pathsep)
        extensions.cache_clear()
        yield
    extensions.cache_clear()


@pytest.fixture(scope="module")
def trained(found: None, target: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of the package's head that is trained, and what the command said."""
    folder = tmp_path_factory.mktemp("trained")
    texts = "<|endoftext|>".join(f"one two three four {number}" for number in range(300))
    (folder / "texts.txt").write_text(texts)
    options = ("--data", f"words={folder / 'texts.txt'}", "--target", str(target), "--out", str(folder / "linear"))
    ended = CliRunner().invoke(train, ["head", "--kind", "linear", "--tokens", "2048", *options])
    assert ended.exit_code == 0, ended.output
    return folder / "linear", ended.output


def test_a_head_of_a_package_is_trained(trained: tuple[Path, str]) -> None:
    folder, told = trained
    losses = [float(loss) for loss in re.findall(r"held out after .* tokens: ([\d.]+)", told)]
    assert losses[-1] < math.log(300) - 0.1  # that of a head that learnt nothing
    assert f"wrote {folder}\ntry: coppice up" in told
    assert "# A linear draft head for target" in (folder / "README.md").read_text()


def test_the_heads_keep_the_contract(package: Path, found: None) -> None:
    passed = SimpleNamespace(count=0)
    passed.pytest_runtest_logreport = lambda report: setattr(passed, "count", passed.count + (report.when == "call"))
    options = ["-q", "-p", "no:cacheprovider", "--rootdir", str(package), str(package / "test_heads.py")]
    assert pytest.main(options, plugins=[passed]) == 0
    assert passed.count == 16


@pytest.fixture(scope="module")
def address(target: Path, trained: tuple[Path, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A stack with the packages' heads and policy beside a head of ours."""
    heads = HeadSpec("mine", "repeat"), HeadSpec("lookup", "lookup"), HeadSpec("linear", "linear", trained[0])
    with serving(tmp_path_factory.mktemp("logs"), target, *heads, policy="deepest") as running:
        yield running.address


def test_texts_are_exact_under_both(address: str, target: Path) -> None:
    with Client(address) as client:
        model = client.describe()
        assert model.default_policy == "deepest"
        assert {"deepest", "single:mine", "auto"} <= set(model.policies)
        expected = Reference(target, "float32", threads=1).greedy(PROMPT, NEW).ids
        told = {"max_new_tokens": NEW, "ignore_eos": True, "budget": 8}  # all of it is verified, whether or not it pays
        sampled = client.generate(PROMPT, policy="plain", temperature=1.0, seed=3, **told).ids
        verified = {}
        for policy in ("", "single:mine", "single:linear", "deepest:mine/lookup"):
            answer = client.generate(PROMPT, policy=policy, **told)
            assert answer.ids == expected, policy
            assert client.generate(PROMPT, policy=policy, temperature=1.0, seed=3, **told).ids == sampled, policy
            verified[answer.policy] = sum(answer.verified_nodes)
        assert min(verified[name] for name in ("deepest", "single:mine", "single:linear")) > 0
        long = client.generate(PROMPT, policy="auto", max_new_tokens=200, ignore_eos=True)
        assert long.ids[:NEW] == expected
        assert long.routed.count(long.heads.index("mine")) < long.steps / 2  # it drafts nothing that is right


def test_a_package_that_cannot_be_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "broken", {"coppice.heads": {"broken": "nowhere:Head"}})
    monkeypatch.syspath_prepend(tmp_path)
    extensions.cache_clear()
    with pytest.raises(InvalidField, match=r"^drafter\.kind: 'broken' is not to be had from nowhere:Head: "):
        build_head(load_settings(["--drafter.kind", "broken"]).drafter)
    extensions.cache_clear()


# --- the wheel, installed into an environment of its own: what it holds, and that it serves without a checkout ---


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    return built(ROOT, tmp_path_factory.mktemp("wheel"))


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
        with Client(told["address"]) as client:
            ids = client.generate(PROMPT, max_new_tokens=16, ignore_eos=True).ids
    for service, line in zip(told["services"], lines, strict=True):
        assert f" coppice.{MODULES[service['role']]} " in line
    assert ids == Reference(target, "float32", threads=1).greedy(PROMPT, 16).ids


def test_without_a_checkout_the_demos_models_are_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coppice.stack.spec.checkout", lambda: None)
    with pytest.raises(NotFound, match="in a checkout and in the image, not in the package: give --target DIR"):
        StackSpec.demo()
