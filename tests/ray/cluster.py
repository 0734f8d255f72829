"""`serve run` as an operator starts it: a Ray of its own, token authentication, an application of tiny models."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil
import yaml

from coppice.stack.process import Ready
from tests.layout.test_layout import ROOT

APPLICATION = "coppice"
SERVE_YAML = ROOT / "orchestrator" / "serve.yaml"


def free_port() -> int:
    """One that nobody has now."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@dataclass(frozen=True)
class ServiceProcess:
    """A service of the application: its process, its addresses, and the actor that keeps it."""

    process: psutil.Process
    actor: psutil.Process
    ready: Ready


class Cluster:
    """The shipped Serve config with other arguments, run in a folder of its own: a context manager."""

    def __init__(self, args: Mapping[str, Any], folder: Path) -> None:
        self.folder = folder
        self.door = f"127.0.0.1:{(port := free_port())}"
        config = yaml.safe_load(SERVE_YAML.read_text(encoding="utf-8"))
        config["grpc_options"]["port"], config["http_options"]["port"] = port, free_port()
        config["applications"][0]["args"] = args
        self._config = folder / "serve.yaml"
        self._config.write_text(yaml.safe_dump(config), encoding="utf-8")
        self._session = tempfile.TemporaryDirectory(prefix="ray-")  # a short path: Ray has sockets in it
        self.environment = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_TMPDIR": self._session.name,
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("COPPICE_")}
        with (self.folder / "serve.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ray.serve.scripts", "run", str(self._config)],
                cwd=ROOT,
                env=inherited | self.environment | {"PYTHONPATH": str(ROOT)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process
        mine = self._processes()
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
        psutil.wait_procs(mine, timeout=20)
        for left in self._processes():
            left.kill()
        self._session.cleanup()

    @property
    def log(self) -> str:
        """What `serve run` and its replicas said."""
        return (self.folder / "serve.log").read_text(encoding="utf-8", errors="replace")

    def services(self, name: str) -> list[ServiceProcess]:
        """The processes of a deployment that are ready now."""
        found = []
        for process in self._processes():
            try:
                line = process.cmdline()
                if "coppice.stack.child" in line and line[-1].endswith(f"/{name}.ready.json"):
                    ready = Ready(**json.loads(Path(line[-1]).read_text(encoding="utf-8")))
                    found.append(ServiceProcess(process, psutil.Process(process.ppid()), ready))
            except (psutil.NoSuchProcess, OSError):
                continue  # it ended, or is not ready yet
        return found

    def _processes(self) -> list[psutil.Process]:
        """Those of this Ray, by the folder that they were told of."""
        mine = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("RAY_TMPDIR") == self._session.name and process.pid != os.getpid():
                    mine.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return mine
