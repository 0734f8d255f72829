"""The house: where files live, who may import whom, and how large a thing may grow before it is two."""

from __future__ import annotations

import ast
import subprocess
from collections import defaultdict
from functools import cache
from pathlib import Path

from coppice.config.settings import Settings
from tests.layout.test_layout import ROOT, imports, sources

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
    ("lab/paper", "lab/pretrain", "lab/services"),
)
"""Floors, the lowest first: a folder imports from floors below its own, and from itself."""

ENTRANCES = ("coppice/__init__.py", "coppice/cli.py")
"""They stand above everything: what they import, they import when somebody asks for it."""

FILES_AT_THE_TOP = 8
MOST_LINES, MOST_FUNCTION_LINES = 600, 60
"""of a file; of a function that declares no command line"""

GENERATED = "docs/settings.md"  # of the settings' classes, word for word
RATCHET = {
    "Python outside tests": 30_438,
    "of it lab": 2_952,
    "files outside tests": 153,
    "Python of tests": 29_115,
    "words of docs": 23_834,
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
