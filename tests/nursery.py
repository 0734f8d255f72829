"""Service processes of tests, forked from one that has imported what takes seconds (`python -m tests.nursery`).

Nothing ever runs in that process but imports and forks: no thread, no gRPC, no torch operation and no CUDA, so that its
children begin as if they had imported everything themselves. What is asked for and answered are JSON lines; the file
descriptors of a child's standard input and log travel beside them.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

PRELOADED = ("coppice.engine.engine", "coppice.config")
_LARGEST = 1 << 20  # bytes of a request
_START_S = 120.0


class Child:
    """A process of the nursery, with the verbs of subprocess.Popen that are needed."""

    def __init__(self, nursery: Nursery, pid: int, stdin: int) -> None:
        self.pid, self.stdin = pid, os.fdopen(stdin, "wb")
        self._nursery = nursery

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return self._nursery.code(self.pid)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code once it has ended. Raises subprocess.TimeoutExpired."""
        code = self._nursery.code(self.pid, wait=True, timeout=timeout)
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return code

    @property
    def returncode(self) -> int | None:
        """As poll."""
        return self.poll()

    def send_signal(self, number: int) -> None:
        """Does nothing once it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


class Nursery:
    """The launcher's end. For any number of threads."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._changed, self._starting = threading.Condition(), threading.Lock()
        self._pids: dict[int, int] = {}  # by request
        self._codes: dict[int, int] = {}  # by pid
        self._asked = 0
        self._gone = False
        # Its own arrays need no second thread, and a fork wants none.
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.nursery", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            env=environment | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        threading.Thread(target=self._listen, name="nursery", daemon=True).start()

    @property
    def alive(self) -> bool:
        """Whether it can start anything."""
        return not self._gone

    def start(self, module: str, arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> Child:
        """As coppice.stack.process.spawn. Raises OSError when it cannot."""
        read, write = os.pipe()
        with log.open("ab") as output, self._starting:
            with self._changed:
                self._asked += 1
                asked = self._asked
                request = {"id": asked, "argv": [module, *arguments], "environment": dict(environment)}
                socket.send_fds(self._socket, [json.dumps(request).encode() + b"\n"], [read, output.fileno()])
                self._changed.wait_for(lambda: asked in self._pids or self._gone, _START_S)
            os.close(read)
        if asked not in self._pids:
            os.close(write)
            raise OSError("the process that starts services has ended")
        return Child(self, self._pids.pop(asked), write)

    def code(self, pid: int, wait: bool = False, timeout: float | None = None) -> int | None:
        """A child's exit code."""
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: pid in self._codes or self._gone, timeout)
            return self._codes.get(pid, -signal.SIGKILL if self._gone else None)

    def close(self) -> None:
        """End it; its children see that their standard input closes when the launcher ends."""
        self._socket.close()
        self._process.terminate()
        self._process.wait()

    def _listen(self) -> None:
        with contextlib.suppress(OSError), self._socket.makefile("r") as lines:
            for line in lines:
                told = json.loads(line)
                with self._changed:
                    if "id" in told:
                        self._pids[told["id"]] = told["pid"]
                    else:
                        self._codes[told["pid"]] = told["code"]
                    self._changed.notify_all()
        with self._changed:
            self._gone = True
            self._changed.notify_all()


_lock = threading.Lock()
_nurseries: list[Nursery] = []


def spawn(module: str, arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> Child:
    """What coppice.stack.process.spawn does, by a nursery that is started with the first child."""
    with _lock:
        if not _nurseries or not _nurseries[-1].alive:
            _nurseries.append(Nursery())
            atexit.register(_nurseries[-1].close)
    return _nurseries[-1].start(module, arguments, log, environment)


def _become(request: dict[str, Any], stdin: int, log: int) -> None:
    """What a fork does: be the child."""
    os.setsid()
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for source, number in ((stdin, 0), (log, 1), (log, 2)):
        os.dup2(source, number)
    os.close(stdin)
    os.close(log)
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in sys.path]
    sys.argv = ["coppice.stack.child", *request["argv"]]
    import_module("coppice.stack.child").main()


def _reaped() -> list[bytes]:
    """What to tell of children that have ended."""
    told = []
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            code = os.waitstatus_to_exitcode(ended[1])
            told.append(json.dumps({"pid": ended[0], "code": code}).encode() + b"\n")
    return told


def main(descriptor: int) -> None:
    """Fork for every request until the launcher is gone."""
    launcher = socket.socket(fileno=descriptor)
    wake, woken = socket.socketpair()
    woken.setblocking(False)
    wake.setblocking(False)
    for module in PRELOADED:
        import_module(module)
    gc.collect()
    gc.freeze()  # a collection in a child would touch, and so copy, every page
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno())
    selector = selectors.DefaultSelector()
    selector.register(launcher, selectors.EVENT_READ)
    selector.register(woken, selectors.EVENT_READ)
    while True:
        ready = {key.fileobj for key, _ in selector.select()}
        if woken in ready:
            woken.recv(4096)
            for line in _reaped():
                launcher.sendall(line)
        if launcher not in ready:
            continue
        message, descriptors, _, _ = socket.recv_fds(launcher, _LARGEST, 2)
        while message and not message.endswith(b"\n"):
            message += launcher.recv(_LARGEST)
        if not message:
            return
        request = json.loads(message)
        pid = os.fork()
        if not pid:
            signal.set_wakeup_fd(-1)
            selector.close()
            for own in (launcher, wake, woken):
                own.close()
            _become(request, *descriptors)
            return
        for one in descriptors:
            os.close(one)
        launcher.sendall(json.dumps({"id": request["id"], "pid": pid}).encode() + b"\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
