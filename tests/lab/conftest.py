"""The pipeline of tests/pipeline, for what measures it, and the distribution's entry points as they stand here."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator

import pytest

from coppice.machine import extensions
from tests.pipeline.conftest import client, reference, stack, target
from tests.pipeline.test_extend import ROOT, install

__all__ = ["client", "reference", "stack", "target"]


@pytest.fixture(scope="session", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What lab/pyproject.toml adds is found here, and in processes that tests start, whatever is installed."""
    folder = tmp_path_factory.mktemp("packages")
    project = tomllib.loads((ROOT / "lab" / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    install(folder, "coppice_lab", project["entry-points"])
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{ROOT}", prepend=os.pathsep)
        extensions.cache_clear()
        yield
    extensions.cache_clear()
