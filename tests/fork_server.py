"""Service processes of tests: forks, as those of `coppice up`, with other constants where TEST_CONSTANTS names some."""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from coppice.stack import process

_fork: Any = process.fork


def fork(module: str, arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> process.Fork:
    """Start a process as coppice.stack.process.fork does."""
    by = ["tests.fork_server"] if environment.get("TEST_CONSTANTS") else []
    first, *others = [*by, module, *arguments]
    forked: process.Fork = _fork(first, others, log, environment)
    return forked


if __name__ == "__main__":
    for assignment in os.environ["TEST_CONSTANTS"].split():  # PACKAGE.MODULE.NAME=NUMBER ...
        name, _, value = assignment.partition("=")
        place, _, constant = name.rpartition(".")
        setattr(import_module(place), constant, json.loads(value))
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
