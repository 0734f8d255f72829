"""What the source may not do, whoever asks it to: run code out of data, hand text to a shell, check with `assert`.

Ruff refuses what pyproject.toml bans; here are planted faults that it must find, and what it has no rule for.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

from tests.layout.test_layout import ROOT, sources

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
import marshal as m
from shelve import open as o
from grpc_reflection.v1alpha import reflection
import builtins; builtins.exec(x)
import torch; torch.load(x)
import torch as t; t.load(x, weights_only=True)
from torch import load as l; l(x)
import yaml; yaml.load(x, Loader=yaml.SafeLoader)
from yaml import unsafe_load; unsafe_load(x)
import os; os.system(x)
from os import popen as p; p(x)
import asyncio; asyncio.create_subprocess_shell(x)
""".strip().splitlines()
SAFE = """
import yaml; yaml.safe_load(x)
import subprocess; subprocess.run(["ls", x])
import json; json.load(x)
from safetensors.torch import load; load(x)
model.eval()
import re; re.compile(x)
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
