"""A running stack, the reference beside it, ways to answer the same prompts in turns, and a verdict on every answer."""

import json
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import typer
from pydantic import TypeAdapter
from rich.console import Console

from coppice.client.client import Client
from coppice.client.completion import Completion
from coppice.errors import InvalidField
from coppice.speculation.sampling import SamplingParams
from coppice.stack.launch import MODULES, Stack
from coppice.stack.spec import StackSpec
from coppice.telemetry import metric
from coppice.testing.reference import Reference, Verdict
from coppice.training.progress import Progress
from lab.options import Options
from lab.report import Check, Report, commit

K = TypeVar("K")
Ids = tuple[int, ...]
Asked = Sequence[tuple[Ids, SamplingParams]]
Ask = Callable[[Sequence[Ids], SamplingParams], list[Completion]]  # one way to answer prompts that are asked together
GREEDY = SamplingParams()
_ANSWERS = TypeAdapter(dict[str, list[Completion]])


@dataclass
class Bench:
    """A stack that is measured, and what is said of it."""

    stack: Stack
    client: Client
    report: Report
    options: Options

    @cached_property
    def reference(self) -> Reference:
        """Plain transformers on the stack's target, loaded when it is first asked."""
        return reference_of(self.stack.spec)


class Journal:
    """The answers of a run, kept on disk as they come: the same command goes on behind them."""

    def __init__(self, options: Options | None = None) -> None:
        """They lie beside `--json FILE`, without one nowhere. Raises InvalidField if they are of another run."""
        file = options and options.json_file
        self._file = file and file.with_name(f"{file.name}.partial")
        self._run, self._lines = json.dumps([commit(), repr(options)]), list[str]()
        if self._file and self._file.exists():
            self._lines = self._file.read_text("utf-8").split("\n")
            if self._lines.pop(0) != self._run:
                raise InvalidField("json", f"{self._file} has answers of another run or commit: remove it first")
            self._lines.pop()  # empty, or cut
            self._file.write_text("\n".join((self._run, *self._lines, "")), "utf-8")

    def next(self) -> dict[str, list[Completion]] | None:
        """What was added next when the run was broken off; None behind its end."""
        return _ANSWERS.validate_json(self._lines.pop(0)) if self._lines else None

    def add(self, answers: dict[str, list[Completion]]) -> dict[str, list[Completion]]:
        """Keep the answers by method to prompts that were asked together, and return them."""
        if self._file:
            with self._file.open("a", encoding="utf-8") as lines:
                lines.write("" if lines.tell() else f"{self._run}\n")
                lines.write(f"{_ANSWERS.dump_json(answers).decode()}\n")
        return answers

    def remove(self) -> None:
        """Forget them: the run is complete."""
        if self._file:
            self._file.unlink(missing_ok=True)


def reference_of(spec: StackSpec) -> Reference:
    """Plain transformers on a stack's target, run in this process as its verifier runs it."""
    verifier = spec.settings().verifier
    return Reference(spec.target, verifier.dtype, verifier.device, verifier.threads)


@contextmanager
def measuring(command: str, spec: StackSpec, options: Options, modules: Mapping[str, str] = MODULES) -> Iterator[Bench]:
    """A running stack, of these `modules` by role, with a client, and a report: see `reporting`."""
    with reporting(command, spec, options) as report, ExitStack() as ended:
        with Console().status("starting the services"):
            stack = ended.enter_context(running(spec, report, modules))
        report.notes += [ready.memory for ready in stack.services.values() if ready.memory]
        yield Bench(stack, ended.enter_context(Client(stack.address)), report, options)


@contextmanager
def reporting(command: str, spec: StackSpec, options: Options) -> Iterator[Report]:
    """A report that is printed and written to `--json` at the end, even if broken off; exits 1 if a check failed."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    verifier = spec.settings().verifier
    report = Report(command, verifier.dtype, verifier.threads, verifier.device)
    try:
        yield report
    except (Exception, KeyboardInterrupt) as error:
        if report.rows or report.figures:
            report.checks.append(Check("broken off", 1, "0", False, " ".join(str(error).split())[:300]))
            with suppress(typer.Exit):
                report.end(options.json_file)
        raise
    report.end(options.json_file)


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


def asking(
    client: Client, new_tokens: int, sessions: int = 1, **options: Any
) -> Callable[[Sequence[str | Ids], SamplingParams], list[Completion]]:
    """The way that asks a stack with these options of a request, so many prompts at once, past end-of-text ids too."""

    def ask(prompts: Sequence[str | Ids], sampling: SamplingParams) -> list[Completion]:
        request = {"sampling": sampling, "max_new_tokens": new_tokens, "ignore_eos": True, **options}
        with ThreadPoolExecutor(sessions) as pool:
            return list(pool.map(lambda prompt: client.generate(prompt, **request), prompts))

    return ask


def in_turn(
    ways: Mapping[K, Ask], prompts: Sequence[Ids], sampling: SamplingParams, number: int, progress: Progress
) -> dict[K, list[Completion]]:
    """Every way's answers to prompts that are asked together; for groups of odd numbers the last way is the first."""
    answers = {}
    for way in list(ways)[:: -1 if number % 2 else 1]:
        answers[way] = ways[way](prompts, sampling)
        progress.add(len(prompts))
    return {way: answers[way] for way in ways}


def judged(
    reference: Reference, asked: Asked, answers: Mapping[K, Sequence[Completion]], own: Sequence[Ids] | None = None
) -> dict[K, list[Verdict]]:
    """A verdict on every answer of every way: against `own`, else against the first way's, which are re-scored."""
    first = next(iter(answers))
    expected = own or [answer.ids for answer in answers[first]]
    return {
        way: [
            reference.judge(prompt, answer.ids, sampling, None if own is None and way == first else ids)
            for (prompt, sampling), answer, ids in zip(asked, its, expected, strict=True)
        ]
        for way, its in answers.items()
    }
