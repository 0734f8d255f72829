"""Service processes for tests: started as in production, stopped by SIGTERM, never left behind; and a loop without
waiting.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import selectors
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from coppice.stack.process import await_end
from tests import fork_server


class Service:
    """One `python -m MODULE` on free ports, ready to be called; a context manager that stops it."""

    def __init__(
        self,
        module: str,
        *flags: str,
        folder: Path,
        ready_s: float = 60.0,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Start with COPPICE_ `variables` and none but these, and wait for the ready file.

        Raises RuntimeError with the log when there is none in `ready_s`.
        """
        folder.mkdir(parents=True)
        ready = folder / "ready.json"
        self.log_path = folder / "log"
        self.exit_code: int | None = None
        environment = {name: value for name, value in os.environ.items() if not name.startswith("COPPICE_")}
        environment |= variables
        arguments = ["--server.ready_file", str(ready), "--server.grace_s", "5", *flags]
        self.process = fork_server.fork(module, arguments, self.log_path, environment)
        until = time.monotonic() + ready_s
        while not ready.exists():
            if self.process.poll() is not None or time.monotonic() > until:
                self.kill()
                raise RuntimeError(f"{module} is not ready (exit code {self.process.poll()}):\n{self.log}")
            time.sleep(0.01)
        addresses = json.loads(ready.read_text())
        self.address: str = addresses["address"]
        self.health: str = addresses["health"]
        self.metrics: str = addresses["metrics"]

    @property
    def log(self) -> str:
        """What it wrote so far."""
        return self.log_path.read_text(errors="replace")

    def stop(self, within_s: float = 20.0) -> int:
        """Ask it to end (SIGTERM) and return its exit code; -9 when it had to be killed. Does nothing twice."""
        if self.exit_code is None:
            self.process.terminate()
            self.exit_code = await_end(self.process, within_s)
        return self.exit_code

    def kill(self) -> None:
        """End it at once (SIGKILL), as a fault: its exit code is not held against it."""
        self.process.kill()
        self.process.wait()
        self.exit_code = 0

    def __enter__(self) -> Service:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


StartService = Callable[..., Service]  # what the fixture `start_service` is


def free_port() -> int:
    """One that nobody has now."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


async def until(condition: Callable[[], bool], within_s: float = 10.0) -> None:
    """Wait until something is so; TimeoutError after `within_s`."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


class _Jumping(selectors.DefaultSelector):
    """Where nothing is ready, the next timer is due at once, so that sleeps take no time."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        """What is ready now; else, unless a thread or a socket is all that is waited for, time passes."""
        ready = super().select(None if timeout is None else 0)
        self.now += (timeout or 0.0) if not ready else 0.0
        return ready


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop on that clock, which begins at 0."""

    def __init__(self) -> None:
        self._clock = _Jumping()
        super().__init__(self._clock)

    def time(self) -> float:
        """Seconds that were slept."""
        return self._clock.now


def without_waiting(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Decorator: runs a test on a loop whose clock jumps."""

    @functools.wraps(test)
    def run(*arguments: Any, **options: Any) -> None:
        with asyncio.Runner(loop_factory=JumpingLoop) as runner:
            runner.run(test(*arguments, **options))  # type: ignore[arg-type]

    return run
