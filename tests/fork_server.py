"""Service processes of tests, forked from one that has imported what takes seconds (multiprocessing's fork server).

Nothing runs in the server but imports and forks: no thread, no gRPC call, no torch operation and no CUDA. A child
therefore begins as if it had imported everything itself. Unlike a process of its own it ends without finalising the
interpreter.
"""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib import import_module
from multiprocessing import connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

_server = multiprocessing.get_context("forkserver")
_SERVICES = (
    "services.verifier.service",
    "services.drafter.service",
    "services.adapter.service",
    "orchestrator.service",
)
_LATE = ("orchestrator.http.server", "transformers.models.llama.modeling_llama")  # what they import when it is needed
_server.set_forkserver_preload([*_SERVICES, *_LATE, "coppice.config", "pytest", "tests.fork_server"])
# The server asks for a GPU without starting CUDA, which no fork could use.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
_lock = threading.Lock()  # two threads that read one exit code at once would lose it


class Child:
    """A forked process, with the verbs of subprocess.Popen that are needed. Any number of threads may use it."""

    def __init__(self, process: ForkServerProcess, stdin: connection.Connection) -> None:
        self.pid, self.stdin = process.pid or 0, stdin
        self._process = process

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""
        with _lock:
            return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code once the process has ended. Raises subprocess.TimeoutExpired."""
        connection.wait([self._process.sentinel], timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return code

    @property
    def returncode(self) -> int | None:
        """The same as `poll`."""
        return self.poll()

    def send_signal(self, number: int) -> None:
        """Send a signal; this does nothing once the process has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def spawn(module: str, arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> Child:
    """Start a process as coppice.stack.process.spawn does, by a fork of the server."""
    log.touch()
    read, write = _server.Pipe(duplex=False)
    inherited = (module, tuple(arguments), log.absolute(), dict(environment), read)
    process = _server.Process(name=module, target=_become, args=inherited, daemon=True)
    with _lock:
        process.start()
    read.close()
    return Child(process, write)


def _become(
    module: str, arguments: Sequence[str], log: Path, environment: Mapping[str, str], stdin: connection.Connection
) -> None:
    """Be the child: run the module in a process group of its own, with this log and environment."""
    gc.freeze()  # a collection would touch, and so copy, every page that is shared with the server
    os.setpgrp()
    with log.open("ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.dup2(stdin.fileno(), 0)
    stdin.close()
    os.environ.clear()
    os.environ.update(environment)
    for assignment in environment.get("TEST_CONSTANTS", "").split():  # PACKAGE.MODULE.NAME=NUMBER ...
        name, _, value = assignment.partition("=")
        place, _, constant = name.rpartition(".")
        setattr(import_module(place), constant, json.loads(value))
    sys.path[:0] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path not in sys.path]
    sys.argv = ["coppice.stack.child", module, *arguments]
    import_module("coppice.stack.child").main()
