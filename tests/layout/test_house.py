"""The house: where files live, who may import whom, how large a thing may grow before it is two, and what no source may
do, whoever asks it to: run code out of data, hand text to a shell, check with `assert`.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coppice.cli import app
from coppice.config.settings import Settings
from tests.nightly.__main__ import CAMPAIGNS, main

ROOT = Path(__file__).parents[2]
PACKAGES = ("coppice", "services", "orchestrator", "lab")
PURE = ("coppice/speculation/",)
"""Folders that load no framework."""
HEAVY = ("torch", "transformers", "tokenizers", "ray", "redis")


@cache
def sources() -> dict[str, ast.Module]:
    """Every file of the product, by its path in the repository; generated ones are left out."""
    files = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    found = {str(file.relative_to(ROOT)): file for file in files if "coppice/v1/" not in str(file)}
    trees = {path: ast.parse(file.read_text(encoding="utf-8")) for path, file in found.items()}
    for path, tree in trees.items():
        make_absolute(tree, Path(path).parent.parts)
    return trees


def make_absolute(tree: ast.Module, package: tuple[str, ...]) -> None:
    """Write the relative imports of a file, wherever in it, as absolute ones."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            parents = package[: len(package) - node.level + 1]
            node.module, node.level = ".".join([*parents, *([node.module] if node.module else [])]), 0


def imports(tree: ast.Module) -> set[str]:
    """Modules and names that a file imports, wherever in it, as dotted names."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {str(node.module), *(f"{node.module}.{name.name}" for name in node.names)}
    return found


def importing(folder: str, *roots: str) -> set[tuple[str, str]]:
    """(file, name) of every import below `folder` that begins with one of the roots."""
    return {
        (path, name)
        for path, tree in sources().items()
        if path.startswith(f"{folder}/")
        for name in imports(tree)
        if any(f"{name}.".startswith(f"{root}.") for root in roots)
    }


def test_services_and_the_orchestrator_import_their_own_modules_relatively() -> None:
    """In a wheel they are parts of coppice, and have other names."""
    named = re.compile(r"^\s*(from|import) (services|orchestrator)\b", re.MULTILINE)
    assert [path for path in sources() if named.search((ROOT / path).read_text(encoding="utf-8"))] == []


def test_nothing_imports_the_laboratory_the_tests_or_what_is_made_of_it() -> None:
    """Between folders test_house orders the rest; this holds for what makes a process, too."""
    assert {path for package in PACKAGES[:-1] for path, _ in importing(package, "lab", "tests")} == set()
    assert importing("coppice", "services", "orchestrator") | importing("orchestrator", "services") == set()


def test_one_file_knows_of_ray() -> None:
    assert {path for package in PACKAGES for path, _ in importing(package, "ray")} == {"orchestrator/ray_app.py"}


def stub_uses(tree: ast.Module) -> Iterator[str]:
    """Uses of the message modules other than annotations, descriptors and messages that hold nothing.

    What an operator asks of an adapter is no hot path and reaches no session: those messages are used as they are.
    """
    modules = {
        name.asname or name.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "coppice.v1"
        for name in node.names
        if name.name != "adapter_pb2"
    }
    harmless: set[ast.AST] = set()
    for node in ast.walk(tree):
        notes: list[ast.expr | None] = []
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            notes = [node.returns]
        elif isinstance(node, ast.arg | ast.AnnAssign):
            notes = [node.annotation]
        elif isinstance(node, ast.Call) and not node.args and not node.keywords:
            notes = [node.func]
        harmless |= {part for note in notes if note is not None for part in ast.walk(note)}
    for node in ast.walk(tree):
        of_stub = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules
        if of_stub and node not in harmless and node.attr != "DESCRIPTOR":
            yield f"line {node.lineno}: {ast.unparse(node)}"


def test_wire_is_the_only_package_that_builds_or_reads_messages() -> None:
    outside = sorted(path for path in sources() if not path.startswith("coppice/wire/"))
    assert {path: uses for path in outside if (uses := list(stub_uses(sources()[path])))} == {}
    assert list(stub_uses(ast.parse("from coppice.v1 import common_pb2 as c\nx = c.Fence(step=1)")))


def loaded_by(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after `code`."""
    command = [sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules)"]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {name.partition(".")[0] for name in output.split()}


