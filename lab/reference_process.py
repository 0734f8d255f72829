"""The reference in a process of its own, which is started as the services are: `generate` is timed beside them."""

from __future__ import annotations

import socket
import sys
import tempfile
from contextlib import ExitStack, suppress
from multiprocessing.connection import Client, Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from coppice.client.completion import Completion
from coppice.stack.process import POLL_S, ProcessFailed, end, environment, spawn, tail
from coppice.stack.spec import checkout
from coppice.testing.reference import Reference, Verdict
from coppice.testing.target_text import TargetText

GRACE_S = 5.0


class ReferenceProcess(Reference):
    """A Reference whose target a child process loads when it is first asked, and runs; a context manager."""

    def __init__(self, target: Path, dtype: str, device: str = "cpu", threads: int = 0) -> None:
        """See Reference."""
        self.text = TargetText(target)
        self._told = (str(target), dtype, device, str(threads))
        self._ended = ExitStack()
        self._pipe: Connection | None = None
        self._log = Path()

    def generate(self, *told: Any, **options: Any) -> Completion:
        """See Reference."""
        answer: Completion = self._ask("generate", told, options)
        return answer

    def judge(self, *told: Any, **options: Any) -> Verdict:
        """See Reference."""
        verdict: Verdict = self._ask("judge", told, options)
        return verdict

    def redraw(self, *told: Any, **options: Any) -> tuple[list[int], float]:
        """See Reference."""
        drawn: tuple[list[int], float] = self._ask("redraw", told, options)
        return drawn

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._pipe = None
        self._ended.close()

    def _ask(self, *told: Any) -> Any:
        """What a method of the Reference gives. Raises ProcessFailed if the process ends; the next call starts one."""
        try:
            if self._pipe is None:
                self._pipe = self._start()
            self._pipe.send(told)
            return self._pipe.recv()
        except (EOFError, OSError):
            failed = ProcessFailed(f"the process of transformers ended{tail(self._log)}")
            self.__exit__(None, None, None)
            raise failed from None

    def _start(self) -> Connection:
        """Raises EOFError when the process ends before it is there."""
        folder = Path(self._ended.enter_context(tempfile.TemporaryDirectory(prefix="coppice-")))
        self._log, door = folder / "log", folder / "door"
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(door))
            listening.listen()
            listening.settimeout(POLL_S)
            process = spawn(__name__, [str(door), *self._told], self._log, environment(checkout()))
            assert process.stdin
            self._ended.callback(process.stdin.close)
            self._ended.callback(end, process, GRACE_S)
            while process.poll() is None:
                with suppress(TimeoutError):
                    return self._ended.enter_context(Connection(listening.accept()[0].detach()))
        raise EOFError


def main() -> None:
    """Do what is asked until the other end is closed."""
    door, target, dtype, device, threads = sys.argv[1:]
    reference = Reference(Path(target), dtype, device, int(threads))
    with Client(door) as pipe, suppress(EOFError):
        while True:
            method, told, options = pipe.recv()
            pipe.send(getattr(reference, method)(*told, **options))


if __name__ == "__main__":
    main()
