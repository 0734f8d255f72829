"""The reference in a process of its own, started when it is first asked: `generate` is timed beside the services."""

from __future__ import annotations

import multiprocessing
import signal
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from coppice.errors import Unavailable
from coppice.testing.reference import Reference
from coppice.testing.target_text import TargetText

GRACE_S = 5.0


class ReferenceProcess(Reference):
    """A Reference that lives in a child process; a context manager. The child ends with whoever asks."""

    def __init__(self, target: Path, dtype: str, device: str = "cpu", threads: int = 0) -> None:
        """See Reference."""
        self.text = TargetText(target)
        self._arguments = (target, dtype, device, threads)
        self._pipe: Connection | None = None

    def generate(self, *arguments: Any, **options: Any) -> Any:
        """See Reference."""
        return self._ask("generate", arguments, options)

    def judge(self, *arguments: Any, **options: Any) -> Any:
        """See Reference."""
        return self._ask("judge", arguments, options)

    def redraw(self, *arguments: Any, **options: Any) -> Any:
        """See Reference."""
        return self._ask("redraw", arguments, options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pipe is not None:
            self._pipe.close()
            self._process.join(GRACE_S)
            self._process.kill()
            self._process.join()
            self._pipe = None

    def _ask(self, *call: Any) -> Any:
        """What a method of the Reference gives. Raises Unavailable if the process ends; the next call starts one."""
        if self._pipe is None:
            self._pipe, there = multiprocessing.Pipe()
            spawning = multiprocessing.get_context("spawn")
            self._process = spawning.Process(target=_serve, args=(there, *self._arguments), daemon=True)
            self._process.start()
            there.close()
        try:
            self._pipe.send(call)
            return self._pipe.recv()
        except (EOFError, OSError):
            self.__exit__()
            raise Unavailable(f"the process of transformers ended with {self._process.exitcode}") from None


def _serve(pipe: Connection, target: Path, dtype: str, device: str, threads: int) -> None:
    """Do what is asked until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who asks
    reference = Reference(target, dtype, device, threads)
    with suppress(EOFError, OSError):
        while True:
            method, arguments, options = pipe.recv()
            pipe.send(getattr(reference, method)(*arguments, **options))
