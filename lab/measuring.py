"""What measuring commands share: a running stack, the reference beside it, ways to answer the same prompts in turns, a
verdict on every answer, and the report: tables for people, the same as JSON (lab/BOOK.md), and checks.
"""

import json
import shutil
import signal
import statistics
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from coppice import __version__
from coppice.client.client import Client
from coppice.client.completion import Completion
from coppice.machine import this_machine
from coppice.speculation.sampling import SamplingParams
from coppice.stack.launch import Stack
from coppice.stack.spec import StackSpec
from coppice.telemetry import metric
from coppice.testing.reference import Reference, Verdict
from coppice.training.progress import Progress
from lab.options import Options

Ids = tuple[int, ...]
Ask = Callable[[Sequence[Ids], SamplingParams], list[Completion]]  # one way to answer prompts that are asked together
GREEDY = SamplingParams()
Row = dict[str, Any]  # one method's figures over all its prompts, as `--json` holds them: see `make_row`


@dataclass(frozen=True, slots=True)
class Check:
    """A promise, and whether it held."""

    name: str
    value: float
    bound: str
    ok: bool
    note: str = ""  # for people only
    weak: bool = False  # whether too little was measured to prove it: then a missed bound is a note, not a failure

    def __str__(self) -> str:
        sign = "[green]ok[/]" if self.ok else "[yellow]weak[/]" if self.weak else "[red]FAILED[/]"
        note = f" ({self.note})" if self.note else ""
        return f"{sign} {self.name}: {self.value:g}, bound {self.bound}{note}"


@dataclass(slots=True)
class Report:
    """One run of a measuring command."""

    command: str
    dtype: str
    threads: int
    device: str = "cpu"
    rows: list[dict[str, Any]] = field(default_factory=list)  # what was measured, as `--json` holds it
    tables: list[str] = field(default_factory=list)  # the same for people: Markdown
    notes: list[str] = field(default_factory=list)  # lines below the tables
    checks: list[Check] = field(default_factory=list)  # of correctness
    figures: dict[str, Any] = field(default_factory=dict)  # what else `--json` holds

    @property
    def ok(self) -> bool:
        return all(check.ok or check.weak for check in self.checks)

    def add_table(self, title: str, lines: Iterable[Mapping[Any, Any]], formats: Mapping[str, str] = {}) -> None:
        self.tables.append(table(title, list(lines), formats))

    def add_figures(
        self, name: str, title: str, lines: Sequence[Mapping[str, Any]], formats: Mapping[str, str] = {}
    ) -> None:
        """Add lines of one kind: as `figures[name]`, and as a table."""
        self.figures[name] = [dict(line) for line in lines]
        self.add_table(title, lines, formats)

    def end(self, json_file: Path | None) -> None:
        """Print all of it, and write it to a file if one is given; exits 1 if a check failed."""
        self.print(Console())
        if json_file:
            machine = this_machine().describe()
            if self.device.startswith("cuda"):
                import torch

                machine += f", {torch.cuda.get_device_name(self.device)}"
            facts = {"version": __version__, "commit": commit(), "machine": machine, "ok": self.ok}
            json_file.parent.mkdir(parents=True, exist_ok=True)
            json_file.write_text(json.dumps(asdict(self) | facts, indent=1) + "\n", encoding="utf-8")
        if not self.ok:
            raise typer.Exit(1)

    def print(self, console: Console) -> None:
        for text in [*self.tables, *self.notes]:
            console.print(text, soft_wrap=True, highlight=False, markup=False)
        for check in self.checks:
            console.print(str(check), highlight=False, soft_wrap=True)


def table(title: str, lines: Sequence[Mapping[Any, Any]], formats: Mapping[str, str] = {}) -> str:
    """A title, and Markdown's table with a column for each key that a line has a value for, as wide as it must be.

    A float has two digits unless `formats` gives its key another format; None is a dash.
    """
    keys = list(dict.fromkeys(key for line in lines for key, value in line.items() if value is not None))
    cells = [[str(key) for key in keys]]
    for values in ([line.get(key) for key in keys] for line in lines):
        forms = [formats.get(key, ".2f" * isinstance(value, float)) for key, value in zip(keys, values, strict=True)]
        cells.append(["-" if value is None else format(value, form) for value, form in zip(values, forms, strict=True)])
    widths = [max(len(row[at]) for row in cells) for at in range(len(keys))]
    sides = ["<" if all(isinstance(line.get(key), str) for line in lines) else ">" for key in keys]
    cells.insert(1, [f"{'' if side == '<' else ':':->{width}}" for side, width in zip(sides, widths, strict=True)])
    rows = [" | ".join(map("{:{}{}}".format, row, sides, widths)) for row in cells]
    return "\n".join([title, "", *(f"| {row} |" for row in rows), ""])


