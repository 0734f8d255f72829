"""How the repository is laid out: who imports whom, and what is never used."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

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


def test_pure_modules_load_no_framework() -> None:
    paths = [path for path in sources() if path.startswith(PURE)]
    loaded = loaded_by("\n".join(f"import {path[:-3].replace('/', '.')}" for path in paths))
    assert len(paths) >= 4
    assert loaded.isdisjoint({"grpc", "google", *HEAVY})
    assert {"coppice", "numpy"} <= loaded


def test_the_sdk_and_the_command_line_load_no_framework() -> None:
    loaded = loaded_by("import coppice\nfrom coppice import AsyncClient, Client, SamplingParams\nimport coppice.cli")
    assert loaded.isdisjoint(HEAVY)
    assert "grpc" in loaded


def test_importing_coppice_alone_loads_nothing_else() -> None:
    assert loaded_by("import coppice").isdisjoint({"grpc", "google", "numpy", "pydantic", *HEAVY})


def test_every_file_that_names_the_version_names_the_same() -> None:
    """Whoever releases changes them together, and heads the changelog with it."""
    (version,) = re.findall(r'^__version__ = "(.*)"$', (ROOT / "coppice/__init__.py").read_text(), re.MULTILINE)
    named = {
        "CITATION.cff": f"version: {version}",
        "helm/Chart.yaml": f"version: {version}\nappVersion: {version}",
        "examples/compose.yaml": f"image: coppice:{version}-cpu",
        "CHANGELOG.md": f"## [Unreleased]\n\n## [{version}] - 20",
    }
    assert [file for file, text in named.items() if text not in (ROOT / file).read_text(encoding="utf-8")] == []