def test_imports_load_no_framework() -> None:
    pure = [path for path in sources() if path.startswith(PURE)]
    assert len(pure) >= 4
    for code, forbidden in (
        ("\n".join(f"import {path[:-3].replace('/', '.')}" for path in pure), {"grpc", "google", *HEAVY}),
        ("import coppice\nfrom coppice import AsyncClient, Client, SamplingParams\nimport coppice.cli", {*HEAVY}),
        ("import coppice", {"grpc", "google", "numpy", "pydantic", *HEAVY}),
    ):
        loaded = loaded_by(code)
        assert "coppice" in loaded
        assert loaded.isdisjoint(forbidden)


def test_every_file_that_names_the_version_names_the_same() -> None:
    """Whoever releases changes them together, and heads the changelog with it."""
    (version,) = re.findall(r'^__version__ = "(.*)"$', (ROOT / "coppice/__init__.py").read_text(), re.MULTILINE)
    version = re.escape(version)
    named = {
        "CITATION.cff": f"version: {version}",
        "helm/Chart.yaml": f"version: {version}\nappVersion: {version}",
        "examples/compose.yaml": f"image: coppice:{version}-cpu",
        "CHANGELOG.md": rf"## \[Unreleased\]\n(?:(?!## ).*\n)*## \[{version}\] - 20",
    }
    assert [file for file, text in named.items() if not re.search(text, (ROOT / file).read_text("utf-8"))] == []


# --- floors and sizes ---

ORDER = (
    ("coppice",),
    ("coppice/speculation", "coppice/prompts"),
    ("coppice/config", "coppice/wire"),
    ("coppice/engine", "coppice/stack"),
    ("coppice/rpc",),
    ("coppice/adaptation", "coppice/client"),
    ("coppice/heads",),
    ("coppice/training", "coppice/testing"),
    ("orchestrator", "services/verifier", "services/drafter", "services/adapter"),
    ("orchestrator/http",),
    ("coppice/commands",),
    ("lab",),
    ("lab/paper", "lab/pretrain"),
)
"""Floors, the lowest first: a folder imports from floors below its own, and from itself."""

ENTRANCES = ("coppice/__init__.py", "coppice/cli.py")
"""They stand above everything: what they import, they import when somebody asks for it."""

FILES_AT_THE_TOP = 8
MOST_LINES, MOST_FUNCTION_LINES = 600, 60
"""of a file; of a function that declares no command line"""

GENERATED = "docs/settings.md"  # of the settings' classes, word for word
RATCHET = {
    "Python outside tests": 29_718,
    "of it lab": 2_554,
    "files outside tests": 150,
    "Python of tests": 26_962,
    "words of docs": 23_742,
    "settings": 69,
    "MB of tracked files": 73,
}
"""Bounds of the repository's sizes. A landing that makes one smaller writes its figure here; nobody raises one."""


def is_entrance(path: str) -> bool:
    """Whether a file is above all floors: the package's root, the command lines, and what makes a process."""
    return path in ENTRANCES or path.endswith(("/cli.py", "/__main__.py"))


def folder(path: str) -> str:
    """The folder of a file."""
    return str(Path(path).parent)


@cache
def edges() -> dict[str, set[str]]:
    """For every file of the product the files that it imports, wherever in it."""
    modules = {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in sources()}
    found: dict[str, set[str]] = {}
    for path, tree in sources().items():
        # `from package import name` names a module or something in the package: the longest module counts.
        names = [
            name for name in imports(tree) if name.partition(".")[0] in ("coppice", "services", "orchestrator", "lab")
        ]
        files = set()
        for name in names:
            while name and name not in modules:
                name = name.rpartition(".")[0]
            if name and not (modules[name].endswith("__init__.py") and any(o.startswith(f"{name}.") for o in names)):
                files.add(modules[name])
        found[path] = files - {path}
    return found


