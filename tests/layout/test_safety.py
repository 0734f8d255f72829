"""What the source may not do, whoever asks it to: run code out of data, hand text to a shell, check with `assert`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.layout.test_layout import ROOT, imports, sources

NEVER_IMPORTED = {
    *("pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"),
    "grpc_reflection",  # tells strangers what there is to call
}
NEVER_CALLED = {
    *("eval", "exec", "compile", "builtins.eval", "builtins.exec", "builtins.compile"),
    *("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "pty.spawn"),
    *("asyncio.create_subprocess_shell", "asyncio.subprocess.create_subprocess_shell"),
    *("torch.load", "torch.save", "torch.jit.load", "torch.hub.load", "numpy.fromregex"),
    *("yaml.load", "yaml.load_all", "yaml.full_load", "yaml.full_load_all", "yaml.unsafe_load", "yaml.unsafe_load_all"),
}
NEVER_TRUE = {"shell", "allow_pickle", "trust_remote_code"}
NEVER_FALSE = {"weights_only"}
STARTERS = {f"subprocess.{name}" for name in ("run", "Popen", "call", "check_call", "check_output")}

# Where what comes from outside is checked: python -O takes an `assert` away.
CHECKING = ("coppice/rpc/", "coppice/wire/", "coppice/adaptation/", "services/adapter/", "services/drafter/")
CHECKING_FILES = {
    *("coppice/rpc/access.py", "coppice/config/sections.py", "coppice/limits.py", "coppice/speculation/tree.py"),
    *("orchestrator/service.py", "services/verifier/service.py", "services/verifier/session.py"),
}


def names_of(tree: ast.Module) -> dict[str, str]:
    """What each imported name of a file stands for."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {name.asname: name.name for name in node.names if name.asname}
        elif isinstance(node, ast.ImportFrom):
            found |= {name.asname or name.name: f"{node.module}.{name.name}" for name in node.names}
    return found


def unsafe(tree: ast.Module) -> Iterator[str]:
    """What runs code out of data, or hands a string to a shell."""
    names = names_of(tree)
    for name in imports(tree):
        if name.partition(".")[0] in NEVER_IMPORTED or name in NEVER_CALLED:
            yield f"import {name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name) and _means(node, names) in NEVER_CALLED:
            yield f"line {node.lineno}: {ast.unparse(node)}"
        if isinstance(node, ast.Call):
            yield from _unsafe_call(node, names)


def _means(node: ast.expr, names: dict[str, str]) -> str:
    """The dotted name of an expression, aliases resolved; empty for other expressions."""
    if isinstance(node, ast.Attribute):
        return f"{owner}.{node.attr}" if (owner := _means(node.value, names)) else ""
    return names.get(node.id, node.id) if isinstance(node, ast.Name) else ""


def _unsafe_call(node: ast.Call, names: dict[str, str]) -> Iterator[str]:
    called = _means(node.func, names)
    for keyword in node.keywords:
        value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
        if (keyword.arg in NEVER_TRUE and value is not False) or (keyword.arg in NEVER_FALSE and value is not True):
            yield f"line {node.lineno}: {ast.unparse(keyword)}"
    told = [str(part.value).partition(".")[0] for part in node.args[:1] if isinstance(part, ast.Constant)]
    if called in ("__import__", "importlib.import_module") and NEVER_IMPORTED.intersection(told):
        yield f"line {node.lineno}: {ast.unparse(node)}"
    if called in STARTERS:
        command = [*node.args[:1], *(keyword.value for keyword in node.keywords if keyword.arg == "args")]
        if any(_is_text(part) for part in command):
            yield f"line {node.lineno}: {called} of a string"


def _is_text(node: ast.expr) -> bool:
    """Whether an expression is a string by its looks."""
    if isinstance(node, ast.BinOp):
        return _is_text(node.left) or _is_text(node.right)
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Attribute) and node.func.attr in ("join", "format")
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


def asserts(tree: ast.Module) -> list[str]:
    return [f"line {node.lineno}: {ast.unparse(node)}" for node in ast.walk(tree) if isinstance(node, ast.Assert)]


def test_nothing_runs_code_out_of_data() -> None:
    files = {str(file.relative_to(ROOT)): file for file in sorted((ROOT / "tests").rglob("*.py"))}
    tests = {path: ast.parse(file.read_text(encoding="utf-8")) for path, file in files.items()}
    everything = {**sources(), **tests}
    assert {path: found for path, tree in everything.items() if (found := list(unsafe(tree)))} == {}


def test_what_comes_from_outside_is_not_checked_by_assert() -> None:
    checking = {path: tree for path, tree in sources().items() if path.startswith(CHECKING) or path in CHECKING_FILES}
    assert set(checking) >= CHECKING_FILES
    assert all(any(path.startswith(folder) for path in checking) for folder in CHECKING)
    assert {path: found for path, tree in checking.items() if (found := asserts(tree))} == {}


@pytest.mark.parametrize(
    "snippet",
    [
        "import pickle",
        "import dill.a",
        "import marshal as m",
        "from shelve import open",
        "from grpc_reflection.v1alpha import reflection",
        "import importlib\nimportlib.import_module('pickle')",
        "__import__('dill')",
        "eval(x)",
        "exec(x)",
        "run = eval",
        "import builtins\nbuiltins.exec(x)",
        "import torch\ntorch.load(x)",
        "import torch as t\nt.load(x, weights_only=True)",
        "from torch import load",
        "from torch import load as l\nl(x)",
        "read(x, weights_only=False)",
        "import yaml\nyaml.load(x, Loader=yaml.SafeLoader)",
        "from yaml import unsafe_load\nunsafe_load(x)",
        "import numpy\nnumpy.load(x, allow_pickle=True)",
        "run(x, shell=True)",
        "run(x, shell=wanted)",
        "import os\nos.system(x)",
        "from os import popen as p\np(x)",
        "import asyncio\nasyncio.create_subprocess_shell(x)",
        "import subprocess\nsubprocess.run('ls')",
        "import subprocess as s\ns.Popen(f'ls {x}')",
        "from subprocess import check_output\ncheck_output('ls ' + x)",
        "import subprocess\nsubprocess.run(args='ls %s' % x)",
        "import subprocess\nsubprocess.run(' '.join(x))",
    ],
)
def test_what_is_unsafe_is_found(snippet: str) -> None:
    assert list(unsafe(ast.parse(snippet)))


@pytest.mark.parametrize(
    "snippet",
    [
        "import yaml\nyaml.safe_load(x)",
        "import subprocess\nsubprocess.run(['ls', x], shell=False)",
        "import subprocess\nsubprocess.Popen(command)",
        "import json\njson.load(x)",
        "from safetensors.torch import load\nload(x)",
        "model.eval()",
        "import re\nre.compile(x)",
    ],
)
def test_what_is_safe_is_left_alone(snippet: str) -> None:
    assert not list(unsafe(ast.parse(snippet)))


def test_an_assert_is_found() -> None:
    assert asserts(ast.parse("def f(x):\n    assert x > 0, 'positive'"))


def test_the_gate_sees_generated_stubs_too() -> None:
    stubs = {file: ast.parse(file.read_text(encoding="utf-8")) for file in Path(ROOT / "coppice" / "v1").glob("*.py")}
    assert stubs
    assert {str(file): found for file, tree in stubs.items() if (found := list(unsafe(tree)))} == {}
