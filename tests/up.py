"""`coppice up` as a process, for tests."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path


@contextlib.contextmanager
def up(
    command: Sequence[str], ready: Path, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Run a command that ends in `up ...`, on free ports, until the block ends; gives it once `ready` is written."""
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    told = [*command, "--port", "0", "--http-port", "0", "--ready-file", str(ready)]
    with subprocess.Popen(told, text=True, env=environment, **output) as process:  # type: ignore[call-overload]
        try:
            deadline = time.monotonic() + 60
            while not ready.exists():
                assert process.poll() is None, process.stderr.read()
                assert time.monotonic() < deadline
                time.sleep(0.05)
            yield process
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