def make_row(
    method: str, completions: Sequence[Completion], verdicts: Sequence[Verdict], budget: int, sessions: int = 1
) -> Row:
    steps = sum(answer.steps for answer in completions)
    behind_first = sum(sum(answer.accept_lengths) for answer in completions)
    decode_s = sum(answer.decode_s for answer in completions)
    step_ns = sum(sum(answer.timings.step_ns) for answer in completions)
    counts = Counter(verdicts)
    return {
        "method": method,
        "heads": completions[0].heads,
        "budget": budget,
        "sessions": sessions,
        "prompts": len(completions),
        "tokens": sum(answer.new_tokens for answer in completions),
        "tau": behind_first / steps if steps else 1.0,
        # Of all sessions; the prefill is left out.
        "tokens_per_s": sessions * behind_first / decode_s if decode_s else 0.0,
        "speedup": 0.0,
        # Time that steps wait for drafts over the time of all steps.
        "draft_share": sum(answer.timings.draft_ns for answer in completions) / step_ns if step_ns else 0.0,
        "verified_nodes": sum(sum(answer.verified_nodes) for answer in completions) / steps if steps else 0.0,
        "late_drafts": sum(answer.late_drafts for answer in completions),
        "identical": counts["identical"],
        "ties": counts["tie"],
        "wrong": counts["wrong"],
    }


def costs(answers: Sequence[Completion]) -> tuple[float, float, dict[str, float]]:
    """Milliseconds of a step: the mean, the median of what the split costs, and the mean by parts."""
    timings, steps = [answer.timings for answer in answers], sum(answer.steps for answer in answers)
    step = sum(sum(timing.step_ns) for timing in timings) / steps / 1e6
    split = statistics.median(each for timing in timings for each in timing.split_ns) / 1e6
    names = ("draft", "head_forward", "verify", "target_forward", "transport", "accept", "commit")
    means = {name: sum(getattr(timing, f"{name}_ns") for timing in timings) / steps / 1e6 for name in names}
    parts = dict[str, float]()
    for work, model, rest in (("draft", "head", "drafting"), ("verify", "target", "verifying")):
        forward = min(means[f"{model}_forward"], means[work])
        parts |= {f"{model} forward": forward, f"rest of {rest}": means[work] - forward}
    return step, split, parts | {name: means[name] for name in ("transport", "accept", "commit")}


def verdicts_of(row: Row) -> str:
    """The answers that are the reference's, that differ from it by rounding alone, and that are wrong, for tables."""
    counts = [row[name] for name in ("identical", "ties", "wrong")]
    return "/".join(map(str, counts)) if any(counts) else "-"


def exactness(rows: Sequence[Row], dtype: str, tokens_each: int) -> list[Check]:
    """Nothing wrong, in float32 no ties either; and whether that is enough evidence: long answers, accepted drafts."""
    wrong, ties = sum(row["wrong"] for row in rows), sum(row["ties"] for row in rows)
    checks = [Check("wrong answers", wrong, "0", wrong == 0)]
    if dtype == "float32":
        checks.append(Check("ties", ties, "0", ties == 0))
    best = max((row["tau"] for row in rows if row["heads"]), default=1.0)
    strong = best > 1.3 and tokens_each >= 64
    note = "" if strong else "too few drafts accepted, or answers too short, to prove much"
    checks.append(Check("best tau", best, "> 1.3 at 64 tokens a prompt", strong, note, weak=True))
    return checks


def commit() -> str:
    """The checkout's commit, with "-dirty" behind it when files differ; empty outside one."""
    root, git = Path(__file__).resolve().parents[1], shutil.which("git")
    if git is None or not (root / ".git").exists():
        return "$Format:%H$".partition("$")[0]  # `git archive` puts the commit there
    command = [git, "-C", str(root), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


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


def reference_of(spec: StackSpec) -> Reference:
    """Plain transformers on a stack's target, run in this process as its verifier runs it."""
    verifier = spec.settings().verifier
    return Reference(spec.target, verifier.dtype, verifier.device, verifier.threads)


@contextmanager
def measuring(command: str, spec: StackSpec, options: Options) -> Iterator[Bench]:
    """A running stack with a client, and a report: see `reporting`."""
    with reporting(command, spec, options) as report, ExitStack() as ended:
        with Console().status("starting the services"):
            stack = ended.enter_context(running(spec, report))
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
def running(spec: StackSpec, report: Report) -> Iterator[Stack]:
    """A stack that runs meanwhile; the report gets checks that it suspects no head and that it stopped cleanly."""
    with Stack(spec) as stack:
        yield stack
        orchestrators = [ready for ready in stack.services.values() if ready.role == "orchestrator"]
        suspects = sum(metric(ready.metrics, "coppice_head_suspect") for ready in orchestrators)
        # What is measured with a head that was loaded wrongly says nothing.
        report.checks.append(Check("heads that draft far below what they expect", suspects, "0", not suspects))
    report.checks.append(clean_check(stack))


def clean_check(stack: Stack) -> Check:
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
    ways: Mapping[str, Ask], prompts: Sequence[Ids], sampling: SamplingParams, number: int, progress: Progress
) -> dict[str, list[Completion]]:
    """Every way's answers to prompts that are asked together; for groups of odd numbers the last way is the first."""
    answers = {}
    for way in list(ways)[:: -1 if number % 2 else 1]:
        answers[way] = ways[way](prompts, sampling)
        progress.add(len(prompts))
    return {way: answers[way] for way in ways}
