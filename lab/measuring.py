"""A running stack, the reference beside it, and a report that is shown and written even if it is broken off."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import typer
from rich.console import Console

from coppice.client.client import Client
from coppice.errors import Unavailable
from coppice.stack.launch import MODULES, Stack
from coppice.stack.spec import StackSpec
from coppice.telemetry import metric
from lab.options import Options
from lab.report import Check, Report

GRACE_S = 5.0


@dataclass
class Bench:
    """A stack that is measured, and what is said of it."""

    stack: Stack
    client: Client
    report: Report
    options: Options
    reference: Any
    """plain transformers on the stack's target: a Reference, or a ReferenceProcess"""


@contextmanager
def measuring(command: str, spec: StackSpec, options: Options, modules: Mapping[str, str] = MODULES) -> Iterator[Bench]:
    """A running stack, of these `modules` by role, with a client, and a report: see `reporting`."""
    with reporting(command, spec, options) as report, ExitStack() as ended:
        with Console().status("starting the services"):
            stack = ended.enter_context(running(spec, report, modules))
        client = ended.enter_context(Client(stack.address))
        yield Bench(stack, client, report, options, ended.enter_context(ReferenceProcess(spec)))


@contextmanager
def reporting(command: str, spec: StackSpec, options: Options) -> Iterator[Report]:
    """A report that is printed, and written to `--json`, at the end; exits 1 if a check failed.

    What breaks it off leaves by then measured figures printed and written all the same.
    """
    report = report_of(command, spec)
    try:
        yield report
    except (Exception, KeyboardInterrupt) as error:
        if report.rows or report.figures:  # what was measured before is not lost
            report.checks.append(Check("broken off", 1, "0", False, " ".join(str(error).split())[:300]))
            with suppress(typer.Exit):
                finish(Console(), report, options.json_file)
        raise
    finish(Console(), report, options.json_file)


def finish(console: Console, report: Report, json_file: Path | None) -> None:
    """Print a report, and write it if a file is given; exits 1 when a check failed."""
    report.print(console)
    if json_file:
        report.write(json_file)
    if not report.ok:
        raise typer.Exit(1)


@contextmanager
def running(spec: StackSpec, report: Report, modules: Mapping[str, str] = MODULES) -> Iterator[Stack]:
    """A stack that runs meanwhile; the report gets checks that it suspects no head and that it stopped cleanly."""
    with Stack(spec, modules) as stack:
        yield stack
        orchestrators = [ready for ready in stack.services.values() if ready.role == "orchestrator"]
        suspects = sum(metric(ready.metrics, "coppice_head_suspect") for ready in orchestrators)
        # What is measured with a head that was loaded wrongly says nothing.
        report.checks.append(Check("heads that draft far below what they expect", suspects, "0", not suspects))
    report.checks.append(clean_check(stack))


def clean_check(stack: Stack) -> Check:
    """Whether every process of a stack that has ended stopped by itself."""
    return Check("processes not stopped cleanly", len(stack.unclean), "0", not stack.unclean, ", ".join(stack.unclean))


def report_of(command: str, spec: StackSpec) -> Report:
    """An empty report of a command that measures what a spec describes."""
    verifier = spec.settings().verifier
    return Report(command, verifier.dtype, verifier.threads, verifier.device)


class ReferenceProcess:
    """The methods of a Reference on a stack's target, run as its verifier runs it, in a child process: `generate` is
    timed beside the services.

    A context manager. The child starts with the first call and ends with whoever asks.
    """

    def __init__(self, spec: StackSpec) -> None:
        from coppice.testing.reference import TargetText

        verifier = spec.settings().verifier
        self.text = TargetText(spec.target)
        self._arguments = (spec.target, verifier.dtype, verifier.device, verifier.threads)
        self._pipe: Connection | None = None

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        return lambda *arguments, **options: self._ask(method, arguments, options)

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
    from coppice.testing.reference import Reference

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who asks
    reference = Reference(target, dtype, device, threads)
    with suppress(EOFError, OSError):
        while True:
            method, arguments, options = pipe.recv()
            pipe.send(getattr(reference, method)(*arguments, **options))
