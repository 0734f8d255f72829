"""What the commands of `coppice bench` share: options, a running stack, prompts, the end of a report."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from coppice.errors import InvalidField

if TYPE_CHECKING:
    from rich.console import Console

    from coppice.bench.reference import Reference
    from coppice.bench.report import Check, Report
    from coppice.bench.target_text import TargetText
    from coppice.client.client import Client
    from coppice.messages.generation import ModelDescription
    from coppice.prompts.files import FilePrompt
    from coppice.stack.launch import Stack
    from coppice.stack.spec import StackSpec

T = TypeVar("T", int, float)

Target = Annotated[Path | None, typer.Option(help="Model folder; default: the demo's target and heads.")]
Heads = Annotated[
    list[str] | None, typer.Option("--heads", metavar="NAME=KIND[:DIR]", help="Draft heads (repeatable).")
]
Prompts = Annotated[Path | None, typer.Option(help="JSON lines or .txt; default: the prompts that come with Coppice.")]
Count = Annotated[int, typer.Option("--n", min=1, help="Prompts used.")]
NewTokens = Annotated[int, typer.Option(min=2, help="Tokens made for each prompt, past end-of-text ids too.")]
Methods = Annotated[list[str] | None, typer.Option(help="Policies or head names (repeatable); default: all.")]
Category = Annotated[
    str | None, typer.Option(metavar="NAME,...", help="Keep the prompts of these categories, such as code,maths.")
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the keyed noise and of the prompts' order.")]
Dtype = Annotated[str | None, typer.Option(help="float32 or bfloat16.")]
Rounds = Annotated[int, typer.Option(min=1, help="Alternating rounds; medians are reported.")]
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the figures as JSON.")]


@contextmanager
def measuring(command: str, spec: StackSpec, json_file: Path | None) -> Iterator[tuple[Console, Stack, Report, Client]]:
    """A running stack with a client, and a report that is printed and written at the end; exits 1 if a check failed.

    What breaks it off leaves by then measured figures printed and written all the same.
    """
    from rich.console import Console

    from coppice.bench.report import Check
    from coppice.client.client import Client

    console, report = Console(), report_of(command, spec)
    try:
        with running(spec, report) as stack, Client(stack.address) as client:
            yield console, stack, report, client
    except (Exception, KeyboardInterrupt) as error:
        if report.rows or report.figures:  # what was measured before is not lost
            report.checks.append(Check("broken off", 1, "0", False, " ".join(str(error).split())[:300]))
            report.print(console)
            if json_file:
                report.write(json_file)
        raise
    finish(console, report, json_file)


@contextmanager
def running(spec: StackSpec, report: Report) -> Iterator[Stack]:
    """A stack that runs meanwhile; the report gets checks that it suspects no head and that it stopped cleanly."""
    from coppice.stack.launch import Stack

    with Stack(spec) as stack:
        yield stack
        report.checks.append(suspects_check(stack))
    report.checks.append(clean_check(stack))


def clean_check(stack: Stack) -> Check:
    """Whether every process of a stack that has ended stopped by itself."""
    from coppice.bench.report import Check

    unclean = stack.unclean
    return Check("processes not stopped cleanly", len(unclean), "0", not unclean, ", ".join(unclean))


def suspects_check(stack: Stack) -> Check:
    """Whether no orchestrator suspects a head: what is measured with one that was loaded wrongly says nothing."""
    from coppice.bench.report import Check
    from coppice.telemetry import metric

    orchestrators = [ready for ready in stack.services.values() if ready.role == "orchestrator"]
    suspects = sum(metric(ready.metrics, "coppice_head_suspect") for ready in orchestrators)
    return Check("heads that draft far below what they expect", suspects, "0", not suspects)


@contextmanager
def counting(console: Console, what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar with counts and the time left; gives what is told of every few that came."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(what, total=total)
        yield lambda came: bar.advance(task, came)


def report_of(command: str, spec: StackSpec) -> Report:
    """An empty report of a command that measures what a spec describes."""
    from coppice.bench.report import Report

    verifier = spec.settings().verifier
    return Report(command, verifier.dtype, verifier.threads, verifier.device)


def spec_of(target: Path | None, heads: list[str] | None, dtype: str | None) -> StackSpec:
    """The stack that the options describe; unusable ones are a usage error that names the option."""
    from coppice.stack.options import stack_spec

    return stack_spec(target, heads, dtype=dtype, port=0)


def shipped_heads(methods: Sequence[str]) -> list[str] | None:
    """The shipped heads that methods name; None when they name none."""
    from coppice.stack.spec import SHIPPED_HEADS

    named = {head for method in methods for head in re.split("[,:/]", method)}
    return [head for head in SHIPPED_HEADS if head in named or (head == "lm" and "hf-assisted" in named)] or None


def prompts_of(file: Path | None, count: int, client: Client, new_tokens: int = 0) -> list[str | tuple[int, ...]]:
    """The first `count` prompts of a file or of Coppice's own; random ids for a target without a tokenizer.

    Raises InvalidField naming a file's prompts that do not fit into the context with an answer of `new_tokens`.
    """
    model = client.describe()
    prompts = file_prompts(file, count, model)
    long = [one.name for one in prompts if file and not _fits(client, one.prompt, model.max_len - new_tokens)]
    if long:
        why = f"no room for {new_tokens} new tokens in a context of {model.max_len} behind {'; '.join(long)}"
        raise InvalidField("prompts", why)
    return [one.prompt for one in prompts]


def _fits(client: Client, prompt: str | tuple[int, ...], most: int) -> bool:
    try:
        return client.prompt_tokens(prompt) <= most
    except InvalidField as error:
        if error.field == "prompt":
            return False
        raise


def file_prompts(
    file: Path | None, count: int | None, model: ModelDescription | TargetText, category: str | None = None
) -> list[FilePrompt]:
    """As prompts_of, with what the file says of each; a category, or several with commas between, leaves out others.

    `count` None: all of them.
    """
    from coppice.prompts.files import FilePrompt, demo_prompts, read_prompts

    if file is None and not model.has_tokenizer:
        rng, size = random.Random(0), model.vocab_size  # noqa: S311
        return [
            FilePrompt(tuple(rng.randrange(size) for _ in range(8 + 5 * number)), where=f"random prompt {number + 1}")
            for number in range(count or 1)
        ]
    prompts = read_prompts(file) if file else demo_prompts()
    if category:
        prompts = [prompt for prompt in prompts if prompt.category in category.split(",")]
        if not prompts:
            raise typer.BadParameter(f"no prompt is of {category!r}", param_hint="--category")
    if file is None:
        prompts = spread(prompts, count)
    return prompts[:count]


def spread(prompts: list[FilePrompt], count: int | None) -> list[FilePrompt]:
    """`count` prompts taken from all categories in turn."""
    by_category: dict[str, list[FilePrompt]] = {}
    for prompt in prompts:
        by_category.setdefault(prompt.category, []).append(prompt)
    turns = zip_longest(*by_category.values())
    return [prompt for turn in turns for prompt in turn if prompt is not None][:count]


def prompt_ids(
    file: Path | None, count: int, client: Client, reference: Reference, new_tokens: int
) -> list[tuple[int, ...]]:
    """As prompts_of, as token ids."""
    prompts = prompts_of(file, count, client, new_tokens)
    return [reference.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]


def numbers(option: str, text: str, kind: type[T]) -> tuple[T, ...]:
    """The numbers of an option that takes several, with commas between. Raises BadParameter, which names the option."""
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of numbers", param_hint=f"--{option}") from None


def reference_of(spec: StackSpec) -> Reference:
    """Plain transformers on the spec's target, as its verifier runs it."""
    from coppice.bench.reference import Reference

    verifier = spec.settings().verifier
    return Reference(spec.target, verifier.dtype, verifier.device, verifier.threads)


def finish(console: Console, report: Report, json_file: Path | None) -> None:
    """Print a report, and write it if a file is given; exits 1 when a check failed."""
    report.print(console)
    if json_file:
        report.write(json_file)
    if not report.ok:
        raise typer.Exit(1)


def encode(target: Path, prompt: str | tuple[int, ...]) -> tuple[int, ...]:
    """A prompt as the target's token ids."""
    from coppice.bench.target_text import TargetText

    return TargetText(target).encode(prompt) if isinstance(prompt, str) else prompt


def vocab_size_of(target: Path) -> int:
    """The size of a target's vocabulary, which its heads may need to be told."""
    from coppice.bench.target_text import TargetText

    return TargetText(target).vocab_size
