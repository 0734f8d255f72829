"""Node's packages for tests."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def node_modules(config: pytest.Config, name: str, *packages: str) -> Path:
    """A folder with packages, kept between test runs under a name. Skips where they cannot be had."""
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("there is no node")
    assert config.cache is not None
    folder = config.cache.mkdir(f"node-{name}")
    if not (folder / "complete").exists():
        command = ["npm", "install", "--no-audit", "--no-fund", *packages]
        try:
            subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=90)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
            pytest.skip(f"{', '.join(packages)} cannot be installed")
        (folder / "complete").touch()
    return folder / "node_modules"
