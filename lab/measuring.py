"""A running stack, and a report that is shown and written at the end, whatever breaks it off."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from coppice.client.client import Client
from coppice.stack.launch import MODULES, Stack
from coppice.stack.spec import StackSpec
from coppice.telemetry import metric
from lab.options import Options
from lab.report import Check, Report

if TYPE_CHECKING:
    from coppice.testing.reference import Reference
    from lab.reference_process import ReferenceProcess


@dataclass
class Bench:
    """A stack that is measured, and what is said of it."""

    stack: Stack
    client: Client
    report: Report
    options: Options
    reference: Reference
    """plain transformers on the stack's target"""


@contextmanager
def measuring(command: str, spec: StackSpec, options: Options, modules: Mapping[str, str] = MODULES) -> Iterator[Bench]:
    """A running stack, of these `modules` by role, with a client, and a report: see `reporting`."""
    with reporting(command, spec, options) as report, ExitStack() as ended:
        with Console().status("starting the services"):
            stack = ended.enter_context(running(spec, report, modules))
        client = ended.enter_context(Client(stack.address))
        reference = ended.enter_context(reference_of(spec))
        yield Bench(stack, client, report, options, reference)


@contextmanager
def reporting(command: str, spec: StackSpec, options: Options) -> Iterator[Report]:
    """A report that is printed and written at the end; exits 1 if a check failed.

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


@contextmanager
def running(spec: StackSpec, report: Report, modules: Mapping[str, str] = MODULES) -> Iterator[Stack]:
    """A stack that runs meanwhile; the report gets checks that it suspects no head and that it stopped cleanly."""
    with Stack(spec, modules) as stack:
        yield stack
        report.checks.append(suspects_check(stack))
    report.checks.append(clean_check(stack))


def clean_check(stack: Stack) -> Check:
    """Whether every process of a stack that has ended stopped by itself."""
    unclean = stack.unclean
    return Check("processes not stopped cleanly", len(unclean), "0", not unclean, ", ".join(unclean))


def suspects_check(stack: Stack) -> Check:
    """Whether no orchestrator suspects a head: what is measured with one that was loaded wrongly says nothing."""
    orchestrators = [ready for ready in stack.services.values() if ready.role == "orchestrator"]
    suspects = sum(metric(ready.metrics, "coppice_head_suspect") for ready in orchestrators)
    return Check("heads that draft far below what they expect", suspects, "0", not suspects)


def report_of(command: str, spec: StackSpec) -> Report:
    """An empty report of a command that measures what a spec describes."""
    verifier = spec.settings().verifier
    return Report(command, verifier.dtype, verifier.threads, verifier.device)


def reference_of(spec: StackSpec) -> ReferenceProcess:
    """Plain transformers on the spec's target, as its verifier runs it, in a process of its own."""
    from lab.reference_process import ReferenceProcess

    verifier = spec.settings().verifier
    return ReferenceProcess(spec.target, verifier.dtype, verifier.device, verifier.threads)


def finish(console: Console, report: Report, json_file: Path | None) -> None:
    """Print a report, and write it if a file is given; exits 1 when a check failed."""
    report.print(console)
    if json_file:
        report.write(json_file)
    if not report.ok:
        raise typer.Exit(1)