def test_imports_run_downwards_only() -> None:
    floors = {name: number for number, names in enumerate(ORDER) for name in names}
    upwards = {
        (path, imported)
        for path, files in edges().items()
        for imported in files
        if not is_entrance(path)
        and folder(path) != folder(imported)
        and (is_entrance(imported) or floors[folder(imported)] >= floors[folder(path)])
    }
    assert {(path, imported) for path, imported in upwards if imported != "coppice/__init__.py"} == set()


def test_no_file_imports_itself_through_others() -> None:
    left = {path: {file for file in files if not is_entrance(file)} for path, files in edges().items()}
    while leaves := [path for path, files in left.items() if not files & left.keys()]:
        for path in leaves:
            del left[path]
    assert {path for path in left if not is_entrance(path)} == set()


def test_what_one_service_alone_uses_lives_in_that_service() -> None:
    users: dict[str, set[str]] = defaultdict(set)
    for path, files in edges().items():
        side = "/".join(path.split("/")[:2]) if path.startswith("services/") else path.partition("/")[0]
        for imported in files:
            users[imported].add(side)
    alone = {path: sides for path, sides in users.items() if path.startswith("coppice/") and len(sides) == 1}
    assert {path: sides for path, sides in alone.items() if sides not in ({"coppice"}, {"lab"})} == {}


def test_few_files_stand_at_the_top() -> None:
    assert len([path for path in sources() if folder(path) == "coppice"]) <= FILES_AT_THE_TOP


def tracked(*patterns: str) -> list[Path]:
    """The files of the repository that match a git pathspec."""
    listed = subprocess.run(["git", "ls-files", "-z", "--", *patterns], cwd=ROOT, capture_output=True, check=True)
    return [ROOT / name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).exists()]


def sizes() -> dict[str, int]:
    """The repository's sizes, by what the ratchet calls them."""
    product = tracked("*.py", ":!tests")
    lines = {file: len(file.read_text(encoding="utf-8").splitlines()) for file in tracked("*.py")}
    words = [
        len(file.read_text(encoding="utf-8").split()) for file in tracked("docs/*.md", "README.md", f":!{GENERATED}")
    ]
    return {
        "Python outside tests": sum(lines[file] for file in product),
        "of it lab": sum(lines[file] for file in tracked("lab/*.py")),
        "files outside tests": sum("_pb2" not in file.name for file in product),
        "Python of tests": sum(lines.values()) - sum(lines[file] for file in product),
        "words of docs": sum(words),
        "settings": sum(len(section.annotation.model_fields) for section in Settings.model_fields.values()),
        "MB of tracked files": -(-sum(file.stat().st_size for file in tracked(".")) // 10**6),
    }


def test_the_repository_does_not_grow() -> None:
    figures = sizes()
    print(*(f"{name}: {figures[name]} of {bound}" for name, bound in RATCHET.items()), sep="\n")
    assert {name: size for name, size in figures.items() if size > RATCHET[name]} == {}


def test_files_are_one_noun_each() -> None:
    lengths = {path: len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in sources()}
    assert {path: lines for path, lines in lengths.items() if lines > MOST_LINES} == {}


def declares_a_command(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether its arguments are options of a command line."""
    return "typer." in ast.unparse(node.args) or any("command" in ast.unparse(one) for one in node.decorator_list)


def test_functions_fit_on_a_screen() -> None:
    long = {
        f"{path}: {node.name}": lines
        for path, tree in sources().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or 0) - node.lineno + 1) > MOST_FUNCTION_LINES
        and not declares_a_command(node)
    }
    assert long == {}


# --- safety: ruff refuses what pyproject.toml bans; here are planted faults, and what it has no rule for ---

NEVER_TRUE, NEVER_FALSE = {"shell", "allow_pickle", "trust_remote_code"}, {"weights_only"}
# Where what comes from outside is checked: python -O takes an `assert` away.
CHECKING = (
    *("coppice/rpc", "coppice/wire", "coppice/adaptation", "services/adapter", "services/drafter"),
    *("coppice/config/sections.py", "coppice/limits.py", "coppice/speculation/tree.py"),
    *("orchestrator/service.py", "services/verifier/service.py", "services/verifier/session.py"),
)
UNSAFE = """
import pickle
import dill.a
from shelve import open as o
from grpc_reflection.v1alpha import reflection
import builtins; builtins.exec(x)
import torch; torch.load(x)
import torch as t; t.load(x, weights_only=True)
import yaml; yaml.load(x, Loader=yaml.SafeLoader)
import os; os.system(x)
import asyncio; asyncio.create_subprocess_shell(x)
""".strip().splitlines()
SAFE = """
import yaml; yaml.safe_load(x)
import subprocess; subprocess.run(["ls", x])
from safetensors.torch import load; load(x)
model.eval()
""".strip().splitlines()


def found_by_ruff(*arguments: str) -> list[dict[str, str]]:
    """What ruff finds by our configuration, whatever a comment says."""
    ruff = str(Path(sys.executable).parent / "ruff")
    command = [ruff, "check", "--no-cache", "--ignore-noqa", "--output-format", "json", *arguments]
    return list(json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout))


def found_by_name(tree: ast.Module) -> set[str]:
    """Builtins that run text, and keywords that switch a protection off."""
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} & {"eval", "exec", "compile"}
    keywords = [node for node in ast.walk(tree) if isinstance(node, ast.keyword)]
    switched = {each.arg for each in keywords if each.arg in NEVER_TRUE and ast.unparse(each.value) != "False"}
    switched |= {each.arg for each in keywords if each.arg in NEVER_FALSE and ast.unparse(each.value) != "True"}
    return names | {str(keyword) for keyword in switched}


def test_nothing_runs_code_out_of_data() -> None:
    assert found_by_ruff("--select", "TID251", ".") == []
    assert {path: found for path, tree in sources().items() if (found := found_by_name(tree))} == {}


def test_what_comes_from_outside_is_not_checked_by_assert() -> None:
    assert all((ROOT / path).exists() for path in CHECKING)
    assert found_by_ruff("--isolated", "--select", "S101", *CHECKING) == []


def test_what_is_unsafe_is_found_and_what_is_safe_is_left_alone(tmp_path: Path) -> None:
    for number, line in enumerate([*UNSAFE, *SAFE]):
        (tmp_path / f"{number}.py").write_text(f"{line}\n")
    config = f"--config={ROOT / 'pyproject.toml'}"
    found = found_by_ruff(config, "--select", "TID251", str(tmp_path))
    assert {int(Path(each["filename"]).stem) for each in found} == set(range(len(UNSAFE)))
    for line in ("eval(x)", "run = exec", "f(x, shell=wanted)", "f(x, weights_only=False)", "f(x, allow_pickle=True)"):
        assert found_by_name(ast.parse(line))
    assert not any(found_by_name(ast.parse(line)) for line in (*SAFE, "f(x, shell=False, weights_only=True)"))


# --- the campaigns of the proof ---


def test_the_files_and_commands_of_the_campaigns_exist() -> None:
    files = [part for command in CAMPAIGNS.values() for part in command if part.startswith("tests/")]
    assert files
    assert all((ROOT / file).is_file() for file in files)
    for name in (name for name in CAMPAIGNS if name.startswith("bench")):
        command = CAMPAIGNS[name]
        ended = CliRunner().invoke(app, [*command[command.index("bench") :], "--help"])
        assert ended.exit_code == 0, ended.output
    with pytest.raises(SystemExit, match="no campaign begins with 'lightning'; there are trees and draws, "):
        main(["lightning"])
